"""Which sequences are on both sides: in the same bin, in another one, with another mask, or on one side only.

Each sequence is known by two hashes, of its tokens and of its tokens with their masks. Those of very many sequences are
kept in temporary files, by the value of the first, so that memory stays bounded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.inspect.compare.sides import Chunk, Side

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
    """How many sequences of A are where on side B; `only_in_b` counts those that A lacks."""

    in_same_bin: int = 0
    in_other_bin: int = 0
    other_mask: int = 0
    only_in_a: int = 0
    only_in_b: int = 0
    examples: dict[str, list[tuple[Place, ...]]] = field(default_factory=dict)


def find_moves(a: Side, b: Side, num_sequences: int, max_examples: int) -> Moves:
    """Match the sequences of two sides by their content.

    Args:
        a, b: the sides.
        num_sequences: of the larger side.
        max_examples: of each kind, the first ones.
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
    """Return for each sequence a hash of its tokens, and one of its tokens and masks.

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
    """Match two sides in three steps, each with what the one before left: so of equal sequences, some stayed first."""

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
    """Return which values have no partner: of n equal ones, as many are matched as the other side has.

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
    """Return for each of a few sequences one of the same content, or of the same tokens, on the other side."""
    order = np.argsort(others[name], kind="stable")
    return others[order[np.searchsorted(others[name][order], some[name])]] if len(some) else some
