"""Writing, opening, reading and validating: memmap_v1 beside a plain copy, the legacy pickle and packed Parquet.

python -m benchmarks.storage --bins 20000 --pack-size 4096
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import in_own_process, peak_megabytes, print_table, private_megabytes, resident_megabytes, timed
from megatron_packed_sft import open_shard, validate
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

VOCAB_SIZE = 120_000
SEQUENCES_PER_BIN = 12
FULL = 0.986
POOL = 512  # distinct rows; written repeatedly
BLOCK = 128


def rows(pack_size: int) -> BinBlock:
    """Return a pool of valid rows: 98.6 % full, 12 sequences each."""
    rng = np.random.default_rng(0)
    length = int(pack_size * FULL)
    starts = np.linspace(0, length, SEQUENCES_PER_BIN, endpoint=False).astype(np.uint32)
    ids = rng.integers(0, VOCAB_SIZE, (POOL, pack_size), dtype=np.int32)
    mask = (rng.random((POOL, pack_size)) < 0.4).astype(np.uint8)
    ids[:, length:] = 0
    mask[:, length:] = 0
    mask[:, np.append(starts[1:], length) - 1] = 0
    return BinBlock(
        ids,
        mask,
        np.full(POOL, length, np.uint32),
        (np.arange(POOL + 1) * SEQUENCES_PER_BIN).astype(np.uint32),
        np.tile(starts, POOL),
    )


def part(pool: BinBlock, first: int, count: int) -> BinBlock:
    """`count` rows of the pool from `first` on, without a copy."""
    first %= POOL
    return BinBlock(
        pool.input_ids[first : first + count],
        pool.loss_mask[first : first + count],
        pool.packed_len[first : first + count],
        pool.seq_offsets[first : first + count + 1],
        pool.seq_starts[first * SEQUENCES_PER_BIN : (first + count) * SEQUENCES_PER_BIN],
    )


def blocks(num_bins: int) -> list[tuple[int, int]]:
    """(first bin, number of bins) of each block; a block never wraps around the pool."""
    return [(first, min(BLOCK, num_bins - first)) for first in range(0, num_bins, BLOCK)]


def plain_copy(target: Path, pool: BinBlock, num_bins: int) -> None:
    """numpy.copyto of the same bytes into preallocated maps, and fsync: the least any writer can do."""
    target.mkdir()
    pack_size = pool.input_ids.shape[1]
    maps = []
    for name, source in (("ids", pool.input_ids), ("mask", pool.loss_mask)):
        with open(target / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bins * pack_size * source.itemsize)
        maps.append(np.memmap(target / name, source.dtype, "r+", shape=(num_bins, pack_size)))
    for first, count in blocks(num_bins):
        piece = part(pool, first, count)
        np.copyto(maps[0][first : first + count], piece.input_ids)
        np.copyto(maps[1][first : first + count], piece.loss_mask)
    for array in maps:
        array.flush()
    for name in ("ids", "mask"):
        with open(target / name, "rb") as file:
            os.fsync(file.fileno())


def memmap_blocks(target: Path, pool: BinBlock, num_bins: int) -> None:
    """Our writer, blocks of 128 bins."""
    with MemmapShardWriter(target, num_bins, pool.input_ids.shape[1], vocab_size=VOCAB_SIZE) as writer:
        for first, count in blocks(num_bins):
            writer.write_block(first, part(pool, first, count))
        writer.finalize()


def memmap_bins(target: Path, pool: BinBlock, num_bins: int) -> None:
    """Our writer, one bin at a time."""
    with MemmapShardWriter(target, num_bins, pool.input_ids.shape[1], vocab_size=VOCAB_SIZE) as writer:
        for index in range(num_bins):
            writer.write_bin(index, *pool[index % POOL])
        writer.finalize()


def legacy_lists(target: Path, pool: BinBlock, num_bins: int) -> None:
    """What Megatron-Bridge does: Python lists in dicts, one np.save at the end."""
    data = [
        dict(zip(("input_ids", "loss_mask", "seq_start_id"), (a.tolist() for a in pool[index % POOL]), strict=True))
        for index in range(num_bins)
    ]
    with open(target, "wb") as file:
        np.save(file, np.array(data, dtype=object), allow_pickle=True)
        file.flush()
        os.fsync(file.fileno())


def legacy_ours(target: Path, pool: BinBlock, num_bins: int) -> None:
    """Our writer of the same legacy file."""
    with LegacyPickleWriter(target, WriterOptions(num_bins=num_bins)) as writer:
        for first, count in blocks(num_bins):
            writer.write_block(first, part(pool, first, count))
        writer.finalize()


def parquet_bridge(target: Path, pool: BinBlock, num_bins: int) -> None:
    """Megatron-Bridge's packed Parquet: lists, zstd, groups of 1,000 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"input_ids": pa.int32(), "loss_mask": pa.int8(), "seq_start_id": pa.int32()}
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in types.items()])
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for first in range(0, num_bins, 1000):
            some = [pool[index % POOL] for index in range(first, min(first + 1000, num_bins))]
            columns = [
                pa.array([np.asarray(row[k], dtype=np.int32) for row in some], pa.list_(pa.int32())).cast(
                    pa.list_(kind)
                )
                for k, kind in enumerate(types.values())
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=1000)


WRITERS: dict[str, Callable[[Path, BinBlock, int], None]] = {
    "plain np.copyto into maps + fsync": plain_copy,
    "memmap_v1, blocks of bins": memmap_blocks,
    "memmap_v1, single bins": memmap_bins,
    "legacy .npy, our writer": legacy_ours,
    "legacy .npy, lists + np.save": legacy_lists,
    "Parquet, zstd, groups of 1,000": parquet_bridge,
}


def write_case(name: str, target: str, pack_size: int, num_bins: int, repeats: int) -> dict[str, float]:
    """Write once or several times; best seconds and what the writer added to the peak memory."""
    pool = rows(pack_size)
    write = WRITERS[name]
    path = Path(target)
    write(Path(f"{target}.warm"), pool, BLOCK)  # compilation and imports are not measured
    before = peak_megabytes()
    best = float("inf")
    for _ in range(repeats):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        os.sync()  # so that no run pays for the dirty pages of the one before
        best = min(best, timed(lambda: write(path, pool, num_bins)))
    return {"seconds": best, "megabytes": peak_megabytes() - before}


class MemmapRows:
    """Our reader."""

    def __init__(self, path: Path) -> None:
        self._shard = open_shard(path)
        assert len(self._shard[0].input_ids)

    def row(self, index: int) -> tuple[Any, ...]:
        """Copied out, as a collate would."""
        return tuple(array.copy() for array in self._shard[index])


class LegacyRows:
    """np.load, with real unpickling, as Megatron-Bridge does it."""

    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, allow_pickle=True)

    def row(self, index: int) -> tuple[Any, ...]:
        """Lists into arrays, as a collate would."""
        return tuple(np.array(value) for value in self._rows[index].values())


class ParquetRows:
    """Random rows of a Parquet file, the last row group cached, as Megatron-Bridge's class does it."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path)
        self._rows_per_group = self._file.metadata.row_group(0).num_rows
        self._group = -1
        self.row(0)

    def row(self, index: int) -> tuple[Any, ...]:
        """One row as arrays."""
        group, inside = divmod(index, self._rows_per_group)
        if group != self._group:
            self._table = self._file.read_row_group(group)
            self._group = group
        return tuple(np.array(self._table.column(k)[inside].values) for k in range(3))


READERS = {
    "memmap_v1": (MemmapRows, "memmap_v1, blocks of bins", 20_000),
    "legacy .npy (np.load)": (LegacyRows, "legacy .npy, lists + np.save", 2_000),
    "Parquet": (ParquetRows, "Parquet, zstd, groups of 1,000", 30),
}


def read_case(name: str, path: str, num_bins: int) -> dict[str, float]:
    """Open, then read shuffled rows."""
    reader_class, _, num_reads = READERS[name]
    opened: Any = None
    before = resident_megabytes()

    def open_it() -> None:
        nonlocal opened
        opened = reader_class(Path(path))

    if name == "memmap_v1":
        open_it()  # the module itself is imported once per process, not once per shard
    seconds = min(timed(open_it) for _ in range(5 if name == "memmap_v1" else 1))
    after_open = resident_megabytes() - before
    order = np.random.default_rng(1).integers(0, num_bins, num_reads).tolist()
    rate = num_reads / timed(lambda: [opened.row(index) for index in order])
    if name == "memmap_v1":
        private = private_megabytes()
        for index in range(num_bins):
            opened.row(index)
        private = private_megabytes() - private
    else:
        private = float("nan")
    return {"open_ms": seconds * 1e3, "open_mb": after_open, "rate": rate, "private_mb": private}


def validate_case(path: str) -> dict[str, float]:
    """Full validation from the page cache."""
    report = validate(path)
    assert report.ok
    seconds = min(timed(lambda: validate(path)) for _ in range(3))
    return {"gigabytes_per_second": report.num_bytes / seconds / 1e9, "seconds": seconds}


def open_growth_case(directory: str, sizes: Sequence[int], pack_size: int) -> dict[str, float]:
    """Milliseconds to open shards of several sizes, without the first read."""
    pool = rows(pack_size)
    result = {}
    for num_bins in sizes:
        path = Path(directory, f"growth_{num_bins}")
        memmap_blocks(path, pool, num_bins)
        open_shard(path)
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            open_shard(path)
            best = min(best, time.perf_counter() - start)
        result[str(num_bins)] = best * 1e3
        shutil.rmtree(path)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int, default=20_000)
    parser.add_argument("--pack-size", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=3, help="best of this many, for the fast writers")
    arguments = parser.parse_args(argv)
    num_tokens = int(arguments.pack_size * FULL) * arguments.bins
    with tempfile.TemporaryDirectory(prefix="packed_sft_bench_") as home:
        paths = {name: f"{home}/{number}.npy" for number, name in enumerate(WRITERS)}
        measured = {}
        for name, path in paths.items():
            repeats = arguments.repeats if name.startswith(("plain", "memmap")) else 1
            measured[name] = in_own_process(write_case, name, path, arguments.pack_size, arguments.bins, repeats)
        base = measured["plain np.copyto into maps + fsync"]["seconds"]
        print_table(
            f"Writing {arguments.bins:,} bins of {arguments.pack_size:,} tokens, fsync included",
            ("", "seconds", "Mtok/s", "time / plain copy", "peak memory added, MB", "bytes / token"),
            [
                (
                    name,
                    f"{result['seconds']:.2f}",
                    f"{num_tokens / result['seconds'] / 1e6:.0f}",
                    f"{result['seconds'] / base:.2f}",
                    f"{result['megabytes']:.0f}",
                    f"{size_of(Path(paths[name])) / num_tokens:.2f}",
                )
                for name, result in measured.items()
            ],
        )
        readings = {
            name: in_own_process(read_case, name, paths[source], arguments.bins)
            for name, (_, source, _) in READERS.items()
        }
        ours = readings["memmap_v1"]
        print_table(
            "Opening and first read; then shuffled rows, copied out",
            ("", "open ms", "ratio", "memory after open, MB", "rows/s", "ratio", "private MB after reading all"),
            [
                (
                    name,
                    f"{result['open_ms']:.2f}",
                    f"{result['open_ms'] / ours['open_ms']:,.0f}x",
                    f"{result['open_mb']:.1f}",
                    f"{result['rate']:,.0f}",
                    f"1/{ours['rate'] / result['rate']:,.0f}",
                    "-" if np.isnan(result["private_mb"]) else f"{result['private_mb']:.1f}",
                )
                for name, result in readings.items()
            ],
        )
        growth = in_own_process(open_growth_case, home, (100, 1_000, arguments.bins), arguments.pack_size)
        print_table(
            "open_shard alone, by the size of the shard",
            ("bins", "ms"),
            [(f"{int(bins):,}", f"{ms:.2f}") for bins, ms in growth.items()],
        )
        checked = in_own_process(validate_case, paths["memmap_v1, blocks of bins"])
        print_table(
            "validate --level full, from the page cache",
            ("seconds", "GB/s"),
            [(f"{checked['seconds']:.2f}", f"{checked['gigabytes_per_second']:.2f}")],
        )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a directory."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir())


if __name__ == "__main__":
    main()
