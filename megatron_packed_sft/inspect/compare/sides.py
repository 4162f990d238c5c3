"""Packed data of any storage as a stream of chunks: bins end to end, in flat arrays, one shard open at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.inspect.find_tokenizer import FoundTokenizer, find_tokenizer
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.storage.bins import BinBlock, PackedBin
from megatron_packed_sft.storage.blocks import blocks_of, clear_sequence_ends
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, has_dataset, open_dataset
from megatron_packed_sft.storage.interface import PackedShard
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.storage.remote_shard import local_copy
from megatron_packed_sft.support.paths import is_url, local_path, redacted

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive bins, end to end.

    Args:
        ids, masks: of all tokens; the mask is a weight.
        lengths: tokens of each bin.
        starts: where sequences begin inside their bin.
        counts: sequences of each bin.
    """

    ids: npt.NDArray[np.int32]
    masks: npt.NDArray[np.float32]
    lengths: Int64
    starts: Int64
    counts: Int64

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, num_bins: int) -> tuple[Chunk, Chunk]:
        """Return the first bins, and the others."""
        tokens, sequences = int(self.lengths[:num_bins].sum()), int(self.counts[:num_bins].sum())
        first, rest = slice(None, num_bins), slice(num_bins, None)
        return (
            Chunk(
                self.ids[:tokens], self.masks[:tokens], self.lengths[first], self.starts[:sequences], self.counts[first]
            ),
            Chunk(
                self.ids[tokens:], self.masks[tokens:], self.lengths[rest], self.starts[sequences:], self.counts[rest]
            ),
        )

    @property
    def sequence_starts(self) -> Int64:
        """Where each sequence begins among all tokens."""
        first_token = np.cumsum(self.lengths) - self.lengths
        return np.repeat(first_token, self.counts) + self.starts


@dataclass(eq=False)
class Part:
    """One shard of a side; its number of bins is known once it was read."""

    path: Path
    open: Callable[[], PackedShard]
    num_bins: int | None = None


@dataclass(eq=False)
class Side:
    """One of two things to compare.

    Args:
        path: where it is, as messages call it.
        storage: the names of its storages.
        splits: its shards by split; data without splits is one, called train.
        recorded: tokenizer, chat template and pack size, as far as it records them.
        num_cleared: loss masks at the last token of a sequence, which predict nothing and are not compared.
    """

    path: str
    storage: str
    splits: Mapping[str, list[Part]]
    recorded: Mapping[str, Any]
    dataset: DatasetDirectory | None = None
    num_cleared: int = 0
    _open: tuple[Part, PackedShard] | None = field(default=None, repr=False)  # one at a time: some are read whole

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the bins of a split in order."""
        for part in self.splits.get(split, ()):
            shard = self._shard(part)
            part.num_bins = len(shard)
            for block in blocks_of(shard, shard.pack_size, 0):
                self.num_cleared += clear_sequence_ends(block)
                yield _flat(block, part.path)

    def bin(self, split: str, number: int) -> PackedBin:
        """Return one bin; its split was read before."""
        for part in self.splits[split]:
            assert part.num_bins is not None
            if number < part.num_bins:
                return self._shard(part)[number]
            number -= part.num_bins
        raise IndexError(f"{self.path}: bin {number} of split {split}")

    def _shard(self, part: Part) -> PackedShard:
        if self._open is None or self._open[0] is not part:
            self._open = None  # before the next one is read
            self._open = (part, part.open())
        return self._open[1]

    def find_tokenizer(self, given: str | None) -> FoundTokenizer:
        """Return the tokenizer that made the data: the given one, or one that it is known by."""
        if self.dataset is not None:
            return open_data(self.dataset.url or self.dataset.path).find_tokenizer(given)
        return find_tokenizer(self.recorded.get("tokenizer"), given=given)


def open_side(path: str | os.PathLike[str], split: str | None = None) -> Side:
    """Open a dataset directory, a shard or file of any storage, or a directory of them; no shard is opened yet.

    Args:
        path: the data, or its URL: each shard is fetched into the cache of the node when its turn comes.
        split: only this split of a dataset directory.
    """
    if not is_url(path) and not os.path.lexists(path):
        raise InvalidInputError(f"{local_path(path)} does not exist; check the path")
    if has_dataset(path):
        return _of_dataset(open_dataset(path), split)
    location = local_copy(os.fspath(path)) if is_url(path) else local_path(path)
    storage = storage_of(location)
    found = [(location, storage)] if storage is not None else shards_inside(location)
    if not found:
        raise InvalidInputError(
            f"{location} holds no packed bins, so it cannot be compared; name a dataset directory, a shard or a packed "
            "file, and see `packed-sft info` for what it is"
        )
    parts = [Part(one, functools.partial(its.open, one)) for one, its in found if its is not None]
    names = sorted({its.name for _, its in found if its is not None})
    place = redacted(os.fspath(path)) if is_url(path) else str(location)
    return Side(place, ", ".join(names), {split or "train": parts}, found[0][1].recorded(found[0][0]))


def _of_dataset(dataset: DatasetDirectory, split: str | None) -> Side:
    names = sorted(dataset.splits, key=lambda name: (name != "train", name)) if split is None else [split]
    splits = {
        name: [
            Part(dataset.shard_path(name, entry), functools.partial(dataset.open_shard, name, entry))
            for entry in dataset.entries(name)
        ]
        for name in names
    }
    return Side(dataset.location, dataset.storage.name, splits, vars(dataset.figures[names[0]]), dataset)


def _flat(block: BinBlock, path: Path) -> Chunk:
    width = block.input_ids.shape[1]
    lengths, pointers = block.packed_len.astype(np.int64), block.seq_offsets.astype(np.int64)
    counts, starts = np.diff(pointers), block.seq_starts.astype(np.int64)
    is_sound = (counts >= 1).all() and counts.sum() == len(starts) and (lengths >= 1).all() and (lengths <= width).all()
    if not is_sound or (starts >= np.repeat(lengths, counts)).any():
        raise ShardError(f"the indices of {path} are damaged; run `packed-sft validate` on it")
    is_token = np.arange(width) < lengths[:, None]
    masks = block.loss_mask if block.loss_weights is None else block.loss_weights
    return Chunk(
        block.input_ids[is_token].astype(np.int32), masks[is_token].astype(np.float32), lengths, starts, counts
    )
