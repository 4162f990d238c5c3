"""A small SentencePiece model with the seed's four special tokens, texts and chats for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_packed_sft import train_sentencepiece
from megatron_packed_sft.caches import SPECIAL_TOKENS, Message

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
