"""A small tokenizer that the tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.records.samples import sample_conversations


def train_sample_tokenizer(directory: Path) -> str:
    """Train a SentencePiece model with ChatML's markers on sample chats, and return its path."""
    chats = sample_conversations(300, seed=1)
    texts = [message["content"] for chat in chats for message in chat.messages if message.get("content")]
    return str(train_sentencepiece(texts, directory / "sp.model", vocab_size=1000))
