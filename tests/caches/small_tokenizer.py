"""Small tokenizers with the seed's four special tokens, texts and chats for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft import train_sentencepiece
from megatron_packed_sft.caches import SPECIAL_TOKENS, Message
from megatron_packed_sft.encode.sequences import MarkedText, Sequences

SENTENCE = "the quick brown fox jumps over a lazy dog while seven clever wizards quietly mix jugs of liquid gold"
WORDS = SENTENCE.split()
TEXTS = [
    " ".join(WORDS[(start * step + place) % len(WORDS)] for place in range(5 + (start * 7) % 40)) + "."
    for step in (1, 3, 5)
    for start in range(20)
]
CHATS: list[list[Message]] = [
    [
        {"role": "system", "content": f"You are wizard {number}."},
        {"role": "user", "content": TEXTS[number]},
        {"role": "assistant", "content": TEXTS[-number - 1]},
        {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": f"Gold {number}."},
    ][number % 2 :]
    for number in range(30)
]


def train(folder: Path, *, symbols: tuple[str, ...] = tuple(SPECIAL_TOKENS.values())) -> str:
    """Train the model; return its path."""
    return str(train_sentencepiece(TEXTS, folder / "spm.model", vocab_size=400, user_defined_symbols=symbols))


def processor(path: str) -> Any:
    """Load a model with the package `sentencepiece` itself."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=path)


def special_ids(path: str) -> dict[str, int]:
    """The ids of sys, usr, asst and eot, as the package `sentencepiece` says."""
    return {name: processor(path).piece_to_id(text) for name, text in SPECIAL_TOKENS.items()}


class Letters:
    """As small as a tokenizer can be: an id per letter; the four special tokens are 150 to 153."""

    name = fingerprint = "letters"
    path = __file__
    eos_id = None

    def __init__(self, vocab_size: int = 200) -> None:
        self.vocab_size = vocab_size
        self.control_tokens = {text: 150 + number for number, text in enumerate(SPECIAL_TOKENS.values())}

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        ids = [self.encode(text) for text, *_ in texts]
        flat = np.fromiter(chain.from_iterable(ids), np.int32)
        return Sequences(flat, np.zeros(len(flat), np.uint8), np.array([*map(len, ids)]), np.arange(len(ids)))

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 128 for letter in text]
