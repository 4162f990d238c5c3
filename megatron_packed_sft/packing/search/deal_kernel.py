"""From "which sizes share a bin" or "which bin is it in" to the bins themselves, in canonical order.

Canonical order: indices ascend inside a bin, and bins are ordered by their smallest index. Sequences of equal size are
interchangeable, so they can be dealt out in such a way that no sorting is needed: walk over the sequences once; each
goes into an open bin that waits for its size, or else opens the next bin. Bins are then numbered in the order of
their first member, and every bin is filled in ascending order. Open bins are few and recent, so they stay in the
processor's cache, and the sequences of a bin lie close together in the data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64
from megatron_packed_sft.support.compiled import inner_kernel, kernel

# Everything that is used as an index here is unsigned: for signed ones numba looks at every access whether the index
# is negative, which doubled the time of these loops.
Uint32 = npt.NDArray[np.uint32]

# Columns of the state kept per size in `deal`.
_WAITING = 0  # the latest open place for this size, 0 = none
_NEXT = 1  # the pattern to open next, in the list of patterns that hold this size
_END = 2
_START = 3
_OPENED = 4  # how often that pattern was opened in this turn
NUM_COLUMNS = 8  # half a cache line

_ZERO = np.uint32(0)
_ONE = np.uint32(1)
# A pattern that stands for many bins is opened more often in its turn than one for few.
TURNS = 64


@kernel
def count_sizes(sizes: Int32, histogram: Int64) -> None:
    """Count each size; all of them are inside the histogram."""
    for i in range(sizes.size):
        histogram[sizes[i]] += 1


@kernel
def check_and_count(
    lengths: Int64, limit: Scalar, checked: Int32, histogram: Int64
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Copy lengths as int32 and count them; one pass, because at 10^7 lengths the passes are what costs.

    Lengths above `limit` are counted together in histogram[limit + 1]. Returns the shortest and the longest length,
    the sum, and the first index with a length that is not in 1..2^31-1 (-1 = none; the rest is then not filled in).
    """
    shortest = np.int64(1) << 40
    longest = np.int64(0)
    total = np.int64(0)
    for i in range(lengths.size):
        length = np.int64(lengths[i])
        if length < 1 or length > 2147483647:
            return shortest, longest, total, i
        checked[i] = length
        histogram[min(length, limit + 1)] += 1
        shortest = min(shortest, length)
        longest = max(longest, length)
        total += length
    return shortest, longest, total, -1


@inner_kernel
def _patterns_by_size(
    pattern_offsets: Int64, pattern_sizes: Uint32, starts: Uint32, state: Uint32, patterns: Uint32
) -> None:
    """List, for each size, the patterns that hold it, and note in `state` where each size's list starts and ends.

    `starts` is scratch, [capacity + 2] zeros.
    """
    num_patterns = pattern_offsets.size - 1
    for pattern in range(num_patterns):
        previous = _ZERO
        for k in range(pattern_offsets[pattern], pattern_offsets[pattern + 1]):
            size = pattern_sizes[k]
            if size != previous:
                starts[size + _ONE] += _ONE
            previous = size
    for size in range(state.shape[0]):
        starts[size + 1] += starts[size]
        state[size, _NEXT] = starts[size]
        state[size, _START] = starts[size]
        state[size, _END] = starts[size + 1]
    for pattern in range(num_patterns):
        previous = _ZERO
        for k in range(pattern_offsets[pattern], pattern_offsets[pattern + 1]):
            size = pattern_sizes[k]
            if size != previous:
                patterns[starts[size]] = pattern
                starts[size] += _ONE
            previous = size


@kernel
def deal(
    sizes: Uint32,
    pattern_offsets: Int64,
    pattern_sizes: Uint32,
    left: Uint32,
    per_turn: Uint32,
    starts: Uint32,
    state: Uint32,
    patterns: Uint32,
    places: Uint32,
    bin_offsets: Int64,
    indices: Uint32,
) -> None:
    """Deal sequences out to patterns, writing bins in canonical order.

    `places` is scratch, [num_sequences + 1, 2]: open places, as (last position of the bin, next open place for the
    same size); place 0 stands for none. While a bin is open, its last position holds where its next member goes.
    Which pattern is opened rotates among those that hold the size, so that all sizes are waited for in proportion.
    `left` and `per_turn` say how many bins a pattern still stands for, and how many of them it opens in its turn; the
    other scratch is `starts` [capacity + 2] and `state` [capacity + 1, NUM_COLUMNS], both zeros, and `patterns`, as
    long as pattern_sizes.
    """
    _patterns_by_size(pattern_offsets, pattern_sizes, starts, state, patterns)
    free = _ZERO
    num_places = _ONE
    position = _ZERO
    num_bins = 0
    bin_offsets[0] = 0
    for i in range(sizes.size):
        size = sizes[i]
        place = state[size, _WAITING]
        if place == _ZERO:
            pattern = _next_pattern(state, size, patterns, left, per_turn)
            first = np.uint32(pattern_offsets[pattern])
            end = np.uint32(pattern_offsets[pattern + _ONE])
            last = np.uint32(position + (end - first) - _ONE)
            indices[last] = position
            k = first
            while k < end:
                wanted = pattern_sizes[k]
                if free != _ZERO:
                    place = free
                    free = places[place, 1]
                else:
                    place = num_places
                    num_places = np.uint32(num_places + _ONE)
                places[place, 0] = last
                places[place, 1] = state[wanted, _WAITING]
                state[wanted, _WAITING] = place
                k = np.uint32(k + _ONE)
            position = np.uint32(last + _ONE)
            num_bins += 1
            bin_offsets[num_bins] = position
            place = state[size, _WAITING]
        last = places[place, 0]
        state[size, _WAITING] = places[place, 1]
        places[place, 1] = free
        free = place
        # When this member is the last one, its index replaces the note of where it goes.
        here = indices[last]
        indices[last] = here + _ONE
        indices[here] = i


@inner_kernel
def _next_pattern(state: Uint32, size: Scalar, patterns: Uint32, left: Uint32, per_turn: Uint32) -> Scalar:
    """Take a bin of a pattern that holds `size`; there is one, because the patterns hold every sequence."""
    chosen = state[size, _NEXT]
    pattern = patterns[chosen]
    while left[pattern] == _ZERO:
        end = np.uint32(state[size, _END] - _ONE)
        state[size, _END] = end
        patterns[chosen] = patterns[end]
        if chosen >= end:
            chosen = state[size, _START]
        pattern = patterns[chosen]
        state[size, _OPENED] = _ZERO
    left[pattern] -= _ONE
    state[size, _OPENED] += _ONE
    if state[size, _OPENED] >= per_turn[pattern]:
        state[size, _OPENED] = _ZERO
        chosen = np.uint32(chosen + _ONE)
    state[size, _NEXT] = chosen if chosen < state[size, _END] else state[size, _START]
    return pattern


@kernel
def group_by_bin(bin_of: Uint32, bin_sizes: Uint32, bin_offsets: Int64, indices: Uint32) -> None:
    """Write bins in canonical order, from the bin number of each sequence and how many sequences each bin has."""
    # Where each bin's next member goes, plus one; 0 = the bin has no member yet.
    following = np.zeros(bin_sizes.size, np.uint32)
    position = _ZERO
    num_bins = 0
    bin_offsets[0] = 0
    for i in range(bin_of.size):
        number = bin_of[i]
        here = following[number]
        if here == _ZERO:
            here = np.uint32(position + _ONE)
            position = np.uint32(position + bin_sizes[number])
            num_bins += 1
            bin_offsets[num_bins] = position
        indices[here - _ONE] = i
        following[number] = here + _ONE
