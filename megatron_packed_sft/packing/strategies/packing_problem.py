"""What a strategy is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.search.bounds import lower_bound

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
# pattern_offsets, pattern_sizes, pattern_counts: see histogram_kernel.py
Patterns = tuple[Int64, Int32, Int64]


@dataclass(frozen=True, kw_only=True)
class PackingProblem:
    """Sizes to put into bins: each 1..capacity, at most `max_per_bin` to a bin.

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
    work_limit: int = 1 << 40

    @cached_property
    def lower_bound(self) -> int:
        """No packing has fewer bins."""
        return lower_bound(self.histogram, self.capacity, self.max_per_bin)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Bins in canonical order: bin b holds indices[bin_offsets[b] : bin_offsets[b + 1]].

    `method` says how they were found, when a strategy has more than one way.
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
    from megatron_packed_sft.packing.search.deal_kernel import count_sizes

    histogram = np.zeros(capacity + 1, np.int64)
    count_sizes(sizes, histogram)
    return histogram


def num_bins_of(patterns: Patterns) -> int:
    """Return how many bins the patterns stand for."""
    return int(patterns[2].sum())


def joined(parts: list[Patterns]) -> Patterns:
    """Put lists of patterns one behind the other."""
    starts = np.cumsum([0, *(part[1].size for part in parts)])
    offsets = [part[0][:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return (
        np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def bins_from_patterns(problem: PackingProblem, patterns: Patterns, method: str = "") -> Bins:
    """Deal the sequences out to the patterns."""
    from megatron_packed_sft.packing.search.deal_kernel import NUM_COLUMNS, TURNS, deal

    num_sequences = problem.sizes.size
    # NumPy, not numba, allocates what is large: it asks for huge pages, which random access is much faster in.
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
    from megatron_packed_sft.packing.search.deal_kernel import group_by_bin

    bin_sizes = np.bincount(bin_of, minlength=num_bins).astype(np.uint32)
    bin_offsets = np.empty(num_bins + 1, np.int64)
    indices = np.empty(bin_of.size, np.int32)
    group_by_bin(bin_of.view(np.uint32), bin_sizes, bin_offsets, indices.view(np.uint32))
    return Bins(bin_offsets=bin_offsets, indices=indices, method=method)
