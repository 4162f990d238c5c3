"""Real tokenizers, where they are at hand: the ids of `AutoTokenizer`, and the same masks either way."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.encode import tiny_tokenizers as tiny
from tests.real_data import IS_WHOLE, NAMES, sentencepiece_models, tokenizer_folder

SLOW = ("deepseek_v3", "gemma3")


@pytest.mark.parametrize("name", NAMES if IS_WHOLE else NAMES[:1])
def test_ids_are_those_of_transformers_and_masks_do_not_depend_on_the_path(name: str) -> None:
    folder = tokenizer_folder(name)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    fast, slow = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, fast=False)
    assert fast.fast_path == (None if name in SLOW else "gigatoken"), fast.fast_path_refusal
    texts = [MarkedText(text, [(0, len(text) // 2)]) for text in tiny.nasty_texts(list(fast.control_tokens))]
    one, other = fast.encode_many(texts), slow.encode_many(texts)
    assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    expected = oracle([text.text for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    assert one.input_ids.tolist() == [number for ids in expected for number in ids]
    assert (fast.bos_id, fast.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert fast.vocab_size == len(oracle)


def test_sentencepiece_models_give_every_text_back() -> None:
    for path in sentencepiece_models():
        tokenizer = SentencePieceTokenizer(path)
        for text in tiny.nasty_texts(list(tokenizer.control_tokens)[:50]):
            assert tokenizer.decode(tokenizer.encode_many([MarkedText(text)]).input_ids.tolist()) == text
