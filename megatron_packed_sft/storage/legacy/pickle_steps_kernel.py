"""What each opcode does to the pickle machine: its stack, its tables and its registers. `pickle_kernel` runs them."""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_bytes_kernel import (
    find_callable,
    find_newline,
    find_text,
    kind_of,
    little_endian,
    payload_of,
    payload_span,
    read_rare_int,
    skip_frame,
    skip_ints,
)
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.storage.legacy.pickle_tuple_kernel import make_tuple
from megatron_packed_sft.support.compiled import inner_kernel

# The machine's registers.
DEPTH = 0  # of the stack
TOP_MARK = 1  # where on the stack the last MARK is, or -1
NUM_VALUES = 2
NUM_DICTS = 3
NUM_MEMO = 4
NUM_BINS = 5
BIN_LIST = 6  # the value that is the list of bins, or -1
OPEN_LIST = 7  # the list of integers that was extended last, and the place in the file where it may continue
OPEN_PLACE = 8
NUM_REGISTERS = 9


@inner_kernel
def find_end(data: ByteArray, place: int) -> tuple[int, int]:
    """Return the place behind an opcode and its arguments, and a code."""
    end = data.size
    if place >= end:
        return place, tables.TRUNCATED
    op = data[place]
    num_bytes = np.int64(tables.ARGUMENT_BYTES[op])
    after = place + 1 + num_bytes
    if num_bytes < 0:
        return place, tables.BAD_OPCODE
    if after > end:
        return place, tables.TRUNCATED
    if tables.IS_COUNTED[op]:
        length = little_endian(data, place + 1, num_bytes)
        return after + length, (tables.OK if 0 <= length <= end - after else tables.TRUNCATED)
    if op == tables.GLOBAL:
        newline = find_newline(data, after, end)
        newline = find_newline(data, newline + 1, end) if newline >= 0 else newline
        return newline + 1, (tables.OK if newline >= 0 else tables.TRUNCATED)
    if op == tables.INT:
        _, after = read_rare_int(data, place, end)
        return after, (tables.OK if after >= 0 else tables.MALFORMED)
    if op == tables.FRAME:
        return after, (tables.OK if skip_frame(data, place, end) >= 0 else tables.TRUNCATED)
    return after, tables.OK


@inner_kernel
def push(stack: LongArray, registers: LongArray, payload: int, kind: int) -> int:
    """Put an entry on the stack; return a code."""
    depth = registers[DEPTH]
    if depth == tables.STACK_LIMIT:
        return tables.TOO_DEEP
    stack[depth] = payload << tables.KIND_BITS | kind
    registers[DEPTH] = depth + 1
    return tables.OK


@inner_kernel
def pop_to(stack: LongArray, registers: LongArray, depth: int, with_mark: bool) -> None:
    """Cut the stack down to `depth`; with the mark that stands there, if there is one."""
    if with_mark:
        registers[TOP_MARK] = payload_of(stack[depth]) - 1
    registers[DEPTH] = depth


@inner_kernel
def extend_list(
    value_places: LongArray, value_infos: LongArray, registers: LongArray, value: int, place: int, count: int
) -> bool:
    """Add integers to a list. All of a list's integers must lie together in the file; False when they do not."""
    info = value_infos[value]
    if info == tables.INTS:
        value_places[value] = place
    elif info & tables.FORM_MASK != tables.INTS or value != registers[OPEN_LIST] or place != registers[OPEN_PLACE]:
        return False
    value_infos[value] = info + (count << tables.FORM_BITS)
    return True


@inner_kernel
def begin_batch(
    data: ByteArray,
    place: int,
    stack: LongArray,
    value_places: LongArray,
    value_infos: LongArray,
    registers: LongArray,
) -> tuple[int, int]:
    """Run a MARK; return the place to continue at, and a code.

    A whole batch of integers is taken at once: nearly all bytes of a file go by in `skip_ints`.
    """
    end = data.size
    depth = registers[DEPTH]
    after, count = skip_ints(data, place + 1, end)
    closing = data[after] if count > 0 and after < end else np.uint8(0)
    if closing == tables.APPENDS and depth > 0 and kind_of(stack[depth - 1]) == tables.KIND_LIST:
        value = payload_of(stack[depth - 1])
        if not extend_list(value_places, value_infos, registers, value, place, count):
            return place, tables.MALFORMED
        registers[OPEN_LIST] = value
        registers[OPEN_PLACE] = after + 1
        return after + 1, tables.OK
    if closing == tables.TUPLE and count > 1:
        value = registers[NUM_VALUES]
        value_places[value] = place
        value_infos[value] = count << tables.FORM_BITS | tables.INTS
        registers[NUM_VALUES] = value + 1
        return after + 1, push(stack, registers, value, tables.KIND_INT_TUPLE)
    if count > tables.LONGEST_STATE:
        return after, tables.MIXED_LIST
    code = push(stack, registers, registers[TOP_MARK] + 1, tables.KIND_MARK)
    registers[TOP_MARK] = depth
    return place + 1, code


@inner_kernel
def append_items(
    op: int,
    after: int,
    stack: LongArray,
    value_places: LongArray,
    value_infos: LongArray,
    fields: LongArray,
    bins: npt.NDArray[np.int32],
    registers: LongArray,
    status: LongArray,
) -> int:
    """Run an APPEND of one integer, or an APPEND or APPENDS of bins; return a code."""
    depth = registers[DEPTH]
    first = registers[TOP_MARK] + 1 if op == tables.APPENDS else depth - 1
    owner = registers[TOP_MARK] - 1 if op == tables.APPENDS else depth - 2
    if owner < 0 or first >= depth or kind_of(stack[owner]) != tables.KIND_LIST:
        return tables.MALFORMED
    value = payload_of(stack[owner])
    if op == tables.APPEND and kind_of(stack[first]) == tables.KIND_INT:
        if not extend_list(value_places, value_infos, registers, value, payload_of(stack[first]), 1):
            return tables.MALFORMED
        registers[OPEN_LIST] = value
        registers[OPEN_PLACE] = after
    else:
        if value_infos[value] == tables.INTS and registers[BIN_LIST] < 0:
            registers[BIN_LIST] = value
        if value != registers[BIN_LIST]:
            return tables.MIXED_LIST
        for j in range(first, depth):
            index = registers[NUM_BINS]
            number = payload_of(stack[j])
            if kind_of(stack[j]) != tables.KIND_DICT:
                return tables.MIXED_LIST
            for field in range(3):
                if fields[3 * number + field] < 0:
                    status[2], status[3] = index, field
                    return tables.MISSING_KEY
            if index == bins.size:
                return tables.BIN_COUNT
            bins[index] = number
            registers[NUM_BINS] = index + 1
        value_infos[value] = registers[NUM_BINS] << tables.FORM_BITS | tables.BINS
    pop_to(stack, registers, owner + 1, op == tables.APPENDS)
    return tables.OK


@inner_kernel
def set_items(
    data: ByteArray, op: int, stack: LongArray, fields: LongArray, registers: LongArray, status: LongArray
) -> int:
    """Run a SETITEM or SETITEMS; return a code."""
    depth = registers[DEPTH]
    first = registers[TOP_MARK] + 1 if op == tables.SETITEMS else depth - 2
    owner = registers[TOP_MARK] - 1 if op == tables.SETITEMS else depth - 3
    if owner < 0 or kind_of(stack[owner]) != tables.KIND_DICT or (depth - first) % 2 != 0:
        return tables.MALFORMED
    number = payload_of(stack[owner])
    # For an error: the bins in the list so far, and those that wait on the stack.
    status[2] = registers[NUM_BINS]
    for j in range(owner):
        status[2] += kind_of(stack[j]) == tables.KIND_DICT
    for j in range(first, depth, 2):
        status[1], status[3] = payload_of(stack[j]), -1
        if kind_of(stack[j]) != tables.KIND_STRING:
            return tables.BAD_KEY
        start, length = payload_span(data, payload_of(stack[j]), data.size)
        field = find_text(data, start, length, tables.FIELD_TEXT, tables.FIELD_ENDS, 0)
        status[3] = field
        if field < 0:
            return tables.UNKNOWN_KEY
        if fields[3 * number + field] >= 0:
            return tables.DUPLICATE_KEY
        if not tables.IS_FIELD_KIND[kind_of(stack[j + 1])]:
            return tables.BAD_VALUE
        fields[3 * number + field] = stack[j + 1]
    pop_to(stack, registers, owner + 1, op == tables.SETITEMS)
    return tables.OK


@inner_kernel
def find_global(
    data: ByteArray, place: int, after: int, stack: LongArray, registers: LongArray, status: LongArray
) -> int:
    """Run a GLOBAL or STACK_GLOBAL; return a code."""
    if data[place] == tables.GLOBAL:
        status[2] = -1
        module = place + 1
        name = find_newline(data, module, data.size) + 1
        module_length, name_length = name - 1 - module, after - 1 - name
    else:
        depth = registers[DEPTH]
        if (
            depth < 2
            or kind_of(stack[depth - 2]) != tables.KIND_STRING
            or kind_of(stack[depth - 1]) != tables.KIND_STRING
        ):
            return tables.MALFORMED
        status[2], status[3] = payload_of(stack[depth - 2]), payload_of(stack[depth - 1])
        module, module_length = payload_span(data, status[2], data.size)
        name, name_length = payload_span(data, status[3], data.size)
        registers[DEPTH] = depth - 2
    number = find_callable(data, module, module_length, name, name_length)
    return push(stack, registers, number, tables.KIND_GLOBAL) if number >= 0 else tables.FOREIGN_GLOBAL


@inner_kernel
def call(stack: LongArray, value_infos: LongArray, registers: LongArray, status: LongArray) -> int:
    """Run a REDUCE: not a call, but the entry that stands for its result. Return a code."""
    depth = registers[DEPTH]
    if depth < 2 or kind_of(stack[depth - 2]) != tables.KIND_GLOBAL:
        return tables.MALFORMED
    number = payload_of(stack[depth - 2])
    kind = kind_of(stack[depth - 1])
    payload = payload_of(stack[depth - 1])
    status[2] = number
    if kind != tables.CALLABLE_ARGUMENTS[number]:
        return tables.BAD_CALL
    if kind == tables.KIND_RECONSTRUCT_ARGUMENTS:
        payload = registers[NUM_VALUES]
        value_infos[payload] = tables.UNBUILT
        registers[NUM_VALUES] = payload + 1
    registers[DEPTH] = depth - 2
    return push(stack, registers, payload, tables.CALLABLE_RESULTS[number])


@inner_kernel
def build(stack: LongArray, value_places: LongArray, value_infos: LongArray, registers: LongArray) -> int:
    """Run a BUILD: give an array its content, or check a dtype's state. Return a code."""
    depth = registers[DEPTH]
    if depth < 2:
        return tables.MALFORMED
    kind, state = kind_of(stack[depth - 1]), payload_of(stack[depth - 1])
    owner_kind, owner = kind_of(stack[depth - 2]), payload_of(stack[depth - 2])
    registers[DEPTH] = depth - 1
    if kind == tables.KIND_ARRAY_STATE and owner_kind == tables.KIND_ARRAY and value_infos[owner] == tables.UNBUILT:
        value_places[owner] = value_places[state]
        value_infos[owner] = value_infos[state]
        return tables.OK
    if kind == tables.KIND_DTYPE_STATE and owner_kind == tables.KIND_DTYPE:
        # Its byte order was checked with the tuple; there is nothing left to set.
        expected = tables.OBJECT_FLAGS if owner == tables.OBJECT_ARRAY else 0
        return tables.OK if state == expected else tables.MALFORMED
    return tables.MALFORMED


@inner_kernel
def use_memo(
    data: ByteArray, place: int, stack: LongArray, memo: LongArray, registers: LongArray, status: LongArray
) -> int:
    """Run an opcode that stores the stack's top in the memo or fetches it from there; return a code."""
    op = data[place]
    num_memo = registers[NUM_MEMO]
    slot = num_memo
    if op != tables.MEMOIZE:
        slot = little_endian(data, place + 1, np.int64(tables.ARGUMENT_BYTES[op]))
    status[2] = slot
    if op == tables.BINGET or op == tables.LONG_BINGET:
        if slot >= num_memo:
            return tables.MEMO_EMPTY
        return push(stack, registers, payload_of(memo[slot]), kind_of(memo[slot]))
    depth = registers[DEPTH]
    if slot > num_memo:  # picklers number their slots one after another
        return tables.MEMO_GAP
    if depth == 0 or kind_of(stack[depth - 1]) == tables.KIND_MARK:
        return tables.MALFORMED
    memo[slot] = stack[depth - 1]
    registers[NUM_MEMO] = max(num_memo, slot + 1)
    return tables.OK


@inner_kernel
def close_tuple(
    data: ByteArray,
    place: int,
    stack: LongArray,
    value_places: LongArray,
    value_infos: LongArray,
    registers: LongArray,
    status: LongArray,
) -> int:
    """Run a TUPLE, TUPLE1, TUPLE2 or TUPLE3; return a code."""
    op = data[place]
    depth = registers[DEPTH]
    count = np.int64(op) - tables.TUPLE1 + 1 if op != tables.TUPLE else depth - registers[TOP_MARK] - 1
    if count > depth or (op == tables.TUPLE and registers[TOP_MARK] < 0):
        return tables.MALFORMED
    kind, payload, info, code = make_tuple(data, stack, depth - count, count, value_infos, place)
    if code != tables.OK:
        status[1] = payload
        return code
    if info != 0:
        value = registers[NUM_VALUES]
        value_places[value] = payload
        value_infos[value] = info
        registers[NUM_VALUES] = value + 1
        payload = value
    pop_to(stack, registers, depth - count - (op == tables.TUPLE), op == tables.TUPLE)
    return push(stack, registers, payload, kind)


@inner_kernel
def stop(after: int, end: int, num_bins: int, stack: LongArray, value_infos: LongArray, registers: LongArray) -> int:
    """Check what a STOP leaves: one array of all bins, and no byte behind it. Return a code."""
    if registers[DEPTH] != 1 or kind_of(stack[0]) != tables.KIND_ARRAY:
        return tables.NOT_BINS
    info = value_infos[payload_of(stack[0])]
    if info & tables.FORM_MASK != tables.BINS:
        return tables.NOT_BINS
    if registers[NUM_BINS] != num_bins or info >> tables.FORM_BITS != num_bins:
        return tables.BIN_COUNT
    return tables.OK if after == end else tables.TRAILING_BYTES
