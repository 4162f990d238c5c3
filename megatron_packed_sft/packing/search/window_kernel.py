"""Packing in order with look-ahead: bins of neighbours, closed exactly by something that waits nearby.

The oldest waiting lot anchors a bin, the next ones follow as long as they fit, and then the end is mended: up to three
of the last are put back, and one, two or three waiting lots are sought, the oldest first, that leave no room at all.
Because the oldest always goes first, hard sizes cannot pile up: bins stay a fair sample of what comes by.

A lot is a size and how many sequences of it there are: 1 when real sequences are packed, many when a histogram is.
How lots wait is in waiting_kernel.py.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Bits, Scalar, add, discard, empty_set, highest_at_most
from megatron_packed_sft.packing.search.deal_kernel import Uint32
from megatron_packed_sft.packing.search.histogram_kernel import Int64
from megatron_packed_sft.packing.search.waiting_kernel import (
    NEXT,
    NONE,
    OLDEST,
    PREVIOUS,
    SAME,
    SIZE,
    YOUNGEST,
    load,
    put_back,
    take,
)
from megatron_packed_sft.support.compiled import kernel

# How many lots may be put back from the end of a bin, and how many openings are tried for three closing lots.
_MOST_PUT_BACK = 3
_TRIPLES_TRIED = 8


@kernel
def _find_pair(room: Scalar, tries: Scalar, lots: Uint32, by_size: Uint32) -> Scalar:
    """Return a waiting lot, the oldest first, that fills `room` together with another one; NONE if there is none."""
    end = np.uint32(lots.shape[0] - 1)
    lot = lots[end, NEXT]
    for _ in range(tries):
        if lot == end:
            break
        size = np.int64(lots[lot, SIZE])
        other = room - size
        if other > 0:
            partner = by_size[np.uint32(other), OLDEST]
            if partner != NONE and (other != size or lots[partner, SAME] != NONE):
                return lot
        lot = lots[lot, NEXT]
    return NONE


@kernel
def _take_pair(first: Scalar, room: Scalar, taken: Uint32, position: Scalar, lots: Uint32, by_size: Uint32) -> Scalar:
    """Take the pair that `_find_pair` found; return where the next lot goes."""
    take(first, lots, by_size)
    taken[position] = first
    second = by_size[np.uint32(room - lots[first, SIZE]), OLDEST]
    take(second, lots, by_size)
    taken[position + 1] = second
    return position + 2


@kernel
def _take_closing(
    room: Scalar, most: Scalar, tries: Scalar, taken: Uint32, position: Scalar, lots: Uint32, by_size: Uint32
) -> Scalar:
    """Take one, two or three waiting lots that fill `room` exactly; return where the next goes, or `position`."""
    if most >= 1 and room < by_size.shape[0]:
        single = by_size[np.uint32(room), OLDEST]
        if single != NONE:
            taken[position] = single
            take(single, lots, by_size)
            return position + 1
    if most >= 2:
        first = _find_pair(room, tries, lots, by_size)
        if first != NONE:
            return _take_pair(first, room, taken, position, lots, by_size)
    if most >= 3:
        end = np.uint32(lots.shape[0] - 1)
        opening = lots[end, NEXT]
        for _ in range(_TRIPLES_TRIED):
            if opening == end:
                break
            size = lots[opening, SIZE]
            if size < room and by_size[size, OLDEST] == opening:
                take(opening, lots, by_size)
                first = _find_pair(room - np.int64(size), tries, lots, by_size)
                if first != NONE:
                    taken[position] = opening
                    return _take_pair(first, room - np.int64(size), taken, position + 1, lots, by_size)
                put_back(opening, lots, by_size)
            opening = lots[opening, NEXT]
    return position


@kernel
def _mend_end(
    taken: Uint32,
    num_taken: Scalar,
    room: Scalar,
    max_per_bin: Scalar,
    tries: Scalar,
    lots: Uint32,
    by_size: Uint32,
) -> Scalar:
    """Make a bin exactly full by other lots at its end; return its number of lots, or -1 with nothing changed."""
    num_back = 0
    while True:
        kept = num_taken - num_back
        # One lot may be added; two may replace one; three may replace two or three.
        most = min(max_per_bin - kept, num_back + 1)
        closed = _take_closing(room, most, tries, taken, kept, lots, by_size)
        if closed > kept:
            return closed
        if kept == 1 or num_back == _MOST_PUT_BACK:
            break
        num_back += 1
        lot = taken[num_taken - num_back]
        put_back(lot, lots, by_size)
        room += np.int64(lots[lot, SIZE])
    for k in range(num_taken - num_back, num_taken):
        take(taken[k], lots, by_size)
    return -1


@kernel
def _best_fit(
    taken: Uint32,
    num_taken: Scalar,
    room: Scalar,
    max_per_bin: Scalar,
    lots: Uint32,
    by_size: Uint32,
    words: Bits,
    summary: Bits,
) -> Scalar:
    """Add the largest waiting lot that fits, again and again; return the number of lots."""
    while room > 0 and num_taken < max_per_bin:
        size = highest_at_most(words, summary, room)
        # Sizes are put into the set when they arrive, and only here taken out when none waits any more.
        while size > 0 and by_size[np.uint32(size), OLDEST] == NONE:
            discard(words, summary, size)
            size = highest_at_most(words, summary, size)
        if size <= 0:
            break
        taken[num_taken] = by_size[np.uint32(size), OLDEST]
        take(taken[num_taken], lots, by_size)
        num_taken += 1
        room -= size
    return num_taken


@kernel
def _use(
    taken: Uint32, num_taken: Scalar, counts: Int64, lots: Uint32, by_size: Uint32, words: Bits, summary: Bits
) -> Scalar:
    """Use the bin as often as its scarcest lot allows, and let what is left of the others wait again in its place.

    Returns how often it was used.
    """
    times = counts[taken[0]]
    for k in range(1, num_taken):
        times = min(times, counts[taken[k]])
    num_left = 0
    for k in range(num_taken):
        counts[taken[k]] -= times
        num_left += 1 if counts[taken[k]] > 0 else 0
    if num_left == 0:
        return times
    for k in range(num_taken - 1, -1, -1):
        put_back(taken[k], lots, by_size)
    for k in range(num_taken):
        lot = taken[k]
        size = lots[lot, SIZE]
        if counts[lot] > 0:
            add(words, summary, np.int64(size))
            continue
        lots[lots[lot, PREVIOUS], NEXT] = lots[lot, NEXT]
        lots[lots[lot, NEXT], PREVIOUS] = lots[lot, PREVIOUS]
        if by_size[size, OLDEST] == lot:
            by_size[size, OLDEST] = lots[lot, SAME]
        else:
            before = by_size[size, OLDEST]
            while lots[before, SAME] != lot:
                before = lots[before, SAME]
            lots[before, SAME] = lots[lot, SAME]
            if by_size[size, YOUNGEST] == lot:
                by_size[size, YOUNGEST] = before
    return times


@kernel
def window_fill(
    sizes: Uint32,
    counts: Int64,
    capacity: Scalar,
    max_per_bin: Scalar,
    window: Scalar,
    tries: Scalar,
    most_misses: Scalar,
    most_waste: Scalar,
    lots: Uint32,
    bin_lots: Uint32,
    bin_offsets: Int64,
    bin_times: Int64,
) -> Scalar:
    """Fill bins while at least `window` lots wait; what is left then stays in `counts`. Returns the number of bins.

    Bin b holds the lots bin_lots[bin_offsets[b] : bin_offsets[b + 1]] and stands for bin_times[b] bins. `lots` is
    scratch. After `most_misses` bins that could not be closed exactly, the search is given up and the rest is filled
    by best fit: the work is bounded, and the same on every machine. When the bins together leave more room than
    `most_waste`, -1 is returned: another packing is better already.
    """
    words, summary = empty_set(capacity)
    by_size = np.empty((capacity + 1, 2), np.uint32)
    by_size[:] = NONE
    taken = np.empty(capacity + 3, np.uint32)
    end = np.uint32(sizes.size)
    lots[end, NEXT] = end
    lots[end, PREVIOUS] = end
    num_loaded = 0
    num_waiting = 0
    num_bins = 0
    num_misses = 0
    waste = np.int64(0)
    bin_offsets[0] = 0
    while True:
        while num_waiting < window and num_loaded < sizes.size:
            load(np.uint32(num_loaded), sizes[num_loaded], lots, by_size, words, summary)
            num_loaded += 1
            num_waiting += 1
        if num_waiting < window:
            return num_bins
        room = np.int64(capacity)
        num_taken = 0
        lot = lots[end, NEXT]
        while num_taken < max_per_bin:
            if lot == end and num_loaded < sizes.size:
                # A bin of very many short ones: more than wait at a time.
                load(np.uint32(num_loaded), sizes[num_loaded], lots, by_size, words, summary)
                num_loaded += 1
                num_waiting += 1
                lot = lots[end, NEXT]
            if lot == end or lots[lot, SIZE] > room:
                break
            take(lot, lots, by_size)
            taken[num_taken] = lot
            num_taken += 1
            room -= np.int64(lots[lot, SIZE])
            lot = lots[lot, NEXT]
        if lot == end and room > 0 and num_taken < max_per_bin:
            return num_bins  # nothing is left to fill this bin with: its lots belong to the rest
        if room > 0:
            mended = -1
            if num_misses < most_misses:
                mended = _mend_end(taken, num_taken, room, max_per_bin, tries, lots, by_size)
            if mended > 0:
                num_taken = mended
            else:
                num_misses += 1
                num_taken = _best_fit(taken, num_taken, room, max_per_bin, lots, by_size, words, summary)
        times = _use(taken, num_taken, counts, lots, by_size, words, summary)
        start = bin_offsets[num_bins]
        room = np.int64(capacity)
        for k in range(num_taken):
            bin_lots[start + k] = taken[k]
            room -= np.int64(lots[taken[k], SIZE])
            num_waiting -= 1 if counts[taken[k]] == 0 else 0
        waste += room * times
        if waste > most_waste:
            return -1
        bin_times[num_bins] = times
        num_bins += 1
        bin_offsets[num_bins] = start + num_taken
