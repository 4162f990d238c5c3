"""Reading single things out of pickle bytes: integers, strings, names. The machine is in `pickle_kernel.py`.

Every function takes the bytes, a place in them and their end, and never reads at or behind the end.
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np

from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.support.compiled import inner_kernel, kernel


@inner_kernel
def kind_of(entry: int) -> int:
    """Return what an entry is."""
    return entry & tables.KIND_MASK


@inner_kernel
def payload_of(entry: int) -> int:
    """Return what an entry refers to."""
    return entry >> tables.KIND_BITS


@inner_kernel
def little_endian(data: ByteArray, start: int, num_bytes: int) -> int:
    """Read an unsigned integer of up to eight bytes; one of 2**63 or more comes out negative."""
    value = np.int64(0)
    for j in range(num_bytes):
        value |= np.int64(data[start + j]) << (8 * j)
    return value


@kernel
def payload_span(data: ByteArray, place: int, end: int) -> tuple[int, int]:
    """Return where the bytes of the string or bytes opcode at `place` begin, and how many there are.

    The length was checked when the opcode was met; it is checked again because the file may change under the map.
    """
    num_bytes = np.int64(tables.ARGUMENT_BYTES[data[place]])
    start = place + 1 + num_bytes
    if num_bytes < 1 or start > end:
        return place, np.int64(0)
    length = little_endian(data, place + 1, num_bytes)
    if length < 0 or length > end - start:
        return start, np.int64(0)
    return start, length


@inner_kernel
def read_rare_int(data: ByteArray, place: int, end: int) -> tuple[int, int]:
    """Read a LONG1 or INT; return its value (cut to +-2**62) and the place behind it, or -1 when there is none."""
    value = np.int64(0)
    if end - place < 2:
        return value, np.int64(-1)
    if data[place] == tables.LONG1:
        num_bytes = np.int64(data[place + 1])
        after = place + 2 + num_bytes
        if after > end:
            return value, np.int64(-1)
        if num_bytes == 0:
            return value, after
        negative = data[after - 1] >= 128
        if num_bytes > 7:
            return (-tables.SATURATED if negative else tables.SATURATED), after
        value = little_endian(data, place + 2, num_bytes)
        return (value - (np.int64(1) << (8 * num_bytes)) if negative else value), after
    if data[place] == tables.INT:
        at = place + 1
        negative = data[at] == tables.MINUS_SIGN
        if negative:
            at += 1
        first_digit = at
        while at < end and tables.DIGIT_ZERO <= data[at] <= tables.DIGIT_NINE and at - first_digit < 18:
            value = value * 10 + np.int64(data[at]) - tables.DIGIT_ZERO
            at += 1
        if at < end and at > first_digit and data[at] == tables.NEWLINE:
            return (-value if negative else value), at + 1
    return value, np.int64(-1)


@inner_kernel
def read_int(data: ByteArray, place: int, end: int) -> tuple[int, int]:
    """Read the integer or boolean at `place`; return its value and the place behind it, or -1 when there is none."""
    if place >= end:
        return np.int64(0), np.int64(-1)
    op = data[place]
    size = np.int64(tables.INTEGER_BYTES[op])
    if size == 0:
        return read_rare_int(data, place, end)
    if place + size > end:
        return np.int64(0), np.int64(-1)
    if size == 1:
        return np.int64(op == tables.NEWTRUE), place + 1
    value = little_endian(data, place + 1, size - 1)
    if op == tables.BININT and value >= 2**31:
        value -= 2**32
    return value, place + size


@inner_kernel
def skip_frame(data: ByteArray, place: int, end: int) -> int:
    """Return the place behind a FRAME opcode, or -1 when its frame reaches beyond the file."""
    if end - place < 9:
        return np.int64(-1)
    length = little_endian(data, place + 1, 8)
    return place + 9 if 0 <= length <= end - place - 9 else np.int64(-1)


@inner_kernel
def skip_ints(data: ByteArray, place: int, end: int) -> tuple[int, int]:
    """Return the place behind a run of integers and how many they are. Frames may begin anywhere between them."""
    count = np.int64(0)
    while place < end:
        size = np.int64(tables.INTEGER_BYTES[data[place]])
        if size > 0:
            if place + size > end:
                break
            place += size
            count += 1
            continue
        if data[place] == tables.FRAME:
            after = skip_frame(data, place, end)
        else:
            _, after = read_rare_int(data, place, end)
            count += after >= 0
        if after < 0:
            break
        place = after
    return place, count


@inner_kernel
def find_text(data: ByteArray, start: int, length: int, text: ByteArray, ends: LongArray, first: int) -> int:
    """Return the first entry of a text table, from `first` on, that equals these bytes; -1 when none does."""
    for entry in range(first, ends.size - 1):
        if ends[entry + 1] - ends[entry] != length:
            continue
        same = True
        for j in range(length):
            same &= data[start + j] == text[ends[entry] + j]
        if same:
            return np.int64(entry)
    return np.int64(-1)


@inner_kernel
def find_callable(data: ByteArray, module: int, module_length: int, name: int, name_length: int) -> int:
    """Return the number of an accepted callable, or -1."""
    entry = find_text(data, module, module_length, tables.MODULE_TEXT, tables.MODULE_ENDS, 0)
    while entry >= 0:
        if find_text(data, name, name_length, tables.NAME_TEXT, tables.NAME_ENDS, entry) == entry:
            return entry
        entry = find_text(data, module, module_length, tables.MODULE_TEXT, tables.MODULE_ENDS, entry + 1)
    return -1


@inner_kernel
def find_newline(data: ByteArray, place: int, end: int) -> int:
    """Return the place of the next newline, or -1."""
    while place < end:
        if data[place] == tables.NEWLINE:
            return place
        place += 1
    return -1


@inner_kernel
def dtype_form(data: ByteArray, place: int) -> int:
    """Return the form of an array whose dtype has this name ("i8", "b1", "O8"), or -1 when it is not accepted."""
    start, length = payload_span(data, place, data.size)
    entry = find_text(data, start, length, tables.DTYPE_TEXT, tables.DTYPE_ENDS, 0)
    return tables.DTYPE_FORMS[entry] if entry >= 0 else np.int64(-1)


@inner_kernel
def is_letter(data: ByteArray, entry: int, letter: int) -> bool:
    """Return whether a string or bytes entry is this one ASCII character."""
    kind = kind_of(entry)
    if kind != tables.KIND_STRING and kind != tables.KIND_BYTES and kind != tables.KIND_LATIN1:
        return False
    start, length = payload_span(data, payload_of(entry), data.size)
    return length == 1 and data[start] == letter


@inner_kernel
def is_number(data: ByteArray, entry: int, number: int) -> bool:
    """Return whether an entry is this integer (or boolean)."""
    if kind_of(entry) != tables.KIND_INT:
        return False
    value, _ = read_int(data, payload_of(entry), data.size)
    return value == number
