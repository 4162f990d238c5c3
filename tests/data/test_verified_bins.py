"""reliability.md rows 27 and 28: a damaged bin is an error when it is first read, and so is a file that is cut."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from megatron_packed_sft import DatasetWriter, PackedLoader, create_sft_dataset, open_shard, validate
from megatron_packed_sft.data.batch import located_bins
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.dataset_directory import open_dataset
from megatron_packed_sft.storage.interface import VERIFY, ReadOptions
from megatron_packed_sft.storage.memmap_v1 import reader as memmap_reader
from megatron_packed_sft.storage.memmap_v1.manifest import (
    ARRAY_FILES,
    BIN_CHECKSUMS,
    INPUT_IDS,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PACKED_LEN,
    SEQ_OFFSETS,
    SEQ_STARTS,
    checksums_of_bin,
)
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.support import checksum
from tests.packed_bins import make_bins, write_shard

BINS = make_bins(12, 64, vocab_size=500, seed=3)
WEIGHTED = [one._replace(loss_mask=one.loss_mask * np.float32(0.5)) for one in BINS]
BIN = next(number for number, one in enumerate(BINS) if len(one.input_ids) > 8 and len(one.seq_start_id) > 2)
FILES = (*ARRAY_FILES, LOSS_WEIGHTS)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified") / "shard"
    write_shard(path, WEIGHTED, 64, vocab_size=500)
    return path


@pytest.fixture
def shard(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "shard")
    return tmp_path / "shard"


def opened(path: Path, **options: str) -> MemmapShard:
    shard = open_shard(path)
    assert isinstance(shard, MemmapShard)
    shard.read_with(ReadOptions(**options))
    return shard


def flip(path: Path, name: str, number: int = BIN, bit: int = 0) -> None:
    """Flip a bit of what a file says of a bin; the result is a possible value."""
    array = np.load(path / name, mmap_mode="r+")
    if name in (INPUT_IDS, LOSS_MASK, LOSS_WEIGHTS):
        cells = array[number, 2:3]
    elif name == SEQ_STARTS:
        first = int(np.load(path / SEQ_OFFSETS)[number])
        cells = array[first + 1 : first + 2]
    else:
        cells = array[number : number + 1]
    cells.view(np.uint8).reshape(-1)[0] ^= 1 << bit
    array.flush()


def dataset_of(path: Path, how: dict[str, str], **arguments: Any) -> Any:
    """A dataset that is read as these options say."""
    dataset = create_sft_dataset(path, 2, **arguments)
    dataset.source.read_with(ReadOptions(**how))
    return dataset


READS: dict[str, Callable[[Path, dict[str, str]], Any]] = {
    "one bin": lambda path, how: dataset_of(path, how)[BIN],
    "a batch": lambda path, how: dataset_of(path, how).fetch_batch([0, BIN, 1]),
    "a block": lambda path, how: opened(path, **how).block(0, 12),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_an_error_that_names_shard_bin_and_file(shard: Path, name: str, read: str) -> None:
    flip(shard, name)
    with pytest.raises(ShardFileError) as caught:
        READS[read](shard, {})
    message = str(caught.value)
    # An entry of seq_offsets ends the bin before, too; a block reads that first.
    assert f"{shard / name} is damaged at bin {BIN}" in message or name == SEQ_OFFSETS
    assert str(shard / name) in message


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", [-1, 1, -3])
def test_a_wrong_length_that_is_possible_is_an_error(shard: Path, read: str, change: int) -> None:
    lengths = np.load(shard / PACKED_LEN, mmap_mode="r+")
    lengths[BIN] = int(lengths[BIN]) + change
    lengths.flush()
    with pytest.raises(ShardFileError, match=rf"packed_len.npy is damaged at bin {BIN}, which does not match"):
        READS[read](shard, {})


def test_other_bins_of_a_damaged_shard_are_read(shard: Path) -> None:
    flip(shard, INPUT_IDS)
    dataset = create_sft_dataset(shard, 2)
    others = [number for number in range(12) if number != BIN]
    assert len(dataset.fetch_batch(others)["tokens"]) == 11
    assert dataset[others[0]]["input_ids"].tolist() == WEIGHTED[others[0]].input_ids.tolist()


@pytest.mark.parametrize("name", [INPUT_IDS, PACKED_LEN, SEQ_STARTS, LOSS_WEIGHTS])
def test_validate_names_the_file_and_the_bin_of_a_flipped_bit(shard: Path, name: str) -> None:
    flip(shard, name)
    found = [(finding.file, finding.bin) for finding in validate(shard).findings]
    assert (str(shard / name), BIN) in found
    assert {file for file, _ in found} == {str(shard / name)}


def test_a_bin_that_is_sound_when_it_is_read_again_is_told_as_that(sound: Path) -> None:
    assert f"{sound}: bin {BIN} did not match its checksum when it was read, and does now" in str(
        opened(sound).damaged_bin(BIN, "checksum")
    )


def test_validate_names_the_checksums_when_they_are_what_is_damaged(shard: Path) -> None:
    flip(shard, BIN_CHECKSUMS)
    [finding] = validate(shard).findings
    assert finding.file == str(shard / BIN_CHECKSUMS)


def test_when_a_bin_is_verified(shard: Path) -> None:
    first, always, never = (opened(shard, verify=verify) for verify in ("first_read", "always", "never"))
    for one in (first, always, never):
        located_bins.locate_in_shard(one, [BIN])
        assert one[BIN].input_ids.tolist() == WEIGHTED[BIN].input_ids.tolist()
    assert first.arrays.verified.tolist() == [number == BIN for number in range(12)]
    flip(shard, INPUT_IDS)
    assert first[BIN].input_ids.tolist() != WEIGHTED[BIN].input_ids.tolist()
    assert len(never[BIN].input_ids)
    with pytest.raises(ShardFileError, match=rf"input_ids.npy is damaged at bin {BIN}"):
        assert always[BIN]
    first.unmap()  # what is mapped again is read again
    with pytest.raises(ShardFileError, match=rf"input_ids.npy is damaged at bin {BIN}"):
        assert first[BIN]


def test_a_batch_verifies_its_bins_once(shard: Path) -> None:
    dataset = create_sft_dataset(shard, 2)
    dataset.fetch_batch([3, BIN])
    assert set(np.flatnonzero(dataset.source.shard(0).arrays.verified)) == {3, BIN}
    flip(shard, LOSS_MASK)
    dataset.fetch_batch([BIN])
    with pytest.raises(ShardFileError, match=r"loss_mask\.npy"):
        create_sft_dataset(shard, 2, opening=OpenOptions(verify="always")).fetch_batch([BIN])
    create_sft_dataset(shard, 2, opening=OpenOptions(verify="never")).fetch_batch([BIN])


def test_a_dataset_directory_opens_its_shards_as_it_is_told(many: Path) -> None:
    dataset = open_dataset(many, verify="always")
    shard = dataset.open_shard("train", dataset.entries("train")[1])
    assert isinstance(shard, MemmapShard)
    assert shard.reading == ReadOptions("always")
    assert shard[BIN].input_ids.tolist() == WEIGHTED[BIN].input_ids.tolist()


def test_unknown_options_are_refused(shard: Path) -> None:
    with pytest.raises(InvalidInputError, match="verify is 'sometimes'; choose from first_read, always, never"):
        create_sft_dataset(shard, 2, opening=OpenOptions(verify="sometimes"))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key], key


def write_many(home: Path, num_shards: int) -> Path:
    with DatasetWriter(home) as dataset:
        for number in range(num_shards):
            bins = WEIGHTED if number % 2 else BINS
            # Shards of both id dtypes, with and without weights.
            arguments = {"num_bins": 12, "pack_size": 64, "vocab_size": 500 if number % 3 else 100_000}
            with dataset.shard_writer("train", number, **arguments) as writer:
                for index, one in enumerate(bins):
                    writer.write_bin(index, *one)
                writer.finalize()
        dataset.finalize()
    return home


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "dataset", 8)


@pytest.mark.parametrize("contract", ["mcore", "hf"])
def test_batches_are_the_same_however_they_are_read(many: Path, contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picked = [0, 95, 13, 40, 51, 67, -3, 77, 86, 12]
    plain = create_sft_dataset(many, 2, contract=contract)
    expected = plain.collate_fn([plain[index] for index in picked])  # samples one by one, laid end to end
    for verify in VERIFY:
        assert_equal(dataset_of(many, {"verify": verify}, contract=contract).fetch_batch(picked), expected)
    monkeypatch.setattr(located_bins, "hash_function", lambda: 0)  # an xxhash that exports nothing
    assert_equal(create_sft_dataset(many, 2, contract=contract).fetch_batch(picked), expected)


def test_an_xxhash_that_exports_nothing_gives_the_same_files_and_errors(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "hash_function", lambda: 0)
    monkeypatch.setattr(located_bins, "hash_function", lambda: 0)
    write_shard(tmp_path / "shard", WEIGHTED, 64, vocab_size=500)
    for name in FILES:
        assert (tmp_path / "shard" / name).read_bytes() == (sound / name).read_bytes()
    flip(tmp_path / "shard", LOSS_WEIGHTS)
    with pytest.raises(ShardFileError, match=rf"loss_weights.npy is damaged at bin {BIN}"):
        create_sft_dataset(tmp_path / "shard", 2).fetch_batch([BIN])


def test_the_checksums_are_those_that_the_format_describes(sound: Path) -> None:
    shard = opened(sound)
    recorded = np.load(sound / BIN_CHECKSUMS)
    first = 0
    for number, one in enumerate(WEIGHTED):
        mask = (one.loss_mask > 0).astype(np.uint8)
        starts = one.seq_start_id.astype("<u4")
        found = checksums_of_bin(one.input_ids.astype("<u2"), mask, one.loss_mask, first, starts)
        assert recorded[number].tolist() == found
        index = np.array([len(one.input_ids), first, first + len(starts), *starts], "<u4")
        assert found[2] == xxhash.xxh3_64_intdigest(index.tobytes())
        first += len(starts)
    assert shard.manifest.bin_checksum_algorithm == "xxh3_64"


def test_threads_verify_the_same_bins_and_all_see_the_damage(many: Path, tmp_path: Path) -> None:
    shutil.copytree(many, tmp_path / "dataset")
    flip(tmp_path / "dataset" / "train" / "shard_000005", INPUT_IDS)
    dataset = create_sft_dataset(tmp_path / "dataset", 2)
    bad = 5 * 12 + BIN

    def read(thread: int) -> int:
        num_errors = 0
        order = np.random.default_rng(thread).permutation(96).reshape(-1, 8).tolist()
        for indices in order:
            try:
                dataset.fetch_batch(indices)
            except ShardFileError:
                num_errors += 1
                assert bad in indices
        return num_errors

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [1] * 4


def _read_in_worker(dataset: Any, index: int, found: Any) -> None:
    try:
        dataset.fetch_batch([index])
        found.put("")
    except ShardFileError as error:
        found.put(str(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_verify_what_they_read(shard: Path, method: str) -> None:
    dataset = create_sft_dataset(shard, 2)
    dataset.fetch_batch([0])
    flip(shard, INPUT_IDS)
    context = multiprocessing.get_context(method)
    found = context.Queue()
    worker = context.Process(target=_read_in_worker, args=(dataset, BIN, found))
    worker.start()
    assert f"input_ids.npy is damaged at bin {BIN}" in found.get(timeout=60)
    worker.join()


class _PausingNumpy:
    """numpy, whose first `array` waits: a thread that maps a shard is in the middle of it."""

    def __init__(self) -> None:
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def array(self, *arguments: Any) -> Any:
        if not self.is_inside.is_set():
            self.is_inside.set()
            self.may_go_on.wait(120)
        return np.array(*arguments)


def test_a_fork_while_another_thread_takes_the_addresses_of_a_shard_reads(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = create_sft_dataset(many, 2)
    dataset.fetch_batch([40])  # compiled, and the other shards are not mapped
    pausing = _PausingNumpy()
    monkeypatch.setattr(memmap_reader, "np", pausing)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    with ThreadPoolExecutor(1) as threads:
        batch = threads.submit(dataset.fetch_batch, [0])
        assert pausing.is_inside.wait(60)
        worker = context.Process(target=_read_in_worker, args=(dataset, 13, found))
        worker.start()
        worker.join(30)
        worker.kill()
        pausing.may_go_on.set()
        assert len(batch.result()["tokens"]) == 1
    assert worker.exitcode == 0


def test_the_loader_stops_at_the_damaged_bin_in_the_first_epoch(shard: Path) -> None:
    flip(shard, INPUT_IDS)
    loader = PackedLoader(create_sft_dataset(shard, 2), micro_batch_size=2, num_epochs=3, shuffle=True)
    with pytest.raises(ShardFileError, match=rf"input_ids.npy is damaged at bin {BIN}"):
        list(loader)
