"""Packing a histogram of sizes: lower bounds, and best fit decreasing that places equal sizes all at once.

A result is a list of patterns, each with how many bins are filled like it:

    pattern_offsets  int64 [num_patterns + 1]   pattern p = pattern_sizes[offsets[p] : offsets[p + 1]]
    pattern_sizes    int32 [...]                the sizes in one bin, equal sizes side by side
    pattern_counts   int64 [num_patterns]       bins filled like this

Nothing here depends on the number of sequences, only on the number of different sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.search.bitset_kernel import Bits, Scalar, add, discard, empty_set, lowest_at_least
from megatron_packed_sft.support.compiled import kernel

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Patterns = tuple[Int64, Int32, Int64]

# Finer rounding than this hardly differs from the plain sum.
_MOST_PARTS = 32


@kernel
def martello_toth_bound(histogram: Int64, capacity: Scalar) -> Scalar:
    """Return max(ceil(sum / capacity), L2 of Martello and Toth): no packing has fewer bins.

    For a threshold t, sizes above capacity - t share a bin with nothing >= t; sizes above half of it share with each
    other never. What of the sizes in [t, capacity / 2] does not fit beside the latter needs further bins.
    """
    half = capacity // 2
    total = np.int64(0)
    for size in range(1, capacity + 1):
        total += size * histogram[size]
    best = (total + capacity - 1) // capacity
    num_alone = np.int64(0)
    num_large = np.int64(0)
    sum_large = np.int64(0)
    for size in range(half + 1, capacity + 1):
        if size > capacity - half:
            num_alone += histogram[size]
        else:
            num_large += histogram[size]
            sum_large += size * histogram[size]
    sum_small = np.int64(0)
    for threshold in range(half, 0, -1):
        if threshold < half:
            size = capacity - threshold
            num_alone -= histogram[size]
            num_large += histogram[size]
            sum_large += size * histogram[size]
        sum_small += threshold * histogram[threshold]
        overflow = max(np.int64(0), sum_small - (num_large * capacity - sum_large))
        best = max(best, num_alone + num_large + (overflow + capacity - 1) // capacity)
    return int(best)


@kernel
def _rounding_bound(histogram: Int64, capacity: Scalar) -> Scalar:
    """Return the best bound by the rounding of Fekete and Schepers (a dual feasible function), k = 2, 3, ...

    Rounding a size x to floor((k + 1) x / capacity) parts of capacity / k never makes a bin impossible (where the
    division has no rest, x itself is kept): at most k sizes above capacity / (k + 1) share a bin. It sees what sums
    cannot, such as lengths just above a third.
    """
    num_at_least = np.zeros(capacity + 2, np.int64)
    for size in range(capacity, 0, -1):
        num_at_least[size] = num_at_least[size + 1] + histogram[size]
    best = 0
    for parts in range(2, _MOST_PARTS + 1):
        weight = np.int64(0)
        for step in range(1, parts + 2):
            size = (step * capacity + parts) // (parts + 1)
            weight += num_at_least[size] * capacity
            if size * (parts + 1) == step * capacity:
                weight -= histogram[size] * size
        best = max(best, (weight + parts * capacity - 1) // (parts * capacity))
    return best


@kernel
def lower_bound(histogram: Int64, capacity: Scalar, max_per_bin: Scalar) -> Scalar:
    """Return the best lower bound known for the number of bins."""
    num_items = np.int64(0)
    for size in range(1, capacity + 1):
        num_items += histogram[size]
    bound = max(martello_toth_bound(histogram, capacity), (num_items + max_per_bin - 1) // max_per_bin)
    return max(bound, _rounding_bound(histogram, capacity))


# Columns of the table of groups in `best_fit_decreasing`.
_PARENT = 0  # the group this one grew from, -1 = an empty bin
_SIZE = 1  # ... by adding this size
_REPEAT = 2  # ... so many times to each bin
_ITEMS = 3  # sequences in each of its bins
_BINS = 4  # bins filled alike
_BELOW = 5  # the next group on its stack
_NUM_COLUMNS = 6


@kernel
def best_fit_decreasing(histogram: Int64, capacity: Scalar, max_per_bin: Scalar) -> Patterns:
    """Pack like best fit decreasing, sequence by sequence, but whole groups of equal bins at once.

    Bins filled alike are one group: a node of a tree (its parent is the group it grew from) with a number of bins.
    Groups with the same room left form a stack. Best fit sends equal sizes into one bin until no more fits there,
    then into the next bin with the least room: so a whole group takes room // size of them per bin in one step.
    """
    words, summary = empty_set(capacity)
    left = histogram.copy()
    top = np.empty(capacity + 1, np.int64)
    top[:] = -1
    groups = np.empty((4096, _NUM_COLUMNS), np.int64)
    used = np.int64(0)
    size = np.int64(capacity)
    # Growing the table is kept out of the hot loop: reassigning an array there costs more than the loop's own work.
    while size > 0:
        size, used = _place_sizes(left, capacity, max_per_bin, words, summary, top, groups, used, size)
        if size > 0:
            larger = np.empty((2 * groups.shape[0], _NUM_COLUMNS), np.int64)
            for node in range(used):  # assigning a slice would take numba seconds to compile
                for column in range(_NUM_COLUMNS):
                    larger[node, column] = groups[node, column]
            groups = larger
    return _collect(top, groups)


@kernel
def _place_sizes(
    left: Int64,
    capacity: Scalar,
    max_per_bin: Scalar,
    words: Bits,
    summary: Bits,
    top: Int64,
    groups: Int64,
    used: Scalar,
    size: Scalar,
) -> tuple[Scalar, Scalar]:
    """Place sizes from `size` downwards until the table is full; return the size to continue with, and its length."""
    while size > 0:
        while left[size] > 0:
            if used + 2 > groups.shape[0]:
                return size, used
            remaining = left[size]
            room = lowest_at_least(words, summary, size)
            if room < 0:
                room = capacity
                group: Scalar = np.int64(-1)
                items: Scalar = np.int64(0)
                repeat: Scalar = np.int64(min(capacity // size, max_per_bin))
                bins = (remaining + repeat - 1) // repeat
            else:
                group = top[room]
                items = groups[group, _ITEMS]
                repeat = min(room // size, max_per_bin - items)
                bins = groups[group, _BINS]
                top[room] = groups[group, _BELOW]
                if top[room] < 0:
                    discard(words, summary, room)
            # At most three kinds of bins come out: with `repeat` more, one with the rest, and those left alone.
            whole = min(bins, remaining // repeat)
            rest = remaining - whole * repeat if whole < bins else np.int64(0)
            untouched = bins - whole - (1 if rest > 0 else 0)
            for kind in range(3):
                more = repeat if kind == 0 else (rest if kind == 1 else np.int64(0))
                count = whole if kind == 0 else (np.int64(rest > 0) if kind == 1 else untouched)
                if count == 0:
                    continue
                node = group
                if more > 0:
                    node = np.int64(used)
                    used += 1
                    groups[node, _PARENT] = group
                    groups[node, _SIZE] = size
                    groups[node, _REPEAT] = more
                    groups[node, _ITEMS] = items + more
                groups[node, _BINS] = count
                # Bins that may take nothing more wait on the stack of rooms 0, which no size fits into.
                room_left = room - more * size if items + more < max_per_bin else 0
                groups[node, _BELOW] = top[room_left]
                top[room_left] = node
                if room_left > 0:
                    add(words, summary, room_left)
            left[size] = remaining - whole * repeat - rest
        size -= 1
    return size, used


@kernel
def _collect(top: Int64, groups: Int64) -> Patterns:
    """Turn the groups that are left on the stacks into patterns."""
    num_patterns = 0
    num_sizes = np.int64(0)
    for room in range(top.size):
        node = top[room]
        while node >= 0:
            num_patterns += 1
            num_sizes += groups[node, _ITEMS]
            node = groups[node, _BELOW]
    offsets = np.empty(num_patterns + 1, np.int64)
    sizes = np.empty(num_sizes, np.int32)
    counts = np.empty(num_patterns, np.int64)
    offsets[0] = 0
    pattern = 0
    position = 0
    for room in range(top.size):
        node = top[room]
        while node >= 0:
            ancestor = node
            while ancestor >= 0:
                for _ in range(groups[ancestor, _REPEAT]):
                    sizes[position] = groups[ancestor, _SIZE]
                    position += 1
                ancestor = groups[ancestor, _PARENT]
            counts[pattern] = groups[node, _BINS]
            pattern += 1
            offsets[pattern] = position
            node = groups[node, _BELOW]
    return offsets, sizes, counts
