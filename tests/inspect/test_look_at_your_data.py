"""docs/look_at_your_data.md: its commands run as pasted, in order, and show what it says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.docs.test_pages_name_what_exists import commands
from tests.inspect.previewing import packed_sft, tokenizer_path
from tests.prepare.preparing import chat, write_records
from tests.real_data import tokenizer_folder

__all__ = ["tokenizer_path"]

PAGE = Path(__file__).parents[2] / "docs" / "look_at_your_data.md"


def shown_in_the_page() -> list[str]:
    return re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_command_of_the_page_runs(tmp_path: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tokenizer_path, tmp_path / "sp.model")
    long = [chat(f"What is {number} + {number}?", f"{2 * number}. " * 3) for number in range(40)]
    write_records(tmp_path / "chats.jsonl", [chat("What is 2 + 2?", "4."), *long])
    write_records(tmp_path / "pairs.jsonl", [{"prompt": "Why?", "chosen": "Because.", "rejected": "No."}])
    outputs = []
    for words in commands(PAGE):
        done = packed_sft(*words)
        assert done.code == 0, (shlex.join(words), done.err)
        outputs.append(done.out)
    assert len(outputs) >= 15
    assert shown_in_the_page()[0] in outputs[0]


def test_what_the_page_says_of_qwen3_is_so() -> None:
    assert shown_in_the_page()[1] in packed_sft("explain-template", tokenizer_folder("qwen3")).out


def test_the_signs_of_the_page_are_those_of_the_painter() -> None:
    from megatron_packed_sft.inspect import painting

    text = PAGE.read_text()
    for sign in (painting.OPEN, painting.CLOSE, painting.OPEN_CUT, painting.CLOSE_CUT, painting.LINE_END):
        assert sign in text
    assert painting.times(0.5) in text
    assert painting.note("U+202E") in text
