"""Packing in order with look-ahead: bins of neighbours, closed exactly by something that waits nearby.

The oldest waiting lot anchors a bin, the next ones follow as long as they fit, and then the end is mended: up to three
of the last are put back, and one, two or three waiting lots are sought, the oldest first, that leave no room at all.
Because the oldest always goes first, hard sizes cannot pile up: bins stay a fair sample of what comes by.

A lot is a size and how many sequences of it there are: 1 when real sequences are packed, many when a histogram is.
Lots and sizes are unsigned, like every index in a hot loop here (deal_kernel.py says why).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from megatron_packed_sft.packing.bitset_kernel import Bits, Scalar, add, discard, empty_set, highest_at_most
from megatron_packed_sft.packing.deal_kernel import Uint32
from megatron_packed_sft.packing.histogram_kernel import Int64

NONE = np.uint32(0xFFFFFFFF)

# Columns of `Waiting.links`.
_NEXT = 0
_PREVIOUS = 1
_SAME = 2

# How many lots may be put back from the end of a bin, and how many openings are tried for three closing lots.
_MOST_PUT_BACK = 3
_TRIPLES_TRIED = 8


class Waiting(NamedTuple):
    """The lots that wait: a list in order of age, and per size a chain that starts with the oldest.

    links[lot] = (next, previous, next of the same size); row num_lots is the list's two ends.
    """

    sizes: Uint32
    links: Uint32
    oldest: Uint32  # of each size, or NONE
    youngest: Uint32
    words: Bits  # sizes that wait; some may have gone
    summary: Bits


@njit(cache=True, nogil=True)
def _load(lot: Scalar, waiting: Waiting) -> None:
    """Let a new lot wait behind all others."""
    links = waiting.links
    size = waiting.sizes[lot]
    end = np.uint32(waiting.sizes.size)
    last = links[end, _PREVIOUS]
    links[last, _NEXT] = lot
    links[lot, _PREVIOUS] = last
    links[lot, _NEXT] = end
    links[end, _PREVIOUS] = lot
    links[lot, _SAME] = NONE
    if waiting.oldest[size] == NONE:
        waiting.oldest[size] = lot
        add(waiting.words, waiting.summary, np.int64(size))
    else:
        links[waiting.youngest[size], _SAME] = lot
    waiting.youngest[size] = lot


@njit(cache=True, nogil=True)
def _take(lot: Scalar, waiting: Waiting) -> None:
    """Remove the oldest waiting lot of its size from the lists."""
    links = waiting.links
    after = links[lot, _NEXT]
    before = links[lot, _PREVIOUS]
    links[before, _NEXT] = after
    links[after, _PREVIOUS] = before
    waiting.oldest[waiting.sizes[lot]] = links[lot, _SAME]


@njit(cache=True, nogil=True)
def _put_back(lot: Scalar, waiting: Waiting) -> None:
    """Undo `_take`. Lots must come back in the reverse order of their going."""
    links = waiting.links
    links[links[lot, _NEXT], _PREVIOUS] = lot
    links[links[lot, _PREVIOUS], _NEXT] = lot
    waiting.oldest[waiting.sizes[lot]] = lot


@njit(cache=True, nogil=True)
def _find_pair(room: Scalar, tries: Scalar, waiting: Waiting) -> Scalar:
    """Return a waiting lot, the oldest first, that fills `room` together with another one; NONE if there is none."""
    end = np.uint32(waiting.sizes.size)
    lot = waiting.links[end, _NEXT]
    for _ in range(tries):
        if lot == end:
            break
        size = np.int64(waiting.sizes[lot])
        other = room - size
        if other > 0:
            partner = waiting.oldest[np.uint32(other)]
            if partner != NONE and (other != size or waiting.links[partner, _SAME] != NONE):
                return lot
        lot = waiting.links[lot, _NEXT]
    return NONE


@njit(cache=True, nogil=True)
def _take_pair(first: Scalar, room: Scalar, taken: Uint32, position: Scalar, waiting: Waiting) -> Scalar:
    """Take the pair that `_find_pair` found; return where the next lot goes."""
    _take(first, waiting)
    taken[position] = first
    second = waiting.oldest[np.uint32(room - waiting.sizes[first])]
    _take(second, waiting)
    taken[position + 1] = second
    return position + 2


@njit(cache=True, nogil=True)
def _take_closing(
    room: Scalar, most: Scalar, tries: Scalar, taken: Uint32, position: Scalar, waiting: Waiting
) -> Scalar:
    """Take one, two or three waiting lots that fill `room` exactly; return where the next goes, or `position`."""
    oldest = waiting.oldest
    if most >= 1 and room < oldest.size and oldest[np.uint32(room)] != NONE:
        taken[position] = oldest[np.uint32(room)]
        _take(taken[position], waiting)
        return position + 1
    if most >= 2:
        first = _find_pair(room, tries, waiting)
        if first != NONE:
            return _take_pair(first, room, taken, position, waiting)
    if most >= 3:
        end = np.uint32(waiting.sizes.size)
        opening = waiting.links[end, _NEXT]
        for _ in range(_TRIPLES_TRIED):
            if opening == end:
                break
            size = np.int64(waiting.sizes[opening])
            if size < room and oldest[np.uint32(size)] == opening:
                _take(opening, waiting)
                first = _find_pair(room - size, tries, waiting)
                if first != NONE:
                    taken[position] = opening
                    return _take_pair(first, room - size, taken, position + 1, waiting)
                _put_back(opening, waiting)
            opening = waiting.links[opening, _NEXT]
    return position


@njit(cache=True, nogil=True)
def _mend_end(
    taken: Uint32, num_taken: Scalar, room: Scalar, max_per_bin: Scalar, tries: Scalar, waiting: Waiting
) -> Scalar:
    """Make a bin exactly full by other lots at its end; return its number of lots, or -1 with nothing changed."""
    num_back = 0
    while True:
        kept = num_taken - num_back
        # One lot may be added; two may replace one; three may replace two or three.
        most = min(max_per_bin - kept, num_back + 1)
        closed = _take_closing(room, most, tries, taken, kept, waiting)
        if closed > kept:
            return closed
        if kept == 1 or num_back == _MOST_PUT_BACK:
            break
        num_back += 1
        lot = taken[num_taken - num_back]
        _put_back(lot, waiting)
        room += np.int64(waiting.sizes[lot])
    for k in range(num_taken - num_back, num_taken):
        _take(taken[k], waiting)
    return -1


@njit(cache=True, nogil=True)
def _best_fit(taken: Uint32, num_taken: Scalar, room: Scalar, max_per_bin: Scalar, waiting: Waiting) -> Scalar:
    """Add the largest waiting lot that fits, again and again; return the number of lots."""
    while room > 0 and num_taken < max_per_bin:
        size = highest_at_most(waiting.words, waiting.summary, room)
        # Sizes are put into the set when they arrive, and only here taken out when none waits any more.
        while size > 0 and waiting.oldest[np.uint32(size)] == NONE:
            discard(waiting.words, waiting.summary, size)
            size = highest_at_most(waiting.words, waiting.summary, size)
        if size <= 0:
            break
        taken[num_taken] = waiting.oldest[np.uint32(size)]
        _take(taken[num_taken], waiting)
        num_taken += 1
        room -= size
    return num_taken


@njit(cache=True, nogil=True)
def _use(taken: Uint32, num_taken: Scalar, counts: Int64, waiting: Waiting) -> Scalar:
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
    links = waiting.links
    oldest = waiting.oldest
    for k in range(num_taken - 1, -1, -1):
        _put_back(taken[k], waiting)
    for k in range(num_taken):
        lot = taken[k]
        size = waiting.sizes[lot]
        if counts[lot] > 0:
            add(waiting.words, waiting.summary, np.int64(size))
            continue
        links[links[lot, _PREVIOUS], _NEXT] = links[lot, _NEXT]
        links[links[lot, _NEXT], _PREVIOUS] = links[lot, _PREVIOUS]
        if oldest[size] == lot:
            oldest[size] = links[lot, _SAME]
        else:
            before = oldest[size]
            while links[before, _SAME] != lot:
                before = links[before, _SAME]
            links[before, _SAME] = links[lot, _SAME]
            if waiting.youngest[size] == lot:
                waiting.youngest[size] = before
    return times


@njit(cache=True, nogil=True)
def window_fill(
    sizes: Uint32,
    counts: Int64,
    capacity: Scalar,
    max_per_bin: Scalar,
    window: Scalar,
    tries: Scalar,
    most_misses: Scalar,
    most_waste: Scalar,
    links: Uint32,
    bin_lots: Uint32,
    bin_offsets: Int64,
    bin_times: Int64,
) -> Scalar:
    """Fill bins while at least `window` lots wait; what is left then stays in `counts`. Returns the number of bins.

    Bin b holds the lots bin_lots[bin_offsets[b] : bin_offsets[b + 1]] and stands for bin_times[b] bins. `links` is
    scratch, [num_lots + 1, 3]. After `most_misses` bins that could not be closed exactly, the search is given up and
    the rest is filled by best fit: the work is bounded, and the same on every machine. When the bins together leave
    more room than `most_waste`, -1 is returned: another packing is better already.
    """
    words, summary = empty_set(capacity)
    oldest = np.empty(capacity + 1, np.uint32)
    oldest[:] = NONE
    waiting = Waiting(sizes, links, oldest, np.empty(capacity + 1, np.uint32), words, summary)
    taken = np.empty(capacity + 3, np.uint32)
    end = np.uint32(sizes.size)
    links[end, _NEXT] = end
    links[end, _PREVIOUS] = end
    num_loaded = 0
    num_waiting = 0
    num_bins = 0
    num_misses = 0
    waste = np.int64(0)
    bin_offsets[0] = 0
    while True:
        while num_waiting < window and num_loaded < sizes.size:
            _load(np.uint32(num_loaded), waiting)
            num_loaded += 1
            num_waiting += 1
        if num_waiting < window:
            return num_bins
        room = np.int64(capacity)
        num_taken = 0
        lot = links[end, _NEXT]
        while lot != end and sizes[lot] <= room and num_taken < max_per_bin:
            _take(lot, waiting)
            taken[num_taken] = lot
            num_taken += 1
            room -= np.int64(sizes[lot])
            lot = links[lot, _NEXT]
        if room > 0:
            mended = -1
            if num_misses < most_misses:
                mended = _mend_end(taken, num_taken, room, max_per_bin, tries, waiting)
            if mended > 0:
                num_taken = mended
            else:
                num_misses += 1
                num_taken = _best_fit(taken, num_taken, room, max_per_bin, waiting)
        times = _use(taken, num_taken, counts, waiting)
        start = bin_offsets[num_bins]
        room = np.int64(capacity)
        for k in range(num_taken):
            bin_lots[start + k] = taken[k]
            room -= np.int64(sizes[taken[k]])
            num_waiting -= 1 if counts[taken[k]] == 0 else 0
        waste += room * times
        if waste > most_waste:
            return -1
        bin_times[num_bins] = times
        num_bins += 1
        bin_offsets[num_bins] = start + num_taken
