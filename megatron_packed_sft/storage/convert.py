"""`convert`: legacy .npy or packed Parquet -> memmap_v1, and memmap_v1 -> legacy .npy; rows stay equal, token by token.

One file becomes one shard. Several become a dataset directory (or a directory of .npy files), published together.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from megatron_packed_sft.disk.atomic import Staging, fsync_directory, os_errors
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.dataset_directory import DATASET, DatasetWriter, open_dataset
from megatron_packed_sft.storage.legacy.reader import LegacyShard
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard, open_memmap_shard
from megatron_packed_sft.storage.parquet.reader import ParquetShard
from megatron_packed_sft.storage.writers import MEMMAP_V1, PackedShardWriter, create_shard_writer, storage_name

Source = LegacyShard | ParquetShard | MemmapShard
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What `convert` did."""

    target: str
    packed_storage: str
    num_files: int
    num_bins: int
    num_tokens: int
    pack_size: int
    asked_pack_size: int | None
    num_cleared_masks: int


@dataclass(frozen=True, slots=True)
class _Job:
    """One source and the place of its result, relative to the target; None is the target itself."""

    source: Path
    split: str
    number: int | None


def convert(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    to: str = MEMMAP_V1,
    pack_size: int | None = None,
    overlong: Literal["grow", "error"] = "grow",
    vocab_size: int | None = None,
    pad_id: int = 0,
    split: str = "train",
    overwrite: bool = False,
    progress: bool = False,
) -> ConversionReport:
    """Convert packed data from one storage to the other.

    Args:
        sources: files, shards, dataset directories, directories of such files, or globs.
        target: where the result appears, whole or not at all.
        to: `memmap_v1` or `legacy`.
        pack_size: the width of the shards; when not given, the longest row.
        overlong: rows longer than `pack_size` (Megatron-Bridge packs by length - 1, so it writes such rows) make the
            width grow to fit, or are an error.
        vocab_size: ids must be below it; when not given, the largest id + 1.
        pad_id: fills the rows behind their bins.
        split: the split that the shards of several files go to.
        overwrite: replace an existing target.
        progress: show a bar over the bins.

    Megatron-Bridge leaves the loss mask at 1 on the last token of a sequence for data without a chat template. No
    collate reads that place (it predicts nothing); memmap_v1 keeps it 0, and the report counts how many were cleared.

    Example:
        >>> convert("training_4096.npy", "shards/shard_000000").num_bins  # doctest: +SKIP
        20000
    """
    storage = storage_name(to)
    if overlong not in ("grow", "error"):
        raise InvalidInputError(f"overlong is {overlong!r}; use 'grow' or 'error'")
    if pack_size is not None and pack_size < 1:
        raise InvalidInputError(f"pack_size is {pack_size}; it must be at least 1")
    jobs = _plan(sources, split)
    memmap_sources = [job for job in jobs if job.source.is_dir()]
    if storage == MEMMAP_V1 and memmap_sources:
        raise InvalidInputError(f"{memmap_sources[0].source} is memmap_v1 already; give legacy .npy or Parquet files")
    if storage != MEMMAP_V1 and len(memmap_sources) < len(jobs):
        raise InvalidInputError(f"{next(j.source for j in jobs if not j.source.is_dir())} is not a memmap_v1 shard")
    conversion = _Conversion(storage, pack_size, overlong, vocab_size, pad_id)
    # Legacy files are parsed whole, so each is opened twice rather than all being held in memory at once.
    conversion.survey(jobs)
    with tqdm(total=conversion.num_bins, unit="bin", desc=f"convert to {storage}", disable=not progress) as bar:
        if len(jobs) == 1 and jobs[0].number is None:
            conversion.write(jobs[0], Path(target), overwrite, bar)
        elif storage == MEMMAP_V1:
            with DatasetWriter(target, overwrite=overwrite) as dataset:
                for job in jobs:
                    conversion.write(job, dataset.shard_path(job.split, job.number or 0), False, bar)
                dataset.finalize(provenance={"converted_from": [job.source.name for job in jobs]})
        else:
            _write_legacy_directory(conversion, jobs, target, overwrite, bar)
    return conversion.report(target, len(jobs))


def _write_legacy_directory(
    conversion: _Conversion, jobs: list[_Job], target: str | os.PathLike[str], overwrite: bool, bar: tqdm[Any]
) -> None:
    with Staging(target, overwrite=overwrite) as staging:
        for job in jobs:
            conversion.write(job, staging.path / job.split / f"shard_{job.number or 0:06d}.npy", False, bar)
        with os_errors("publish", target):
            for name in {job.split for job in jobs}:
                fsync_directory(staging.path / name)
        staging.publish()


class _Conversion:
    """The settings of one call, and the figures it collects."""

    def __init__(self, storage: str, pack_size: int | None, overlong: str, vocab_size: int | None, pad_id: int) -> None:
        self._storage = storage
        self._asked_pack_size = pack_size
        self._overlong = overlong
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._pack_size = pack_size or 1
        self._num_tokens = 0
        self._num_cleared = 0
        self._opened: dict[Path, Source] = {}
        self.num_bins = 0

    def survey(self, jobs: list[_Job]) -> None:
        """Learn the width and the vocabulary that hold every source, so that all shards agree."""
        vocab_bound = self._pad_id + 1
        for job in jobs:
            source = _open_source(job.source)
            self.num_bins += len(source)
            longest = source.pack_size
            asked = self._asked_pack_size
            if asked is not None and longest > asked and self._overlong == "error":
                raise InvalidInputError(
                    f"{job.source} has a row of {longest} tokens, longer than pack_size {asked}; "
                    f"use a pack_size of {longest} or overlong='grow'"
                )
            self._pack_size = max(self._pack_size, longest)
            vocab_bound = max(vocab_bound, _vocab_bound(source))
            if len(jobs) == 1:
                self._opened[job.source] = source
        if self._vocab_size is None:
            self._vocab_size = vocab_bound

    def write(self, job: _Job, output: Path, overwrite: bool, bar: tqdm[Any]) -> None:
        """Convert one source into one shard or file."""
        source = self._opened.pop(job.source, None) or _open_source(job.source)
        with create_shard_writer(
            self._storage,
            output,
            num_bins=len(source),
            pack_size=self._pack_size,
            vocab_size=self._vocab_size,
            pad_id=self._pad_id,
            overwrite=overwrite,
        ) as writer:
            self._copy(source, writer, bar)
            writer.finalize()

    def _copy(self, source: Source, writer: PackedShardWriter, bar: tqdm[Any]) -> None:
        first_bin = 0
        for block in _blocks(source, self._pack_size, self._pad_id):
            if not isinstance(source, MemmapShard):
                self._num_cleared += _clear_sequence_ends(block)
            try:
                writer.write_block(first_bin, block)
            except InvalidInputError as error:
                raise InvalidInputError(f"{source.path}: {error}") from None
            self._num_tokens += int(block.packed_len.sum())
            first_bin += len(block)
            bar.update(len(block))

    def report(self, target: str | os.PathLike[str], num_files: int) -> ConversionReport:
        """The figures of the whole call."""
        return ConversionReport(
            target=os.path.abspath(target),
            packed_storage=self._storage,
            num_files=num_files,
            num_bins=self.num_bins,
            num_tokens=self._num_tokens,
            pack_size=self._pack_size,
            asked_pack_size=self._asked_pack_size,
            num_cleared_masks=self._num_cleared,
        )


def _plan(sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], split: str) -> list[_Job]:
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not given:
        raise InvalidInputError("there is nothing to convert; name at least one file")
    jobs: list[_Job] = []
    for item in given:
        for path in _expand(item):
            if (path / DATASET).exists():
                dataset = open_dataset(path)
                for name, entries in dataset.splits.items():
                    jobs += [_Job(dataset.shard_path(name, entry), name, None) for entry in entries]
            elif path.is_dir() and not (path / MANIFEST).exists():
                inside = sorted(
                    p for pattern in ("*.npy", "*.parquet", "*.pq", "*/manifest.json") for p in path.glob(pattern)
                )
                if not inside:
                    raise InvalidInputError(f"{path} holds no .npy, no Parquet file and no shard; check the path")
                jobs += [_Job(p.parent if p.name == MANIFEST else p, split, None) for p in inside]
            else:
                jobs.append(_Job(path, split, None))
    if len(jobs) == 1 and len(given) == 1 and _is_single(given[0]):
        return jobs
    counts: dict[str, int] = {}
    numbered = []
    for job in jobs:
        number = counts.get(job.split, 0)
        counts[job.split] = number + 1
        numbered.append(_Job(job.source, job.split, number))
    return numbered


def _is_single(source: str | os.PathLike[str]) -> bool:
    """Whether a source names one shard or file itself, and not a directory or pattern that happens to hold one."""
    path = Path(source)
    return path.is_file() or (path / MANIFEST).exists()


def _expand(source: str | os.PathLike[str]) -> list[Path]:
    path = Path(os.path.abspath(source))
    if os.path.lexists(path):
        return [path]
    found = sorted(glob.glob(os.path.abspath(source)))
    if not found:
        raise InvalidInputError(f"{os.fspath(source)} does not exist and matches nothing; check the path")
    return [Path(name) for name in found]


def _open_source(path: Path) -> Source:
    if path.is_dir():
        return open_memmap_shard(path)
    if path.suffix == ".npy":
        return LegacyShard(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetShard(path)
    raise InvalidInputError(
        f"{path} is no packed data known here; give .npy, .parquet or .pq files or shard directories"
    )


def _vocab_bound(source: Source) -> int:
    return source.manifest.id_limit if isinstance(source, MemmapShard) else source.vocab_bound


def _blocks(source: Source, width: int, pad_id: int) -> Iterator[BinBlock]:
    if isinstance(source, ParquetShard):
        yield from source.blocks(width, pad_id)
        return
    rows_at_once = max(1, _BLOCK_BYTES // (width * 5))
    for start in range(0, len(source), rows_at_once):
        stop = min(start + rows_at_once, len(source))
        if isinstance(source, MemmapShard):
            yield source.block(start, stop)
        else:
            yield source.block(start, stop, width, pad_id)


def _clear_sequence_ends(block: BinBlock) -> int:
    from megatron_packed_sft.storage import bin_kernel

    return int(bin_kernel.clear_sequence_ends(block.loss_mask, block.packed_len, block.seq_offsets, block.seq_starts))
