"""A pickle machine that can build one thing: an object array of packed rows. It calls nothing and imports nothing.

    file bytes ─▶ run_pickle ─▶ values   where each list or array of integers lies in the file, and how many it holds
                                dicts    three entries each: input_ids, loss_mask, seq_start_id
                                rows     one dict each

Integers are not decoded here: a list is a place in the file and a count, so the machine's memory does not grow with the
tokens. Everything on the stack, in the memo and in a dict is one int64, `payload << 5 | kind`. What the tables may take
is limited by `budget`, and every step is linear in the file, whatever the bytes say.

An opcode, a callable or a structure that NumPy does not write for such an array ends the run with a code;
`legacy_errors.py` puts it into words.
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from megatron_packed_sft.storage import pickle_tables as tables
from megatron_packed_sft.storage.pickle_bytes_kernel import (
    find_callable,
    find_newline,
    find_text,
    little_endian,
    payload_span,
    read_rare_int,
    skip_frame,
    skip_ints,
)
from megatron_packed_sft.storage.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.storage.pickle_tuple_kernel import make_tuple


@njit(cache=True, nogil=True)
def set_items(
    data: ByteArray, end: int, stack: LongArray, low: int, high: int, fields: LongArray, number: int, status: LongArray
) -> bool:
    """Put key-value pairs into a dict's three fields; False, with the status set, when one does not belong there."""
    for j in range(low, high, 2):
        key, entry = stack[j], stack[j + 1]
        status[1] = key >> tables.KIND_BITS
        status[3] = -1
        if key & tables.KIND_MASK != tables.KIND_STRING:
            status[0] = tables.BAD_KEY
            return False
        start, length = payload_span(data, key >> tables.KIND_BITS, end)
        field = find_text(data, start, length, tables.FIELD_TEXT, tables.FIELD_ENDS, 0)
        status[3] = field
        if field < 0:
            status[0] = tables.UNKNOWN_KEY
            return False
        if fields[3 * number + field] >= 0:
            status[0] = tables.DUPLICATE_KEY
            return False
        kind = entry & tables.KIND_MASK
        is_value = kind == tables.KIND_LIST or kind == tables.KIND_ARRAY or kind == tables.KIND_INT_TUPLE
        if not is_value and kind != tables.KIND_ONE_INT and kind != tables.KIND_EMPTY_TUPLE:
            status[0] = tables.BAD_VALUE
            return False
        fields[3 * number + field] = entry
    return True


@njit(cache=True, nogil=True)
def count_kind(stack: LongArray, low: int, high: int, kind: int) -> int:
    """Count the entries of a kind in a part of the stack."""
    count = 0
    for j in range(low, high):
        count += stack[j] & tables.KIND_MASK == kind
    return count


@njit(cache=True, nogil=True)
def grown(table: LongArray) -> LongArray:
    """Return a copy with room for twice as many entries."""
    larger = np.empty(2 * table.size, np.int64)
    for j in range(table.size):  # a slice assignment takes numba seconds to compile
        larger[j] = table[j]
    return larger


@njit(cache=True, nogil=True)
def run_pickle(
    data: ByteArray, start: int, num_rows: int, budget: int, status: LongArray
) -> tuple[LongArray, LongArray, LongArray, npt.NDArray[np.int32]]:
    """Run the pickle in `data[start:]`, which must hold `num_rows` rows and end with the data.

    Returns the values' places and infos, the dicts' fields (three entries each) and the dict of each row; all of it
    means something only when `status[0]` is OK. `status` gets the code, the place in the file, two details, and the
    bytes that the tables take.
    """
    end = data.size
    guess = min(num_rows, (end - start) // tables.SMALLEST_ROW)
    value_places = np.empty(3 * guess + 64, np.int64)
    value_infos = np.empty(3 * guess + 64, np.int64)
    fields = np.empty(3 * guess + 64, np.int64)
    memo = np.empty(4 * guess + 64, np.int64)
    rows = np.empty(num_rows, np.int32)
    stack = np.empty(tables.STACK_LIMIT, np.int64)
    depth = 0
    top_mark = -1  # where on the stack the last MARK is
    num_values = 0
    num_fields = 0
    num_memo = 0
    row = 0
    row_list = -1  # the value that is the list of rows
    open_list = -1  # the list of integers that was extended last, and the place where it may go on
    open_place = -1
    code = tables.OK
    place = start
    after = start + 2
    if end < after or data[start] != tables.PROTO or not 2 <= data[start + 1] <= 5:
        code = tables.BAD_PROTOCOL
    while code == tables.OK:
        place = after
        if place >= end:
            code = tables.TRUNCATED
            break
        op = data[place]

        # Find the end of the opcode's arguments before looking at what it does.
        num_bytes = np.int64(tables.ARGUMENT_BYTES[op])
        after = place + 1 + num_bytes
        if num_bytes < 0:
            code = tables.BAD_OPCODE
            break
        if after > end:
            code = tables.TRUNCATED
            break
        name = after
        if tables.IS_COUNTED[op]:
            length = little_endian(data, place + 1, num_bytes)
            if length < 0 or length > end - after:
                code = tables.TRUNCATED
                break
            after += length
        elif op == tables.GLOBAL:
            name = find_newline(data, after, end) + 1
            after = find_newline(data, name, end) + 1
            if name == 0 or after == 0:
                code = tables.TRUNCATED
                break
        elif op == tables.INT:
            _, after = read_rare_int(data, place, end)
            if after < 0:
                code = tables.MALFORMED
                break
        elif op == tables.FRAME and skip_frame(data, place, end) < 0:
            code = tables.TRUNCATED
            break

        # No opcode adds more than one entry to a table, so there is room for it from here on.
        grow_values = num_values == value_places.size
        grow_fields = num_fields + 3 > fields.size
        grow_memo = num_memo == memo.size
        if grow_values or grow_fields or grow_memo:
            total = 8 * (2 * value_places.size + fields.size + memo.size) + 4 * rows.size
            total += 32 * value_places.size * grow_values + 16 * fields.size * grow_fields + 16 * memo.size * grow_memo
            if total > budget:
                code = tables.OVER_BUDGET
                break
            if grow_values:
                value_places = grown(value_places)
                value_infos = grown(value_infos)
            if grow_fields:
                fields = grown(fields)
            if grow_memo:
                memo = grown(memo)

        pushed = np.int64(-1)
        if op == tables.MARK:
            behind, count = skip_ints(data, after, end)
            below = stack[depth - 1] if depth > 0 else np.int64(0)
            closing = data[behind] if count > 0 and behind < end else np.uint8(0)
            if closing == tables.APPENDS and below & tables.KIND_MASK == tables.KIND_LIST:
                # A whole batch of integers at once; this is where nearly all bytes of a file go by.
                value = below >> tables.KIND_BITS
                info = value_infos[value]
                if info == tables.INTS:
                    value_places[value] = after
                elif info & tables.FORM_MASK != tables.INTS or value != open_list or place != open_place:
                    code = tables.MALFORMED
                    break
                value_infos[value] = info + (count << tables.FORM_BITS)
                after = behind + 1
                open_list, open_place = value, after
            elif closing == tables.TUPLE:
                value_places[num_values] = after
                value_infos[num_values] = count << tables.FORM_BITS | tables.INTS
                pushed = np.int64(num_values) << tables.KIND_BITS | tables.KIND_INT_TUPLE
                if count == 1:
                    pushed = after << tables.KIND_BITS | tables.KIND_ONE_INT
                else:
                    num_values += 1
                after = behind + 1
            elif count > tables.LONGEST_STATE:
                place = behind
                code = tables.MIXED_LIST
            else:
                pushed = np.int64(top_mark + 1) << tables.KIND_BITS | tables.KIND_MARK
                top_mark = depth
        elif op == tables.FRAME:
            if open_place == place:
                open_place = after
        elif tables.INTEGER_BYTES[op] > 0 or op == tables.LONG1 or op == tables.INT:
            pushed = place << tables.KIND_BITS | tables.KIND_INT
        elif op == tables.NONE:
            pushed = np.int64(tables.KIND_NONE)
        elif op == tables.BINUNICODE or op == tables.SHORT_BINUNICODE or op == tables.BINUNICODE8:
            pushed = place << tables.KIND_BITS | tables.KIND_STRING
        elif tables.IS_COUNTED[op]:
            pushed = place << tables.KIND_BITS | tables.KIND_BYTES
        elif op == tables.EMPTY_TUPLE:
            pushed = np.int64(tables.KIND_EMPTY_TUPLE)
        elif op == tables.EMPTY_LIST:
            value_places[num_values] = place
            value_infos[num_values] = tables.INTS
            pushed = np.int64(num_values) << tables.KIND_BITS | tables.KIND_LIST
            num_values += 1
        elif op == tables.EMPTY_DICT:
            for field in range(3):
                fields[num_fields + field] = -1
            pushed = np.int64(num_fields // 3) << tables.KIND_BITS | tables.KIND_DICT
            num_fields += 3
        elif op == tables.BINPUT or op == tables.LONG_BINPUT or op == tables.MEMOIZE:
            slot = np.int64(num_memo)
            if op != tables.MEMOIZE:
                slot = little_endian(data, place + 1, num_bytes)
            # Picklers number their slots one after another.
            if slot > num_memo:
                code = tables.MEMO_GAP
                status[2] = slot
            elif depth == 0 or stack[depth - 1] & tables.KIND_MASK == tables.KIND_MARK:
                code = tables.MALFORMED
            else:
                memo[slot] = stack[depth - 1]
                num_memo += slot == num_memo
        elif op == tables.BINGET or op == tables.LONG_BINGET:
            slot = little_endian(data, place + 1, num_bytes)
            if slot >= num_memo:
                code = tables.MEMO_EMPTY
                status[2] = slot
            else:
                pushed = memo[slot]
        elif op == tables.GLOBAL:
            number = find_callable(data, place + 1, name - place - 2, name, after - name - 1)
            pushed = np.int64(number) << tables.KIND_BITS | tables.KIND_GLOBAL
            if number < 0:
                code = tables.FOREIGN_GLOBAL
                status[2] = -1
        elif op == tables.STACK_GLOBAL:
            if depth < 2 or count_kind(stack, depth - 2, depth, tables.KIND_STRING) != 2:
                code = tables.MALFORMED
                break
            status[2], status[3] = stack[depth - 2] >> tables.KIND_BITS, stack[depth - 1] >> tables.KIND_BITS
            module, module_length = payload_span(data, status[2], end)
            name, name_length = payload_span(data, status[3], end)
            number = find_callable(data, module, module_length, name, name_length)
            pushed = np.int64(number) << tables.KIND_BITS | tables.KIND_GLOBAL
            depth -= 2
            if number < 0:
                code = tables.FOREIGN_GLOBAL
        elif op == tables.REDUCE:
            if depth < 2 or stack[depth - 2] & tables.KIND_MASK != tables.KIND_GLOBAL:
                code = tables.MALFORMED
                break
            number = stack[depth - 2] >> tables.KIND_BITS
            kind = stack[depth - 1] & tables.KIND_MASK
            payload = stack[depth - 1] >> tables.KIND_BITS
            depth -= 2
            if kind != tables.CALLABLE_ARGUMENTS[number]:
                code = tables.BAD_CALL
                status[2] = number
                break
            if kind == tables.KIND_RECONSTRUCT_ARGUMENTS:
                value_infos[num_values] = tables.UNBUILT
                payload = np.int64(num_values)
                num_values += 1
            pushed = payload << tables.KIND_BITS | tables.CALLABLE_RESULTS[number]
        elif op == tables.BUILD:
            state = stack[depth - 1] if depth >= 2 else np.int64(0)
            built = stack[depth - 2] if depth >= 2 else np.int64(0)
            kinds = (state & tables.KIND_MASK, built & tables.KIND_MASK)
            state, built = state >> tables.KIND_BITS, built >> tables.KIND_BITS
            if kinds == (tables.KIND_ARRAY_STATE, tables.KIND_ARRAY):
                if value_infos[built] != tables.UNBUILT:
                    code = tables.MALFORMED
                value_places[built], value_infos[built] = value_places[state], value_infos[state]
            elif kinds == (tables.KIND_DTYPE_STATE, tables.KIND_DTYPE):
                # The byte order is checked already; there is nothing left to set.
                if state != (tables.OBJECT_FLAGS if built == tables.OBJECT_ARRAY else 0):
                    code = tables.MALFORMED
            else:
                code = tables.MALFORMED
            depth -= 1
        elif op == tables.APPEND or op == tables.APPENDS:
            first = top_mark + 1 if op == tables.APPENDS else depth - 1
            owner = top_mark - 1 if op == tables.APPENDS else depth - 2
            if owner < 0 or first >= depth or stack[owner] & tables.KIND_MASK != tables.KIND_LIST:
                code = tables.MALFORMED
                break
            value = stack[owner] >> tables.KIND_BITS
            info = value_infos[value]
            if op == tables.APPEND and stack[first] & tables.KIND_MASK == tables.KIND_INT:
                item = stack[first] >> tables.KIND_BITS
                if info == tables.INTS:
                    value_places[value] = item
                elif info & tables.FORM_MASK != tables.INTS or value != open_list or item != open_place:
                    code = tables.MALFORMED
                    break
                value_infos[value] = info + (1 << tables.FORM_BITS)
                open_list, open_place = value, after
            else:
                if info == tables.INTS and row_list < 0:
                    row_list = value
                    info = tables.ROWS
                if value != row_list or count_kind(stack, first, depth, tables.KIND_DICT) != depth - first:
                    code = tables.MIXED_LIST
                    break
                for j in range(first, depth):
                    number = stack[j] >> tables.KIND_BITS
                    for field in range(3):
                        if fields[3 * number + field] < 0 and code == tables.OK:
                            code = tables.MISSING_KEY
                            status[2], status[3] = row, field
                    if row == num_rows:
                        code = tables.ROW_COUNT
                    if code != tables.OK:
                        break
                    rows[row] = number
                    row += 1
                value_infos[value] = np.int64(row) << tables.FORM_BITS | tables.ROWS
            depth = owner + 1
            if op == tables.APPENDS:
                top_mark = (stack[owner + 1] >> tables.KIND_BITS) - 1
        elif op == tables.SETITEM or op == tables.SETITEMS:
            first = top_mark + 1 if op == tables.SETITEMS else depth - 2
            owner = top_mark - 1 if op == tables.SETITEMS else depth - 3
            if owner < 0 or stack[owner] & tables.KIND_MASK != tables.KIND_DICT or (depth - first) % 2 != 0:
                code = tables.MALFORMED
                break
            number = stack[owner] >> tables.KIND_BITS
            if not set_items(data, end, stack, first, depth, fields, number, status):
                code = status[0]
                place = status[1]
                status[2] = row + count_kind(stack, 0, owner, tables.KIND_DICT)
                break
            depth = owner + 1
            if op == tables.SETITEMS:
                top_mark = (stack[owner + 1] >> tables.KIND_BITS) - 1
        elif op == tables.STOP:
            built = stack[0] if depth == 1 else np.int64(0)
            info = value_infos[built >> tables.KIND_BITS] if built & tables.KIND_MASK == tables.KIND_ARRAY else 0
            if info & tables.FORM_MASK != tables.ROWS:
                code = tables.NOT_ROWS
            elif row != num_rows or info >> tables.FORM_BITS != num_rows:
                code = tables.ROW_COUNT
            elif after != end:
                code = tables.TRAILING_BYTES
            break
        else:  # TUPLE, TUPLE1, TUPLE2, TUPLE3
            count = np.int64(op) - tables.TUPLE1 + 1 if op != tables.TUPLE else np.int64(depth - top_mark - 1)
            if count > depth or (op == tables.TUPLE and top_mark < 0):
                code = tables.MALFORMED
                break
            kind, payload, info, code, place = make_tuple(data, end, stack, depth - count, count, value_infos, place)
            depth -= count
            if op == tables.TUPLE:
                depth = top_mark
                top_mark = (stack[depth] >> tables.KIND_BITS) - 1
            if info != 0:
                value_places[num_values] = payload
                value_infos[num_values] = info
                payload = np.int64(num_values)
                num_values += 1
            pushed = payload << tables.KIND_BITS | kind

        if pushed >= 0:
            if depth == tables.STACK_LIMIT:
                code = tables.TOO_DEEP
                break
            stack[depth] = pushed
            depth += 1
    status[0] = code
    status[1] = place
    status[4] = 8 * (2 * value_places.size + fields.size) + 4 * rows.size
    return value_places[:num_values], value_infos[:num_values], fields[:num_fields], rows
