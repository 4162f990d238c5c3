"""`packed-sft validate` on a token stream, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import train_sentencepiece
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from tests.packed_bins import make_bins, write_shard


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    home = tmp_path / "tokens"
    home.mkdir()
    np.save(home / "shard_0.npy", np.arange(100, dtype=np.uint16) % 50)
    return home


def test_validate_checks_the_vocabulary_and_prints_how_to_train(
    tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tokens), "--eos-id", "2", "--vocab-size", "50", "--seq-length", "16"]) == 0
    printed = capsys.readouterr().out
    assert f"packed-sft train data.path={tokens} data.sequence_length=16 data.pack_sequences=true" in printed
    assert (
        f"create_sft_dataset({str(tokens)!r}, 2, seq_length=16, stream=StreamOptions(pack_sequences=True))" in printed
    )
    assert main(["validate", str(tokens), "--vocab-size", "40"]) == 1
    printed = capsys.readouterr().out
    assert "shard_0.npy: the token at position 40 is 40, not in 0..39, and 19 more like it" in printed
    assert "packed-sft train" not in printed  # not before it is sound


def test_a_tokenizer_gives_the_eos_id_and_the_vocabulary(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"a text number {number} of a few words" for number in range(300)]
    train_sentencepiece(texts, tmp_path / "sp.model", vocab_size=300)
    tokenizer = load_tokenizer(tmp_path / "sp.model")
    assert main(["validate", str(tokens), "--tokenizer", str(tmp_path / "sp.model"), "--json"]) == 0
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert f"data.eos_id={tokenizer.eos_id} model.vocab_size={tokenizer.vocab_size}" in notes


def test_flags_speak_of_flags(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tokens), "--seq-length", "500"]) == 1
    assert "the longest has 100; lower --seq-length to at most 99" in capsys.readouterr().out
    assert main(["validate", str(tokens), "--dtype", "float32"]) == 2
    assert "--dtype is 'float32', which is not an integer dtype; write uint16 or uint32" in capsys.readouterr().err


def test_flags_of_token_streams_are_refused_for_packed_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    assert main(["validate", str(tmp_path / "shard"), "--eos-id", "2"]) == 2
    assert "is not a token stream, so --eos-id does not apply; leave it out" in capsys.readouterr().err
