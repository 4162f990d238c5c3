"""A bin as tokens: texts that add up to the text, positions, trained flags."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, load_tokenizer
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import find_tokenizer
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, escape_invisible, tokens_of_bin
from tests.encode.tiny_tokenizers import byte_level_tokenizer, metaspace_tokenizer, save_folder
from tests.inspect.conftest import HOSTILE

TEXTS = [*HOSTILE.values(), "plain words, twice  spaced\n\n\tand a tab", "αβγ ﷽ 🇺🇳🇺🇳 ٣٤", "a"]


@pytest.fixture(scope="module", params=["sentencepiece", "byte_level", "metaspace"])
def tokenizer(
    request: pytest.FixtureRequest, tokenizer_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param == "sentencepiece":
        return load_tokenizer(tokenizer_path)
    made = byte_level_tokenizer() if request.param == "byte_level" else metaspace_tokenizer()
    return load_tokenizer(save_folder(made, tmp_path_factory.mktemp("tokenizer") / request.param))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_tokens_add_up_to_the_text_and_no_character_is_broken(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_many([MarkedText(text)]).input_ids
    texts = TokenDecoder(tokenizer).texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts).lstrip(" ") == tokenizer.decode(ids.tolist()).lstrip(" ")
    assert "\ufffd" not in "".join(texts)


def test_a_part_of_a_character_alone_is_shown_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_many([MarkedText("👋")]).input_ids
    assert len(ids) > 1, "the emoji is spelled by several tokens"
    first = TokenDecoder(tokenizer).texts(ids[-1:])
    assert len(first) == 1
    assert first[0], "half a character is not nothing"


def test_tokens_know_their_place_and_whether_they_are_trained(tokenizer_path: str) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    end = tokenizer.control_tokens["<|im_end|>"]
    packed = PackedBin(
        np.array([300, 301, end, 400, 401], np.int32),
        np.array([1, 0.5, 0, 1, 0], np.float32),
        np.array([0, 3], np.uint32),
    )
    first, second = tokens_of_bin(packed, TokenDecoder(tokenizer))
    assert [token.id for token in first] == [300, 301, end]
    assert [token.weight for token in first] == [0, 1, 0.5]
    assert [token.is_trained for token in first] == [False, True, True]
    assert [token.is_control for token in first] == [False, False, True]
    assert [(token.position, token.sequence, token.is_trained) for token in second] == [(0, 1, False), (1, 1, True)]


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_numbers(tokenizer_path: str) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    assert TokenDecoder(tokenizer).texts([tokenizer.vocab_size + 5]) == [f"[{tokenizer.vocab_size + 5}]"]
    assert TokenDecoder(None).texts([7, 8]) == ["7 ", "8 "]


def test_characters_that_hide_or_turn_text_around_are_written_as_escapes() -> None:
    assert escape_invisible("a\u202eb\x00\x1b[31m") == "a\\u202eb\\u0000\\u001b[31m"
    assert escape_invisible("line\n\ttab é 👋 שלום") == "line\n\ttab é 👋 שלום"
    assert escape_invisible("\ud800").encode() == b"\\ud800", "half a surrogate pair cannot be written to a file"


def test_a_tokenizer_counts_only_with_the_recorded_fingerprint(tokenizer_path: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    recorded = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    found = find_tokenizer(recorded, candidates=[tmp_path / "gone", __file__, tokenizer_path])
    assert found.tokenizer is not None
    assert found.note == ""
    other = {"name": "other", "fingerprint": "0" * 32}
    assert find_tokenizer(other, candidates=[tokenizer_path]).tokenizer is None
    assert "give its path with --tokenizer" in find_tokenizer(other, candidates=[tokenizer_path]).note
    with pytest.raises(InvalidInputError, match="made with the tokenizer 'other'"):
        find_tokenizer(other, given=tokenizer_path)
    assert find_tokenizer(None, given=tokenizer_path).tokenizer is not None, "data that records nothing takes any"
    assert "records no tokenizer" in find_tokenizer(None).note
