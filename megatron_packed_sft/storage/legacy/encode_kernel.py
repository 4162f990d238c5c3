"""From packed bins to pickled integers: the loops of the legacy writer."""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import inner_kernel, kernel

ByteArray = npt.NDArray[np.uint8]
LongArray = npt.NDArray[np.int64]

# Opcodes of pickles.
MARK = ord("(")
BININT, BININT1, BININT2 = ord("J"), ord("K"), ord("M")
EMPTY_LIST, APPENDS = ord("]"), ord("e")
EMPTY_DICT, SETITEMS = ord("}"), ord("u")


@inner_kernel
def put_bytes(out: ByteArray, place: int, source: ByteArray) -> int:
    """Copy `source` to `place`; return the place behind it."""
    for j in range(source.size):
        out[place + j] = source[j]
    return place + source.size


@inner_kernel
def put_list(out: ByteArray, place: int, values: npt.NDArray[np.integer]) -> int:
    """Write a list of integers in 0..2**31-1; return the place behind it. Four bytes behind it are overwritten."""
    out[place] = EMPTY_LIST
    out[place + 1] = MARK
    place += 2
    for k in range(values.size):
        value = np.int64(values[k])
        above_one = np.int64(value > 0xFF)
        above_two = np.int64(value > 0xFFFF)
        # K, M or J without a branch: tokens fall on both sides of 65,536 at random.
        out[place] = BININT1 + above_one * (BININT2 - BININT1) + above_two * (BININT - BININT2)
        out[place + 1] = value & 0xFF
        out[place + 2] = value >> 8 & 0xFF
        out[place + 3] = value >> 16 & 0xFF
        out[place + 4] = value >> 24 & 0xFF
        place += 2 + above_one + 2 * above_two
    out[place] = APPENDS
    return place + 1


@kernel
def encode_bins(
    input_ids: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.uint8],
    packed_len: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.uint32],
    seq_starts: npt.NDArray[np.uint32],
    first_bin: int,
    batch: int,
    keys: ByteArray,
    key_ends: LongArray,
    out: ByteArray,
) -> int:
    """Write each bin as one fragment of the pickle, a dict of three lists; return the size of all of them.

    `keys` are the three pickled keys, one behind the other. Bins come in batches: a fragment that begins a batch has
    the MARK in front and one that ends a full batch has the APPENDS behind.
    """
    place = 0
    for index in range(packed_len.size):
        length = np.int64(packed_len[index])
        first = np.int64(seq_offsets[index]) - np.int64(seq_offsets[0])
        last = np.int64(seq_offsets[index + 1]) - np.int64(seq_offsets[0])
        if (first_bin + index) % batch == 0:
            out[place] = MARK
            place += 1
        out[place] = EMPTY_DICT
        out[place + 1] = MARK
        place = put_bytes(out, place + 2, keys[: key_ends[0]])
        place = put_list(out, place, input_ids[index, :length])
        place = put_bytes(out, place, keys[key_ends[0] : key_ends[1]])
        place = put_list(out, place, loss_mask[index, :length])
        place = put_bytes(out, place, keys[key_ends[1] : key_ends[2]])
        place = put_list(out, place, seq_starts[first:last])
        out[place] = SETITEMS
        place += 1
        if (first_bin + index) % batch == batch - 1:
            out[place] = APPENDS
            place += 1
    return place
