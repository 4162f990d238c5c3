"""Reading: lazy, read-only, bounded, and the same in every process and thread."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import create_sft_dataset, open_shard
from megatron_packed_sft.errors import ShardError, ShardFileError
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.support import file_maps as mapping
from tests.open_files import mapped_files, open_files
from tests.packed_bins import assert_same_bins, make_bins, write_shard

ROWS = make_bins(12, 64, seed=5)


@pytest.fixture
def shard(tmp_path: Path) -> MemmapShard:
    write_shard(tmp_path / "shard", ROWS, 64)
    opened = open_shard(tmp_path / "shard")
    assert isinstance(opened, MemmapShard)
    return opened


def test_nothing_is_mapped_before_the_first_read_and_no_descriptor_stays_open(shard: MemmapShard) -> None:
    assert len(shard) == 12
    assert len(mapped_files(shard.path)) == 0
    row = shard[3]
    assert len(mapped_files(shard.path)) == 6
    assert open_files(shard.path) == []
    shard.unmap()
    np.testing.assert_array_equal(row.input_ids, ROWS[3].input_ids)


def test_maps_vanish_with_the_last_array(shard: MemmapShard) -> None:
    row = shard[0]
    shard.unmap()
    gc.collect()
    assert len(mapped_files(shard.path)) == 3  # input_ids, loss_mask and seq_starts are held by the row
    del row
    gc.collect()
    assert len(mapped_files(shard.path)) == 0


def test_arrays_are_read_only_and_cannot_be_made_writable(shard: MemmapShard) -> None:
    for array in (*shard[2], shard.arrays.input_ids, shard.block(1, 4).loss_mask):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        assert type(array) is np.ndarray  # the np.memmap subclass is 1.7x slower on row copies


def test_copies_go_to_torch_without_its_warning_and_bear_in_place_operations(shard: MemmapShard) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = shard.bin(2, copy=True)
        tensor = torch.from_numpy(row.input_ids)
        tensor += 1
        assert torch.tensor(shard[2].input_ids).tolist() == ROWS[2].input_ids.tolist()
    np.testing.assert_array_equal(row.input_ids, ROWS[2].input_ids + 1)
    np.testing.assert_array_equal(shard[2].input_ids, ROWS[2].input_ids)


@pytest.mark.parametrize("index", [-1, 12, 10**9])
def test_an_index_outside_is_an_index_error(index: int, shard: MemmapShard) -> None:
    with pytest.raises(IndexError, match=f"bin {index} of 12"):
        shard[index]
    with pytest.raises(IndexError):
        shard.block(5, 5)
    with pytest.raises(IndexError):
        shard.block(5, 13)


def test_a_pickled_shard_carries_no_arrays(shard: MemmapShard) -> None:
    assert_same_bins(shard, ROWS)
    data = pickle.dumps(shard)
    assert len(data) < 4096
    assert_same_bins(pickle.loads(data), ROWS)


def _read_all(shard: MemmapShard) -> list[list[int]]:
    return [row.input_ids.tolist() for row in shard]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_of_every_kind_read_the_same(method: str, shard: MemmapShard) -> None:
    expected = _read_all(shard)  # the parent has its maps open already
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_read_all, [shard, shard, shard]) == [expected] * 3


def test_a_fork_while_another_thread_holds_the_lock_does_not_hang(shard: MemmapShard) -> None:
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with mapping.POOL.lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    process = multiprocessing.get_context("fork").Process(target=_read_all, args=(shard,))
    process.start()
    process.join(30)
    alive = process.is_alive()
    process.kill()
    release.set()
    thread.join()
    assert not alive
    assert process.exitcode == 0


def test_threads_share_one_shard_while_it_is_unmapped_under_them(shard: MemmapShard) -> None:
    expected = [row.input_ids.tolist() for row in ROWS]

    def read(worker: int) -> bool:
        for step in range(60):
            if (step + worker) % 7 == 0:
                shard.unmap()
            index = (step * 5 + worker) % 12
            if shard[index].input_ids.tolist() != expected[index]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_the_pool_keeps_the_number_of_maps_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_packed_sft.support import file_maps as memmap_reader

    monkeypatch.setattr(memmap_reader, "POOL", mapping.MapPool(limit=3))
    for number in range(10):
        write_shard(tmp_path / f"shard_{number}", make_bins(2, 8, seed=number), 8)
    shards = [open_shard(tmp_path / f"shard_{number}") for number in range(10)]
    for _ in range(2):
        for number, one in enumerate(shards):
            assert_same_bins(one, make_bins(2, 8, seed=number))
            assert len(mapped_files(tmp_path)) <= 3 * 6


@pytest.mark.parametrize("how", ["unmap", "read_with"])
def test_a_shard_that_was_unmapped_leaves_no_place_taken_in_the_pool(
    shard: MemmapShard, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A place that was still taken by the same shard would have it unmapped in the moment that it is mapped again.
    monkeypatch.setattr(mapping, "POOL", mapping.MapPool(limit=1))
    for verify in ("always", "never", "always"):
        assert_same_bins(shard, ROWS)
        if how == "unmap":
            shard.unmap()
        else:
            shard.read_with(ReadOptions(verify))
        assert not mapping.POOL._mapped
    assert_same_bins(shard, ROWS)


def test_a_shard_that_another_thread_unmaps_right_after_it_was_mapped_is_read(
    shard: MemmapShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnmappedAtOnce(mapping.MapPool):
        def add(self, mapped: mapping.LazyMaps[Any]) -> None:
            super().add(mapped)
            mapped.unmap()

    monkeypatch.setattr(mapping, "POOL", UnmappedAtOnce(limit=3))
    assert_same_bins(shard, ROWS)
    assert not shard.is_mapped


def test_threads_read_the_right_bins_while_a_small_pool_unmaps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "POOL", mapping.MapPool(limit=2))
    for number in range(5):
        write_shard(tmp_path / f"shard_{number}", make_bins(12, 64, seed=number), 64)
    dataset = create_sft_dataset([tmp_path / f"shard_{number}" for number in range(5)], 2)
    everything = dataset.fetch_batch(range(60))["tokens"]

    def read(worker: int) -> bool:
        order = np.random.default_rng(worker).permutation(60).reshape(-1, 6)
        batches = [dataset.fetch_batch(indices)["tokens"] for indices in order]
        return all(
            torch.equal(batch, everything[indices, : batch.shape[1]])
            for batch, indices in zip(batches, order, strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(16)))


def test_the_pool_prefers_to_keep_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_packed_sft.support import file_maps as memmap_reader

    monkeypatch.setattr(memmap_reader, "POOL", mapping.MapPool(limit=2))
    for number in range(4):
        write_shard(tmp_path / f"shard_{number}", make_bins(2, 8), 8)
    hot, *others = [open_shard(tmp_path / f"shard_{number}") for number in range(4)]
    assert len(hot[0].input_ids)
    maps = hot.arrays
    for other in others:
        assert len(other[0].input_ids)
        assert hot.arrays is maps


def test_a_path_that_is_no_shard_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="does not exist; check the path"):
        open_shard(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardError, match="is not packed data of a known storage"):
        open_shard(tmp_path / "file")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "seq_starts.npy").write_text("")
    with pytest.raises(ShardFileError, match=r"manifest.json is missing; the shard is incomplete"):
        open_shard(tmp_path / "half")
    with pytest.raises(ShardError):
        open_shard("a\0b")


def test_a_damaged_index_is_an_error_and_not_a_wrong_row(tmp_path: Path) -> None:
    for name, value in (("packed_len", 65), ("packed_len", 0), ("seq_offsets", 10**6), ("seq_starts", 64)):
        path = tmp_path / f"{name}_{value}"
        write_shard(path, ROWS, 64)
        array = np.load(path / f"{name}.npy", mmap_mode="r+")
        array[1 if name == "seq_offsets" else 0] = value
        array.flush()
        with pytest.raises(ShardFileError, match=f"{name}.npy is damaged at bin 0|seq_.*damaged at bin 0"):
            open_shard(path)[0]


def test_a_header_of_another_length_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 64)
    path = tmp_path / "shard" / "packed_len.npy"
    data = path.read_bytes()
    header = data[10:128].rstrip() + b"\n"  # a valid .npy file whose numbers lie at odd addresses
    path.write_bytes(data[:8] + len(header).to_bytes(2, "little") + header + bytes(128 - 10 - len(header)) + data[128:])
    with pytest.raises(ShardFileError, match=r"packed_len.npy has a header of \d+ bytes, not 128"):
        open_shard(tmp_path / "shard")
