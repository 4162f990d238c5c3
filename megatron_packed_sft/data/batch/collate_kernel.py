"""The compiled core of collate: bins go from the maps into a batch's arrays in one pass over their tokens.

The inner loops run over one sequence and one output at a time. A sequence fits the first-level cache, so the bin is
read from memory once, and each of these loops becomes vector instructions; one loop that fills all four outputs takes
1.4 times as long. A wrong index would read foreign memory: `collate` checks the table of bins first, in integers that
cannot overflow, and the starts of the sequences are checked here.

Imported lazily (numba costs 0.2 s).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    BAD_BIN_NUMBER,
    BAD_LENGTH,
    BAD_OFFSETS,
    BAD_STARTS,
    BATCH_INDEX,
    BIN,
    FIRST_SEQUENCE,
    IS_PADDING,
    LENGTH,
    OK,
    SEQUENCES_END,
    START,
)
from megatron_packed_sft.support.compiled import kernel

IGNORED_LABEL = -100  # what torch's cross entropy and every Hugging Face model skip


@kernel
def locate_bins(
    packed_len: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.uint32],
    num_sequences: int,
    pack_size: int,
    bins: npt.NDArray[np.int64],
    batch_indices: npt.NDArray[np.int64],
    is_padding: npt.NDArray[np.bool_],
    table: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Fill the table of a `LocatedBins` from the index of a memmap shard."""
    for column in range(bins.size):
        number = bins[column]
        if number < 0 or number >= packed_len.size:
            return BAD_BIN_NUMBER, column
        length = np.int64(packed_len[number])
        first = np.int64(seq_offsets[number])
        end = np.int64(seq_offsets[number + 1])
        if length < 1 or length > pack_size:
            return BAD_LENGTH, column
        if first >= end or end > num_sequences or end - first > length:
            return BAD_OFFSETS, column
        table[START, column] = number * pack_size
        table[LENGTH, column] = length
        table[FIRST_SEQUENCE, column] = first
        table[SEQUENCES_END, column] = end
        table[BATCH_INDEX, column] = batch_indices[column]
        table[BIN, column] = number
        table[IS_PADDING, column] = is_padding[column]
    return OK, 0


@kernel
def fill(
    flat_ids: npt.NDArray[np.integer],
    flat_mask: npt.NDArray[np.uint8],
    flat_weights: npt.NDArray[np.float32],
    seq_starts: npt.NDArray[np.uint32],
    table: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    ids_out: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.generic],
    denominators: npt.NDArray[np.float64],
    boundaries: npt.NDArray[np.int32],
    longest: npt.NDArray[np.int32],
    padding_mask: npt.NDArray[np.bool_],
    doc_ids: npt.NDArray[np.int32],
    eos_id: int,
    keep_eos_loss: bool,
    train_all: bool,
    sequences_aligned: bool,
    per_sequence: bool,
) -> tuple[int, int]:
    """Fill the bins' places in a batch.

    In a padded batch (R = B) each bin has a row of its own: tokens and labels are shifted by one, and padding fills up
    the row. In a flattened batch (R = 1) all bins lie end to end, as Hugging Face models take them: whole sequences,
    labels that are the ids themselves where they are trained and -100 elsewhere, and padding behind the last bin.

    Args:
        flat_ids, flat_mask, flat_weights, seq_starts, table: a `LocatedBins` whose bins fit these arrays and the
            outputs.
        offsets: [2, B + 1]: where the tokens and the boundaries of each bin of a flattened batch begin, and where the
            last ones end; [2, 0] for a padded batch.
        ids_out: [3, R, L]: tokens, labels, position ids.
        loss_mask: [R, L]; of floats, weights are wanted. Of integers, it is not filled in a flattened batch.
        denominators: [B], or [0] when no weights are wanted: what each bin adds to the loss's denominator.
        boundaries: [2, R, K]: physical and logical ends of the sequences, behind a 0; the last value is repeated.
        longest: [B, 1]: the longest physical sequence of each bin; its padding counts as one.
        padding_mask, doc_ids: [R, L], or [0, 0] when they are not wanted.
        eos_id: pads tokens and labels; where it is a token and `keep_eos_loss` is false, the loss does not count.
        train_all: count the loss at every token, whatever the stored mask says, except in padding samples.
        sequences_aligned: sequences may end in EOS tokens that only align their length.
        per_sequence: the weights of each sequence are divided by their sum, so that all sequences count the same.
    """
    is_flattened = offsets.size > 0
    # An id that no token has switches the comparison off without a second loop.
    dropped_id = np.int32(-1 if keep_eos_loss else eos_id)
    for column in range(table.shape[1]):
        base = table[START, column]
        length = table[LENGTH, column]
        first = table[FIRST_SEQUENCE, column]
        count = table[SEQUENCES_END, column] - first
        index = table[BATCH_INDEX, column]
        if not _starts_rise(seq_starts, first, first + count, length):
            return BAD_STARTS, column
        # (mask & stored) | always: the stored mask, or 1 everywhere, or 0 everywhere.
        is_padding = table[IS_PADDING, column] != 0
        stored = np.uint8(0 if is_padding or train_all else 255)
        always = np.uint8(1 if train_all and not is_padding else 0)
        row, offset, stop = index, np.int64(0), np.int64(ids_out.shape[2])
        boundary, last_boundary = np.int64(0), np.int64(boundaries.shape[2])
        if is_flattened:
            row, offset, stop = 0, offsets[0, index], offsets[0, index + 1]
            boundary, last_boundary = offsets[1, index], offsets[1, index + 1] + 1
        logical_offset = offset
        longest_sequence = 0
        denominator = 0.0
        boundaries[0, row, boundary] = offset
        boundaries[1, row, boundary] = offset
        for k in range(count):
            start = base + np.int64(seq_starts[first + k])
            end = base + (length if k == count - 1 else np.int64(seq_starts[first + k + 1]))
            num_tokens = end - start - 1  # the last id is a label only
            ids = flat_ids[start:end]
            mask = flat_mask[start:end]
            logical = num_tokens
            if sequences_aligned:
                logical = _logical_length(ids, mask, num_tokens, eos_id, keep_eos_loss)
            num_places = num_tokens + 1 if is_flattened else num_tokens
            tokens = ids_out[0, row, offset : offset + num_places]
            labels = ids_out[1, row, offset : offset + num_places]
            position_ids = ids_out[2, row, offset : offset + num_places]
            for j in range(num_places):
                tokens[j] = ids[j]
            for j in range(num_places):
                position_ids[j] = j
            if is_flattened:
                labels[0] = IGNORED_LABEL
                for j in range(logical):
                    labels[j + 1] = ids[j + 1] if ((mask[j] & stored) | always) != 0 else IGNORED_LABEL
                labels[logical + 1 :] = IGNORED_LABEL
                if denominators.size > 0:
                    loss = loss_mask[row, offset : offset + num_places]
                    for j in range(num_places):
                        loss[j] = labels[j] != IGNORED_LABEL
                    denominator += _weigh(loss[1:], flat_weights[start:end], per_sequence)
            else:
                loss = loss_mask[row, offset : offset + num_tokens]
                for j in range(num_tokens):
                    labels[j] = ids[j + 1]
                for j in range(logical):
                    loss[j] = ((mask[j] & stored) | always) * (np.int32(ids[j]) != dropped_id)
                loss[logical:] = 0
                if denominators.size > 0:
                    denominator += _weigh(loss, flat_weights[start:end], per_sequence)
            if padding_mask.size > 0:
                padding_mask[row, offset : offset + logical] = False
                padding_mask[row, offset + logical : offset + num_tokens] = True
            if doc_ids.size > 0:
                doc_ids[row, offset : offset + num_places] = boundary + k
            offset += num_places
            logical_offset += logical
            longest_sequence = max(longest_sequence, num_places)
            boundaries[0, row, boundary + k + 1] = offset
            boundaries[1, row, boundary + k + 1] = logical_offset
        # Attention kernels want every position in some sequence, so the padding is one; it may have length zero.
        boundaries[0, row, boundary + count + 1 : last_boundary] = stop
        boundaries[1, row, boundary + count + 1 : last_boundary] = logical_offset
        longest[index, 0] = stop - offset if stop - offset > longest_sequence else longest_sequence
        ids_out[0, row, offset:stop] = eos_id
        ids_out[1, row, offset:stop] = IGNORED_LABEL if is_flattened else eos_id
        ids_out[2, row, offset:stop] = 0
        if is_flattened:
            for j in range(stop - offset):
                ids_out[2, row, offset + j] = j
        if denominators.size > 0:
            denominators[index] = denominator
        if denominators.size > 0 or not is_flattened:
            loss_mask[row, offset:stop] = 0
        if padding_mask.size > 0:
            padding_mask[row, offset:stop] = True
        if doc_ids.size > 0:
            doc_ids[row, offset:stop] = boundary + count
    return OK, 0


@kernel
def _weigh(loss: npt.NDArray[np.generic], weights: npt.NDArray[np.float32], per_sequence: bool) -> float:
    """Turn the 0/1 mask of a sequence into weights, in place; return what it adds to the loss's denominator.

    That is the sum of the weights. With `per_sequence` each is divided by that sum, and a sequence adds 1, or 0 if
    nothing of it is trained. `weights` is empty where every trained token counts 1.
    """
    if weights.size > 0:
        for j in range(loss.size):
            loss[j] *= weights[j]
    total = 0.0
    for j in range(loss.size):
        total += loss[j]
    if not per_sequence or total == 0:
        return total
    for j in range(loss.size):
        loss[j] = loss[j] / total
    return 1.0


@kernel
def _starts_rise(seq_starts: npt.NDArray[np.uint32], first: int, end: int, length: int) -> bool:
    """Return whether the sequences of a bin start at 0 and follow each other inside its `length` ids."""
    previous = np.int64(seq_starts[first])
    if previous != 0:
        return False
    for k in range(first + 1, end):
        start = np.int64(seq_starts[k])
        if start <= previous:
            return False
        previous = start
    return bool(previous < length)


@kernel
def _logical_length(
    ids: npt.NDArray[np.integer], mask: npt.NDArray[np.uint8], num_tokens: int, eos_id: int, keep_eos_loss: bool
) -> int:
    """Return how many tokens are left without the EOS tokens that only align the sequence's end.

    Bridge stops at the last token that is not EOS. Where the loss at EOS is kept, a trained EOS is not padding either:
    attention would skip it, and its loss would mean nothing.
    """
    length = num_tokens
    while length > 0 and ids[length - 1] == eos_id and not (keep_eos_loss and mask[length - 1] != 0):
        length -= 1
    return length
