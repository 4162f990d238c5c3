"""Real tokenizers, where they are at hand: the ids of `AutoTokenizer`, and the same masks either way."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft.encode.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_packed_sft.encode.interface import MarkedText
from megatron_packed_sft.encode.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.encode import tiny_tokenizers as tiny

HOME = Path(os.environ.get("PACKED_SFT_TOKENIZERS", "/tmp/tokenizers"))
FAST = ("qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "gpt2")
SLOW = ("deepseek_v3", "gemma3")
MODELS = "mistral_common/mistral_common/data/*.model*"


def folder_of(name: str) -> Path:
    folder = HOME / name / "models"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; point PACKED_SFT_TOKENIZERS at real tokenizers")
    return folder


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_ids_are_those_of_transformers_and_masks_do_not_depend_on_the_path(name: str) -> None:
    folder = folder_of(name)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    fast, slow = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, fast=False)
    assert fast.fast_path == ("tiktoken" if name in FAST else None), fast.fast_path_refusal
    texts = [MarkedText(text, [(0, len(text) // 2)]) for text in tiny.nasty_texts(list(fast.control_tokens))]
    one, other = fast.encode_many(texts), slow.encode_many(texts)
    assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    expected = oracle([text.text for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    assert one.input_ids.tolist() == [number for ids in expected for number in ids]
    assert (fast.bos_id, fast.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert fast.vocab_size == len(oracle)


def test_sentencepiece_models_give_every_text_back() -> None:
    paths = sorted(HOME.glob(MODELS))
    if not paths:
        pytest.skip(f"no {HOME / MODELS}; point PACKED_SFT_TOKENIZERS at real tokenizers")
    for path in paths:
        tokenizer = SentencePieceTokenizer(path)
        for text in tiny.nasty_texts(list(tokenizer.control_tokens)[:50]):
            assert tokenizer.decode(tokenizer.encode_many([MarkedText(text)]).input_ids.tolist()) == text
