"""Acceptance test 2 of seed 002: y is x one token later, always, and ids are within the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.caches import PretrainTokenStreamDataset, build_pretrain_cache, read_meta
from tests.caches.small_tokenizer import TEXTS, train


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cache")
    tokenizer = load_tokenizer(train(home))
    build_pretrain_cache(
        TEXTS * 3,
        str(home / "texts"),
        tokenizer=tokenizer,
        max_train_tokens=5000,
        max_val_tokens=300,
        shard_bytes=1000,
        seed=42,
        shuffle_buffer=16,
    )
    return home / "texts"


@pytest.mark.parametrize("split", ["train", "val"])
def test_y_is_x_one_token_later_and_ids_are_within_the_vocabulary(cache: Path, split: str) -> None:
    vocab_size = read_meta(str(cache / "meta.json"))["vocab_size"]
    dataset = PretrainTokenStreamDataset(str(cache / split), T=32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        x, y = dataset.get_batch(B=8, generator=generator)
        assert x.shape == y.shape == (8, 32)
        assert x.dtype == y.dtype == torch.int64
        assert x.device == y.device == torch.device("cpu")
        assert torch.equal(y[:, :-1], x[:, 1:])
        assert int(x.min()) >= 0
        assert max(int(x.max()), int(y.max())) < vocab_size


def test_windows_lie_within_one_shard_and_every_window_is_equally_likely(tmp_path: Path) -> None:
    np.arange(0, 12, dtype="<u2").tofile(tmp_path / "shard_00000.bin")
    np.arange(100, 106, dtype="<u2").tofile(tmp_path / "shard_00001.bin")
    dataset = PretrainTokenStreamDataset(str(tmp_path), T=4, device="cpu")
    x, y = dataset.get_batch(B=5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(y, x + 1)
    firsts, counts = x[:, 0].unique(return_counts=True)
    assert firsts.tolist() == [*range(8), 100, 101]
    assert int(counts.min()) > 400
    assert int(counts.max()) < 600


def test_the_generator_alone_decides(cache: Path) -> None:
    dataset = PretrainTokenStreamDataset(str(cache / "train"), T=16, device="cpu")
    again = PretrainTokenStreamDataset(str(cache / "train"), T=16, device="cpu")
    torch.manual_seed(3)
    first = dataset.get_batch(B=4, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(4)
    second = again.get_batch(B=4, generator=torch.Generator().manual_seed(5))
    other = again.get_batch(B=4, generator=torch.Generator().manual_seed(6))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])
