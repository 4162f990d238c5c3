"""Static packs of raw samples, from any map-style dataset."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.data import sample_packs
from megatron_packed_sft.data.sample_packs import SamplePackDataset, compute_lengths
from megatron_packed_sft.errors import InvalidInputError, ManifestError


class Samples:
    """Multimodal samples: text ids and an image that takes a number of positions."""

    fingerprint = "samples 1"

    def __init__(self, count: int = 50) -> None:
        rng = np.random.default_rng(0)
        self._items = [
            {"ids": list(range(n)), "image": np.zeros((3, 4, 4)), "patches": int(p)}
            for n, p in zip(rng.integers(1, 20, count), rng.integers(0, 8, count), strict=True)
        ]
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        return self._items[index]


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["ids"]) + sample["patches"]


def test_the_number_of_packs_is_fixed_and_every_sample_is_in_one_pack_whole() -> None:
    samples = Samples()
    packs = SamplePackDataset(samples, length_of, pack_size=32)
    seen = []
    for index in range(len(packs)):
        pack = packs[index]
        assert sum(length_of(sample) for sample in pack) <= 32
        numbers = packs.plan.bin(index).tolist()
        assert numbers == sorted(numbers)
        assert all(sample is samples._items[number] for sample, number in zip(pack, numbers, strict=True))
        seen += numbers
    assert sorted(seen) == list(range(50))
    assert SamplePackDataset(Samples(), length_of, pack_size=32).fingerprint == packs.fingerprint


def test_a_sample_longer_than_the_pack_is_alone_or_dropped_or_an_error() -> None:
    data = [[0] * 3, [0] * 50, [0] * 4]
    packs = SamplePackDataset(data, len, pack_size=10, overflow="single")
    assert [len(sample) for sample in packs[1]] == [50]
    dropped = SamplePackDataset(data, len, pack_size=10, overflow="drop")
    assert sum(len(dropped[i]) for i in range(len(dropped))) == 2
    with pytest.raises(InvalidInputError, match="longer than"):
        SamplePackDataset(data, len, pack_size=10, overflow="error")
    with pytest.raises(InvalidInputError, match="samples are never cut"):
        SamplePackDataset(data, len, pack_size=10, overflow="truncate")


def test_packs_are_padded_or_dropped_to_a_multiple_of_the_ranks() -> None:
    data = [[0] * 10] * 7
    padded = SamplePackDataset(data, len, pack_size=10, world_size=4, drop_last=False)
    assert len(padded) == 8
    assert padded.aligned.repeated_bins.tolist() == [0]
    assert len(SamplePackDataset(data, len, pack_size=10, world_size=4, drop_last=True)) == 4


def test_datasets_that_resample_are_refused_with_the_reason() -> None:
    class Resampling(Samples):
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError

    with pytest.raises(InvalidInputError, match="Resampling has set_epoch, so its samples may change"):
        SamplePackDataset(Resampling(), length_of, pack_size=32)


def test_lengths_that_change_between_calls_are_detected() -> None:
    class Growing(Samples):
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            return {**sample, "patches": sample["patches"] + self.num_reads // 60}

    with pytest.raises(InvalidInputError, match=r"sample \d+ had length \d+ when lengths were computed and has"):
        SamplePackDataset(Growing(), length_of, pack_size=64)
    samples = Samples()
    packs = SamplePackDataset(samples, length_of, pack_size=32)
    samples._items[packs.plan.bin(0)[0]]["ids"].append(1)
    with pytest.raises(InvalidInputError, match="must not depend on chance"):
        packs[0]


def test_lengths_are_computed_once_and_kept(tmp_path: Path) -> None:
    samples = Samples()
    first = compute_lengths(samples, length_of, cache_path=tmp_path / "lengths")
    reads = samples.num_reads
    again = compute_lengths(samples, length_of, cache_path=tmp_path / "lengths")
    assert again.tolist() == first.tolist()
    assert samples.num_reads == reads
    with pytest.raises(InvalidInputError, match="lengths of another dataset or of other settings"):
        compute_lengths(samples, length_of, cache_path=tmp_path / "lengths", fingerprint="other")
    with pytest.raises(InvalidInputError, match="a different number of lengths"):
        compute_lengths(Samples(49), length_of, cache_path=tmp_path / "lengths")
    with pytest.raises(InvalidInputError, match="needs a fingerprint, and list has none"):
        compute_lengths([[1]], len, cache_path=tmp_path / "other")
    path = tmp_path / "lengths" / "lengths.npy"
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    with pytest.raises(ManifestError, match="does not match its checksum"):
        compute_lengths(samples, length_of, cache_path=tmp_path / "lengths")


class SharedSamples(Samples):
    """Reads of all processes are counted in a file; the last sample waits until every process has asked for it."""

    def __init__(self, directory: Path, barrier: Barrier | None, patches: int) -> None:
        super().__init__()
        self._reads = directory / "reads"
        self._barrier = barrier
        self._items[0]["patches"] = patches

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._reads.open("ab") as file:
            file.write(b".")
        if index == 49 and self._barrier is not None:
            self._barrier.wait()
        return super().__getitem__(index)


def compute_on_a_rank(rank: int, directory: Path, started: Barrier, measured: Barrier | None, patches: int) -> None:
    if measured is not None:
        sample_packs._lock = lambda fd, path: False  # type: ignore[assignment]  # a file system without locks
    started.wait()
    try:
        samples = SharedSamples(directory, measured, patches)
        result = str(compute_lengths(samples, length_of, cache_path=directory / "lengths").tolist())
    except InvalidInputError as error:
        result = str(error)
    (directory / f"rank_{rank}").write_text(result)


def compute_on_ranks(directory: Path, patches: list[int], *, has_locks: bool) -> list[str]:
    context = multiprocessing.get_context("spawn")
    started, measured = context.Barrier(len(patches)), None if has_locks else context.Barrier(len(patches))
    processes = [
        context.Process(target=compute_on_a_rank, args=(rank, directory, started, measured, number))
        for rank, number in enumerate(patches)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [path.read_text() for path in sorted(directory.glob("rank_*"))]


def lengths_with(directory: Path, patches: int) -> str:
    return str([length_of(sample) for sample in SharedSamples(directory, None, patches)._items])


def test_ranks_that_share_a_new_cache_compute_it_once_and_get_the_same_lengths(tmp_path: Path) -> None:
    assert compute_on_ranks(tmp_path, [3, 3, 3], has_locks=True) == [lengths_with(tmp_path, 3)] * 3
    assert len((tmp_path / "reads").read_bytes()) == 50 + 16  # by one rank; it measures a few samples twice
    assert not list(tmp_path.glob(".*"))  # neither locks nor staging directories stay behind


def test_without_file_locks_all_ranks_get_the_lengths_that_were_published_first(tmp_path: Path) -> None:
    assert compute_on_ranks(tmp_path, [3, 3], has_locks=False) == [lengths_with(tmp_path, 3)] * 2


def test_a_rank_whose_lengths_differ_from_the_published_ones_is_refused(tmp_path: Path) -> None:
    results = compute_on_ranks(tmp_path, [3, 4], has_locks=False)
    assert sum(result in (lengths_with(tmp_path, 3), lengths_with(tmp_path, 4)) for result in results) == 1
    assert sum("sample 0 had length" in result for result in results) == 1


def test_empty_samples_and_empty_datasets_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="sample 1 has length 0"):
        compute_lengths([[1], []], len)
    with pytest.raises(InvalidInputError, match="the dataset has 0 samples"):
        compute_lengths([], len)
    packs = SamplePackDataset([[1]], len, pack_size=4)
    with pytest.raises(IndexError, match="pack 1 of 1"):
        packs[1]
    assert packs.collate_fn(packs.__getitems__([0])) == [[[1]]]
