"""Chats and a tokenizer that this package makes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft.records.samples import write_sample_data
from tests.sample_tokenizer import train_sample_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model with ChatML's markers, trained on sample chats."""
    return train_sample_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of chat files in several formats and schemas."""
    directory = tmp_path_factory.mktemp("chats")
    write_sample_data(directory, num_records=200, seed=2)
    return directory
