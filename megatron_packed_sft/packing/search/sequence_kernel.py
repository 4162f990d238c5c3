"""Loops over all sequences: counting, next fit and first fit, cutting, shuffling, and bins in canonical order.

Canonical order: indices ascend inside a bin, and bins are ordered by their smallest index. Sequences of equal size are
interchangeable, so `deal` needs no sorting: it walks over the sequences once, and each goes into an open bin that
waits for its size, or else opens the next bin. Bins are then numbered in the order of their first member, and every
bin is filled in ascending order. Open bins are few and recent, so they stay in the processor's cache, and the
sequences of a bin are close together in the data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64, Scalar
from megatron_packed_sft.support.compiled import inner_kernel, kernel

# Indices of the hot loops are unsigned: numba tests signed ones for being negative at every access, which doubled the
# time of these loops.
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
    """Count each size; all sizes must be inside the histogram."""
    for i in range(sizes.size):
        histogram[sizes[i]] += 1


@kernel
def check_and_count(
    lengths: Int64, limit: Scalar, checked: Int32, histogram: Int64
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Copy lengths as int32 and count them, in a single pass: at 10^7 lengths, the passes are the cost.

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


@kernel
def next_fit(sizes: Int32, capacity: Scalar, max_per_bin: Scalar, bin_of: Int32) -> Scalar:
    """Keep the order: a sequence that does not fit into the current bin opens the next. Returns the number of bins."""
    number = np.int32(0)
    room = np.int64(capacity)
    num_items = 0
    for i in range(sizes.size):
        if sizes[i] > room or num_items == max_per_bin:
            number += np.int32(1)
            room = np.int64(capacity)
            num_items = 0
        room -= sizes[i]
        num_items += 1
        bin_of[i] = number
    return int(number) + 1


@kernel
def first_fit(sizes: Int32, order: Int32, capacity: Scalar, max_per_bin: Scalar, bin_of: Int32) -> Scalar:
    """Put each sequence, taken in `order`, into the earliest bin with room for it. Returns the number of bins.

    A tree over the bins holds the most room in each subtree, so finding the earliest takes log2(bins) steps. It is
    doubled when its leaves run out.
    """
    num_leaves = 1024
    room = np.zeros(2 * num_leaves, np.int64)
    num_items = np.zeros(num_leaves, np.int64)
    num_bins = np.int64(0)
    done = np.int64(0)
    while done < order.size:
        done, num_bins = _first_fit_some(sizes, order, capacity, max_per_bin, bin_of, room, num_items, done, num_bins)
        if done == order.size:
            break
        larger = np.zeros(4 * num_leaves, np.int64)
        more_items = np.zeros(2 * num_leaves, np.int64)
        for leaf in range(num_leaves):
            larger[2 * num_leaves + leaf] = room[num_leaves + leaf]
            more_items[leaf] = num_items[leaf]
        num_leaves *= 2
        for node in range(num_leaves - 1, 0, -1):
            larger[node] = max(larger[2 * node], larger[2 * node + 1])
        room = larger
        num_items = more_items
    return num_bins


@inner_kernel
def _first_fit_some(
    sizes: Int32,
    order: Int32,
    capacity: Scalar,
    max_per_bin: Scalar,
    bin_of: Int32,
    room: Int64,
    num_items: Int64,
    done: Scalar,
    num_bins: Scalar,
) -> tuple[Scalar, Scalar]:
    """Place sequences until all are placed or the tree is full; return how many are placed, and the bins."""
    num_leaves = num_items.size
    while done < order.size:
        i = order[done]
        size = sizes[i]
        node = 1
        if room[1] >= size:
            while node < num_leaves:
                node = 2 * node if room[2 * node] >= size else 2 * node + 1
        else:
            if num_bins == num_leaves:
                break
            node = num_leaves + num_bins
            room[node] = capacity
            num_bins += 1
        number = node - num_leaves
        bin_of[i] = number
        num_items[number] += 1
        room[node] = room[node] - size if num_items[number] < max_per_bin else 0
        node >>= 1
        while node > 0:
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
            node >>= 1
        done += 1
    return done, num_bins


@kernel
def sort_decreasing(sizes: Int32, histogram: Int64, order: Int32) -> None:
    """Write the sequences in falling order of size, equal ones in their own order."""
    start = np.empty(histogram.size, np.int64)
    position = np.int64(0)
    for size in range(histogram.size - 1, -1, -1):
        start[size] = position
        position += histogram[size]
    for i in range(sizes.size):
        order[start[sizes[i]]] = i
        start[sizes[i]] += 1


@inner_kernel
def _mix(value: Scalar) -> Scalar:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@kernel
def shuffle_groups(values: Int32, group_offsets: Int64, seed: Scalar) -> None:
    """Shuffle each group values[offsets[g] : offsets[g + 1]] in place (Fisher-Yates)."""
    state = _mix(seed ^ np.uint64(0x9E3779B97F4A7C15))
    for group in range(group_offsets.size - 1):
        start = group_offsets[group]
        for k in range(group_offsets[group + 1] - start - 1, 0, -1):
            state += np.uint64(0x9E3779B97F4A7C15)
            # The high half times the number of choices: the bias is below 2^-32 of a choice.
            choice = np.int64(((_mix(state) >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
            kept = values[start + k]
            values[start + k] = values[start + choice]
            values[start + choice] = kept


@inner_kernel
def _longest(room: Scalar, is_inputs: Scalar, multiple: Scalar) -> Scalar:
    """Return the most tokens that an item may have to fit into `room`; 0 if there is none."""
    if room < 1:
        return 0
    inputs = room if is_inputs else room - 1
    return inputs // multiple * multiple + 1


@kernel
def cut_and_fill(
    lengths: Int32,
    capacity: Scalar,
    is_inputs: Scalar,
    multiple: Scalar,
    stride: Scalar,
    min_len: Scalar,
    max_per_bin: Scalar,
    window: Scalar,
    sequence: Int32,
    start: Int32,
    length: Int32,
    masked: Int32,
    bin_offsets: Int64,
    window_offsets: Int64,
) -> tuple[Scalar, Scalar, Scalar]:
    """Next fit that cuts a sequence where its bin ends. Returns the chunks, the bins and the tokens of dropped tails.

    A cut leaves at least `min_len` tokens, and two, on both sides; where it cannot, the sequence goes to the next bin.
    """
    least = max(min_len, 2)
    num_chunks = 0
    num_bins = 0  # closed ones
    num_lost = np.int64(0)
    num_windows = 0
    room = np.int64(capacity)
    first = 0  # chunk of the open bin
    bin_offsets[0] = 0
    for i in range(lengths.size):
        if i % window == 0:
            if num_chunks > first:
                num_bins += 1
                bin_offsets[num_bins] = num_chunks
                first = num_chunks
                room = np.int64(capacity)
            window_offsets[num_windows] = num_bins
            num_windows += 1
        position = np.int64(0)
        overlap = np.int64(0)
        while position < lengths[i]:
            left = lengths[i] - position + overlap
            if position > 0 and left < min_len:
                num_lost += left - overlap
                break
            fits = _longest(room, is_inputs, multiple) if num_chunks - first < max_per_bin else np.int64(0)
            taken = left
            if left > fits:
                taken = min(fits, left + stride - least)
                if taken < max(least, stride + 1):
                    if num_chunks > first:
                        num_bins += 1
                        bin_offsets[num_bins] = num_chunks
                        first = num_chunks
                        room = np.int64(capacity)
                        continue
                    taken = fits
            sequence[num_chunks] = i
            start[num_chunks] = position - overlap
            length[num_chunks] = taken
            masked[num_chunks] = overlap
            num_chunks += 1
            inputs = -(-(taken - 1) // multiple) * multiple
            room -= max(inputs, 1) if is_inputs else inputs + 1
            position += taken - overlap
            overlap = np.int64(stride)
    if num_chunks > first:
        num_bins += 1
        bin_offsets[num_bins] = num_chunks
    window_offsets[num_windows] = num_bins
    return num_chunks, num_bins, num_lost
