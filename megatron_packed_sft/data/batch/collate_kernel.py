"""The compiled core of collate: bins go from the maps into a batch's arrays in one pass over their tokens.

The inner loops run over one sequence and one output at a time. A sequence fits the first-level cache, so the bin is
read from memory once, and each of these loops becomes vector instructions; one loop that fills all four outputs takes
1.4 times as long. A wrong index would read foreign memory: `collate` checks the table of bins first, in integers that
cannot overflow. The starts of the sequences are checked here, in a copy, because another process may write to the file.

Imported lazily (numba costs 0.2 s).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    BAD_BIN_NUMBER,
    BAD_CHECKSUM,
    BAD_LENGTH,
    BAD_OFFSETS,
    BAD_STARTS,
    BATCH_INDEX,
    BIN,
    CHECKSUMS,
    ID_BYTES,
    IDS,
    IS_PADDING,
    LENGTH,
    MASK,
    NUM_SEQUENCES,
    OFFSET,
    OK,
    ORIGIN,
    STARTS,
    VERIFIED,
    WEIGHTS,
)
from megatron_packed_sft.storage.memmap_v1 import reader
from megatron_packed_sft.storage.memmap_v1.manifest import IDS_COLUMN, INDEX_COLUMN, MASK_COLUMN, WEIGHTS_COLUMN
from megatron_packed_sft.support.compiled import inner_kernel, kernel
from megatron_packed_sft.support.memory_kernel import (
    carray,
    hash_bytes,
    load_byte,
    load_eight_bytes,
    load_four_bytes,
    load_two_bytes,
    pointer,
    store_byte,
)

IGNORED_LABEL = -100  # what torch's cross entropy and every Hugging Face model skip


@kernel
def locate_bins(addresses: npt.NDArray[np.int64], table: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Fill the table of a `LocatedBins` from the indices of memmap shards.

    Args:
        addresses: [shards, NUM_ADDRESSES]: where their arrays are.
        table: has the bins' numbers, owners, batch indices and flags, and as IDS their places in the large arrays.
    """
    for column in range(table.shape[1]):
        number = table[BIN, column]
        place = table[IDS, column]
        owner = table[ORIGIN, column]
        if owner < 0 or owner >= addresses.shape[0]:
            return BAD_BIN_NUMBER, column
        shard = addresses[owner]
        num_bins, pack_size = shard[reader.NUM_BINS], shard[reader.PACK_SIZE]
        if number < 0 or number >= num_bins:
            return BAD_BIN_NUMBER, column
        length = load_four_bytes(shard[reader.LENGTHS_ADDRESS] + number * 4)
        first = load_four_bytes(shard[reader.OFFSETS_ADDRESS] + number * 4)
        end = load_four_bytes(shard[reader.OFFSETS_ADDRESS] + number * 4 + 4)
        if length < 1 or length > pack_size:
            return BAD_LENGTH, column
        if first >= end or end > shard[reader.NUM_STARTS] or end - first > length:
            return BAD_OFFSETS, column
        id_bytes = shard[reader.ID_BYTES]
        weights, checksums = shard[reader.WEIGHTS_ADDRESS], shard[reader.CHECKSUMS_ADDRESS]
        verified = shard[reader.VERIFIED_ADDRESS]
        table[IDS, column] = shard[reader.IDS_ADDRESS] + place * pack_size * id_bytes
        table[MASK, column] = shard[reader.MASK_ADDRESS] + place * pack_size
        table[WEIGHTS, column] = weights + place * pack_size * 4 if weights != 0 else 0
        table[STARTS, column] = shard[reader.STARTS_ADDRESS] + first * 4
        table[LENGTH, column] = length
        table[NUM_SEQUENCES, column] = end - first
        table[ID_BYTES, column] = id_bytes
        table[CHECKSUMS, column] = checksums + number * shard[reader.NUM_CHECKSUMS] * 8 if checksums != 0 else 0
        table[VERIFIED, column] = verified + number if verified != 0 else 0
        table[OFFSET, column] = first
    return OK, 0


@inner_kernel
def _is_sound(function: int, table: npt.NDArray[np.int64], column: int, message: npt.NDArray[np.uint32]) -> bool:
    """Return whether a bin matches its checksums, or did so before; its starts are in the message already."""
    verified = table[VERIFIED, column]
    if verified != 0 and load_byte(verified) != 0:
        return True
    length, count, first = table[LENGTH, column], table[NUM_SEQUENCES, column], table[OFFSET, column]
    recorded = table[CHECKSUMS, column]
    message[0], message[1], message[2] = length, first, first + count
    if hash_bytes(function, message.ctypes.data, (count + 3) * 4) != load_eight_bytes(recorded + INDEX_COLUMN * 8):
        return False
    num_bytes = length * table[ID_BYTES, column]
    if hash_bytes(function, table[IDS, column], num_bytes) != load_eight_bytes(recorded + IDS_COLUMN * 8):
        return False
    if hash_bytes(function, table[MASK, column], length) != load_eight_bytes(recorded + MASK_COLUMN * 8):
        return False
    weights = table[WEIGHTS, column]
    if weights != 0 and hash_bytes(function, weights, length * 4) != load_eight_bytes(recorded + WEIGHTS_COLUMN * 8):
        return False
    if verified != 0:
        store_byte(verified, 1)
    return True


@kernel
def fill(
    function: int,
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
    the row. In a flattened batch (R = 1) all bins are concatenated, as Hugging Face models take them: whole sequences,
    labels that are the ids themselves where they are trained and -100 elsewhere, and padding behind the last bin.

    Args:
        function: the address of XXH3_64bits.
        table: of a `LocatedBins` whose bins fit the outputs.
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
    longest_bin, most_sequences = _largest(table)
    widened = np.empty(longest_bin, np.int32)
    message = np.empty(most_sequences + 3, np.uint32)
    for column in range(table.shape[1]):
        length = table[LENGTH, column]
        count = table[NUM_SEQUENCES, column]
        index = table[BATCH_INDEX, column]
        starts = message[3 : count + 3]
        for k in range(count):
            starts[k] = load_four_bytes(table[STARTS, column] + k * 4)
        # Here and not for all bins before: a bin that was just hashed is read from the cache.
        if table[CHECKSUMS, column] != 0 and not _is_sound(function, table, column, message):
            return BAD_CHECKSUM, column
        if not _starts_rise(starts, length):
            return BAD_STARTS, column
        # Ids of two bytes are widened first: that costs less than a second set of compiled loops.
        bin_ids = widened[:length]
        if table[ID_BYTES, column] == 2:
            for j in range(length):
                bin_ids[j] = load_two_bytes(table[IDS, column] + j * 2)
        else:
            bin_ids = carray(pointer(table[IDS, column]), (length,), np.int32)
        bin_mask = carray(pointer(table[MASK, column]), (length,), np.uint8)
        num_weights = length if table[WEIGHTS, column] != 0 else 0
        bin_weights = carray(pointer(table[WEIGHTS, column]), (num_weights,), np.float32)
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
            start: Any = np.int64(starts[k])
            end: Any = length if k == count - 1 else np.int64(starts[k + 1])
            num_tokens = end - start - 1  # the last id is a label only
            ids = bin_ids[start:end]
            mask = bin_mask[start:end]
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
                    denominator += _weigh(loss[1:], bin_weights[start:end], per_sequence)
            else:
                loss = loss_mask[row, offset : offset + num_tokens]
                for j in range(num_tokens):
                    labels[j] = ids[j + 1]
                for j in range(logical):
                    loss[j] = ((mask[j] & stored) | always) * (np.int32(ids[j]) != dropped_id)
                loss[logical:] = 0
                if denominators.size > 0:
                    denominator += _weigh(loss, bin_weights[start:end], per_sequence)
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


@inner_kernel
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


@inner_kernel
def _largest(table: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return the length of the longest bin whose ids take two bytes, and the most sequences of any bin."""
    longest, most = 0, 0
    for column in range(table.shape[1]):
        if table[ID_BYTES, column] == 2:
            longest = max(longest, table[LENGTH, column])
        most = max(most, table[NUM_SEQUENCES, column])
    return longest, most


@inner_kernel
def _starts_rise(starts: npt.NDArray[np.uint32], length: int) -> bool:
    """Return whether the sequences of a bin start at 0 and follow each other inside its `length` ids."""
    if starts[0] != 0:
        return False
    for k in range(1, starts.size):
        if starts[k] <= starts[k - 1]:
            return False
    return bool(starts[-1] < length)


@inner_kernel
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
