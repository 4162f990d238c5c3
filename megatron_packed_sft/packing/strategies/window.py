"""The order-keeping strategy: bins of neighbours in the data, closed exactly by something nearby."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.strategies.optimal import pack_optimal
from megatron_packed_sft.packing.strategies.packing_problem import (
    Bins,
    Int32,
    Int64,
    PackingProblem,
    bins_from_numbers,
    histogram_of,
)

_logger = logging.getLogger(__name__)

# How many sequences wait (a narrower window takes over at the end), and how many are tried to close a bin.
_WINDOWS = (2048, 256)
_TRIES = 128
# When more than one in so many bins is above the lower bound, `optimal` is used if it saves as many bins.
_LARGEST_GAP = 200


def pack_window(problem: PackingProblem) -> Bins:
    """Pack in order, looking 2,000 sequences ahead; fall back to `optimal`, with a warning, where that wastes too much.

    Sorted lengths, and lengths whose only good partners are far away, cannot be packed well in order.

    Example:
        >>> sizes = np.array([3, 1, 2, 2], np.int32)
        >>> pack_window(PackingProblem(sizes=sizes, histogram=histogram_of(sizes, 4), capacity=4)).indices.tolist()
        [0, 1, 2, 3]
    """
    bins = _pack_in_order(problem)
    num_bins = bins.bin_offsets.size - 1
    if (num_bins - problem.lower_bound) * _LARGEST_GAP > problem.lower_bound:
        other = pack_optimal(problem)
        num_other = other.bin_offsets.size - 1
        if (num_bins - num_other) * _LARGEST_GAP > num_other:
            _logger.warning(
                "strategy 'window' needs %d bins for these lengths in this order, 'optimal' needs %d: using 'optimal'; "
                "shuffle the data if it is sorted, or choose 'optimal' to silence this warning",
                num_bins,
                num_other,
            )
            return Bins(bin_offsets=other.bin_offsets, indices=other.indices, method=f"optimal: {other.method}")
    return bins


def _pack_in_order(problem: PackingProblem) -> Bins:
    """Pack with a wide window, pack what it leaves over with a narrower one, and the last few with `optimal`."""
    bin_of = np.empty(problem.sizes.size, np.int32)
    num_bins = 0
    left = np.arange(problem.sizes.size, dtype=np.int32)
    for window in _WINDOWS:
        bins, left_there = _fill_window(problem, problem.sizes[left], window)
        _number(bin_of, left[bins.indices], bins.bin_offsets, num_bins)
        num_bins += bins.bin_offsets.size - 1
        left = left[left_there]
    if left.size:
        sizes = problem.sizes[left]
        rest = replace(problem, sizes=sizes, histogram=histogram_of(sizes, problem.capacity))
        bins = pack_optimal(rest)
        _number(bin_of, left[bins.indices], bins.bin_offsets, num_bins)
        num_bins += bins.bin_offsets.size - 1
    return bins_from_numbers(bin_of, num_bins, "in order")


def _fill_window(problem: PackingProblem, sizes: Int32, window: int) -> tuple[Bins, npt.NDArray[np.intp]]:
    """Return bins of `sizes`, and the positions of the sizes that were left over."""
    from megatron_packed_sft.packing.search.window_kernel import window_fill

    waiting = np.ones(sizes.size, np.int64)
    lots = np.empty((sizes.size + 1, 4), np.uint32)
    members = np.empty(sizes.size, np.uint32)
    offsets = np.empty(sizes.size + 1, np.int64)
    times = np.empty(sizes.size, np.int64)
    num_bins = window_fill(
        sizes.view(np.uint32),
        waiting,
        problem.capacity,
        problem.max_per_bin,
        window,
        _TRIES,
        problem.work_limit // _TRIES,
        sizes.size * problem.capacity,
        lots,
        members,
        offsets,
        times,
    )
    bins = Bins(bin_offsets=offsets[: num_bins + 1], indices=members[: offsets[num_bins]].view(np.int32))
    return bins, np.flatnonzero(waiting)


def _number(bin_of: Int32, members: Int32, offsets: Int64, first: int) -> None:
    """Give the members of each bin its number, counted from `first`."""
    numbers = np.arange(first, first + offsets.size - 1, dtype=np.int32)
    bin_of[members] = np.repeat(numbers, np.diff(offsets))
