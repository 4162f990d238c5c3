"""Pack a histogram of sizes: best fit decreasing that places equal sizes all at once, and exact fill.

A result is a list of patterns, each with how many bins are filled like it:

    pattern_offsets  int64 [num_patterns + 1]   pattern p = pattern_sizes[offsets[p] : offsets[p + 1]]
    pattern_sizes    int32 [...]                the sizes in one bin, equal sizes side by side
    pattern_counts   int64 [num_patterns]       bins filled like this

Nothing here depends on the number of sequences, only on the number of different sizes.

Both searches rest on a set of small integers with fast neighbours: one bit per value, and one bit per word of those.

    words    uint64, bit v of the set
    summary  uint64, bit w = "words[w] is not zero"

Packers ask one of two questions thousands of times: the smallest member that is at least x (best fit), and the largest
member that is at most x (the largest sequence that still fits). Each takes two or three words. Words and bits are
unsigned, because numba tests signed indices for being negative at every access.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import inner_kernel, kernel

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Patterns = tuple[Int64, Int32, Int64]
# A whole number: int outside, int64 (or unsigned, where it is an index) in compiled code. Only numba sees which.
Scalar = Any
Bits = npt.NDArray[np.uint64]

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)
_SIX = np.uint64(6)
_LOW_SIX = np.uint64(63)
# Multiplying a power of two by this de Bruijn sequence brings a different 6-bit number to the top for each of the 64.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_NUMBER = np.zeros(64, dtype=np.uint64)
for _bit in range(64):
    _BIT_NUMBER[((0x03F79D71B4CB0A89 << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


def new_set(largest: Scalar) -> tuple[Bits, Bits]:
    """Make an empty set for values 0..largest; inside kernels it is `empty_set`."""
    num_words = (largest >> 6) + 1
    return np.zeros(num_words, np.uint64), np.zeros((num_words >> 6) + 1, np.uint64)


empty_set = inner_kernel(new_set)


@inner_kernel
def add(words: Bits, summary: Bits, value: Scalar) -> None:
    """Put `value` into the set."""
    bit = np.uint64(value)
    word = bit >> _SIX
    words[word] |= _ONE << (bit & _LOW_SIX)
    summary[word >> _SIX] |= _ONE << (word & _LOW_SIX)


@inner_kernel
def discard(words: Bits, summary: Bits, value: Scalar) -> None:
    """Take `value` out of the set."""
    bit = np.uint64(value)
    word = bit >> _SIX
    words[word] &= ~(_ONE << (bit & _LOW_SIX))
    if words[word] == 0:
        summary[word >> _SIX] &= ~(_ONE << (word & _LOW_SIX))


@inner_kernel
def _lowest_bit(word: Scalar) -> Scalar:
    return _BIT_NUMBER[((word & (~word + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@inner_kernel
def _highest_bit(word: Scalar) -> Scalar:
    word |= word >> np.uint64(1)
    word |= word >> np.uint64(2)
    word |= word >> np.uint64(4)
    word |= word >> np.uint64(8)
    word |= word >> np.uint64(16)
    word |= word >> np.uint64(32)
    return _BIT_NUMBER[((word ^ (word >> np.uint64(1))) * _DE_BRUIJN) >> np.uint64(58)]


@inner_kernel
def lowest_at_least(words: Bits, summary: Bits, start: Scalar) -> Scalar:
    """Return the smallest member >= start, or -1. `start` is at most the set's largest possible value."""
    bit = np.uint64(start)
    word = bit >> _SIX
    bits = words[word] & (_ALL << (bit & _LOW_SIX))
    if bits != 0:
        return np.int64((word << _SIX) + _lowest_bit(bits))
    word += _ONE
    group = word >> _SIX
    num_groups = np.uint64(summary.size)
    if group >= num_groups:
        return np.int64(-1)
    bits = summary[group] & (_ALL << (word & _LOW_SIX))
    while bits == 0:
        group += _ONE
        if group >= num_groups:
            return np.int64(-1)
        bits = summary[group]
    word = (group << _SIX) + _lowest_bit(bits)
    return np.int64((word << _SIX) + _lowest_bit(words[word]))


@inner_kernel
def highest_at_most(words: Bits, summary: Bits, start: Scalar) -> Scalar:
    """Return the largest member <= start, or -1. A negative `start` is allowed."""
    if start < 0:
        return np.int64(-1)
    bit = np.uint64(start)
    word = bit >> _SIX
    bits = words[word] & (_ALL >> (_LOW_SIX - (bit & _LOW_SIX)))
    if bits != 0:
        return np.int64((word << _SIX) + _highest_bit(bits))
    if word == 0:
        return np.int64(-1)
    word -= _ONE
    group = word >> _SIX
    bits = summary[group] & (_ALL >> (_LOW_SIX - (word & _LOW_SIX)))
    while bits == 0:
        if group == 0:
            return np.int64(-1)
        group -= _ONE
        bits = summary[group]
    word = (group << _SIX) + _highest_bit(bits)
    return np.int64((word << _SIX) + _highest_bit(words[word]))


# Columns of the table of groups in `best_fit_decreasing`.
_PARENT = 0  # the group this one grew from, -1 = an empty bin
_SIZE = 1  # ... by adding this size
_REPEAT = 2  # ... so many times to each bin
_ITEMS = 3  # sequences in each of its bins
_BINS = 4  # bins filled alike
_BELOW = 5  # the next group on its stack
_NUM_COLUMNS = 6

# How many candidates `exact_fill` tries for the first of two, and of three, closing sizes. With more of them no
# distribution that was measured (docs/packing.md) got fuller bins, and the search got slower.
_PAIRS_TRIED = 64
_TRIPLES_TRIED = 16


def best_fit_decreasing(histogram: Int64, capacity: int, max_per_bin: int) -> Patterns:
    """Pack as best fit decreasing does sequence by sequence, but with whole groups of equal bins at once.

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
    """Fill bins exactly where possible; each pattern is used until one of its sizes runs out.

    The largest size left anchors a bin. Best fit wastes the last few tokens of it, because it takes the largest size
    that fits, and then nothing fits any more. Here, as soon as two or three of the sizes left fill the room exactly,
    they are taken.
    """
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
