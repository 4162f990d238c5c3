"""The strategies that everybody knows: next fit, first fit and best fit."""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.strategies.packing_problem import (
    Bins,
    PackingProblem,
    bins_from_numbers,
    bins_from_patterns,
)


def pack_greedy(problem: PackingProblem) -> Bins:
    """Next fit: keep the order; what does not fit any more opens the next bin.

    Example:
        >>> sizes = np.array([3, 2, 1], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_greedy(problem).bin_offsets.tolist()
        [0, 1, 3]
    """
    from megatron_packed_sft.packing.search.fit_kernel import next_fit

    bin_of = np.empty(problem.sizes.size, np.int32)
    num_bins = next_fit(problem.sizes, problem.capacity, problem.max_per_bin, bin_of)
    return bins_from_numbers(bin_of, num_bins)


def pack_first_fit(problem: PackingProblem) -> Bins:
    """First fit decreasing: the longest first, each into the earliest bin with room.

    Example:
        >>> sizes = np.array([1, 3, 2, 2], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_first_fit(problem).indices.tolist()
        [0, 1, 2, 3]
    """
    from megatron_packed_sft.packing.search.fit_kernel import sort_decreasing

    order = np.empty(problem.sizes.size, np.int32)
    sort_decreasing(problem.sizes, problem.histogram, order)
    return _first_fit(problem, order)


def pack_first_fit_shuffle(problem: PackingProblem) -> Bins:
    """First fit over the shuffled sequences, as users of NeMo know it: mixed bins, depends on the seed.

    Example:
        >>> sizes = np.array([4, 4], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_first_fit_shuffle(problem).indices.tolist()
        [0, 1]
    """
    from megatron_packed_sft.packing.search.fit_kernel import shuffle_groups

    order = np.arange(problem.sizes.size, dtype=np.int32)
    shuffle_groups(order, np.array([0, order.size]), np.uint64(problem.seed))
    return _first_fit(problem, order)


def pack_best_fit(problem: PackingProblem) -> Bins:
    """Best fit decreasing: the longest first, each into the bin with the least room it fits into.

    Example:
        >>> sizes = np.array([1, 3, 2, 2], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_best_fit(problem).indices.tolist()
        [0, 1, 2, 3]
    """
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing

    patterns = best_fit_decreasing(problem.histogram, problem.capacity, problem.max_per_bin)
    return bins_from_patterns(problem, patterns)


def _first_fit(problem: PackingProblem, order: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Bins:
    from megatron_packed_sft.packing.search.fit_kernel import first_fit

    bin_of = np.empty(problem.sizes.size, np.int32)
    num_bins = first_fit(problem.sizes, order, problem.capacity, problem.max_per_bin, bin_of)
    return bins_from_numbers(bin_of, num_bins)
