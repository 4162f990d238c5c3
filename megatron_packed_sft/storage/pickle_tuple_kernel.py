"""The tuples of NumPy's own pickles, recognised one by one; the machine in `pickle_kernel.py` knows no others.

(ndarray, (0,), b"b")                       arguments of _reconstruct
("i8", False, True)                         arguments of dtype
(3, "<", None, None, None, -1, -1, 0)       state of a dtype
(1, (n,), dtype, False, bytes or list)      state of an array
(bytes, dtype, (n,), "C")                   arguments of _frombuffer (protocol 5)
(string, "latin1")                          arguments of encode (bytes in protocol 2)
(), (n,), (a, b, c, ...)                    no arguments, a shape, the integers of a row
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
from numba import njit

from megatron_packed_sft.storage import pickle_tables as tables
from megatron_packed_sft.storage.pickle_bytes_kernel import (
    dtype_form,
    find_text,
    is_letter,
    is_number,
    payload_span,
    read_int,
)
from megatron_packed_sft.storage.pickle_tables import ByteArray, LongArray


@njit(cache=True, nogil=True)
def array_value(data: ByteArray, end: int, shape: int, form: int, content: int) -> tuple[int, int, int]:
    """Join shape, dtype and bytes of an array; return its place, its info, and a code."""
    kind = content & tables.KIND_MASK
    place = content >> tables.KIND_BITS
    if shape & tables.KIND_MASK != tables.KIND_ONE_INT:
        return place, 0, tables.NOT_ONE_DIMENSIONAL
    if form == tables.OBJECT_ARRAY:
        return place, 0, tables.BAD_DTYPE
    count, _ = read_int(data, shape >> tables.KIND_BITS, end)
    start, length = np.int64(0), np.int64(0)
    if kind != tables.KIND_EMPTY_BYTES:
        start, length = payload_span(data, place, end)
    if count < 0 or count > length:
        return place, 0, tables.ARRAY_SIZE
    num_bytes = count << (form & 3)
    if kind == tables.KIND_LATIN1:
        # Each byte takes one or two; which, is found when the array is decoded.
        if not num_bytes <= length <= 2 * num_bytes:
            return place, 0, tables.ARRAY_SIZE
        return place, count << tables.FORM_BITS | form | tables.LATIN1_FORM, tables.OK
    if num_bytes != length:
        return place, 0, tables.ARRAY_SIZE
    return start, count << tables.FORM_BITS | form, tables.OK


@njit(cache=True, nogil=True)
def make_tuple(
    data: ByteArray, end: int, stack: LongArray, low: int, count: int, value_infos: LongArray, place: int
) -> tuple[int, int, int, int, int]:
    """Recognise a tuple; return its kind, payload or place, info (0 when it needs no value), a code and its place.

    Only the tuples of NumPy's own pickles and tuples of integers exist.
    """
    mask = (1 << tables.KIND_BITS) - 1
    if count == 0:
        return tables.KIND_EMPTY_TUPLE, 0, 0, tables.OK, place
    kind = stack[low] & mask
    payload = stack[low] >> tables.KIND_BITS
    if kind == tables.KIND_INT and count <= 3:
        at = payload
        for j in range(count):
            # One after another in the file, so that a place and a count are enough to find them again.
            while at < end and data[at] == tables.FRAME:
                at += 9
            if stack[low + j] != (at << tables.KIND_BITS | tables.KIND_INT):
                return 0, 0, 0, tables.MALFORMED, place
            _, at = read_int(data, at, end)
        if count == 1:
            return tables.KIND_ONE_INT, payload, 0, tables.OK, place
        return tables.KIND_INT_TUPLE, payload, count << tables.FORM_BITS | tables.INTS, tables.OK, place
    if count == 2 and kind == tables.KIND_STRING and stack[low + 1] & mask == tables.KIND_STRING:
        start, length = payload_span(data, stack[low + 1] >> tables.KIND_BITS, end)
        if find_text(data, start, length, tables.LATIN1_TEXT, tables.LATIN1_ENDS, 0) == 0:
            return tables.KIND_ENCODE_ARGUMENTS, payload, 0, tables.OK, place
    elif count == 3 and kind == tables.KIND_GLOBAL and payload == tables.CALLABLE_NDARRAY:
        if stack[low + 1] & mask == tables.KIND_ONE_INT and is_letter(data, stack[low + 2], end, tables.LETTER_B):
            size, _ = read_int(data, stack[low + 1] >> tables.KIND_BITS, end)
            if size == 0:
                return tables.KIND_RECONSTRUCT_ARGUMENTS, 0, 0, tables.OK, place
    elif (
        count == 3
        and kind == tables.KIND_STRING
        and is_number(data, stack[low + 1], end, 0)
        and is_number(data, stack[low + 2], end, 1)
    ):
        form = dtype_form(data, payload, end)
        if form < 0:
            return 0, 0, 0, tables.BAD_DTYPE, payload
        return tables.KIND_DTYPE_ARGUMENTS, form, 0, tables.OK, place
    elif (
        count == 4
        and stack[low + 1] & mask == tables.KIND_DTYPE
        and is_letter(data, stack[low + 3], end, tables.LETTER_C)
    ):
        if kind == tables.KIND_BYTES or kind == tables.KIND_EMPTY_BYTES:
            start, info, code = array_value(data, end, stack[low + 2], stack[low + 1] >> tables.KIND_BITS, stack[low])
            return tables.KIND_BUFFER_ARGUMENTS, start, info, code, place
    elif count == 5 and is_number(data, stack[low], end, 1) and stack[low + 2] & mask == tables.KIND_DTYPE:
        content = stack[low + 4] & mask
        if is_number(data, stack[low + 3], end, 0):
            if content == tables.KIND_BYTES or content == tables.KIND_LATIN1 or content == tables.KIND_EMPTY_BYTES:
                start, info, code = array_value(
                    data, end, stack[low + 1], stack[low + 2] >> tables.KIND_BITS, stack[low + 4]
                )
                return tables.KIND_ARRAY_STATE, start, info, code, place
            if (
                content == tables.KIND_LIST
                and stack[low + 1] & mask == tables.KIND_ONE_INT
                and stack[low + 2] >> tables.KIND_BITS == tables.OBJECT_ARRAY
            ):
                info = value_infos[stack[low + 4] >> tables.KIND_BITS]
                size, _ = read_int(data, stack[low + 1] >> tables.KIND_BITS, end)
                if info & tables.FORM_MASK != tables.ROWS:
                    return 0, 0, 0, tables.BAD_DTYPE, place
                if size != info >> tables.FORM_BITS:
                    return 0, 0, 0, tables.ROW_COUNT, place
                return tables.KIND_ARRAY_STATE, place, info, tables.OK, place
            if content == tables.KIND_LIST and stack[low + 1] & mask != tables.KIND_ONE_INT:
                return 0, 0, 0, tables.NOT_ONE_DIMENSIONAL, place
    elif count == 8 and is_number(data, stack[low], end, 3) and stack[low + 1] & mask == tables.KIND_STRING:
        plain = (
            stack[low + 2] & mask == tables.KIND_NONE
            and stack[low + 3] & mask == tables.KIND_NONE
            and stack[low + 4] & mask == tables.KIND_NONE
        )
        plain &= is_number(data, stack[low + 5], end, -1) and is_number(data, stack[low + 6], end, -1)
        if plain and stack[low + 7] & mask == tables.KIND_INT:
            if is_letter(data, stack[low + 1], end, tables.ORDER_BIG):
                return 0, 0, 0, tables.BIG_ENDIAN, place
            is_little = is_letter(data, stack[low + 1], end, tables.ORDER_LITTLE)
            flags, _ = read_int(data, stack[low + 7] >> tables.KIND_BITS, end)
            if (is_little or is_letter(data, stack[low + 1], end, tables.ORDER_NONE)) and flags >= 0:
                return tables.KIND_DTYPE_STATE, flags, 0, tables.OK, place
    return 0, 0, 0, tables.MALFORMED, place
