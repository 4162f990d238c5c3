"""Chats and a tokenizer that this package makes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.records.samples import sample_conversations, write_sample_data


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model with ChatML's markers, trained on sample chats."""
    chats = sample_conversations(300, seed=1)
    texts = [message["content"] for chat in chats for message in chat.messages if message.get("content")]
    return str(train_sentencepiece(texts, tmp_path_factory.mktemp("tokenizer") / "sp.model", vocab_size=1000))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of chat files in several formats and schemas."""
    directory = tmp_path_factory.mktemp("chats")
    write_sample_data(directory, num_records=200, seed=2)
    return directory
