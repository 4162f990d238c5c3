"""Exact fill: the largest size left anchors a bin, and what follows is chosen so that no room is left at all.

Best fit wastes the last few tokens of a bin, because it takes the largest size that fits and then nothing fits any
more. Here, as soon as the room can be closed by two or three sizes that are there, exactly, they are taken.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import (
    Bits,
    Scalar,
    add,
    discard,
    empty_set,
    highest_at_most,
    lowest_at_least,
)
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64, Patterns
from megatron_packed_sft.support.compiled import inner_kernel, kernel

# How many candidates for the first of two, and for the first of three closing sizes are looked at. Beyond these the
# bins got no fuller in any of the distributions measured (docs/packing.md), only the search slower.
_PAIRS_TRIED = 64
_TRIPLES_TRIED = 16


@inner_kernel
def _larger_of_pair(words: Bits, summary: Bits, left: Int64, room: Scalar, smallest: Scalar) -> Scalar:
    """Return the larger of two sizes that fill `room` exactly, as large as possible; -1 if none was found."""
    size = highest_at_most(words, summary, room - smallest)
    for _ in range(_PAIRS_TRIED):
        if 2 * size < room:
            return -1
        other = room - size
        if left[other] > (1 if other == size else 0):
            return size
        size = highest_at_most(words, summary, size - 1)
    return -1


@inner_kernel
def _largest_of_triple(
    words: Bits, summary: Bits, left: Int64, room: Scalar, smallest: Scalar, largest: Scalar
) -> Scalar:
    """Return the largest of three sizes that fill `room` exactly; -1 if none was found."""
    size = highest_at_most(words, summary, min(largest, room - 2 * smallest))
    for _ in range(_TRIPLES_TRIED):
        if size < 0 or 3 * size < room:
            return -1
        left[size] -= 1
        second = _larger_of_pair(words, summary, left, room - size, smallest)
        left[size] += 1
        if second >= 0:
            third = room - size - second
            if left[size] >= 1 + (1 if second == size else 0) + (1 if third == size else 0):
                return size
        size = highest_at_most(words, summary, size - 1)
    return -1


@kernel
def exact_fill(histogram: Int64, capacity: Scalar, max_per_bin: Scalar) -> Patterns:
    """Fill bins exactly where it can be done; each pattern is used until one of its sizes runs out."""
    left = histogram.copy()
    words, summary = empty_set(capacity)
    num_items = 0
    num_different = 0
    for size in range(1, capacity + 1):
        if left[size] > 0:
            num_items += int(left[size])
            num_different += 1
            add(words, summary, size)
    # Each pattern at least halves what is left of one of its sizes. Pages that are never written cost nothing.
    most_patterns = min(num_items, 64 * num_different)
    offsets = np.empty(most_patterns + 1, np.int64)
    counts = np.empty(most_patterns, np.int64)
    sizes = np.empty(num_items, np.int32)
    offsets[0] = 0
    num_patterns = 0
    position: Scalar = np.int64(0)
    while num_items > 0:
        start = position
        position = _fill_one(left, words, summary, capacity, max_per_bin, sizes, start)
        # The same bin again, as often as its scarcest size allows.
        times = num_items
        first = start
        for k in range(start, position):
            left[sizes[k]] += 1
            if k + 1 == position or sizes[k + 1] != sizes[first]:
                times = min(times, left[sizes[first]] // (k + 1 - first))
                first = k + 1
        for k in range(start, position):
            used = np.int64(sizes[k])
            left[used] -= times
            if left[used] > 0:
                add(words, summary, used)
            else:
                discard(words, summary, used)
        num_items -= times * (position - start)
        counts[num_patterns] = times
        num_patterns += 1
        offsets[num_patterns] = position
    return offsets[: num_patterns + 1].copy(), sizes[:position].copy(), counts[:num_patterns].copy()


@inner_kernel
def _fill_one(
    left: Int64, words: Bits, summary: Bits, capacity: Scalar, max_per_bin: Scalar, sizes: Int32, start: Scalar
) -> Scalar:
    """Fill one bin into sizes[start:], in falling order, taking what it uses out of `left`; return where it ends."""
    position = start
    room = capacity
    smallest = lowest_at_least(words, summary, np.int64(1))
    size = highest_at_most(words, summary, capacity)
    while True:
        place = position
        while place > start and sizes[place - 1] < size:
            sizes[place] = sizes[place - 1]
            place -= 1
        sizes[place] = size
        position += 1
        room -= size
        left[size] -= 1
        if left[size] == 0:
            discard(words, summary, size)
            if size == smallest:
                smallest = lowest_at_least(words, summary, size)
        allowed = max_per_bin - (position - start)
        if room == 0 or allowed == 0:
            return position
        size = highest_at_most(words, summary, room)
        if size < 0:
            return position
        if size < room and allowed >= 2:
            closing = -1
            if 2 * size >= room:
                closing = _larger_of_pair(words, summary, left, room, smallest)
            if closing < 0 and 3 * size >= room and allowed >= 3:
                closing = _largest_of_triple(words, summary, left, room, smallest, size)
            if closing > 0:
                size = closing
