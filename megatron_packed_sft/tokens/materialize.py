"""Turn a plan and a token store into shards: one compiled pass per block of bins, straight into the writer.

`materialize` fills one writer. `materialize_shards` and `write_shards` write many shards with any number of processes,
to disk or to an object store; the bytes are always the same.

    plan.bin_order ─▶ block of bins ─▶ where each item goes (NumPy) ─▶ copy + mask alignment (compiled) ─▶ write_block

Memory is two blocks, whatever the number of bins; tokens are read through the store's memory maps.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, TargetExistsError
from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.uploads import scratch_directory, send_shard
from megatron_packed_sft.storage.bins import BinBlock, cannot_keep
from megatron_packed_sft.storage.dataset_directory import ShardEntry
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShardWriter, WriterOptions
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, storage_named
from megatron_packed_sft.support.checksum import hash_function, stored_size
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.processes import Executor, LocalExecutor
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.remote_store import GatheredSequences
from megatron_packed_sft.tokens.store import TokenStore

_BLOCK_BYTES = 4 << 20  # smaller blocks lose more to switching the GIL than they gain in cache
# The most scratch space for the shards of one task whose sequences are gathered.
_MOST_BYTES_AT_ONCE = 16 << 30


class Placements(NamedTuple):
    """The source and the target of each item of a block of bins, bin after bin."""

    sequences: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # inside the sequence
    lengths: npt.NDArray[np.int64]
    overlaps: npt.NDArray[np.int64]
    bins: npt.NDArray[np.int64]  # inside the block
    positions: npt.NDArray[np.int64]  # inside the bin
    ends: npt.NDArray[np.int64]  # position + padded length
    counts: npt.NDArray[np.int64]  # items per bin
    packed_len: npt.NDArray[np.int64]  # per bin


class _Buffer(NamedTuple):
    """The arrays of a block of bins."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, shape: tuple[int, int], store: TokenStore | GatheredSequences) -> _Buffer:
        """Return empty arrays for bins of a store."""
        weights = np.empty(shape, np.float32) if store.has_weights else None
        return cls(np.empty(shape, store.manifest.dtype), np.empty(shape, np.uint8), weights)


def stored_width(plan: PackPlan) -> int:
    """Return how many tokens the longest bin of a plan stores.

    It is at most `pack_size` for plans with `measure="tokens"`. Plans with `measure="inputs"`, and sequences longer
    than the pack (`overflow="single"`), need more.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> stored_width(pack([3, 1, 2, 2], pack_size=4))
        4
    """
    sizes = sizes_of(plan.item_lengths, "tokens", plan.pad_seq_to_mult)
    return int(np.add.reduceat(sizes[plan.indices], plan.bin_offsets[:-1], dtype=np.int64).max())


def plan_block(plan: PackPlan, store: TokenStore, bins: npt.NDArray[np.int64], width: int, pad_id: int = 0) -> BinBlock:
    """Return some bins of a plan, by their canonical numbers, as a block that owns its arrays."""
    [(_, block)] = _blocks(plan, store, bins, len(bins), width, pad_id)
    return block


def materialize(
    plan: PackPlan,
    store: TokenStore,
    writer: PackedShardWriter,
    *,
    bins: npt.NDArray[Any] | Sequence[int] | None = None,
    width: int | None = None,
    pad_id: int = 0,
    on_bins: Callable[[int], object] | None = None,
) -> int:
    """Write the bins of a plan, in its reading order, as bins 0, 1, 2, ... of a writer; return the tokens written.

    Masks are aligned with the next token; the overlap of split sequences is not trained twice; with `pad_seq_to_mult`
    each sequence is padded with `pad_id` so that its inputs are a multiple. The caller calls `writer.finalize`.

    Args:
        plan: from `pack`, over `store.lengths`.
        store: the token store.
        writer: for these bins, each of up to `width` tokens.
        bins: canonical numbers of the bins to write; by default all of them, in reading order.
        width: the writer's pack size; by default the plan's.
        pad_id: fills bins and padded sequences; the writer's pad_id.
        on_bins: called with the number of bins after each block, such as a progress bar's `update`.
    """
    chosen = plan.bin_order.astype(np.int64) if bins is None else np.asarray(bins, np.int64)
    width = plan.pack_size if width is None else width
    check_fit(plan, store, width)
    return write_bins(plan, store, writer, chosen, width, pad_id, on_bins or no_progress)


def no_progress(num_bins: int) -> None:
    """Ignore progress."""


def write_bins(
    plan: PackPlan,
    store: TokenStore | GatheredSequences,
    writer: PackedShardWriter,
    bins: npt.NDArray[np.int64],
    width: int,
    pad_id: int,
    on_bins: Callable[[int], object],
) -> int:
    """Write some bins of a plan, block by block; return the tokens written."""
    num_tokens = 0
    blocks = _blocks(plan, store, bins, max(1, _BLOCK_BYTES // (width * 5)), width, pad_id)
    for first, block in _one_ahead(blocks):
        writer.write_block(first, block)
        num_tokens += int(block.packed_len.sum(dtype=np.int64))
        on_bins(len(block))
    return num_tokens


def _one_ahead(blocks: Iterator[tuple[int, BinBlock]]) -> Iterator[tuple[int, BinBlock]]:
    """Fill the next block in a thread while the caller writes this one; copies, checks and writes release the GIL."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, blocks, None)
            yield block


def check_fit(plan: PackPlan, store: TokenStore, width: int) -> None:
    """Refuse a plan that was made from other sequences, or that needs wider bins."""
    needed = stored_width(plan)
    if needed > width:
        raise InvalidInputError(
            f"a bin of this plan stores {needed} tokens, but the pack size is {width}; use {needed}, or plan with "
            "measure='tokens' and without overflow='single'"
        )
    lengths = store.lengths
    if plan.chunks is None:
        fits = len(lengths) == len(plan.item_lengths) and np.array_equal(lengths, plan.item_lengths)
    else:
        chunks = plan.chunks
        fits = len(chunks.sequence) == 0 or (
            int(chunks.sequence.max()) < len(lengths)
            and bool(np.all(chunks.start.astype(np.int64) + plan.item_lengths <= lengths[chunks.sequence]))
        )
    if not fits:
        for part in store.parts if not store.is_remote else ():
            part.spans(np.arange(len(part)))  # wrong lengths may come from damaged offsets, which is an error here
        raise _made_from_others(store)


def _refused(
    store: TokenStore | GatheredSequences, part: TokenPart | GatheredSequences, sequence: int, is_unsound: bool
) -> PackedSFTError:
    """Return the error for a sequence that could not be copied into a bin."""
    if is_unsound:
        return part.damaged(sequence)
    try:
        part.spans(np.array([sequence]))
    except PackedSFTError as error:
        return error
    return _made_from_others(store)


def _made_from_others(store: TokenStore | GatheredSequences) -> InvalidInputError:
    return InvalidInputError(
        f"the plan was not made from {store.path}: their lengths differ; pack the lengths of this store"
    )


def _blocks(
    plan: PackPlan,
    store: TokenStore | GatheredSequences,
    bins: npt.NDArray[np.int64],
    bins_at_once: int,
    width: int,
    pad_id: int,
) -> Iterator[tuple[int, BinBlock]]:
    from megatron_packed_sft.tokens import gather_kernel

    shape = (min(bins_at_once, len(bins)), width)
    # Two buffers: one is written by the caller while the other is filled (see _one_ahead).
    num_buffers = min(2, -(-len(bins) // bins_at_once))
    buffers = [_Buffer.of(shape, store) for _ in range(num_buffers)]
    for number, first in enumerate(range(0, len(bins), bins_at_once)):
        ids, mask, weights = buffers[number % num_buffers]
        items = place(plan, bins[first : first + bins_at_once])
        num_bins = len(items.counts)
        if weights is not None:
            weights[:] = 0
        for part, chosen, inside in store.by_part(items.sequences):
            arrays = part.arrays
            if not hash_function():  # this build of xxhash does not export its functions
                part.spans(inside)
            code, bad = gather_kernel.fill_bins(
                *arrays.for_kernels(part.verify),
                inside,
                chosen,
                items.starts,
                items.lengths,
                items.overlaps,
                plan.chunks is None,
                items.bins,
                items.positions,
                ids,
                mask,
            )
            if code != gather_kernel.OK:
                raise _refused(store, part, int(inside[bad]), code == gather_kernel.BAD_CHECKSUM)
            if weights is not None:
                gather_kernel.fill_weights(
                    arrays.kernel_weights(),
                    arrays.begins,
                    inside,
                    chosen,
                    items.starts,
                    items.lengths,
                    items.bins,
                    items.positions,
                    mask,
                    weights,
                )
        if plan.pad_seq_to_mult > 1:
            gather_kernel.fill_gaps(items.bins, items.positions + items.lengths, items.ends, pad_id, ids, mask)
        tails = np.full(num_bins, width, np.int64)
        gather_kernel.fill_gaps(np.arange(num_bins), items.packed_len, tails, pad_id, ids, mask)
        yield (
            first,
            BinBlock(
                ids[:num_bins],
                mask[:num_bins],
                items.packed_len.astype(np.uint32),
                np.concatenate(([0], np.cumsum(items.counts))).astype(np.uint32),
                items.positions.astype(np.uint32),
                None if weights is None else weights[:num_bins],
            ),
        )


def place(plan: PackPlan, bins: npt.NDArray[np.int64]) -> Placements:
    """Return the source and the target of each item of some bins."""
    first = plan.bin_offsets[bins]
    counts = plan.bin_offsets[bins + 1] - first
    offsets = np.concatenate(([0], np.cumsum(counts)))
    items = plan.indices[np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)]
    lengths = plan.item_lengths[items].astype(np.int64)
    sizes = sizes_of(plan.item_lengths[items], "tokens", plan.pad_seq_to_mult).astype(np.int64)
    filled = np.concatenate(([0], np.cumsum(sizes)))
    positions = filled[:-1] - np.repeat(filled[offsets[:-1]], counts)
    if plan.chunks is None:
        sequences, starts, overlaps = items.astype(np.int64), np.zeros_like(lengths), np.zeros_like(lengths)
    else:
        sequences, starts, overlaps = (
            array[items].astype(np.int64)
            for array in (plan.chunks.sequence, plan.chunks.start, plan.chunks.masked_prefix)
        )
    return Placements(
        sequences=sequences,
        starts=starts,
        lengths=lengths,
        overlaps=overlaps,
        bins=np.repeat(np.arange(len(bins)), counts),
        positions=positions,
        ends=positions + sizes,
        counts=counts,
        packed_len=filled[offsets[1:]] - filled[offsets[:-1]],
    )


def materialize_shards(
    plan: PackPlan,
    store: TokenStore,
    paths: Sequence[str | os.PathLike[str]],
    *,
    storage: str = DEFAULT_STORAGE,
    num_workers: int = 1,
    executor: Executor | None = None,
    pad_id: int = 0,
    on_bins: Callable[[int], object] | None = None,
) -> list[BinFigures]:
    """Write a plan as several shards, with any number of processes; the bytes are always the same.

    The bins are cut, in reading order, into as many even runs as there are paths. A shard that exists already is an
    error. If one shard fails, those published before it stay; to get all or none, publish them below one staged
    directory, as `DatasetWriter` does.

    Args:
        plan: from `pack`, over `store.lengths`.
        store: the token store.
        paths: of the shards.
        storage: of the shards.
        num_workers: processes of this machine.
        executor: writes the shards instead of processes of this machine; it may retry a shard after a worker died.
        pad_id: fills bins and padded sequences.
        on_bins: called with the number of bins after each block or shard.
    """
    if num_workers < 1:
        raise InvalidInputError(f"num_workers is {num_workers}; it must be at least 1")
    written = write_shards(
        plan,
        store,
        [local_path(path) for path in paths],
        storage=storage,
        executor=executor or LocalExecutor(num_workers),
        pad_id=pad_id,
        on_bins=on_bins,
    )
    return [one.figures for one in written]


class WrittenShard(NamedTuple):
    """The figures of a written shard and, if it was sent to an object store, its entry in dataset.json."""

    figures: BinFigures
    entry: ShardEntry | None = None


def write_shards(
    plan: PackPlan,
    store: TokenStore,
    paths: Sequence[Path],
    *,
    storage: str,
    executor: Executor,
    pad_id: int = 0,
    on_bins: Callable[[int], object] | None = None,
    url: str | None = None,
    scratch: Path | None = None,
) -> list[WrittenShard]:
    """Write a plan as shards, as `materialize_shards` does.

    Args:
        plan, store, paths, storage, executor, pad_id, on_bins: as there. The parts of the store may be in an object
            store; then each task takes several shards and reads the parts once for all of them.
        url: of a split in an object store: every shard is sent there as soon as it is written, and removed here.
        scratch: a directory for temporary files; nodes that do not have it use TMPDIR.
    """
    if not 1 <= len(paths) <= plan.num_bins:
        raise InvalidInputError(f"{len(paths)} shards cannot share {plan.num_bins} bins; choose 1 to {plan.num_bins}")
    kind = storage_named(storage)
    if store.has_weights and not kind.keeps_weights:
        raise cannot_keep(str(store.path), storage)
    width = stored_width(plan)
    check_fit(plan, store, width)
    runs = np.array_split(plan.bin_order.astype(np.int64), len(paths))
    job = _Job(plan, store, max(plan.pack_size, width), pad_id, kind.name, url, scratch)
    on_bins = on_bins or no_progress
    tasks = [_ShardTask(*task) for task in zip(count(), paths, runs, strict=False)]
    is_alone = isinstance(executor, LocalExecutor) and (executor.num_workers == 1 or len(paths) == 1)
    if is_alone and url is None and not store.is_remote:
        return [WrittenShard(job.write_shard(path, run, on_bins)) for path, run in zip(paths, runs, strict=True)]
    for path in paths if url is None else ():
        if os.path.lexists(path):
            raise TargetExistsError(f"{path} exists already; remove it or choose another path")
    executor = executor.fitting(store.num_tokens)
    shard_bytes = job.width * len(runs[0]) * 5
    groups = _grouped(tasks, executor.num_workers, shard_bytes) if store.is_remote else [[task] for task in tasks]
    written: dict[int, WrittenShard] = {}
    for some in executor.run(_write_shard, groups, _receive, job):
        written |= some
        on_bins(sum(len(runs[number]) for number in some))
    _received.clear()
    return [one for _, one in sorted(written.items())]


def _grouped(tasks: Sequence[_ShardTask], num_workers: int, shard_bytes: int) -> list[list[_ShardTask]]:
    """Group shards into tasks: two tasks per worker, or more where one would need too much scratch space."""
    size = min(-(-len(tasks) // (2 * num_workers)), max(1, _MOST_BYTES_AT_ONCE // max(1, shard_bytes)))
    return [list(tasks[first : first + size]) for first in range(0, len(tasks), size)]


class _Job(NamedTuple):
    """The arguments that all shards of one call share."""

    plan: PackPlan
    store: TokenStore | GatheredSequences
    width: int
    pad_id: int
    storage: str
    url: str | None = None
    scratch: Path | None = None

    def write_shards(self, tasks: Sequence[_ShardTask]) -> dict[int, WrittenShard]:
        """Write some shards, and send them if they have a URL; remote sequences are gathered first."""
        with scratch_directory(self.scratch if self.scratch is not None and self.scratch.is_dir() else None) as scratch:
            is_fetched = isinstance(self.store, TokenStore) and self.store.is_remote
            job = self._gathered(tasks, scratch) if is_fetched else self
            return {task.number: job._write_or_send(task, scratch) for task in tasks}

    def _gathered(self, tasks: Sequence[_ShardTask], scratch: Path) -> _Job:
        assert isinstance(self.store, TokenStore)
        chosen = np.concatenate([task.bins for task in tasks])
        sequences = np.unique(place(self.plan, chosen).sequences)
        first_part = tasks[0].number * 7919 % len(self.store.parts)  # tasks start with different parts
        return self._replace(store=GatheredSequences(self.store, sequences, scratch, first_part))

    def _write_or_send(self, task: _ShardTask, scratch: Path) -> WrittenShard:
        # A worker may die after it published a shard and before it reported so; then another one writes it again.
        if self.url is None:
            return WrittenShard(self.write_shard(task.path, task.bins, no_progress, overwrite=True))
        path, storage = scratch / task.path.name, storage_named(self.storage)
        figures = self.write_shard(path, task.bins, no_progress)
        num_bytes = None if storage.has_manifest else stored_size(path)
        entry = ShardEntry(path.name, figures.num_bins, storage.checksum(path), num_bytes)
        send_shard(path, child(self.url, path.name))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return WrittenShard(figures, entry)

    def write_shard(
        self, path: Path, bins: npt.NDArray[np.int64], on_bins: Callable[[int], object], *, overwrite: bool = False
    ) -> BinFigures:
        """Write and publish one shard; return its figures."""
        manifest, storage = self.store.manifest, storage_named(self.storage)
        options = WriterOptions(
            num_bins=len(bins),
            pack_size=self.width,
            vocab_size=manifest.vocab_size,
            pad_id=self.pad_id,
            provenance={
                "tokenizer": manifest.tokenizer,
                "chat_template_fingerprint": manifest.chat_template_fingerprint,
                "plan_fingerprint": self.plan.order_fingerprint,
                "pad_seq_to_mult": self.plan.pad_seq_to_mult,
            },
            overwrite=overwrite,
        )
        with storage.create_writer(path, options) as writer:
            write_bins(self.plan, self.store, writer, bins, self.width, self.pad_id, on_bins)
            writer.finalize()
            return writer.figures or storage.open(path).figures


class _ShardTask(NamedTuple):
    """One shard to write."""

    number: int
    path: Path
    bins: npt.NDArray[np.int64]


_received: list[_Job] = []  # in a worker process: the job, sent once and not with every shard


def _receive(job: _Job) -> None:
    _received[:] = [job]


def _write_shard(tasks: Sequence[_ShardTask]) -> dict[int, WrittenShard]:
    return _received[0].write_shards(tasks)
