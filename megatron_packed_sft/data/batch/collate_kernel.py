"""The compiled core of collate: rows go from the maps into a batch's buffers in one pass over their tokens.

The inner loops run over one sequence and one output at a time. A sequence fits the first-level cache, so the row is
read from memory once, and each of these loops becomes vector instructions; one loop that fills all four outputs runs
1.4 times as long. A wrong index would read foreign memory: `collate` checks the rows' table before, in integers that
cannot overflow, and the sequences' starts are checked here.

Imported lazily (numba costs 0.2 s).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    BAD_LENGTH,
    BAD_OFFSETS,
    BAD_ROW_NUMBER,
    BAD_STARTS,
    IS_PADDING,
    LENGTH,
    OK,
    POSITION,
    ROW,
    SEQ_FIRST,
    SEQ_LAST,
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
    numbers: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    is_padding: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Fill the table `rows` of a `LocatedBins` from the index of a memmap shard."""
    for index in range(numbers.size):
        row = numbers[index]
        if row < 0 or row >= packed_len.size:
            return BAD_ROW_NUMBER, index
        length = np.int64(packed_len[row])
        first = np.int64(seq_offsets[row])
        last = np.int64(seq_offsets[row + 1])
        if length < 1 or length > pack_size:
            return BAD_LENGTH, index
        if first >= last or last > num_sequences or last - first > length:
            return BAD_OFFSETS, index
        rows[START, index] = row * pack_size
        rows[LENGTH, index] = length
        rows[SEQ_FIRST, index] = first
        rows[SEQ_LAST, index] = last
        rows[POSITION, index] = positions[index]
        rows[ROW, index] = row
        rows[IS_PADDING, index] = is_padding[index]
    return OK, 0


@kernel
def _starts_rise(seq_starts: npt.NDArray[np.uint32], first: int, last: int, length: int) -> bool:
    """Whether the sequences of a row follow each other inside its `length` ids, from 0 on."""
    previous = np.int64(seq_starts[first])
    if previous != 0:
        return False
    for k in range(first + 1, last):
        start = np.int64(seq_starts[k])
        if start <= previous:
            return False
        previous = start
    return bool(previous < length)


@kernel
def _logical_length(
    ids: npt.NDArray[np.integer], mask: npt.NDArray[np.uint8], num_tokens: int, eos_id: int, keep_eos_loss: bool
) -> int:
    """How many tokens are left when the EOS tokens that only align the sequence's end are taken off.

    Bridge stops at the last token that is not EOS. Where the loss at EOS is kept, a trained EOS is no padding either:
    attention would skip it, and its loss would mean nothing.
    """
    length = num_tokens
    while length > 0 and ids[length - 1] == eos_id and not (keep_eos_loss and mask[length - 1] != 0):
        length -= 1
    return length


@kernel
def fill_padded(
    flat_ids: npt.NDArray[np.integer],
    flat_mask: npt.NDArray[np.uint8],
    seq_starts: npt.NDArray[np.uint32],
    rows: npt.NDArray[np.int64],
    ids_out: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.integer],
    boundaries: npt.NDArray[np.int32],
    longest: npt.NDArray[np.int32],
    padding_mask: npt.NDArray[np.bool_],
    doc_ids: npt.NDArray[np.int32],
    eos_id: int,
    keep_eos_loss: bool,
    train_all: bool,
    sequences_aligned: bool,
) -> tuple[int, int]:
    """Fill the rows' places in a padded batch.

    Args:
        flat_ids, flat_mask, seq_starts, rows: a `LocatedBins` whose rows fit these arrays and the outputs.
        ids_out: [3, B, L]: tokens, labels, position ids.
        loss_mask: [B, L].
        boundaries: [2, B, K]: physical and logical ends of the sequences, behind a 0; the last value is repeated.
        longest: [B, 1]: the longest physical sequence of each row; its padding is one, too.
        padding_mask, doc_ids: [B, L], or [0, 0] when nobody asks for them.
        eos_id: pads tokens and labels; where it is a token and `keep_eos_loss` is false, the loss does not count.
        train_all: count the loss at every token, whatever the stored mask says; never that of a padding sample.
        sequences_aligned: sequences may end in EOS tokens that only align their length.
    """
    width = loss_mask.shape[1]
    # An id that no token has switches the comparison off without a second loop.
    dropped_id = np.int32(-1 if keep_eos_loss else eos_id)
    for index in range(rows.shape[1]):
        base = rows[START, index]
        length = rows[LENGTH, index]
        first = rows[SEQ_FIRST, index]
        count = rows[SEQ_LAST, index] - first
        position = rows[POSITION, index]
        if not _starts_rise(seq_starts, first, first + count, length):
            return BAD_STARTS, index
        # (mask & stored) | always: the stored mask, or 1 everywhere, or 0 everywhere.
        is_padding = rows[IS_PADDING, index] != 0
        stored = np.uint8(0 if is_padding or train_all else 255)
        always = np.uint8(1 if train_all and not is_padding else 0)
        offset = 0
        logical_offset = 0
        longest_sequence = 0
        boundaries[0, position, 0] = 0
        boundaries[1, position, 0] = 0
        for k in range(count):
            start = base + np.int64(seq_starts[first + k])
            end = base + (length if k == count - 1 else np.int64(seq_starts[first + k + 1]))
            num_tokens = end - start - 1  # the last id is a label only
            ids = flat_ids[start:end]
            mask = flat_mask[start:end]
            logical = num_tokens
            if sequences_aligned:
                logical = _logical_length(ids, mask, num_tokens, eos_id, keep_eos_loss)
            tokens = ids_out[0, position, offset : offset + num_tokens]
            labels = ids_out[1, position, offset : offset + num_tokens]
            position_ids = ids_out[2, position, offset : offset + num_tokens]
            loss = loss_mask[position, offset : offset + num_tokens]
            for j in range(num_tokens):
                tokens[j] = ids[j]
            for j in range(num_tokens):
                labels[j] = ids[j + 1]
            for j in range(num_tokens):
                position_ids[j] = j
            for j in range(logical):
                loss[j] = ((mask[j] & stored) | always) * (np.int32(ids[j]) != dropped_id)
            loss[logical:] = 0
            if padding_mask.size > 0:
                padding_mask[position, offset : offset + logical] = False
                padding_mask[position, offset + logical : offset + num_tokens] = True
            if doc_ids.size > 0:
                doc_ids[position, offset : offset + num_tokens] = k
            offset += num_tokens
            logical_offset += logical
            longest_sequence = max(longest_sequence, num_tokens)
            boundaries[0, position, k + 1] = offset
            boundaries[1, position, k + 1] = logical_offset
        ids_out[0, position, offset:] = eos_id
        ids_out[1, position, offset:] = eos_id
        ids_out[2, position, offset:] = 0
        loss_mask[position, offset:] = 0
        if padding_mask.size > 0:
            padding_mask[position, offset:] = True
        if doc_ids.size > 0:
            doc_ids[position, offset:] = count
        # Attention kernels want every position in some sequence, so the padding is one; it may have length zero.
        boundaries[0, position, count + 1 :] = width
        boundaries[1, position, count + 1 :] = logical_offset
        longest[position, 0] = max(longest_sequence, width - offset)
    return OK, 0


@kernel
def fill_flattened(
    flat_ids: npt.NDArray[np.integer],
    flat_mask: npt.NDArray[np.uint8],
    seq_starts: npt.NDArray[np.uint32],
    rows: npt.NDArray[np.int64],
    row_offsets: npt.NDArray[np.int64],
    seq_offsets: npt.NDArray[np.int64],
    ids_out: npt.NDArray[np.integer],
    boundaries: npt.NDArray[np.int32],
    doc_ids: npt.NDArray[np.int32],
    eos_id: int,
    train_all: bool,
    sequences_aligned: bool,
) -> tuple[int, int]:
    """Fill the rows' places in a batch of one long row, as Hugging Face models take it: whole sequences, end to end.

    Args:
        flat_ids, flat_mask, seq_starts, rows: a `LocatedBins` whose rows fit these arrays and the outputs.
        row_offsets, seq_offsets: [B]: where the row at each place of the batch begins, in ids and in sequences.
        ids_out: [3, T]: input ids, labels (the ids themselves where they are trained, else -100), position ids.
        boundaries: [S + 1]: the end of each sequence behind the first entry, which is the caller's.
        doc_ids: [T], or [0] when nobody asks for them.
        eos_id, train_all, sequences_aligned: as for `fill_padded`.
    """
    for index in range(rows.shape[1]):
        base = rows[START, index]
        length = rows[LENGTH, index]
        first = rows[SEQ_FIRST, index]
        count = rows[SEQ_LAST, index] - first
        position = rows[POSITION, index]
        if not _starts_rise(seq_starts, first, first + count, length):
            return BAD_STARTS, index
        offset = row_offsets[position]
        document = seq_offsets[position]
        is_padding = rows[IS_PADDING, index] != 0
        stored = np.uint8(0 if is_padding or train_all else 255)
        always = np.uint8(1 if train_all and not is_padding else 0)
        for k in range(count):
            start = base + np.int64(seq_starts[first + k])
            end = base + (length if k == count - 1 else np.int64(seq_starts[first + k + 1]))
            num_ids = end - start
            ids = flat_ids[start:end]
            mask = flat_mask[start:end]
            logical = num_ids - 1
            if sequences_aligned:
                logical = _logical_length(ids, mask, num_ids - 1, eos_id, True)
            input_ids = ids_out[0, offset : offset + num_ids]
            labels = ids_out[1, offset : offset + num_ids]
            position_ids = ids_out[2, offset : offset + num_ids]
            for j in range(num_ids):
                input_ids[j] = ids[j]
            for j in range(num_ids):
                position_ids[j] = j
            labels[0] = IGNORED_LABEL
            for j in range(logical):
                labels[j + 1] = ids[j + 1] if ((mask[j] & stored) | always) != 0 else IGNORED_LABEL
            labels[logical + 1 :] = IGNORED_LABEL
            if doc_ids.size > 0:
                doc_ids[offset : offset + num_ids] = document
            offset += num_ids
            document += 1
            boundaries[document] = offset
    return OK, 0
