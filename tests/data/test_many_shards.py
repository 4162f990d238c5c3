"""A thousand shards behind one dataset: quick to open, and cheap in every worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft import DatasetWriter, create_sft_dataset
from tests.packed_bins import make_bins, write_shard

NUM_SHARDS = 1000


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("many")
    write_shard(home / "one", make_bins(4, 128, seed=1), 128)
    with DatasetWriter(home / "dataset") as dataset:
        for number in range(NUM_SHARDS):
            path = dataset.shard_path("train", number)
            path.mkdir(parents=True)
            for name in os.listdir(home / "one"):
                os.link(home / "one" / name, path / name)
        dataset.finalize()
    return home / "dataset"


def private_kilobytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty"))


class Probe:
    """Samples that tell what the worker holds for itself, beyond what it had before its first read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.before: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.before is None:
            self.before = private_kilobytes()
        assert len(self.dataset[index]["input_ids"])
        if index % 100 < 8:
            return private_kilobytes() - self.before, len(os.listdir("/proc/self/fd"))
        return 0, 0


def test_opening_touches_no_shard(dataset_path: Path) -> None:
    dataset = create_sft_dataset(dataset_path, 2, seq_length=128)
    assert len(dataset) == 4 * NUM_SHARDS
    assert dataset.source._open == {}
    assert len(dataset.fetch_batch([5, 3999, 0])["tokens"]) == 3
    assert sorted(dataset.source._open) == [0, 1, 999]


def test_a_worker_that_reads_everything_stays_under_20_megabytes_of_its_own(dataset_path: Path) -> None:
    dataset = create_sft_dataset(dataset_path, 2, seq_length=128)
    loader = torch.utils.data.DataLoader(
        Probe(dataset),
        batch_size=8,
        num_workers=2,
        shuffle=True,
        collate_fn=largest,
        multiprocessing_context="spawn",
    )
    seen = list(loader)
    assert max(kilobytes for kilobytes, _ in seen) < 20 * 1024
    assert max(descriptors for _, descriptors in seen) < 100


def largest(samples: list[tuple[int, int]]) -> tuple[int, int]:
    return max(samples)[0], max(count for _, count in samples)
