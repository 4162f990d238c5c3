"""What a strategy is given and what it returns, and lower bounds for the number of bins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
# pattern_offsets, pattern_sizes, pattern_counts: see histogram_kernel.py
Patterns = tuple[Int64, Int32, Int64]


@dataclass(frozen=True, kw_only=True)
class PackingProblem:
    """Sizes to put into bins: each 1..capacity, at most `max_per_bin` to a bin.

    After `work_limit` steps, some tenths of a second, a search settles for the best packing that it has found.

    Example:
        >>> sizes = np.array([3, 1], np.int32)
        >>> PackingProblem(sizes=sizes, histogram=histogram_of(sizes, 4), capacity=4).lower_bound
        1
    """

    sizes: Int32
    histogram: Int64  # histogram[s] = sequences of size s, for s = 0..capacity
    capacity: int
    max_per_bin: int = 1 << 40
    seed: int = 0
    work_limit: int = 100_000_000

    @cached_property
    def lower_bound(self) -> int:
        """The best bound known: no packing has fewer bins."""
        return lower_bound(self.histogram, self.capacity, self.max_per_bin)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Bins in canonical order: bin b holds indices[bin_offsets[b] : bin_offsets[b + 1]].

    `method` says how they were found, where a strategy has several ways.
    """

    bin_offsets: Int64
    indices: Int32
    method: str = ""


def histogram_of(sizes: Int32, capacity: int) -> Int64:
    """Count each size, up to `capacity`.

    Example:
        >>> histogram_of(np.array([1, 3, 3], np.int32), 4).tolist()
        [0, 1, 0, 2, 0]
    """
    from megatron_packed_sft.packing.search.sequence_kernel import count_sizes

    histogram = np.zeros(capacity + 1, np.int64)
    count_sizes(sizes, histogram)
    return histogram


def num_bins_of(patterns: Patterns) -> int:
    """Return how many bins the patterns stand for."""
    return int(patterns[2].sum())


def concatenate_patterns(parts: list[Patterns]) -> Patterns:
    """Return all patterns as one list."""
    starts = np.cumsum([0, *(part[1].size for part in parts)])
    offsets = [part[0][:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return (
        np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def bins_from_patterns(problem: PackingProblem, patterns: Patterns, method: str = "") -> Bins:
    """Turn patterns of sizes into bins of sequences."""
    from megatron_packed_sft.packing.search.sequence_kernel import NUM_COLUMNS, TURNS, deal

    num_sequences = problem.sizes.size
    # NumPy allocates the large arrays, not numba: it asks for huge pages, in which random access is much faster.
    places = np.empty((num_sequences + 1, 2), np.uint32)
    bin_offsets = np.empty(num_bins_of(patterns) + 1, np.int64)
    indices = np.empty(num_sequences, np.int32)
    offsets, sizes, counts = patterns
    deal(
        problem.sizes.view(np.uint32),
        offsets,
        sizes.view(np.uint32),
        counts.astype(np.uint32),
        ((counts + TURNS - 1) // TURNS).astype(np.uint32),
        np.zeros(problem.capacity + 2, np.uint32),
        np.zeros((problem.capacity + 1, NUM_COLUMNS), np.uint32),
        np.empty(sizes.size, np.uint32),
        places,
        bin_offsets,
        indices.view(np.uint32),
    )
    return Bins(bin_offsets=bin_offsets, indices=indices, method=method)


def bins_from_numbers(bin_of: Int32, num_bins: int, method: str = "") -> Bins:
    """Group sequences by the number of their bin. Every number 0..num_bins-1 must occur."""
    from megatron_packed_sft.packing.search.sequence_kernel import group_by_bin

    bin_sizes = np.bincount(bin_of, minlength=num_bins).astype(np.uint32)
    bin_offsets = np.empty(num_bins + 1, np.int64)
    indices = np.empty(bin_of.size, np.int32)
    group_by_bin(bin_of.view(np.uint32), bin_sizes, bin_offsets, indices.view(np.uint32))
    return Bins(bin_offsets=bin_offsets, indices=indices, method=method)


# Finer rounding than this hardly differs from the plain sum.
_MOST_PARTS = 32


def lower_bound(histogram: Int64, capacity: int, max_per_bin: int) -> int:
    """Return the best lower bound known for the number of bins.

    Example:
        >>> lower_bound(np.array([0, 0, 0, 5, 0, 0, 0]), 6, 1 << 40)  # five of 3, two of which share a bin of 6
        3
    """
    num_items = int(histogram[1 : capacity + 1].sum())
    bound = max(martello_toth_bound(histogram, capacity), -(-num_items // max_per_bin))
    return max(bound, _rounding_bound(histogram, capacity))


def martello_toth_bound(histogram: Int64, capacity: int) -> int:
    """Return max(ceil(sum / capacity), L2 of Martello and Toth): no packing has fewer bins.

    For a threshold t, sizes above capacity - t share a bin with nothing >= t; sizes above half of it share with each
    other never. What of the sizes in [t, capacity / 2] does not fit beside the latter needs further bins.
    """
    half = capacity // 2
    num_up_to = np.cumsum(histogram[: capacity + 1])
    sum_up_to = np.cumsum(np.arange(capacity + 1) * histogram[: capacity + 1])
    best = -(-int(sum_up_to[capacity]) // capacity)
    if half == 0:
        return best
    # One value for each threshold 1..half.
    sum_small = sum_up_to[half] - sum_up_to[:half]
    below_alone = slice(capacity - half, capacity)
    num_large = num_up_to[below_alone][::-1] - num_up_to[half]
    room = num_large * capacity - (sum_up_to[below_alone][::-1] - sum_up_to[half])
    overflow = max(0, int((sum_small - room).max()))
    return max(best, int(num_up_to[capacity] - num_up_to[half]) + -(-overflow // capacity))


def _rounding_bound(histogram: Int64, capacity: int) -> int:
    """Return the best bound by the rounding of Fekete and Schepers (a dual feasible function), k = 2, 3, ...

    Rounding a size x to floor((k + 1) x / capacity) parts of capacity / k never makes a bin impossible (where the
    division has no rest, x itself is kept): at most k sizes above capacity / (k + 1) share a bin. It sees what sums
    cannot, such as lengths just above a third.
    """
    num_at_least = np.cumsum(histogram[capacity:0:-1])[::-1]  # of size 1, 2, ...
    sizes, kept, first_steps, parts = _roundings(capacity)
    weights = np.add.reduceat(num_at_least[sizes - 1] * capacity - histogram[sizes] * kept, first_steps)
    return int((-(-weights // (parts * capacity))).max())


@lru_cache(maxsize=8)
def _roundings(capacity: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the smallest size of each step of each rounding, that size where it is kept and else 0, where the steps of
    each rounding begin, and its number of parts.
    """
    parts = np.arange(2, _MOST_PARTS + 1)
    first_steps = np.cumsum(parts + 1) - (parts + 1)
    parts_of = np.repeat(parts, parts + 1)
    steps = capacity * (np.arange(parts_of.size) - np.repeat(first_steps, parts + 1) + 1)
    sizes = (steps + parts_of) // (parts_of + 1)
    return sizes, np.where(sizes * (parts_of + 1) == steps, sizes, 0), first_steps, parts
