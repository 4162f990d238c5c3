"""The two sides of a comparison as streams of bins: differences in step, and sequences matched by their content.

open_side ─▶ Chunk: bins end to end, one shard open at a time ─▶ in_step ─▶ first_positions where they differ
                                                               └▶ find_moves: sequences in another bin, or on one side
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.inspect.opened_data import FoundTokenizer, find_tokenizer, open_data
from megatron_packed_sft.storage.bins import BinBlock, PackedBin, clear_sequence_ends
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
        ids, masks: of all tokens; masks are weights.
        lengths: number of tokens of each bin.
        starts: where sequences begin in their bin.
        counts: number of sequences of each bin.
    """

    ids: npt.NDArray[np.int32]
    masks: npt.NDArray[np.float32]
    lengths: Int64
    starts: Int64
    counts: Int64

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, num_bins: int) -> tuple[Chunk, Chunk]:
        """Return the first `num_bins` bins, and the others."""
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
    """One shard of a side; `num_bins` is set when it is read."""

    path: Path
    open: Callable[[], PackedShard]
    num_bins: int | None = None


@dataclass(eq=False)
class Side:
    """One of two things to compare.

    Args:
        path: its path or URL for messages.
        storage: the names of its storages.
        splits: its shards by split; data without splits has one, called train.
        recorded: tokenizer, chat template and pack size, if they are recorded.
        num_cleared: number of loss masks at the last token of a sequence, which are ignored.
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
            for block in shard.blocks(shard.pack_size, 0):
                self.num_cleared += clear_sequence_ends(block)
                yield _flat(block, part.path)

    def bin(self, split: str, number: int) -> PackedBin:
        """Return one bin of a split that was read before."""
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
        """Return the tokenizer that made the data, or the given one."""
        if self.dataset is not None:
            return open_data(self.dataset.url or self.dataset.path).find_tokenizer(given)
        return find_tokenizer(self.recorded.get("tokenizer"), given=given)


def open_side(path: str | os.PathLike[str], split: str | None = None) -> Side:
    """Find the shards of a dataset directory, a shard or file of any storage, or a directory of them; open none yet.

    Args:
        path: the data or its URL; shards are fetched into the node's cache one by one.
        split: read only this split of a dataset directory.
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
            f"{location} has no packed bins; give a dataset directory, a shard or a packed file (`packed-sft info` "
            "describes the path)"
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


FIELDS = ("input_ids", "loss_mask", "seq_start_id", "length")
_NOWHERE = np.iinfo(np.int64).max


class Pair(NamedTuple):
    """The same bins of both sides. The last pair may have bins of one side only."""

    first_bin: int
    a: Chunk
    b: Chunk


def in_step(side_a: Iterator[Chunk], side_b: Iterator[Chunk]) -> Iterator[Pair]:
    """Yield the bins of two streams as pairs of chunks of equal length, then the rest of the longer stream."""
    a, b, first_bin = next(side_a, None), next(side_b, None), 0
    while a is not None and b is not None:
        num_bins = min(len(a), len(b))
        (of_a, a_rest), (of_b, b_rest) = a.split(num_bins), b.split(num_bins)
        yield Pair(first_bin, of_a, of_b)
        first_bin += num_bins
        a = a_rest if len(a_rest) else next(side_a, None)
        b = b_rest if len(b_rest) else next(side_b, None)
    while a is not None:
        yield Pair(first_bin, a, a.split(0)[0])
        first_bin, a = first_bin + len(a), next(side_a, None)
    while b is not None:
        yield Pair(first_bin, b.split(0)[0], b)
        first_bin, b = first_bin + len(b), next(side_b, None)


def first_positions(a: Chunk, b: Chunk) -> Int64:
    """Return the first position where two chunks differ, for every bin and every field of `FIELDS`; or a huge number.

    Example:
        >>> one = Chunk(np.array([5, 6, 7, 8], np.int32), np.zeros(4, np.float32), np.array([2, 2]), np.zeros(2, int),
        ...             np.ones(2, int))
        >>> other = Chunk(np.array([5, 6, 7, 9], np.int32), np.zeros(4, np.float32), np.array([2, 2]), np.zeros(2, int),
        ...               np.ones(2, int))
        >>> (first_positions(one, other) < 2).tolist()
        [[False, False, False, False], [True, False, False, False]]
    """
    common = np.minimum(a.lengths, b.lengths)
    at_a, at_b, position = _places(a.lengths, common), _places(b.lengths, common), _within(common)
    found = np.full((len(a), len(FIELDS)), _NOWHERE, np.int64)
    found[:, 0] = _first(a.ids[at_a] != b.ids[at_b], position, common)
    found[:, 1] = _first(a.masks[at_a] != b.masks[at_b], position, common)
    sequences = np.minimum(a.counts, b.counts)
    starts_a, starts_b = a.starts[_places(a.counts, sequences)], b.starts[_places(b.counts, sequences)]
    found[:, 2] = _first(starts_a != starts_b, np.minimum(starts_a, starts_b), sequences)
    for chunk in (a, b):  # an extra sequence begins where the other side is still in the sequence before it
        more = np.flatnonzero((chunk.counts > sequences) & (found[:, 2] == _NOWHERE))
        found[more, 2] = chunk.starts[(np.cumsum(chunk.counts) - chunk.counts + sequences)[more]]
    found[:, 3] = np.where(a.lengths != b.lengths, common, _NOWHERE)
    return found


def differs(positions: Int64) -> npt.NDArray[np.bool_]:
    """Return which entries of `first_positions` are positions, not the huge number."""
    result: npt.NDArray[np.bool_] = positions != _NOWHERE
    return result


def _places(sizes: Int64, common: Int64) -> Int64:
    """Return the places of the first `common` values of every bin in flat arrays with bins of these sizes."""
    return np.repeat(np.cumsum(sizes) - sizes, common) + _within(common)


def _within(sizes: Int64) -> Int64:
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _first(is_different: npt.NDArray[np.bool_], position: Int64, sizes: Int64) -> Int64:
    if not len(sizes):
        return np.empty(0, np.int64)
    result: Int64 = np.minimum.reduceat(np.where(is_different, position, _NOWHERE), np.cumsum(sizes) - sizes)
    return result


UInt64 = npt.NDArray[np.uint64]

SEQUENCES_AT_ONCE = 2_000_000  # of each side: about 300 MB with what sorting takes
_KEY = np.dtype([("tokens", "<u8"), ("content", "<u8"), ("split", "<i4"), ("sequence", "<i4"), ("bin", "<i8")])
Keys = npt.NDArray[np.void]


class Place(NamedTuple):
    """Where a sequence is."""

    split: str
    bin: int
    sequence: int


@dataclass
class Moves:
    """Where the sequences of A are in B, with examples; `only_in_b` counts those that A lacks."""

    in_same_bin: int = 0
    in_other_bin: int = 0
    other_mask: int = 0
    only_in_a: int = 0
    only_in_b: int = 0
    examples: dict[str, list[tuple[Place, ...]]] = field(default_factory=dict)


def find_moves(a: Side, b: Side, num_sequences: int, max_examples: int) -> Moves:
    """Match the sequences of two sides by hashes of their content.

    Each sequence has a hash of its tokens and one of its tokens and masks. Those of millions of sequences go through
    temporary files, partitioned by the first hash, so that memory is bounded.

    Args:
        a, b: the sides.
        num_sequences: of the larger side.
        max_examples: how many examples of each kind to keep.
    """
    splits = list(dict.fromkeys([*a.splits, *b.splits]))
    num_parts = max(1, -(-num_sequences // SEQUENCES_AT_ONCE))
    moves = Moves()
    with ExitStack() as stack:
        parts_a, parts_b = (_in_parts(side, splits, num_parts, stack) for side in (a, b))
        for part_a, part_b in zip(parts_a, parts_b, strict=True):
            _match(part_a, part_b, moves, splits, max_examples)
    for some in moves.examples.values():  # those of several parts together
        some.sort(key=lambda places: (splits.index(places[0].split), *places[0][1:]))
        del some[max_examples:]
    return moves


def sequence_hashes(chunk: Chunk) -> tuple[UInt64, UInt64]:
    """Return a hash of the tokens of each sequence, and one of its tokens and masks.

    Example:
        >>> chunk = Chunk(np.array([5, 6, 5, 6], np.int32), np.array([1, 0, 0, 0], np.float32), np.array([4]),
        ...               np.array([0, 2]), np.array([2]))
        >>> tokens, content = sequence_hashes(chunk)
        >>> bool(tokens[0] == tokens[1]), bool(content[0] == content[1])
        (True, False)
    """
    starts = chunk.sequence_starts
    lengths = np.diff(np.append(starts, len(chunk.ids)))
    position = (np.arange(len(chunk.ids)) - np.repeat(starts, lengths)).astype(np.uint64)
    # A sum of well mixed numbers, one for each token at its position.
    by_token = _mixed(chunk.ids.astype(np.uint64) << np.uint64(32) | position)
    masks = (chunk.masks + np.float32(0)).view(np.uint32).astype(np.uint64)  # -0.0 is 0.0
    by_content = _mixed(by_token ^ _mixed(masks + np.uint64(1)))
    length = lengths.astype(np.uint64)
    tokens: UInt64 = _mixed(np.add.reduceat(by_token, starts) + length)
    content: UInt64 = _mixed(np.add.reduceat(by_content, starts) + length)
    return tokens, content


def _mixed(values: UInt64) -> UInt64:
    """Return numbers whose bits all depend on all bits of the given ones (the finalizer of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _in_parts(side: Side, splits: list[str], num_parts: int, stack: ExitStack) -> Iterator[Keys]:
    """Yield the keys of all sequences in parts: equal tokens are in the same part."""
    if num_parts == 1:
        yield np.concatenate([np.empty(0, _KEY), *_keys_of(side, splits)])
        return
    files: list[IO[bytes]] = []
    for _ in range(num_parts):
        files.append(stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115  # the stack closes it
    for keys in _keys_of(side, splits):
        part_of = keys["tokens"] % np.uint64(num_parts)
        for number, file in enumerate(files):
            file.write(keys[part_of == number].tobytes())
    for file in files:
        file.seek(0)
        yield np.frombuffer(file.read(), _KEY)


def _keys_of(side: Side, splits: list[str]) -> Iterator[Keys]:
    for number, split in enumerate(splits):
        first_bin = 0
        for chunk in side.chunks(split):
            keys = np.empty(len(chunk.starts), _KEY)
            keys["tokens"], keys["content"] = sequence_hashes(chunk)
            keys["split"] = number
            keys["bin"] = first_bin + np.repeat(np.arange(len(chunk)), chunk.counts)
            keys["sequence"] = np.arange(len(keys)) - np.repeat(np.cumsum(chunk.counts) - chunk.counts, chunk.counts)
            first_bin += len(chunk)
            yield keys


def _match(a: Keys, b: Keys, moves: Moves, splits: list[str], max_examples: int) -> None:
    """Match sequences of the same bin, then the rest by content, then the rest by tokens alone."""

    def note(name: str, *sides: Keys) -> None:
        some = moves.examples.setdefault(name, [])
        for keys in zip(*(side.tolist() for side in sides), strict=True):
            some.append(tuple(Place(splits[key[2]], key[4], key[3]) for key in keys))

    def first(keys: Keys) -> Keys:
        return np.sort(keys, order=("split", "bin", "sequence"))[:max_examples]

    left_a, left_b = _unmatched(_in_bin(a), _in_bin(b)), _unmatched(_in_bin(b), _in_bin(a))
    moves.in_same_bin += int((~left_a).sum())
    a, b = a[left_a], b[left_b]
    left_a, left_b = _unmatched(a["content"], b["content"]), _unmatched(b["content"], a["content"])
    moves.in_other_bin += int((~left_a).sum())
    moved = first(a[~left_a])
    note("in_other_bin", moved, _partners(moved, b, "content"))
    a, b = a[left_a], b[left_b]
    left_a, left_b = _unmatched(a["tokens"], b["tokens"]), _unmatched(b["tokens"], a["tokens"])
    moves.other_mask += int((~left_a).sum())
    masked = first(a[~left_a])
    note("other_mask", masked, _partners(masked, b, "tokens"))
    moves.only_in_a += int(left_a.sum())
    moves.only_in_b += int(left_b.sum())
    note("only_in_a", first(a[left_a]))
    note("only_in_b", first(b[left_b]))


def _unmatched(own: UInt64, other: UInt64) -> npt.NDArray[np.bool_]:
    """Return which values have no partner; of equal values, as many are matched as the other side has.

    Example:
        >>> _unmatched(np.array([7, 7, 5], np.uint64), np.array([7, 8], np.uint64)).tolist()
        [False, True, True]
    """
    order = np.argsort(own, kind="stable")
    ordered, theirs = own[order], np.sort(other)
    rank = np.arange(len(own)) - np.searchsorted(ordered, ordered, side="left")
    available = np.searchsorted(theirs, ordered, side="right") - np.searchsorted(theirs, ordered, side="left")
    result = np.empty(len(own), np.bool_)
    result[order] = rank >= available
    return result


def _in_bin(keys: Keys) -> UInt64:
    where = keys["bin"].astype(np.uint64) << np.uint64(8) | keys["split"].astype(np.uint64)
    return _mixed(keys["content"] ^ _mixed(where))


def _partners(some: Keys, others: Keys, name: str) -> Any:
    """Return the partners of a few sequences on the other side: the same content, or the same tokens."""
    order = np.argsort(others[name], kind="stable")
    return others[order[np.searchsorted(others[name][order], some[name])]] if len(some) else some
