"""Packing a histogram of sizes: best fit decreasing that places equal sizes all at once.

A result is a list of patterns, each with how many bins are filled like it:

    pattern_offsets  int64 [num_patterns + 1]   pattern p = pattern_sizes[offsets[p] : offsets[p + 1]]
    pattern_sizes    int32 [...]                the sizes in one bin, equal sizes side by side
    pattern_counts   int64 [num_patterns]       bins filled like this

Nothing here depends on the number of sequences, only on the number of different sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.search.bitset_kernel import Bits, Scalar, add, discard, lowest_at_least, new_set
from megatron_packed_sft.support.compiled import kernel

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Patterns = tuple[Int64, Int32, Int64]

# Columns of the table of groups in `best_fit_decreasing`.
_PARENT = 0  # the group this one grew from, -1 = an empty bin
_SIZE = 1  # ... by adding this size
_REPEAT = 2  # ... so many times to each bin
_ITEMS = 3  # sequences in each of its bins
_BINS = 4  # bins filled alike
_BELOW = 5  # the next group on its stack
_NUM_COLUMNS = 6


def best_fit_decreasing(histogram: Int64, capacity: int, max_per_bin: int) -> Patterns:
    """Pack like best fit decreasing, sequence by sequence, but whole groups of equal bins at once.

    Bins filled alike are one group: a node of a tree (its parent is the group it grew from) with a number of bins.
    Groups with the same room left form a stack. Best fit sends equal sizes into one bin until no more fits there,
    then into the next bin with the least room: so a whole group takes room // size of them per bin in one step.
    """
    words, summary = new_set(capacity)
    left = histogram.copy()
    top = np.full(capacity + 1, -1, np.int64)
    groups = np.empty((4096, _NUM_COLUMNS), np.int64)
    used, size = 0, capacity
    # Growing the table is kept out of the hot loop: reassigning an array there costs more than the loop's own work.
    while size > 0:
        size, used = _place_sizes(left, capacity, max_per_bin, words, summary, top, groups, used, size)
        if size > 0:
            groups = np.concatenate([groups, np.empty_like(groups)])
    nothing = np.empty(0, np.int64)
    num_patterns, num_sizes = _collect(top, groups, nothing, np.empty(0, np.int32), nothing)
    offsets, counts = np.empty(num_patterns + 1, np.int64), np.empty(num_patterns, np.int64)
    sizes = np.empty(num_sizes, np.int32)
    _collect(top, groups, offsets, sizes, counts)
    return offsets, sizes, counts


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
def _collect(top: Int64, groups: Int64, offsets: Int64, sizes: Int32, counts: Int64) -> tuple[Scalar, Scalar]:
    """Turn the groups that are left on the stacks into patterns; return how many there are, and their sizes.

    With empty `offsets` nothing is written.
    """
    pattern = 0
    position = np.int64(0)
    for room in range(top.size):
        node = top[room]
        while node >= 0:
            if offsets.size == 0:
                position += groups[node, _ITEMS]
            else:
                offsets[pattern] = position
                ancestor = node
                while ancestor >= 0:
                    for _ in range(groups[ancestor, _REPEAT]):
                        sizes[position] = groups[ancestor, _SIZE]
                        position += 1
                    ancestor = groups[ancestor, _PARENT]
                counts[pattern] = groups[node, _BINS]
                offsets[pattern + 1] = position
            pattern += 1
            node = groups[node, _BELOW]
    return pattern, position
