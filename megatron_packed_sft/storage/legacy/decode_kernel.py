"""From pickled integers to packed bins: the loops of the legacy reader.

`run_pickle` says where the integers of each bin lie; `measure_bins` checks the shapes and counts, so that memory can be
asked for once; `decode_bins` fills it and checks every value.
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_bytes_kernel import payload_span, read_rare_int
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.support.compiled import inner_kernel, kernel

# What can be wrong with a bin; `status` then holds the code, the bin, the field, the position and the value.
OK = 0
NOT_INTEGERS = 1
EMPTY = 2
LENGTHS_DIFFER = 3  # position: tokens in input_ids; value: entries in loss_mask
BIN_TOO_LONG = 4
BAD_BYTES = 5
BAD_ID = 6
BAD_MASK = 7
FIRST_START_NOT_ZERO = 8
STARTS_NOT_INCREASING = 9
START_BEYOND_BIN = 10

INPUT_IDS, LOSS_MASK, SEQ_START_ID = 0, 1, 2
LARGEST_ID = 2**31 - 1
_LONGEST_BIN = 2**31 - 1
_CHUNK = 4096
# For each integer opcode, which of the four bytes behind it belong to it.
_VALUE_MASKS = np.zeros(256, np.uint32)
_VALUE_MASKS[tables.BININT1] = 0xFF
_VALUE_MASKS[tables.BININT2] = 0xFFFF
_VALUE_MASKS[tables.BININT] = 0xFFFFFFFF


@inner_kernel
def value_of(entry: int, value_places: LongArray, value_infos: LongArray) -> tuple[int, int, int]:
    """Return form, place and count of what a bin holds under a key."""
    kind = entry & tables.KIND_MASK
    payload = entry >> tables.KIND_BITS
    if kind == tables.KIND_ONE_INT:
        return np.int64(tables.INTS), payload, np.int64(1)
    if kind == tables.KIND_EMPTY_TUPLE:
        return np.int64(tables.INTS), np.int64(0), np.int64(0)
    info = value_infos[payload]
    return info & tables.FORM_MASK, value_places[payload], info >> tables.FORM_BITS


@kernel
def measure_bins(
    value_places: LongArray,
    value_infos: LongArray,
    fields: LongArray,
    bins: npt.NDArray[np.int32],
    status: LongArray,
) -> tuple[int, int]:
    """Return how many tokens and how many sequences the bins have; a bin of the wrong shape is reported in `status`."""
    num_tokens = np.int64(0)
    num_sequences = np.int64(0)
    for index in range(bins.size):
        counts = (np.int64(0), np.int64(0), np.int64(0))
        for field in range(3):
            form, _, count = value_of(fields[3 * np.int64(bins[index]) + field], value_places, value_infos)
            status[1], status[2] = index, field
            if form == tables.UNBUILT or form == tables.BINS:
                status[0] = NOT_INTEGERS
                return num_tokens, num_sequences
            if count == 0:
                status[0] = EMPTY
                return num_tokens, num_sequences
            counts = (counts[1], counts[2], count)
        length, mask_length, num_starts = counts
        if length != mask_length:
            status[0], status[2], status[3], status[4] = LENGTHS_DIFFER, LOSS_MASK, length, mask_length
            return num_tokens, num_sequences
        if length > _LONGEST_BIN:
            status[0], status[2], status[3] = BIN_TOO_LONG, INPUT_IDS, length
            return num_tokens, num_sequences
        if num_starts > length:
            # More starts than tokens cannot increase strictly and stay inside the bin.
            status[0], status[2], status[3], status[4] = START_BEYOND_BIN, SEQ_START_ID, length, length
            return num_tokens, num_sequences
        num_tokens += length
        num_sequences += num_starts
    return num_tokens, num_sequences


@inner_kernel
def decode_pickled(data: ByteArray, place: int, values: LongArray) -> int:
    """Decode as many pickled integers as `values` has room for; return the place behind them, or -1.

    Between them may lie the ends of batches and frames. Without a branch per integer size: their order is random.
    """
    end = data.size
    k = 0
    while k < values.size:
        # A tuple, its BUILD and the STOP follow every list, so five bytes can always be read.
        if place < 0 or place + 5 > end:
            return -1
        op = data[place]
        size = np.int64(tables.INTEGER_BYTES[op])
        if size > 0:
            raw = np.uint32(data[place + 1]) | np.uint32(data[place + 2]) << np.uint32(8)
            raw |= np.uint32(data[place + 3]) << np.uint32(16) | np.uint32(data[place + 4]) << np.uint32(24)
            values[k] = np.int64(np.int32(np.uint32(raw & _VALUE_MASKS[op]))) + np.int64(op == tables.NEWTRUE)
            place += size
            k += 1
        elif op == tables.MARK or op == tables.APPENDS or op == tables.APPEND:
            place += 1
        elif op == tables.FRAME:
            place += 9
        else:
            values[k], place = read_rare_int(data, place, end)
            k += 1
    return place


@inner_kernel
def decode_latin1(data: ByteArray, place: int, num_bytes: int) -> tuple[int, int]:
    """Read an integer whose bytes are characters up to U+00FF in UTF-8; return it and the place behind it, or -1."""
    value = np.int64(0)
    for j in range(num_bytes):
        if place + 2 > data.size:
            return value, np.int64(-1)
        byte = np.int64(data[place])
        if byte >= 128:
            place += 1
            second = np.int64(data[place])
            if byte & 0xFE != 0xC2 or second & 0xC0 != 0x80:
                return value, np.int64(-1)
            byte = (byte & 3) << 6 | second & 0x3F
        value |= byte << (8 * j)
        place += 1
    return value, place


@inner_kernel
def decode_array(data: ByteArray, place: int, form: int, values: LongArray) -> int:
    """Decode as many array items as `values` has room for; return the place behind them, or -1."""
    num_bytes = 1 << (form & 3)
    if form & tables.LATIN1_FORM != 0:
        for k in range(values.size):
            values[k], place = decode_latin1(data, place, num_bytes)
            if place < 0:
                return -1
    else:
        if place + values.size * num_bytes > data.size:
            return -1
        # The size is written out, so that each loop is compiled to single loads.
        if num_bytes == 1:
            for k in range(values.size):
                values[k] = data[place + k]
        elif num_bytes == 2:
            for k in range(values.size):
                values[k] = np.int64(data[place + 2 * k]) | np.int64(data[place + 2 * k + 1]) << 8
        elif num_bytes == 4:
            for k in range(values.size):
                value = np.int64(0)
                for j in range(4):
                    value |= np.int64(data[place + 4 * k + j]) << (8 * j)
                values[k] = value
        else:
            for k in range(values.size):
                value = np.int64(0)
                for j in range(8):
                    value |= np.int64(data[place + 8 * k + j]) << (8 * j)
                values[k] = value
        place += values.size * num_bytes
    form &= ~np.int64(tables.LATIN1_FORM)
    if form < tables.UNSIGNED_ARRAY:
        shift = 64 - 8 * num_bytes
        for k in range(values.size):
            values[k] = values[k] << shift >> shift
    elif form == tables.BOOL_ARRAY:
        for k in range(values.size):
            if values[k] > 1:  # no boolean; NumPy would take it for True here and for a 2 there
                return -1
    elif num_bytes == 8:
        for k in range(values.size):
            if values[k] < 0:
                values[k] = tables.SATURATED
    return place


@kernel
def decode_bins(
    data: ByteArray,
    value_places: LongArray,
    value_infos: LongArray,
    fields: LongArray,
    bins: npt.NDArray[np.int32],
    input_ids: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.uint8],
    bin_offsets: LongArray,
    seq_starts: npt.NDArray[np.uint32],
    seq_offsets: LongArray,
    status: LongArray,
) -> None:
    """Fill the flat arrays; the first value out of its range ends the run and is reported in `status`."""
    scratch = np.empty(_CHUNK, np.int64)
    bin_offsets[0] = 0
    seq_offsets[0] = 0
    for index in range(bins.size):
        first_token = bin_offsets[index]
        first_start = seq_offsets[index]
        length = np.int64(0)
        for field in range(3):
            form, place, count = value_of(fields[3 * np.int64(bins[index]) + field], value_places, value_infos)
            string_end = np.int64(-1)
            if form & tables.LATIN1_FORM != 0:
                place, num_bytes = payload_span(data, place, data.size)
                string_end = place + num_bytes
            if field == INPUT_IDS:
                length = count
            previous = np.int64(-1)
            for begin in range(0, count, _CHUNK):
                values = scratch[: min(_CHUNK, count - begin)]
                if form == tables.INTS:
                    place = decode_pickled(data, place, values)
                else:
                    place = decode_array(data, place, form, values)
                if place < 0:
                    break
                bad = np.int64(-1)
                code = OK
                if field == INPUT_IDS:
                    for k in range(values.size):
                        value = values[k]
                        if value < 0 or value > LARGEST_ID:
                            code, bad = BAD_ID, np.int64(k)
                            break
                        input_ids[first_token + begin + k] = value
                elif field == LOSS_MASK:
                    for k in range(values.size):
                        if values[k] != 0 and values[k] != 1:
                            code, bad = BAD_MASK, np.int64(k)
                            break
                        loss_mask[first_token + begin + k] = values[k]
                else:
                    for k in range(values.size):
                        value = values[k]
                        if begin + k == 0 and value != 0:
                            code, bad = FIRST_START_NOT_ZERO, np.int64(k)
                        elif value <= previous:
                            code, bad = STARTS_NOT_INCREASING, np.int64(k)
                        elif value >= length:
                            code, bad = START_BEYOND_BIN, np.int64(k)
                        if code != OK:
                            break
                        previous = value
                        seq_starts[first_start + begin + k] = value
                if code != OK:
                    status[0], status[1], status[2], status[3] = code, index, field, begin + bad
                    status[4] = values[bad]
                    return
            if place < 0 or (string_end >= 0 and place != string_end):
                status[0], status[1], status[2] = BAD_BYTES, index, field
                return
            if field == SEQ_START_ID:
                seq_offsets[index + 1] = first_start + count
        bin_offsets[index + 1] = first_token + length
