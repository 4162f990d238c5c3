"""The portfolio: four ways to pack a histogram, from the quickest to the most thorough, until one is good enough.

    best fit      what the best peers do; done if it meets the lower bound
    exact fill    the largest size anchors a bin, the rest is closed without a gap
    mixed fill    the window packer over shuffled lots of equal sizes: keeps every bin a fair sample, which is what
                  lengths around a third or a quarter of the pack need
    guided fill   a linear program says which kinds of sizes belong together; for what greedy searches get wrong

The fullest wins. All of them cost what the number of different sizes costs, not the number of sequences.
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
    joined,
    num_bins_of,
)

# Within one in so many bins of the lower bound nothing further is tried.
_GOOD_ENOUGH = 10_000
# The program costs some 5 to 20 ms; closer to the bound than this, it hardly gains anything.
_WORTH_A_PROGRAM = 3000

# Mixed fill: lots in all, how many of them wait at a time (a sixteenth, within limits), how many of those are looked
# at to close a bin, and how often what is left over is cut into smaller lots and filled again.
_NUM_LOTS = 8192
_LARGEST_WINDOW = 512
_SMALLEST_WINDOW = 128
_TRIES = 128
_LEVELS = 6

_NUM_BUCKETS = 56
_MOST_PIVOTS = 2000


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
    """Return the fewest bins found, and the way that found them."""
    from megatron_packed_sft.packing.search.exact_kernel import exact_fill
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing

    candidates = [(best_fit_decreasing(histogram, capacity, max_per_bin), "best fit")]
    if num_bins_of(candidates[0][0]) > lower_bound:
        candidates.append((exact_fill(histogram, capacity, max_per_bin), "exact fill"))
    excess = _excess(candidates, lower_bound)
    # With very many different sizes a lot is hardly more than a sequence, and exact fill finds partners anyway.
    is_coarse = np.count_nonzero(histogram) <= 4 * _NUM_LOTS
    if excess > 1 and excess * _GOOD_ENOUGH > lower_bound and is_coarse and work_limit > 0:
        fewest = lower_bound + excess
        mixed = mixed_fill(histogram, capacity, max_per_bin, work_limit, fewest)
        if mixed is not None:
            candidates.append((mixed, "mixed fill"))
        excess = _excess(candidates, lower_bound)
        if excess > 1 and excess * _WORTH_A_PROGRAM > lower_bound:
            guided = guided_fill(histogram, capacity, max_per_bin, work_limit, lower_bound + excess)
            if guided is not None:
                candidates.append((guided, "guided fill"))
    return min(candidates, key=lambda candidate: num_bins_of(candidate[0]))


def _excess(candidates: list[tuple[Patterns, str]], lower_bound: int) -> int:
    return min(num_bins_of(patterns) for patterns, _ in candidates) - lower_bound


def simple_fill(histogram: Int64, capacity: int, max_per_bin: int) -> Patterns:
    """Best fit or exact fill, whichever needs fewer bins."""
    from megatron_packed_sft.packing.search.exact_kernel import exact_fill
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing

    both = [fill(histogram, capacity, max_per_bin) for fill in (best_fit_decreasing, exact_fill)]
    return min(both, key=num_bins_of)


def mixed_fill(histogram: Int64, capacity: int, max_per_bin: int, work_limit: int, fewest: int) -> Patterns | None:
    """Cut the histogram into lots, shuffle them, and send them through the window packer.

    The packer stops when too few lots wait to choose from; these are cut into smaller ones, and it continues. None when
    it wastes so much room on the way that it cannot get below the `fewest` bins known.
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
        # A bin's lots are at least one sequence each. Pages that are never written cost nothing.
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
    return joined(parts)


def _cut_into_lots(histogram: Int64, num_lots: int, seed: int) -> tuple[Int32, Int64]:
    """Return sizes and counts of about `num_lots` lots, in shuffled order."""
    from megatron_packed_sft.packing.search.fit_kernel import shuffle_groups

    different = np.flatnonzero(histogram)
    counts = histogram[different]
    num_lots_each = np.minimum(counts, max(1, num_lots // different.size))
    smaller, larger_ones = np.divmod(counts, num_lots_each)
    number_in_size = np.arange(num_lots_each.sum()) - np.repeat(np.cumsum(num_lots_each) - num_lots_each, num_lots_each)
    lot_counts = np.repeat(smaller, num_lots_each) + (number_in_size < np.repeat(larger_ones, num_lots_each))
    order = np.arange(lot_counts.size, dtype=np.int32)
    shuffle_groups(order, np.array([0, order.size]), np.uint64(seed))
    return np.repeat(different, num_lots_each).astype(np.int32)[order], lot_counts[order]


def guided_fill(histogram: Int64, capacity: int, max_per_bin: int, work_limit: int, fewest: int) -> Patterns | None:
    """Solve the linear program over buckets of sizes, fill bins after it, and the rest by the other ways.

    None when the program itself promises no fewer than the `fewest` bins known.
    """
    from megatron_packed_sft.packing.search.guided_kernel import guided_fill as fill
    from megatron_packed_sft.packing.search.linear_program_kernel import RESOLUTION, make_buckets, solve_program

    low, high, demand, tokens = make_buckets(histogram, capacity, _NUM_BUCKETS)
    widths = np.clip((2 * tokens * RESOLUTION + demand * capacity) // (2 * demand * capacity), 1, RESOLUTION)
    pivots = min(_MOST_PIVOTS, work_limit // widths.size**2)
    columns, lengths, bins = solve_program(widths, demand, max_per_bin, pivots)
    if bins.sum() >= fewest << 8:
        return None
    patterns, rest = fill(histogram, capacity, low, high, widths, columns, lengths, bins, work_limit // 4)
    parts: list[Patterns] = [patterns]
    if rest.any():
        simple = simple_fill(rest, capacity, max_per_bin)
        mixed = mixed_fill(rest, capacity, max_per_bin, work_limit, num_bins_of(simple))
        parts.append(simple if mixed is None else min(simple, mixed, key=num_bins_of))
    return joined(parts)
