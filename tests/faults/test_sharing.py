"""reliability.md rows 8, 21 and 22: republishing, thousands of shards, read-only places, many processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft import open_shard
from megatron_packed_sft.errors import ShardChangedError, StorageIOError
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from tests.packed_bins import assert_same_bins, files_of, make_bins, write_shard

OLD = make_bins(5, 32, seed=1)
NEW = make_bins(5, 32, seed=2)


def overwrite(path: Path) -> None:
    with MemmapShardWriter(path, 5, 32, overwrite=True) as writer:
        for index, row in enumerate(NEW):
            writer.write_bin(index, *row)
        writer.finalize()


def test_a_reader_keeps_the_old_bytes_whole_when_the_shard_is_republished(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", OLD, 32)
    reader = open_shard(tmp_path / "shard")
    assert len(reader[0].input_ids)
    overwrite(tmp_path / "shard")
    assert_same_bins(reader, OLD)
    assert_same_bins(open_shard(tmp_path / "shard"), NEW)
    assert os.listdir(tmp_path) == ["shard"]


def test_a_reader_that_would_have_to_map_the_new_bytes_refuses(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", OLD, 32)
    reader = open_shard(tmp_path / "shard")
    overwrite(tmp_path / "shard")
    with pytest.raises(ShardChangedError, match="was replaced since it was opened; open it again"):
        reader[0]


def test_a_republish_that_fails_keeps_the_old_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", OLD, 32)
    before = files_of(tmp_path / "shard")
    with MemmapShardWriter(tmp_path / "shard", 5, 32, overwrite=True) as writer:
        writer.write_bin(0, *NEW[0])
    assert files_of(tmp_path / "shard") == before
    assert os.listdir(tmp_path) == ["shard"]


def test_republishing_works_where_the_system_cannot_swap_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_packed_sft.support import atomic

    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    write_shard(tmp_path / "shard", OLD, 32)
    overwrite(tmp_path / "shard")
    assert_same_bins(open_shard(tmp_path / "shard"), NEW)
    assert os.listdir(tmp_path) == ["shard"]


def _read_many(paths: list[str]) -> tuple[int, int, int]:
    """Open and read all shards; the sum of all ids, and the most descriptors and maps seen."""
    shards = [open_shard(path) for path in paths]
    total = descriptors = maps = 0
    for number, shard in enumerate(shards):
        total += int(shard[0].input_ids.sum())
        if number % 250 == 0 or number == len(shards) - 1:
            descriptors = max(descriptors, len(os.listdir("/proc/self/fd")))
            maps = max(maps, len(Path("/proc/self/maps").read_text().splitlines()))
    return total, descriptors, maps


def test_ten_thousand_shards_and_eight_workers_keep_files_and_maps_bounded(tmp_path: Path) -> None:
    rows = make_bins(1, 8)
    write_shard(tmp_path / "shard_00000", rows, 8)
    paths = [str(tmp_path / "shard_00000")]
    for number in range(1, 10_000):
        path = tmp_path / f"shard_{number:05d}"
        path.mkdir()
        for name in os.listdir(paths[0]):
            os.link(f"{paths[0]}/{name}", path / name)
        paths.append(str(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        # Every worker opens a slice of the shards; one of them opens them all.
        work = [paths, *(paths[start::7] for start in range(7))]
        with multiprocessing.get_context("fork").Pool(8) as pool:
            results = pool.map(_read_many, work, chunksize=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    one = int(rows[0].input_ids.sum())
    for (total, descriptors, maps), part in zip(results, work, strict=True):
        assert total == one * len(part)
        assert descriptors < 100
        assert maps < 1024 * 6 + 2000


def test_reading_writes_nothing_and_works_from_a_read_only_place(tmp_path: Path) -> None:
    write_shard(tmp_path / "place" / "shard", OLD, 32)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "place").rglob("*")}
    for path in before:
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    os.chmod(tmp_path / "place", 0o555)
    assert_same_bins(open_shard(tmp_path / "place" / "shard"), OLD)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "place").rglob("*")} == before
    os.chmod(tmp_path / "place", 0o755)
    for path in before:
        os.chmod(path, 0o755)


def test_a_read_only_mount_is_read_and_refused_for_writing_in_one_sentence(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        write_shard(disk / "shard", OLD, 32)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert_same_bins(open_shard(disk / "shard"), OLD)
        with pytest.raises(StorageIOError, match="Read-only file system; choose a path on a writable disk"):
            MemmapShardWriter(disk / "other", 1, 8)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_two_processes_share_the_pages_of_one_shard(tmp_path: Path) -> None:
    """What a process holds for itself after reading everything stays small, whatever the shard's size.

    Pages of the file are shared and can be dropped at any time; only dirty pages are the process's own.
    """
    rows = make_bins(1, 4096, seed=3)
    with MemmapShardWriter(tmp_path / "shard", 2000, 4096) as writer:
        for index in range(2000):
            writer.write_bin(index, *rows[0])
        writer.finalize()
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from megatron_packed_sft import open_shard\n"
        "def private():\n"
        "    lines = Path('/proc/self/smaps_rollup').read_text().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith('Private_Dirty'))\n"
        "shard = open_shard(sys.argv[1])\n"
        "shard.bin(0, copy=True)\n"
        "before = private()\n"
        "total = sum(int(row.input_ids.sum()) for row in shard)\n"
        "print(private() - before, total)\n"
    )
    readers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "shard")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [reader.communicate()[0].split() for reader in readers]
    expected = int(rows[0].input_ids.sum()) * 2000
    for kilobytes, total in results:
        assert int(total) == expected
        assert int(kilobytes) < 5 * 1024
    shutil.rmtree(tmp_path / "shard")
