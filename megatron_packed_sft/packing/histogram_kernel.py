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
from numba import njit

from megatron_packed_sft.packing.bitset_kernel import add, discard, empty_set, lowest_at_least

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Patterns = tuple[Int64, Int32, Int64]

# Above this many parts the rounding of `_rounding_bound` no longer finds anything.
_LARGEST_FRACTION = 24


@njit(cache=True, nogil=True)
def grown32(array: Int32, used: int, needed: int) -> Int32:
    """Return `array`, or a copy of it with room for `needed` values."""
    if needed <= array.size:
        return array
    larger = np.empty(max(needed, 2 * array.size), np.int32)
    larger[:used] = array[:used]
    return larger


@njit(cache=True, nogil=True)
def grown64(array: Int64, used: int, needed: int) -> Int64:
    """Return `array`, or a copy of it with room for `needed` values."""
    if needed <= array.size:
        return array
    larger = np.empty(max(needed, 2 * array.size), np.int64)
    larger[:used] = array[:used]
    return larger


@njit(cache=True, nogil=True)
def martello_toth_bound(histogram: Int64, capacity: int) -> int:
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


@njit(cache=True, nogil=True)
def _rounding_bound(histogram: Int64, capacity: int) -> int:
    """Return the best bound by the rounding of Fekete and Schepers (a dual feasible function), k = 2, 3, ...

    Rounding a size x to floor((k + 1) x / capacity) parts of capacity / k never makes a bin impossible: at most k
    sizes above capacity / (k + 1) share a bin. It sees what sums cannot, such as lengths just above a third.
    """
    best = 0
    for parts in range(2, _LARGEST_FRACTION + 1):
        weight = np.int64(0)
        for size in range(1, capacity + 1):
            if histogram[size] > 0:
                scaled = (parts + 1) * size
                if scaled % capacity == 0:
                    weight += histogram[size] * size * parts
                else:
                    weight += histogram[size] * (scaled // capacity) * capacity
        best = max(best, (weight + parts * capacity - 1) // (parts * capacity))
    return best


@njit(cache=True, nogil=True)
def lower_bound(histogram: Int64, capacity: int, max_per_bin: int) -> int:
    """Return the best lower bound known for the number of bins."""
    num_items = np.int64(0)
    for size in range(1, capacity + 1):
        num_items += histogram[size]
    bound = max(martello_toth_bound(histogram, capacity), (num_items + max_per_bin - 1) // max_per_bin)
    return max(bound, _rounding_bound(histogram, capacity))


@njit(cache=True, nogil=True)
def best_fit_decreasing(histogram: Int64, capacity: int, max_per_bin: int) -> Patterns:
    """Pack like best fit decreasing, sequence by sequence, but whole groups of equal bins at once.

    Bins filled alike are one group: a node of a tree (its parent is the group it grew from) with a number of bins.
    Groups with the same room left form a stack. Best fit sends equal sizes into one bin until no more fits there,
    then into the next bin with the least room: so a whole group takes room // size of them per bin in one step.
    """
    words, summary = empty_set(capacity)
    top = np.full(capacity + 1, -1, np.int32)
    parent = np.empty(4096, np.int32)
    node_size = np.empty(4096, np.int32)
    node_repeat = np.empty(4096, np.int32)
    node_items = np.empty(4096, np.int32)
    below = np.empty(4096, np.int32)
    num_bins = np.empty(4096, np.int64)
    used = 0
    full = -1
    for size in range(capacity, 0, -1):
        left = histogram[size]
        while left > 0:
            if used + 2 > parent.size:
                parent = grown32(parent, used, used + 2)
                node_size = grown32(node_size, used, used + 2)
                node_repeat = grown32(node_repeat, used, used + 2)
                node_items = grown32(node_items, used, used + 2)
                below = grown32(below, used, used + 2)
                num_bins = grown64(num_bins, used, used + 2)
            room = lowest_at_least(words, summary, size)
            if room < 0:
                room = capacity
                group = -1
                items = 0
                repeat = min(capacity // size, max_per_bin)
                bins = (left + repeat - 1) // repeat
            else:
                group = top[room]
                items = node_items[group]
                repeat = min(room // size, max_per_bin - items)
                bins = num_bins[group]
                top[room] = below[group]
                if top[room] < 0:
                    discard(words, summary, room)
            whole = min(bins, left // repeat)
            rest = left - whole * repeat if whole < bins else np.int64(0)
            # At most three kinds of bins come out: with `repeat` more, one with the rest, and those left alone.
            for kind in range(3):
                if kind == 0:
                    more, count = repeat, whole
                elif kind == 1:
                    more, count = rest, np.int64(1 if rest > 0 else 0)
                else:
                    more, count = np.int64(0), bins - whole - (1 if rest > 0 else 0)
                if count == 0:
                    continue
                node = group
                if more > 0:
                    node = used
                    used += 1
                    parent[node] = group
                    node_size[node] = size
                    node_repeat[node] = more
                    node_items[node] = items + more
                    left -= more * count
                num_bins[node] = count
                room_left = room - more * size
                if room_left == 0 or node_items[node] >= max_per_bin:
                    below[node] = full
                    full = node
                else:
                    below[node] = top[room_left]
                    top[room_left] = node
                    add(words, summary, room_left)
    top[0] = full
    return _collect(top, below, parent, node_size, node_repeat, node_items, num_bins)


@njit(cache=True, nogil=True)
def _collect(
    top: Int32, below: Int32, parent: Int32, node_size: Int32, node_repeat: Int32, node_items: Int32, num_bins: Int64
) -> Patterns:
    """Turn the groups that are left on the stacks into patterns."""
    num_patterns = 0
    num_sizes = 0
    for room in range(top.size):
        node = top[room]
        while node >= 0:
            num_patterns += 1
            num_sizes += node_items[node]
            node = below[node]
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
                for _ in range(node_repeat[ancestor]):
                    sizes[position] = node_size[ancestor]
                    position += 1
                ancestor = parent[ancestor]
            counts[pattern] = num_bins[node]
            pattern += 1
            offsets[pattern] = position
            node = below[node]
    return offsets, sizes, counts
