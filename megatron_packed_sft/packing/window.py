"""The order-keeping strategy: bins of neighbours in the data, closed exactly by something nearby."""

from __future__ import annotations

import logging

import numpy as np

from megatron_packed_sft.packing.optimal import find_patterns, pack_optimal
from megatron_packed_sft.packing.problem import Bins, Problem, bins_from_numbers, bins_from_patterns, histogram_of

_logger = logging.getLogger(__name__)

# How many sequences wait, and how many of them are looked at to close a bin.
WINDOW = 2048
_TRIES = 128
# When more than one in so many bins is above the lower bound, the bins of `optimal` are taken if they save as much.
_LARGEST_GAP = 200


def pack_window(problem: Problem) -> Bins:
    """Pack in order, looking WINDOW sequences ahead; fall back to `optimal`, and say so, where that wastes too much.

    Sorted lengths, and lengths that need particular partners far away, cannot be packed well in order.

    Example:
        >>> sizes = np.array([3, 1, 2, 2], np.int32)
        >>> pack_window(Problem(sizes=sizes, histogram=histogram_of(sizes, 4), capacity=4)).indices.tolist()
        [0, 1, 2, 3]
    """
    bins = _pack_in_order(problem)
    num_bins = bins.bin_offsets.size - 1
    if (num_bins - problem.lower_bound) * _LARGEST_GAP > problem.lower_bound:
        other = pack_optimal(problem)
        num_other = other.bin_offsets.size - 1
        if (num_bins - num_other) * _LARGEST_GAP > num_other:
            _logger.warning(
                "strategy 'window' needs %d bins for these lengths in this order, 'optimal' %d: using 'optimal'; "
                "shuffle the data if it is sorted, or choose 'optimal' to silence this",
                num_bins,
                num_other,
            )
            return Bins(bin_offsets=other.bin_offsets, indices=other.indices, method=f"optimal: {other.method}")
    return bins


def _pack_in_order(problem: Problem) -> Bins:
    from megatron_packed_sft.packing.window_kernel import window_fill

    num_sequences = problem.sizes.size
    waiting = np.ones(num_sequences, np.int64)
    links = np.empty((num_sequences + 1, 3), np.uint32)
    members = np.empty(num_sequences, np.uint32)
    offsets = np.empty(num_sequences + 1, np.int64)
    times = np.empty(num_sequences, np.int64)
    num_bins = window_fill(
        problem.sizes.view(np.uint32),
        waiting,
        problem.capacity,
        problem.max_per_bin,
        WINDOW,
        _TRIES,
        problem.work_limit // _TRIES,
        num_sequences * problem.capacity,
        links,
        members,
        offsets,
        times,
    )
    bin_of = np.empty(num_sequences, np.int32)
    numbers = np.arange(num_bins, dtype=np.int32)
    bin_of[members[: offsets[num_bins]]] = np.repeat(numbers, np.diff(offsets[: num_bins + 1]))
    # The last ones have nothing to wait for any more, so they are packed as full as possible.
    tail = np.flatnonzero(waiting)
    if tail.size:
        sizes = problem.sizes[tail]
        rest = Problem(
            sizes=sizes,
            histogram=histogram_of(sizes, problem.capacity),
            capacity=problem.capacity,
            max_per_bin=problem.max_per_bin,
        )
        patterns, _ = find_patterns(
            rest.histogram, rest.capacity, rest.max_per_bin, rest.lower_bound, problem.work_limit
        )
        last = bins_from_patterns(rest, patterns)
        num_last = last.bin_offsets.size - 1
        numbers = num_bins + np.arange(num_last, dtype=np.int32)
        bin_of[tail[last.indices]] = np.repeat(numbers, np.diff(last.bin_offsets))
        num_bins += num_last
    return bins_from_numbers(bin_of, num_bins, "in order")
