"""Two streams of bins in step: which bins differ, and where each begins to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.inspect.compare.sides import Chunk

Int64 = npt.NDArray[np.int64]

FIELDS = ("input_ids", "loss_mask", "seq_start_id", "length")
_NOWHERE = np.iinfo(np.int64).max


class Pair(NamedTuple):
    """The same bins of both sides, and the number of the first; the last pair may have bins on one side only."""

    first_bin: int
    a: Chunk
    b: Chunk


def in_step(side_a: Iterator[Chunk], side_b: Iterator[Chunk]) -> Iterator[Pair]:
    """Yield the bins of two streams in pairs of chunks of equal length; what is left of the longer one comes last."""
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
    """Return for every bin and field of `FIELDS` the first position where two chunks differ, or a huge number.

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
    for chunk in (a, b):  # a sequence more begins where the other side still has the one before it
        more = np.flatnonzero((chunk.counts > sequences) & (found[:, 2] == _NOWHERE))
        found[more, 2] = chunk.starts[(np.cumsum(chunk.counts) - chunk.counts + sequences)[more]]
    found[:, 3] = np.where(a.lengths != b.lengths, common, _NOWHERE)
    return found


def differs(positions: Int64) -> npt.NDArray[np.bool_]:
    """Return which entries of `first_positions` are positions."""
    result: npt.NDArray[np.bool_] = positions != _NOWHERE
    return result


def _places(sizes: Int64, common: Int64) -> Int64:
    """Return where the first `common` values of every bin are in flat arrays with bins of these sizes."""
    return np.repeat(np.cumsum(sizes) - sizes, common) + _within(common)


def _within(sizes: Int64) -> Int64:
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _first(is_different: npt.NDArray[np.bool_], position: Int64, sizes: Int64) -> Int64:
    if not len(sizes):
        return np.empty(0, np.int64)
    result: Int64 = np.minimum.reduceat(np.where(is_different, position, _NOWHERE), np.cumsum(sizes) - sizes)
    return result
