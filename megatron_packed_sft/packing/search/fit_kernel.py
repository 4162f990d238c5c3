"""What looks at one item after the other: next fit, first fit, and the orders that items are taken in."""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64
from megatron_packed_sft.support.compiled import inner_kernel, kernel


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


@kernel
def sort_by_value(values: Int32, starts: Int64, positions: Int32) -> None:
    """Write the positions of each value, ascending, from starts[value] on; negative values are left out."""
    for i in range(values.size):
        value = values[i]
        if value >= 0:
            positions[starts[value]] = i
            starts[value] += 1


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
