"""Fill bins after the columns of the linear program: real sizes out of their buckets, exactly full where possible.

Inside a bucket the size that lags behind most (the largest share still to be packed) goes first, so that the buckets
keep their shape while they are used up. The last two sizes of a bin are chosen together, to leave no room.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64, Patterns
from megatron_packed_sft.packing.search.linear_program_kernel import RESOLUTION
from megatron_packed_sft.support.compiled import inner_kernel, kernel

# The columns are taken in turns, an eighth of each at a time, for the same reason.
_ROUNDS = 8


@inner_kernel
def _share_left(left: Int64, histogram: Int64, size: Scalar) -> Scalar:
    return int((left[size] << 16) // histogram[size])


@inner_kernel
def _lagging_size(left: Int64, histogram: Int64, low: Scalar, high: Scalar) -> Scalar:
    """Return the size in low..high of which the largest share is left; -1 if all are used up."""
    best = -1
    best_share = 0
    for size in range(low, high + 1):
        if left[size] > 0:
            share = _share_left(left, histogram, size)
            if share > best_share:
                best_share = share
                best = size
    return best


@inner_kernel
def _closing_pair(
    left: Int64,
    histogram: Int64,
    room: Scalar,
    low: Scalar,
    high: Scalar,
    other_low: Scalar,
    other_high: Scalar,
    must_be_exact: Scalar,
) -> tuple[Scalar, Scalar]:
    """Return a size of low..high and one of other_low..other_high with the largest sum that fits into `room`.

    Of equal sums, the one whose sizes lag behind most. With `must_be_exact` a partner outside its bucket that fills
    the room is preferred to one inside that does not. (-1, -1) when nothing fits.
    """
    best_sum = -1
    best_share = 0
    first = -1
    second = -1
    for size in range(low, high + 1):
        if left[size] == 0:
            continue
        other = min(room - size, other_high)
        while other >= other_low and size + other >= best_sum and left[other] <= (1 if other == size else 0):
            other -= 1
        if other < other_low or size + other < best_sum:
            continue
        share = min(_share_left(left, histogram, size), _share_left(left, histogram, other))
        if size + other > best_sum or share > best_share:
            best_sum = size + other
            best_share = share
            first = size
            second = other
    if must_be_exact and best_sum < room:
        nearest = room
        for size in range(low, high + 1):
            other = room - size
            if left[size] == 0 or other < 1 or other >= left.size or left[other] <= (1 if other == size else 0):
                continue
            distance = max(other_low - other, other - other_high)
            if distance < nearest:
                nearest = distance
                first = size
                second = other
    return first, second


@inner_kernel
def _choose_sizes(
    left: Int64,
    histogram: Int64,
    capacity: Scalar,
    low: Int64,
    high: Int64,
    column: Int32,
    length: Scalar,
    is_tight: Scalar,
    chosen: Int64,
) -> Scalar:
    """Choose a size for each bucket of the column into chosen[:length]; False when there is none that fits.

    `left` is the same afterwards as before.
    """
    room = capacity
    num_held = 0
    found = True
    for k in range(length - 2):
        size = _lagging_size(left, histogram, low[column[k]], high[column[k]])
        if size < 0:
            found = False
            break
        chosen[k] = size
        left[size] -= 1
        num_held += 1
        room -= size
    if found and length == 1:
        size = high[column[0]]
        while size >= low[column[0]] and left[size] == 0:
            size -= 1
        found = size >= low[column[0]]
        chosen[0] = size
    elif found:
        one = column[length - 2]
        two = column[length - 1]
        first, second = _closing_pair(left, histogram, room, low[one], high[one], low[two], high[two], is_tight)
        found = first > 0
        chosen[length - 2] = first
        chosen[length - 1] = second
    for k in range(num_held):
        left[chosen[k]] += 1
    return found


@kernel
def guided_fill(
    histogram: Int64,
    capacity: Scalar,
    low: Int64,
    high: Int64,
    widths: Int64,
    columns: Int32,
    lengths: Int32,
    bins: Int64,
    work_limit: Scalar,
) -> tuple[Patterns, Int64]:
    """Fill bins[c] / 256 bins after each column c. Returns patterns, and the histogram of what they do not hold.

    At most `work_limit` sizes are looked at; what is left then is left to others.
    """
    left = histogram.copy()
    num_items = 0
    num_different = 0
    for size in range(1, capacity + 1):
        num_items += int(histogram[size])
        num_different += 1 if histogram[size] > 0 else 0
    # A pattern takes an eighth of one of its sizes (at least one sequence), or all that its column still wants.
    most_patterns = min(num_items, 2 * _ROUNDS * num_different + _ROUNDS * lengths.size)
    offsets = np.empty(most_patterns + 1, np.int64)
    counts = np.empty(most_patterns, np.int64)
    sizes = np.empty(num_items, np.int32)
    chosen = np.empty(columns.shape[1], np.int64)
    done = np.zeros(lengths.size, np.int64)
    offsets[0] = 0
    num_patterns = 0
    position = 0
    work = 0
    for turn in range(1, _ROUNDS + 1):
        for c in range(lengths.size):
            length = lengths[c]
            total_width = 0
            scanned = 1
            for k in range(length):
                total_width += widths[columns[c, k]]
                scanned += high[columns[c, k]] - low[columns[c, k]] + 1
            # A column that leaves no room to speak of is one whose bins must be full.
            is_tight = RESOLUTION - total_width <= length
            while done[c] < (bins[c] * turn // _ROUNDS + 128) >> 8:
                if work > work_limit or num_patterns == most_patterns:
                    break
                work += scanned
                if not _choose_sizes(left, histogram, capacity, low, high, columns[c], length, is_tight, chosen):
                    break
                times = ((bins[c] * turn // _ROUNDS + 128) >> 8) - done[c]
                for k in range(length):
                    size = chosen[k]
                    repeat = 0
                    for other in range(length):
                        repeat += 1 if chosen[other] == size else 0
                    portion = max(np.int64(1), histogram[size] // (_ROUNDS * repeat))
                    times = min(times, min(portion, left[size] // repeat))
                for k in range(length):
                    left[chosen[k]] -= times
                    sizes[position + k] = chosen[k]
                position += length
                done[c] += times
                counts[num_patterns] = times
                num_patterns += 1
                offsets[num_patterns] = position
    patterns = (offsets[: num_patterns + 1].copy(), sizes[:position].copy(), counts[:num_patterns].copy())
    return patterns, left
