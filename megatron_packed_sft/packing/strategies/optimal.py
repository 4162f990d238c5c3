"""Three ways to pack a histogram of sizes, from the quickest to the most thorough, until one is good enough.

    best fit      what the best peers do; done if it meets the lower bound
    exact fill    the largest size anchors a bin, which is then closed without a gap
    mixed fill    the window packer over shuffled lots of equal sizes: every bin stays a fair sample, which is what
                  lengths around a third or a quarter of the pack need

The fewest bins win. The cost of all three depends on the number of different sizes, not on the number of sequences.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.strategies.packing_problem import (
    Bins,
    Int32,
    Int64,
    PackingProblem,
    Patterns,
    bins_from_patterns,
    concatenate_patterns,
    num_bins_of,
)

# With fewer bins above the lower bound than one in so many, nothing further is tried.
_GOOD_ENOUGH = 10_000

# Mixed fill: lots in all, how many of them wait at a time (a sixteenth, within limits), how many of those are looked
# at to close a bin, and how often what is left over is cut into smaller lots and filled again.
_NUM_LOTS = 8192
_LARGEST_WINDOW = 512
_SMALLEST_WINDOW = 128
_TRIES = 128
_LEVELS = 6


def pack_optimal(problem: PackingProblem) -> Bins:
    """Pack as full as possible.

    Example:
        >>> sizes = np.array([6, 6, 5, 5, 4, 4], np.int32)
        >>> bins = pack_optimal(PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=16), capacity=15))
        >>> bins.indices.reshape(2, 3).tolist()
        [[0, 3, 5], [1, 2, 4]]
    """
    patterns, method = find_patterns(
        problem.histogram, problem.capacity, problem.max_per_bin, problem.lower_bound, problem.work_limit
    )
    return bins_from_patterns(problem, patterns, method)


def find_patterns(
    histogram: Int64, capacity: int, max_per_bin: int, lower_bound: int, work_limit: int
) -> tuple[Patterns, str]:
    """Return the patterns with the fewest bins, and how they were found."""
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing, exact_fill

    candidates = [(best_fit_decreasing(histogram, capacity, max_per_bin), "best fit")]
    if num_bins_of(candidates[0][0]) > lower_bound:
        candidates.append((exact_fill(histogram, capacity, max_per_bin), "exact fill"))
    fewest = min(num_bins_of(patterns) for patterns, _ in candidates)
    excess = fewest - lower_bound
    # With very many different sizes a lot is hardly more than a sequence, and exact fill finds partners anyway.
    is_coarse = np.count_nonzero(histogram) <= 4 * _NUM_LOTS
    if excess > 1 and excess * _GOOD_ENOUGH > lower_bound and is_coarse and work_limit > 0:
        mixed = mixed_fill(histogram, capacity, max_per_bin, work_limit, fewest)
        if mixed is not None:
            candidates.append((mixed, "mixed fill"))
    return min(candidates, key=lambda candidate: num_bins_of(candidate[0]))


def simple_fill(histogram: Int64, capacity: int, max_per_bin: int) -> Patterns:
    """Best fit or exact fill, whichever needs fewer bins."""
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing, exact_fill

    both = [fill(histogram, capacity, max_per_bin) for fill in (best_fit_decreasing, exact_fill)]
    return min(both, key=num_bins_of)


def mixed_fill(histogram: Int64, capacity: int, max_per_bin: int, work_limit: int, fewest: int) -> Patterns | None:
    """Cut the histogram into lots, shuffle them, and send them through the window packer.

    The packer stops when too few lots are left to choose from; these are cut into smaller lots, and it continues.
    Returns None when so much room was wasted that the result cannot be below the `fewest` bins known.
    """
    from megatron_packed_sft.packing.search.window_kernel import window_fill

    parts = []
    num_found = 0
    num_lots = min(_NUM_LOTS, work_limit // _TRIES)
    for level in range(_LEVELS):
        if not histogram.any():
            break
        sizes, counts = _cut_into_lots(histogram, num_lots, seed=level)
        window = min(_LARGEST_WINDOW, max(_SMALLEST_WINDOW, sizes.size // 16))
        if sizes.size < 2 * window:
            break
        # A lot of a bin is at least one sequence. Memory pages that are never written cost nothing.
        most_per_bin = min(max_per_bin, capacity // int(sizes.min()))
        most_used = min(int(counts.sum()), sizes.size * most_per_bin)
        lots = np.empty((sizes.size + 1, 4), np.uint32)
        bin_lots = np.empty(most_used, np.uint32)
        bin_offsets = np.empty(sizes.size + 1, np.int64)
        bin_times = np.empty(sizes.size, np.int64)
        num_bins = window_fill(
            sizes.view(np.uint32),
            counts,
            capacity,
            max_per_bin,
            window,
            _TRIES,
            work_limit // _TRIES,
            (fewest - num_found) * capacity - int(histogram @ np.arange(histogram.size)),
            lots,
            bin_lots,
            bin_offsets,
            bin_times,
        )
        if num_bins < 0:
            return None
        used = bin_lots[: bin_offsets[num_bins]]
        parts.append((bin_offsets[: num_bins + 1].copy(), sizes[used], bin_times[:num_bins].copy()))
        num_found += num_bins_of(parts[-1])
        histogram = np.zeros_like(histogram)
        np.add.at(histogram, sizes, counts)
    if histogram.any():
        parts.append(simple_fill(histogram, capacity, max_per_bin))
    return concatenate_patterns(parts)


def _cut_into_lots(histogram: Int64, num_lots: int, seed: int) -> tuple[Int32, Int64]:
    """Return sizes and counts of about `num_lots` lots, in shuffled order."""
    from megatron_packed_sft.packing.search.sequence_kernel import shuffle_groups

    different = np.flatnonzero(histogram)
    counts = histogram[different]
    num_lots_each = np.minimum(counts, max(1, num_lots // different.size))
    smaller, larger_ones = np.divmod(counts, num_lots_each)
    number_in_size = np.arange(num_lots_each.sum()) - np.repeat(np.cumsum(num_lots_each) - num_lots_each, num_lots_each)
    lot_counts = np.repeat(smaller, num_lots_each) + (number_in_size < np.repeat(larger_ones, num_lots_each))
    order = np.arange(lot_counts.size, dtype=np.int32)
    shuffle_groups(order, np.array([0, order.size]), np.uint64(seed))
    return np.repeat(different, num_lots_each).astype(np.int32)[order], lot_counts[order]
