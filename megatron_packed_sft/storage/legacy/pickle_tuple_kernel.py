"""The tuples of NumPy's own pickles, recognised one by one; the machine in `pickle_kernel.py` knows no others.

(ndarray, (0,), b"b")                       arguments of _reconstruct
("i8", False, True)                         arguments of dtype
(3, "<", None, None, None, -1, -1, 0)       state of a dtype
(1, (n,), dtype, False, bytes or list)      state of an array
(bytes, dtype, (n,), "C")                   arguments of _frombuffer (protocol 5)
(string, "latin1")                          arguments of encode (bytes in protocol 2)
(), (n,), (a, b, c, ...)                    no arguments, a shape, the integers of a bin
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np

from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_bytes_kernel import (
    dtype_form,
    find_text,
    is_letter,
    is_number,
    kind_of,
    payload_of,
    payload_span,
    read_int,
)
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.support.compiled import inner_kernel

# What each function here returns: the tuple's kind, its payload, its info and a code. With an info other than 0 the
# tuple needs a value, and the payload is the value's place. With a code other than OK the payload is the error's place.
Recognised = tuple[int, int, int, int]


@inner_kernel
def integers(data: ByteArray, stack: LongArray, low: int, count: int, place: int) -> Recognised:
    """Recognise a short tuple of integers. They must lie together in the file, as those of a list."""
    first = payload_of(stack[low])
    at = first
    for j in range(count):
        while at < data.size and data[at] == tables.FRAME:
            at += 9
        if stack[low + j] != (at << tables.KIND_BITS | tables.KIND_INT):
            return 0, place, 0, tables.MALFORMED
        _, at = read_int(data, at, data.size)
    if count == 1:
        return tables.KIND_ONE_INT, first, 0, tables.OK
    return tables.KIND_INT_TUPLE, first, count << tables.FORM_BITS | tables.INTS, tables.OK


@inner_kernel
def encode_arguments(data: ByteArray, stack: LongArray, low: int, place: int) -> Recognised:
    """Recognise (string, "latin1")."""
    if kind_of(stack[low]) == tables.KIND_STRING and kind_of(stack[low + 1]) == tables.KIND_STRING:
        start, length = payload_span(data, payload_of(stack[low + 1]), data.size)
        if find_text(data, start, length, tables.LATIN1_TEXT, tables.LATIN1_ENDS, 0) == 0:
            return tables.KIND_ENCODE_ARGUMENTS, payload_of(stack[low]), 0, tables.OK
    return 0, place, 0, tables.MALFORMED


@inner_kernel
def call_arguments(data: ByteArray, stack: LongArray, low: int, place: int) -> Recognised:
    """Recognise (ndarray, (0,), b"b") and ("i8", False, True)."""
    first, second, third = stack[low], stack[low + 1], stack[low + 2]
    if kind_of(first) == tables.KIND_GLOBAL and payload_of(first) == tables.CALLABLE_NDARRAY:
        if kind_of(second) == tables.KIND_ONE_INT and is_letter(data, third, tables.LETTER_B):
            size, _ = read_int(data, payload_of(second), data.size)
            if size == 0:
                return tables.KIND_RECONSTRUCT_ARGUMENTS, 0, 0, tables.OK
    elif kind_of(first) == tables.KIND_STRING and is_number(data, second, 0) and is_number(data, third, 1):
        form = dtype_form(data, payload_of(first))
        if form >= 0:
            return tables.KIND_DTYPE_ARGUMENTS, form, 0, tables.OK
        return 0, payload_of(first), 0, tables.BAD_DTYPE
    return 0, place, 0, tables.MALFORMED


@inner_kernel
def array_of(data: ByteArray, kind: int, shape: int, dtype: int, content: int, place: int) -> Recognised:
    """Join shape, dtype and bytes of an array of integers to a tuple of this kind."""
    form = payload_of(dtype)
    if kind_of(shape) != tables.KIND_ONE_INT:
        return 0, place, 0, tables.NOT_ONE_DIMENSIONAL
    if form == tables.OBJECT_ARRAY:
        return 0, place, 0, tables.BAD_DTYPE
    count, _ = read_int(data, payload_of(shape), data.size)
    start, length = np.int64(0), np.int64(0)
    if kind_of(content) != tables.KIND_EMPTY_BYTES:
        start, length = payload_span(data, payload_of(content), data.size)
    if count < 0 or count > length:
        return 0, place, 0, tables.ARRAY_SIZE
    num_bytes = count << (form & 3)
    info = count << tables.FORM_BITS | form
    if kind_of(content) == tables.KIND_LATIN1:
        # In UTF-8 each byte takes one or two; which, is found when the array is decoded.
        if num_bytes <= length <= 2 * num_bytes:
            return kind, payload_of(content), info | tables.LATIN1_FORM, tables.OK
    elif num_bytes == length:
        return kind, start, info, tables.OK
    return 0, place, 0, tables.ARRAY_SIZE


@inner_kernel
def array_state(data: ByteArray, stack: LongArray, low: int, value_infos: LongArray, place: int) -> Recognised:
    """Recognise (1, (n,), dtype, False, bytes) and, for the array of all bins, (1, (n,), dtype, False, list)."""
    shape, dtype, content = stack[low + 1], stack[low + 2], stack[low + 4]
    is_state = is_number(data, stack[low], 1) and is_number(data, stack[low + 3], 0)
    if not is_state or kind_of(dtype) != tables.KIND_DTYPE:
        return 0, place, 0, tables.MALFORMED
    kind = kind_of(content)
    if kind == tables.KIND_BYTES or kind == tables.KIND_LATIN1 or kind == tables.KIND_EMPTY_BYTES:
        return array_of(data, tables.KIND_ARRAY_STATE, shape, dtype, content, place)
    if kind != tables.KIND_LIST or payload_of(dtype) != tables.OBJECT_ARRAY:
        return 0, place, 0, tables.MALFORMED
    if kind_of(shape) != tables.KIND_ONE_INT:
        return 0, place, 0, tables.NOT_ONE_DIMENSIONAL
    info = value_infos[payload_of(content)]
    size, _ = read_int(data, payload_of(shape), data.size)
    if info & tables.FORM_MASK != tables.BINS:
        return 0, place, 0, tables.BAD_DTYPE
    if size != info >> tables.FORM_BITS:
        return 0, place, 0, tables.BIN_COUNT
    return tables.KIND_ARRAY_STATE, place, info, tables.OK


@inner_kernel
def dtype_state(data: ByteArray, stack: LongArray, low: int, place: int) -> Recognised:
    """Recognise (3, byte order, None, None, None, -1, -1, flags): a dtype without fields, shape or metadata."""
    is_plain = is_number(data, stack[low], 3)
    for j in range(2, 5):
        is_plain &= kind_of(stack[low + j]) == tables.KIND_NONE
    for j in range(5, 7):
        is_plain &= is_number(data, stack[low + j], -1)
    if is_plain and kind_of(stack[low + 7]) == tables.KIND_INT:
        order = stack[low + 1]
        flags, _ = read_int(data, payload_of(stack[low + 7]), data.size)
        if is_letter(data, order, tables.ORDER_BIG):
            return 0, place, 0, tables.BIG_ENDIAN
        is_known = is_letter(data, order, tables.ORDER_LITTLE) or is_letter(data, order, tables.ORDER_NONE)
        if is_known and flags >= 0:
            return tables.KIND_DTYPE_STATE, flags, 0, tables.OK
    return 0, place, 0, tables.MALFORMED


@inner_kernel
def make_tuple(
    data: ByteArray, stack: LongArray, low: int, count: int, value_infos: LongArray, place: int
) -> Recognised:
    """Recognise the tuple of the `count` entries from `stack[low]` on; its opcode is at `place`."""
    if count == 0:
        return tables.KIND_EMPTY_TUPLE, 0, 0, tables.OK
    if kind_of(stack[low]) == tables.KIND_INT and count <= 3:
        return integers(data, stack, low, count, place)
    if count == 2:
        return encode_arguments(data, stack, low, place)
    if count == 3:
        return call_arguments(data, stack, low, place)
    if count == 4:
        content, dtype, shape, order = stack[low], stack[low + 1], stack[low + 2], stack[low + 3]
        is_buffer = kind_of(content) == tables.KIND_BYTES and kind_of(dtype) == tables.KIND_DTYPE
        if is_buffer and is_letter(data, order, tables.LETTER_C):
            return array_of(data, tables.KIND_BUFFER_ARGUMENTS, shape, dtype, content, place)
    elif count == 5:
        return array_state(data, stack, low, value_infos, place)
    elif count == 8:
        return dtype_state(data, stack, low, place)
    return 0, place, 0, tables.MALFORMED
