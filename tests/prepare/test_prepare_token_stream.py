"""`prepare` writes packed data, and a token stream is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft import train_sentencepiece
from megatron_packed_sft.cli.main import main


def test_a_read_only_storage_is_refused_before_anything_is_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "yes"}]}\n')
    train_sentencepiece([f"a text number {number}" for number in range(99)], tmp_path / "sp.model", vocab_size=300)
    arguments = [f"input={tmp_path / 'chats.jsonl'}", f"output={tmp_path / 'out'}", "storage=token_stream"]
    assert main(["prepare", *arguments, f"tokenizer.path={tmp_path / 'sp.model'}", "template=chatml"]) == 2
    assert "storage 'token_stream' is read-only; choose another one to write" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "sp.model"]
