"""reliability.md rows 2, 4, 9 and 10: exceptions, full disks, rival writers and partial uploads."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft import create_shard_writer, open_dataset, open_shard, validate
from megatron_packed_sft.errors import NoSpaceError, ShardError, StorageIOError, TargetExistsError
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from tests.faults.injection import Injector
from tests.faults.kill_driver import SCENARIOS, content
from tests.packed_bins import assert_same_bins, files_of, make_bins, write_shard

ROWS = make_bins(4, 16, seed=6)


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
def test_an_exception_inside_a_writer_leaves_nothing_behind(storage: str, tmp_path: Path) -> None:
    def fail() -> None:
        with create_shard_writer(storage, tmp_path / "out.npy", num_bins=4, pack_size=16) as writer:
            writer.write_bin(0, *ROWS[0])
            raise RuntimeError("of the caller's own")

    with pytest.raises(RuntimeError, match="of the caller's own"):
        fail()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
def test_a_writer_that_is_left_without_finalize_publishes_nothing(storage: str, tmp_path: Path) -> None:
    with create_shard_writer(storage, tmp_path / "out.npy", num_bins=4, pack_size=16) as writer:
        for index, row in enumerate(ROWS):
            writer.write_bin(index, *row)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_at_any_step_is_ours_names_the_path_and_leaves_nothing(
    scenario: str, code: int, tmp_path: Path
) -> None:
    name = "result.npy" if scenario == "legacy" else "result"
    SCENARIOS[scenario](tmp_path / "warm_up.npy")  # the first call compiles, and caches the result on disk
    with Injector() as counter:
        SCENARIOS[scenario](tmp_path / name)
    reference = content(tmp_path / name)
    # A write may fail halfway and an fsync after its work; the other calls happen or do not.
    halves = {"pwrite": (False, True), "fsync": (False, True)}
    steps = [(step, after) for step, call in enumerate(counter.calls) for after in halves.get(call, (False,))]
    for step, after in steps:
        place = tmp_path / f"{step}_{after}"
        place.mkdir()
        error = None
        try:
            with Injector(step, error=code, after=after):
                SCENARIOS[scenario](place / name)
        except StorageIOError as caught:
            error = caught
            assert str(place) in str(error)
            assert os.strerror(code) in str(error)
            assert isinstance(error, NoSpaceError) == (code != errno.EIO)
        left = content(place / name)
        assert left in (None, reference)
        if error is None:  # only tidying up after the publication may fail without a word
            assert counter.calls[step] == "unlink"
            assert left == reference
        if left is None:
            assert os.listdir(place) == []
        shutil.rmtree(place)


LIMITED = """
import resource, sys
from megatron_packed_sft import PackedSFTError
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with MemmapShardWriter(sys.argv[1], 64, 1024) as writer:
        writer.finalize()
except PackedSFTError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [0, 100, 5000, 100_000, 266_239])
def test_a_real_file_size_limit_is_an_error_with_path_and_bytes_and_never_a_signal(limit: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "shard"), str(limit)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NoSpaceError cannot write")
    assert "input_ids.npy: File too large; it needs 266,240 bytes" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_really_full_disk_is_an_error_and_never_a_signal(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here; the file-size limit test covers the same path")
    try:
        with pytest.raises(NoSpaceError, match=r"No space left on device; it needs 266,240 bytes; free some space"):
            MemmapShardWriter(disk / "shard", 64, 1024)
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_of_two_writers_one_wins_and_the_other_gets_an_error(tmp_path: Path) -> None:
    first = MemmapShardWriter(tmp_path / "shard", 4, 16)
    second = MemmapShardWriter(tmp_path / "shard", 4, 16)
    for index, row in enumerate(ROWS):
        first.write_bin(index, *row)
        second.write_bin(index, *row)
    second.finalize()
    published = files_of(tmp_path / "shard")
    with pytest.raises(TargetExistsError, match="exists already"):
        first.finalize()
    assert files_of(tmp_path / "shard") == published
    assert os.listdir(tmp_path) == ["shard"]


def test_of_two_legacy_writers_one_wins_and_the_other_gets_an_error(tmp_path: Path) -> None:
    writers = [create_shard_writer("legacy", tmp_path / "x.npy", num_bins=4, pack_size=16) for _ in range(2)]
    for writer in writers:
        for index, row in enumerate(ROWS):
            writer.write_bin(index, *row)
    writers[0].finalize()
    with pytest.raises(TargetExistsError):
        writers[1].finalize()
    assert os.listdir(tmp_path) == ["x.npy"]


def test_a_living_writer_is_left_alone_and_a_dead_one_is_cleaned_up(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter\n"
        "writer = MemmapShardWriter(sys.argv[1], 4, 16)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "shard")], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    [staging] = os.listdir(tmp_path)
    with MemmapShardWriter(tmp_path / "shard", 4, 16):
        assert staging in os.listdir(tmp_path)  # alive: not touched
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    assert os.listdir(tmp_path) == [staging]
    write_shard(tmp_path / "shard", ROWS, 16)
    assert os.listdir(tmp_path) == ["shard"]


def test_a_partial_upload_in_any_order_is_unreadable_until_complete(tmp_path: Path) -> None:
    write_shard(tmp_path / "source", ROWS, 16)
    names = sorted(path.name for path in (tmp_path / "source").iterdir())
    for number, order in enumerate(itertools.permutations(names)):
        if number % 168:  # every 168th of the 5,040 orders
            continue
        target = tmp_path / f"upload_{number}"
        target.mkdir()
        for name in order:
            with pytest.raises(ShardError):
                open_shard(target)
            shutil.copy(tmp_path / "source" / name, target / name)
        assert_same_bins(open_shard(target), ROWS)


def test_a_dataset_whose_dataset_json_is_not_there_yet_does_not_open(tmp_path: Path) -> None:
    SCENARIOS["dataset"](tmp_path / "dataset")
    (tmp_path / "dataset" / "dataset.json").rename(tmp_path / "later")
    with pytest.raises(ShardError, match=r"dataset.json is missing"):
        open_dataset(tmp_path / "dataset")
    (tmp_path / "later").rename(tmp_path / "dataset" / "dataset.json")
    assert validate(tmp_path / "dataset").ok
