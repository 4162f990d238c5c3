r"""A file that is one JSON array, turned into a stream that can be cut like lines.

    [{"a": 1},            {"a": 1}<mark>
     {"b": [2, 3]}]        {"b": [2, 3]}<mark>

The mark is 0x1E, the record separator of JSON text sequences (RFC 7464): no JSON text may hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from megatron_packed_sft.errors import InvalidInputError

MARK = b"\x1e"


def array_elements(blocks: Iterable[bytes], path: str) -> Iterator[bytes]:
    r"""Turn the blocks of a JSON array into blocks in which every element ends with `MARK`.

    Elements are found by their brackets and quotes alone, so one that is wrong inside does not hide the others.

    Example:
        >>> b"".join(array_elements([b'[{"a": 1},', b'{"b": 2}]'], "chats.json"))
        b'{"a": 1}\x1e{"b": 2}\x1e'
    """
    from megatron_packed_sft.records.formats import json_array_kernel as kernel

    state = np.zeros(kernel.STATE_SIZE, np.int64)
    num_elements = 0
    begun = False
    for block in blocks:
        if MARK in block:
            raise InvalidInputError(f"{path}: row {num_elements + 1} or a later one holds the byte 0x1E; remove it")
        buffer = np.frombuffer(block, np.uint8).copy()
        num_seen = kernel.mark_elements(buffer, state, MARK[0])
        marked = buffer[:num_seen].tobytes()
        num_elements += marked.count(MARK)
        _refuse_broken(int(state[kernel.STATUS]), num_elements, path)
        if state[kernel.STATUS] == kernel.AFTER:
            marked = marked[: marked.rfind(MARK) + 1]  # white space may follow the array
        if not begun:
            marked = marked.lstrip(b" \t\r\n")
            begun = bool(marked)
            if begun and marked.startswith(MARK) and num_elements == 1:
                marked, num_elements = marked[1:], 0  # an empty array: the mark stands for its bracket
        if marked:
            yield marked
    if state[kernel.STATUS] != kernel.AFTER:
        raise InvalidInputError(
            f"{path}: the array is not closed; row {num_elements + 1} never ends, so the file is cut or a bracket is "
            "missing; get it again or mend that row"
        )


def _refuse_broken(status: int, num_elements: int, path: str) -> None:
    from megatron_packed_sft.records.formats import json_array_kernel as kernel

    if status == kernel.BROKEN_STRING:
        raise InvalidInputError(
            f"{path}: row {num_elements + 1} has a line break inside a string; a quote is missing, or write \\n for it"
        )
    if status == kernel.TRAILING_BYTES:
        raise InvalidInputError(
            f"{path}: something follows the end of the array, after row {num_elements}; "
            "make it one array, or one object per line in a .jsonl file"
        )
