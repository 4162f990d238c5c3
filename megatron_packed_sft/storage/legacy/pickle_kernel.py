"""A pickle interpreter that can build one thing: an object array of packed bins. It calls and imports nothing.

    file bytes ─▶ run_pickle ─▶ values   where each list or array of integers is in the file, and how many it holds
                                fields   three entries per dict: input_ids, loss_mask, seq_start_id
                                bins     one dict each

Integers are not decoded here: a list is a place in the file and a count, so the machine's memory does not grow with the
tokens. Everything on the stack, in the memo and in a dict is one int64, `payload << 5 | kind`. What the tables may take
is limited by `budget`, and every step is linear in the file, whatever the bytes say.

An opcode, a callable or a structure that NumPy does not write for such an array ends the run with a code;
`error_messages` puts it into words.
"""

# Numba has one integer type where Python has int and np.int64, and unifies them itself.
# mypy: disable-error-code="assignment, return-value, arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_steps_kernel import (
    BIN_LIST,
    NUM_DICTS,
    NUM_MEMO,
    NUM_REGISTERS,
    NUM_VALUES,
    OPEN_LIST,
    OPEN_PLACE,
    TOP_MARK,
    append_items,
    begin_batch,
    build,
    call,
    close_tuple,
    find_end,
    find_global,
    push,
    set_items,
    stop,
    use_memo,
)
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray
from megatron_packed_sft.support.compiled import inner_kernel, kernel


@inner_kernel
def grown(table: LongArray) -> LongArray:
    """Return a copy with room for twice as many entries."""
    larger = np.empty(2 * table.size, np.int64)
    for j in range(table.size):  # a slice assignment takes numba seconds to compile
        larger[j] = table[j]
    return larger


@kernel
def run_pickle(
    data: ByteArray, start: int, num_bins: int, budget: int, status: LongArray
) -> tuple[LongArray, LongArray, LongArray, npt.NDArray[np.int32]]:
    """Run the pickle in `data[start:]`, which must hold `num_bins` bins and end with the data.

    Returns the values' places and infos, the dicts' fields and the dict of each bin; all of it means something only
    when `status[0]` is OK. `status` gets the code, the place in the file, two details, and the bytes that the tables
    take.
    """
    end = data.size
    guess = min(num_bins, (end - start) // tables.SMALLEST_BIN)
    value_places = np.empty(3 * guess + 64, np.int64)
    value_infos = np.empty(3 * guess + 64, np.int64)
    fields = np.empty(3 * guess + 96, np.int64)
    memo = np.empty(4 * guess + 64, np.int64)
    bins = np.empty(num_bins, np.int32)
    stack = np.empty(tables.STACK_LIMIT, np.int64)
    registers = np.zeros(NUM_REGISTERS, np.int64)
    registers[TOP_MARK] = registers[BIN_LIST] = registers[OPEN_LIST] = registers[OPEN_PLACE] = -1
    after = start + 2
    code = tables.OK
    if end < after or data[start] != tables.PROTO or not 2 <= data[start + 1] <= 5:
        code = tables.BAD_PROTOCOL
    op = np.uint8(0)
    while code == tables.OK and op != tables.STOP:
        place = after
        status[1] = place
        after, code = find_end(data, place)
        if code != tables.OK:
            break
        op = data[place]

        # No opcode adds more than one entry to a table, so there is room for it from here on.
        grow_values = registers[NUM_VALUES] == value_places.size
        grow_fields = 3 * registers[NUM_DICTS] + 3 > fields.size
        grow_memo = registers[NUM_MEMO] == memo.size
        if grow_values or grow_fields or grow_memo:
            total = 8 * (2 * value_places.size + fields.size + memo.size) + 4 * bins.size
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

        if op == tables.MARK:
            after, code = begin_batch(data, place, stack, value_places, value_infos, registers)
            if code == tables.MIXED_LIST:
                status[1] = after
        elif op == tables.FRAME:
            if registers[OPEN_PLACE] == place:
                registers[OPEN_PLACE] = after
        elif tables.PLAIN_KINDS[op] >= 0:
            code = push(stack, registers, place, np.int64(tables.PLAIN_KINDS[op]))
        elif op == tables.EMPTY_LIST:
            value = registers[NUM_VALUES]
            value_places[value] = place
            value_infos[value] = tables.INTS
            registers[NUM_VALUES] = value + 1
            code = push(stack, registers, value, tables.KIND_LIST)
        elif op == tables.EMPTY_DICT:
            number = registers[NUM_DICTS]
            for field in range(3):
                fields[3 * number + field] = -1
            registers[NUM_DICTS] = number + 1
            code = push(stack, registers, number, tables.KIND_DICT)
        elif op == tables.APPEND or op == tables.APPENDS:
            code = append_items(op, after, stack, value_places, value_infos, fields, bins, registers, status)
        elif op == tables.SETITEM or op == tables.SETITEMS:
            code = set_items(data, op, stack, fields, registers, status)
        elif op == tables.GLOBAL or op == tables.STACK_GLOBAL:
            code = find_global(data, place, after, stack, registers, status)
        elif op == tables.REDUCE:
            code = call(stack, value_infos, registers, status)
        elif op == tables.BUILD:
            code = build(stack, value_places, value_infos, registers)
        elif op == tables.STOP:
            code = stop(after, end, num_bins, stack, value_infos, registers)
        elif op == tables.TUPLE or tables.TUPLE1 <= op <= tables.TUPLE3:
            code = close_tuple(data, place, stack, value_places, value_infos, registers, status)
        else:
            code = use_memo(data, place, stack, memo, registers, status)
    status[0] = code
    status[4] = 8 * (2 * value_places.size + fields.size) + 4 * bins.size
    num_values = registers[NUM_VALUES]
    return value_places[:num_values], value_infos[:num_values], fields[: 3 * registers[NUM_DICTS]], bins
