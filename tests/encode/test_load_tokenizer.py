"""`load_tokenizer`: which kind is taken, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed_sft.encode.tokenizers.interface import ControlTokens, load_tokenizer
from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError
from tests.encode import tiny_tokenizers as tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path_factory.mktemp("load") / "tiny")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tiny.corpus(50), tmp_path_factory.mktemp("load") / "tokenizer.model", vocab_size=350)


def test_the_kind_is_seen_from_the_files(folder: Path, model: Path) -> None:
    assert isinstance(load_tokenizer(folder), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(folder / "tokenizer.json"), HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(model), SentencePieceTokenizer)
    assert isinstance(load_tokenizer(str(model.parent)), SentencePieceTokenizer)


def test_fast_can_be_switched_off(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, fast=False)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.fast_path_refusal == "fast=False"


def test_a_wrong_path_or_kind_is_one_clear_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"Qwen/Qwen2\.5 does not exist; give a local tokenizer folder"):
        load_tokenizer("Qwen/Qwen2.5")
    with pytest.raises(InvalidInputError, match="kind 'wordpiece' is unknown"):
        load_tokenizer(folder, kind="wordpiece")
    with pytest.raises(InvalidInputError, match=r"has no tokenizer\.json and no SentencePiece \.model file"):
        load_tokenizer(tmp_path)
    with pytest.raises(InvalidInputError, match="is not a folder"):
        load_tokenizer(folder / "tokenizer_config.json", kind="huggingface")


def test_loading_a_folder_imports_neither_transformers_nor_torch(folder: Path) -> None:
    script = (
        "import sys\nfrom megatron_packed_sft.encode.tokenizers.interface import load_tokenizer\n"
        f"assert load_tokenizer({str(folder)!r}).fast_path == 'gigatoken'\n"
        "print({'transformers', 'torch', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_longest_control_token_wins_and_thousands_of_them_are_found() -> None:
    controls = ControlTokens({"<a>": 0, "<a><b>": 1, "<b>": 2, "[x": 3, "[x]": 4})
    assert controls.split("<a><b><a>[x][x").parts == ["", "<a><b>", "", "<a>", "", "[x]", "", "[x", ""]
    many = ControlTokens({f"<unused{number}>": number for number in range(5000)})
    assert many.split("a<unused4999>b<unused77><unused").parts == ["a", "<unused4999>", "b", "<unused77>", "<unused"]
    assert ControlTokens({}).split("a b").parts == ["a b"]
