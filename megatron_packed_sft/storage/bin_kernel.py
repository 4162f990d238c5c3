"""The compiled core of storage: one definition of a bin's invariants, used by every writer and by `validate`.

Imported lazily (numba costs 0.2 s), so that opening and reading shards never pays for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

# What can be wrong with one bin; `bins.find_violations` has a sentence for each.
OK = 0
BAD_LENGTH = 1
BAD_OFFSETS = 2
FIRST_START_NOT_ZERO = 3
STARTS_NOT_INCREASING = 4
START_BEYOND_LENGTH = 5
MASK_NOT_BINARY = 6
MASK_AT_SEQUENCE_END = 7
ID_OUT_OF_RANGE = 8
DIRTY_MASK_PADDING = 9
DIRTY_ID_PADDING = 10

# Indices into the `totals` vector that `check_bins` adds to.
TOTAL_TOKENS = 0
TOTAL_LOSS_TOKENS = 1
MAX_SEQUENCES = 2
MAX_SEQUENCE_LENGTH = 3
MIN_PACKED_LENGTH = 4
NUM_TOTALS = 5


@kernel
def check_bins(
    input_ids: npt.NDArray[np.unsignedinteger],
    loss_mask: npt.NDArray[np.uint8],
    packed_len: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.uint32],
    seq_starts: npt.NDArray[np.uint32],
    vocab_size: np.uint64,
    pad_id: np.int64,
    codes: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.int64],
    totals: npt.NDArray[np.int64],
) -> int:
    """Check every invariant of every bin; return how many bins break one.

    `codes[b]` tells the first violation of bin b, and `positions[b]` where it is, or a value that is wrong; of masks,
    ids and paddings the caller finds the place itself, except of MASK_AT_SEQUENCE_END. `seq_offsets` point into
    `seq_starts` after its own first value is subtracted, so a slice of a larger shard can be checked as it is. Signed
    ids must be passed as their unsigned view: a negative id is then a huge one, and one comparison covers both ends.
    `pad_id` < 0 means that the padding's value is not known and not checked.
    """
    num_bins, width = input_ids.shape
    base = np.int64(seq_offsets[0])
    num_bad = 0
    for index in range(num_bins):
        length = np.int64(packed_len[index])
        first = np.int64(seq_offsets[index]) - base
        last = np.int64(seq_offsets[index + 1]) - base
        code = OK
        position: int | np.int64 = 0
        longest = np.int64(0)
        trained = np.int64(0)
        if length < 1 or length > width:
            code = BAD_LENGTH
            position = length
        elif first < 0 or last <= first or last > seq_starts.size:
            code = BAD_OFFSETS
            position = last - first
        else:
            start = np.int64(seq_starts[first])
            if start != 0:
                code = FIRST_START_NOT_ZERO
                position = start
            for k in range(first + 1, last):
                following = np.int64(seq_starts[k])
                if following <= start:
                    if code == OK:
                        code = STARTS_NOT_INCREASING
                        position = k - first
                elif following - start > longest:
                    longest = following - start
                start = following
            if start >= length and code == OK:
                code = START_BEYOND_LENGTH
                position = last - first - 1
            if length - start > longest:
                longest = length - start
        if code == OK:
            bin_mask = loss_mask[index]
            union = np.uint8(0)
            for j in range(length):
                union |= bin_mask[j]
                trained += bin_mask[j]
            if union > 1:
                code = MASK_NOT_BINARY
        if code == OK:
            for k in range(last - 1, first - 1, -1):
                end = length if k == last - 1 else np.int64(seq_starts[k + 1])
                if bin_mask[end - 1] != 0:
                    code = MASK_AT_SEQUENCE_END
                    position = end - 1
        if code == OK:
            bin_ids = input_ids[index]
            highest = bin_ids[0]
            for j in range(length):
                if bin_ids[j] > highest:
                    highest = bin_ids[j]
            if np.uint64(highest) >= vocab_size:
                code = ID_OUT_OF_RANGE
        if code == OK:
            num_dirty = 0
            for j in range(length, width):
                num_dirty += bin_mask[j] != 0
            if num_dirty > 0:
                code = DIRTY_MASK_PADDING
            elif pad_id >= 0:
                for j in range(length, width):
                    num_dirty += np.int64(bin_ids[j]) != pad_id
                if num_dirty > 0:
                    code = DIRTY_ID_PADDING
        codes[index] = code
        positions[index] = position
        if code != OK:
            num_bad += 1
            continue
        totals[TOTAL_TOKENS] += length
        totals[TOTAL_LOSS_TOKENS] += trained
        if last - first > totals[MAX_SEQUENCES]:
            totals[MAX_SEQUENCES] = last - first
        if longest > totals[MAX_SEQUENCE_LENGTH]:
            totals[MAX_SEQUENCE_LENGTH] = longest
        if length < totals[MIN_PACKED_LENGTH]:
            totals[MIN_PACKED_LENGTH] = length
    return num_bad


@kernel
def check_weights(
    loss_mask: npt.NDArray[np.uint8],
    loss_weights: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int64],
    sums: npt.NDArray[np.float64],
) -> int:
    """Check that weights are finite, and above 0 exactly where the mask is 1; return how many bins break that.

    `positions[b]` is the first such place of bin b, or -1. `sums[b]` is the sum of its weights, added up in one order,
    so that it does not depend on the block that the bin came in.
    """
    num_bins, width = loss_weights.shape
    num_bad = 0
    for index in range(num_bins):
        bin_mask, bin_weights = loss_mask[index], loss_weights[index]
        position = -1
        total = 0.0
        for j in range(width):
            weight = bin_weights[j]
            # A NaN compares as false, and infinity is not below itself.
            is_sound = 0 < weight < np.inf if bin_mask[j] != 0 else weight == 0
            if not is_sound and position < 0:
                position = j
            total += weight
        positions[index] = position
        sums[index] = total
        num_bad += position >= 0
    return num_bad


@kernel
def pad_bins(
    flat_ids: npt.NDArray[np.integer],
    flat_mask: npt.NDArray[np.integer],
    offsets: npt.NDArray[np.integer],
    pad_id: np.int64,
    input_ids: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.uint8],
) -> None:
    """Lay out bins of different lengths (flat values, bin b = [offsets[b], offsets[b + 1])) as padded ones."""
    num_bins, width = input_ids.shape
    for index in range(num_bins):
        start = offsets[index] - offsets[0]
        length = offsets[index + 1] - offsets[index]
        for j in range(length):
            input_ids[index, j] = flat_ids[start + j]
            loss_mask[index, j] = flat_mask[start + j]
        for j in range(length, width):
            input_ids[index, j] = pad_id
            loss_mask[index, j] = 0


@kernel
def clear_sequence_ends(
    loss_mask: npt.NDArray[np.uint8],
    packed_len: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.uint32],
    seq_starts: npt.NDArray[np.uint32],
) -> int:
    """Set the mask to 0 at the last token of every sequence, in place; return how many were not."""
    base = np.int64(seq_offsets[0])
    num_cleared = 0
    for index in range(packed_len.size):
        last = np.int64(seq_offsets[index + 1]) - base
        for k in range(np.int64(seq_offsets[index]) - base, last):
            end = np.int64(packed_len[index]) if k == last - 1 else np.int64(seq_starts[k + 1])
            if 1 <= end <= loss_mask.shape[1] and loss_mask[index, end - 1] != 0:
                loss_mask[index, end - 1] = 0
                num_cleared += 1
    return num_cleared
