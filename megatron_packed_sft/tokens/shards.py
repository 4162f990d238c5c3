"""Turn a plan and a token store into shards: by any number of processes, kept here or sent to an object store."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, TargetExistsError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.uploads import scratch_directory, send_shard
from megatron_packed_sft.storage.bins import cannot_keep
from megatron_packed_sft.storage.dataset_directory import ShardEntry
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, storage_named
from megatron_packed_sft.support.checksum import stored_size
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.processes import Executor, LocalExecutor
from megatron_packed_sft.tokens.gathered import GatheredSequences
from megatron_packed_sft.tokens.materialize import check_fit, no_progress, place, stored_width, write_bins
from megatron_packed_sft.tokens.store import TokenStore

logger = logging.getLogger(__name__)

# Of the shards of one task whose sequences are gathered: the scratch space that it needs.
_MOST_BYTES_AT_ONCE = 16 << 30


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
        executor: who writes the shards instead. It may write one again when a worker died.
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
    """A shard that was written, and what dataset.json says of it if it is not here but was sent to a store."""

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
            store; then each task takes several shards and goes through the parts once for all of them.
        url: of a split in an object store: every shard is sent there as soon as it is written, and not kept here.
        scratch: a directory for what is on its way; nodes that do not have it use TMPDIR.
    """
    if not 1 <= len(paths) <= plan.num_bins:
        raise InvalidInputError(f"{len(paths)} shards cannot share {plan.num_bins} bins; choose 1 to {plan.num_bins}")
    kind = storage_named(storage)
    if store.has_weights and not kind.keeps_weights:
        raise cannot_keep(str(store.path), storage)
    if (note := store.verification_note) is not None:
        logger.info("%s: %s", store.path, note)
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
    """Share shards out among tasks: two tasks per worker, or more where the shards of one would need much room."""
    size = min(-(-len(tasks) // (2 * num_workers)), max(1, _MOST_BYTES_AT_ONCE // max(1, shard_bytes)))
    return [list(tasks[first : first + size]) for first in range(0, len(tasks), size)]


class _Job(NamedTuple):
    """What all shards of one call share."""

    plan: PackPlan
    store: TokenStore | GatheredSequences
    width: int
    pad_id: int
    storage: str
    url: str | None = None
    scratch: Path | None = None

    def write_shards(self, tasks: Sequence[_ShardTask]) -> dict[int, WrittenShard]:
        """Write some shards, whose sequences are gathered first if they must be fetched; send those of a store."""
        with scratch_directory(self.scratch if self.scratch is not None and self.scratch.is_dir() else None) as scratch:
            is_fetched = isinstance(self.store, TokenStore) and self.store.is_remote
            job = self._gathered(tasks, scratch) if is_fetched else self
            return {task.number: job._write_or_send(task, scratch) for task in tasks}

    def _gathered(self, tasks: Sequence[_ShardTask], scratch: Path) -> _Job:
        assert isinstance(self.store, TokenStore)
        chosen = np.concatenate([task.bins for task in tasks])
        sequences = np.unique(place(self.plan, chosen).sequences)
        first_part = tasks[0].number * 7919 % len(self.store.parts)  # spread out
        return self._replace(store=GatheredSequences(self.store, sequences, scratch, first_part))

    def _write_or_send(self, task: _ShardTask, scratch: Path) -> WrittenShard:
        # A worker may die after it published a shard and before it said so; then another writes the same bytes again.
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
