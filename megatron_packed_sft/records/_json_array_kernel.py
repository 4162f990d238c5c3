"""Find where the elements of a JSON array end, block by block, without parsing them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

# What `state` holds between blocks.
DEPTH, IN_STRING, ESCAPED, STATUS = 0, 1, 2, 3
STATE_SIZE = 4

# Values of STATUS.
BEFORE, INSIDE, AFTER, BROKEN_STRING, TRAILING_BYTES = 0, 1, 2, 3, 4

_QUOTE, _BACKSLASH, _COMMA, _NEWLINE, _SPACE = ord('"'), ord("\\"), ord(","), ord("\n"), ord(" ")
_OPEN_LIST, _OPEN_OBJECT, _CLOSE_LIST, _CLOSE_OBJECT = ord("["), ord("{"), ord("]"), ord("}")


@kernel
def mark_elements(block: npt.NDArray[np.uint8], state: npt.NDArray[np.int64], mark: int) -> Any:
    """Overwrite the comma or bracket after each element with `mark`, the rest of the array's own syntax with spaces.

    Return the number of bytes read, fewer than the block has if the array is broken; STATUS has the reason.
    """
    depth, in_string, escaped, status = state[DEPTH], state[IN_STRING], state[ESCAPED], state[STATUS]
    position = 0
    while position < len(block):
        byte = block[position]
        if status == INSIDE:
            if in_string:
                if escaped:
                    escaped = 0
                elif byte == _BACKSLASH:
                    escaped = 1
                elif byte == _QUOTE:
                    in_string = 0
                elif (
                    byte == _NEWLINE
                ):  # never legal here: a quote is missing, so inside and outside are swapped from here on
                    status = BROKEN_STRING
                    break
            elif byte == _QUOTE:
                in_string = 1
            elif byte in (_OPEN_LIST, _OPEN_OBJECT):
                depth += 1
            elif byte in (_CLOSE_LIST, _CLOSE_OBJECT):
                depth -= 1
                if depth == 0:
                    block[position] = mark
                    status = AFTER
            elif byte == _COMMA and depth == 1:
                block[position] = mark
        elif status == BEFORE:  # white space or a byte order mark; the caller has seen that a list begins
            if byte == _OPEN_LIST:
                depth = 1
                status = INSIDE
            block[position] = _SPACE
        elif byte > _SPACE:
            status = TRAILING_BYTES
            break
        position += 1
    state[DEPTH], state[IN_STRING], state[ESCAPED], state[STATUS] = depth, in_string, escaped, status
    return position
