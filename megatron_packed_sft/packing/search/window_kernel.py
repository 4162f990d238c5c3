"""Pack in order with look-ahead: bins of neighbours, closed exactly by something that waits nearby.

The oldest waiting lot anchors a bin, the next ones follow as long as they fit, then the end is improved: up to three of
the last lots are put back, and one, two or three waiting lots, the oldest first, are tried that leave no room at all.
Because the oldest always goes first, hard sizes cannot pile up, and bins stay a fair sample of the data.

A lot is a size and how many sequences of it there are: 1 when real sequences are packed, many when a histogram is.
Waiting lots are in a list in order of age, and per size in a chain that starts with the oldest:

    lots     uint32 [num_lots + 1, 4]   next, previous, next of the same size, size; the last row is the list's two ends
    by_size  uint32 [capacity + 1, 2]   the oldest and the youngest waiting lot of each size

Everything is unsigned (sequence_kernel.py says why) and passed as plain arrays: a tuple of arrays costs numba a
reference count per access, which made this about twice as slow.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.histogram_kernel import (
    Bits,
    Int64,
    Scalar,
    add,
    discard,
    empty_set,
    highest_at_most,
)
from megatron_packed_sft.packing.search.sequence_kernel import Uint32
from megatron_packed_sft.support.compiled import inner_kernel, kernel

_NONE = np.uint32(0xFFFFFFFF)

# Columns of `lots`.
_NEXT = 0
_PREVIOUS = 1
_SAME = 2
_SIZE = 3
# Columns of `by_size`.
_OLDEST = 0
_YOUNGEST = 1

# How many lots may be put back from the end of a bin, and how many openings are tried for three closing lots.
_MOST_PUT_BACK = 3
_TRIPLES_TRIED = 8


@inner_kernel
def _load(lot: Scalar, size: Scalar, lots: Uint32, by_size: Uint32, words: Bits, summary: Bits) -> None:
    """Let a new lot wait behind all others."""
    end = np.uint32(lots.shape[0] - 1)
    last = lots[end, _PREVIOUS]
    lots[last, _NEXT] = lot
    lots[end, _PREVIOUS] = lot
    lots[lot, _PREVIOUS] = last
    lots[lot, _NEXT] = end
    lots[lot, _SAME] = _NONE
    lots[lot, _SIZE] = size
    if by_size[size, _OLDEST] == _NONE:
        by_size[size, _OLDEST] = lot
        add(words, summary, np.int64(size))
    else:
        lots[by_size[size, _YOUNGEST], _SAME] = lot
    by_size[size, _YOUNGEST] = lot


@inner_kernel
def _take(lot: Scalar, lots: Uint32, by_size: Uint32) -> None:
    """Remove the oldest waiting lot of its size from the lists."""
    after = lots[lot, _NEXT]
    before = lots[lot, _PREVIOUS]
    lots[before, _NEXT] = after
    lots[after, _PREVIOUS] = before
    by_size[lots[lot, _SIZE], _OLDEST] = lots[lot, _SAME]


@inner_kernel
def _put_back(lot: Scalar, lots: Uint32, by_size: Uint32) -> None:
    """Undo `_take`. Lots must come back in the reverse order of their going."""
    lots[lots[lot, _NEXT], _PREVIOUS] = lot
    lots[lots[lot, _PREVIOUS], _NEXT] = lot
    by_size[lots[lot, _SIZE], _OLDEST] = lot


@inner_kernel
def _find_pair(room: Scalar, tries: Scalar, lots: Uint32, by_size: Uint32) -> Scalar:
    """Return a waiting lot, the oldest first, that fills `room` together with another one; _NONE if there is none."""
    end = np.uint32(lots.shape[0] - 1)
    lot = lots[end, _NEXT]
    for _ in range(tries):
        if lot == end:
            break
        size = np.int64(lots[lot, _SIZE])
        other = room - size
        if other > 0:
            partner = by_size[np.uint32(other), _OLDEST]
            if partner != _NONE and (other != size or lots[partner, _SAME] != _NONE):
                return lot
        lot = lots[lot, _NEXT]
    return _NONE


@inner_kernel
def _take_pair(first: Scalar, room: Scalar, taken: Uint32, position: Scalar, lots: Uint32, by_size: Uint32) -> Scalar:
    """Take the pair that `_find_pair` found; return where the next lot goes."""
    _take(first, lots, by_size)
    taken[position] = first
    second = by_size[np.uint32(room - lots[first, _SIZE]), _OLDEST]
    _take(second, lots, by_size)
    taken[position + 1] = second
    return position + 2


@inner_kernel
def _take_closing(
    room: Scalar, most: Scalar, tries: Scalar, taken: Uint32, position: Scalar, lots: Uint32, by_size: Uint32
) -> Scalar:
    """Take one, two or three waiting lots that fill `room` exactly; return where the next goes, or `position`."""
    if most >= 1 and room < by_size.shape[0]:
        single = by_size[np.uint32(room), _OLDEST]
        if single != _NONE:
            taken[position] = single
            _take(single, lots, by_size)
            return position + 1
    if most >= 2:
        first = _find_pair(room, tries, lots, by_size)
        if first != _NONE:
            return _take_pair(first, room, taken, position, lots, by_size)
    if most >= 3:
        end = np.uint32(lots.shape[0] - 1)
        opening = lots[end, _NEXT]
        for _ in range(_TRIPLES_TRIED):
            if opening == end:
                break
            size = lots[opening, _SIZE]
            if size < room and by_size[size, _OLDEST] == opening:
                _take(opening, lots, by_size)
                first = _find_pair(room - np.int64(size), tries, lots, by_size)
                if first != _NONE:
                    taken[position] = opening
                    return _take_pair(first, room - np.int64(size), taken, position + 1, lots, by_size)
                _put_back(opening, lots, by_size)
            opening = lots[opening, _NEXT]
    return position


@inner_kernel
def _repair_end(
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
        _put_back(lot, lots, by_size)
        room += np.int64(lots[lot, _SIZE])
    for k in range(num_taken - num_back, num_taken):
        _take(taken[k], lots, by_size)
    return -1


@inner_kernel
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
    """Add the largest waiting lot that fits, until none does; return the number of lots."""
    while room > 0 and num_taken < max_per_bin:
        size = highest_at_most(words, summary, room)
        # Sizes are put into the set when they arrive, and only here taken out when none waits any more.
        while size > 0 and by_size[np.uint32(size), _OLDEST] == _NONE:
            discard(words, summary, size)
            size = highest_at_most(words, summary, size)
        if size <= 0:
            break
        taken[num_taken] = by_size[np.uint32(size), _OLDEST]
        _take(taken[num_taken], lots, by_size)
        num_taken += 1
        room -= size
    return num_taken


@inner_kernel
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
        _put_back(taken[k], lots, by_size)
    for k in range(num_taken):
        lot = taken[k]
        size = lots[lot, _SIZE]
        if counts[lot] > 0:
            add(words, summary, np.int64(size))
            continue
        lots[lots[lot, _PREVIOUS], _NEXT] = lots[lot, _NEXT]
        lots[lots[lot, _NEXT], _PREVIOUS] = lots[lot, _PREVIOUS]
        if by_size[size, _OLDEST] == lot:
            by_size[size, _OLDEST] = lots[lot, _SAME]
        else:
            before = by_size[size, _OLDEST]
            while lots[before, _SAME] != lot:
                before = lots[before, _SAME]
            lots[before, _SAME] = lots[lot, _SAME]
            if by_size[size, _YOUNGEST] == lot:
                by_size[size, _YOUNGEST] = before
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
    by_size[:] = _NONE
    taken = np.empty(capacity + 3, np.uint32)
    end = np.uint32(sizes.size)
    lots[end, _NEXT] = end
    lots[end, _PREVIOUS] = end
    num_loaded = 0
    num_waiting = 0
    num_bins = 0
    num_misses = 0
    waste = np.int64(0)
    bin_offsets[0] = 0
    while True:
        while num_waiting < window and num_loaded < sizes.size:
            _load(np.uint32(num_loaded), sizes[num_loaded], lots, by_size, words, summary)
            num_loaded += 1
            num_waiting += 1
        if num_waiting < window:
            return num_bins
        room = np.int64(capacity)
        num_taken = 0
        lot = lots[end, _NEXT]
        while num_taken < max_per_bin:
            if lot == end and num_loaded < sizes.size:
                # A bin of very many short ones: more than wait at a time.
                _load(np.uint32(num_loaded), sizes[num_loaded], lots, by_size, words, summary)
                num_loaded += 1
                num_waiting += 1
                lot = lots[end, _NEXT]
            if lot == end or lots[lot, _SIZE] > room:
                break
            _take(lot, lots, by_size)
            taken[num_taken] = lot
            num_taken += 1
            room -= np.int64(lots[lot, _SIZE])
            lot = lots[lot, _NEXT]
        if lot == end and room > 0 and num_taken < max_per_bin:
            return num_bins  # nothing is left to fill this bin with: its lots belong to the rest
        if room > 0:
            repaired = -1
            if num_misses < most_misses:
                repaired = _repair_end(taken, num_taken, room, max_per_bin, tries, lots, by_size)
            if repaired > 0:
                num_taken = repaired
            else:
                num_misses += 1
                num_taken = _best_fit(taken, num_taken, room, max_per_bin, lots, by_size, words, summary)
        times = _use(taken, num_taken, counts, lots, by_size, words, summary)
        start = bin_offsets[num_bins]
        room = np.int64(capacity)
        for k in range(num_taken):
            bin_lots[start + k] = taken[k]
            room -= np.int64(lots[taken[k], _SIZE])
            num_waiting -= 1 if counts[taken[k]] == 0 else 0
        waste += room * times
        if waste > most_waste:
            return -1
        bin_times[num_bins] = times
        num_bins += 1
        bin_offsets[num_bins] = start + num_taken
