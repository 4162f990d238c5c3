"""JSON files: where to cut lines and arrays into slices, and how to parse a record without changing it.

Cuts depend on byte offsets alone, so equal content is always cut the same way. An array becomes a stream that can be
cut like lines, with a mark after each element:

    [{"a": 1},            {"a": 1}<mark>
     {"b": [2, 3]}]        {"b": [2, 3]}<mark>

The mark is 0x1E, the record separator of JSON text sequences (RFC 7464): no JSON text may hold it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import MAX_RECORD_BYTES, is_too_deep, too_deep

MARK = b"\x1e"
LEFT_OUT = b"\0"  # replaces the rest of a record that is too long, so that it is never taken for a blank one
_ALL_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_RUN = b"0" * 20  # an integer beyond 64 bits has at least this many digits


class Cut(NamedTuple):
    """Where a slice is: [start, stop) in bytes or records, its first record, from 1, and its carried bytes."""

    start: int
    stop: int
    first_record: int
    payload: bytes | None = None


def cut_stream(
    blocks: Iterable[bytes], separator: bytes, slice_bytes: int, *, carry: bool, longest: int = MAX_RECORD_BYTES
) -> Iterator[Cut]:
    r"""Cut a stream after the first separator that makes a slice at least `slice_bytes` long.

    Args:
        blocks: the stream, in blocks of any sizes.
        separator: the byte that ends each record, except perhaps the last.
        slice_bytes: minimum length of every slice but the last.
        carry: whether slices carry their bytes.
        longest: of a record with more bytes, slices carry enough to show that, and not all of it.

    Example:
        >>> [cut[:3] for cut in cut_stream([b"a\nbb", b"b\nc"], b"\n", 2, carry=True)]
        [(0, 2, 1), (2, 6, 2), (6, 7, 3)]
    """
    block_start = 0
    record_start = 0  # where the unfinished record begins
    start = 0
    first_record = 1
    num_records = 0
    parts: list[bytes] = []
    for block in blocks:
        position = num_left_out = 0
        if block_start - record_start > longest:
            num_left_out = block.find(separator) % (len(block) + 1)  # all of it if there is none
        while True:
            found = block.find(separator, max(position, start + slice_bytes - 1 - block_start))
            end = found + 1 if found >= 0 else len(block)
            num_records += block.count(separator, position, end)
            if carry:
                parts.append(block[position:end] if position >= num_left_out else LEFT_OUT + block[num_left_out:end])
            position = end
            if found < 0:
                break
            stop = block_start + end
            yield Cut(start, stop, first_record, b"".join(parts) if carry else None)
            start, first_record, num_records = stop, first_record + num_records, 0
            parts.clear()
        last = block.rfind(separator)
        if last >= 0:
            record_start = block_start + last + 1
        block_start += len(block)
    if block_start > start:
        yield Cut(start, block_start, first_record, b"".join(parts) if carry else None)


def array_elements(blocks: Iterable[bytes], path: str) -> Iterator[bytes]:
    r"""Turn the blocks of a JSON array into blocks in which every element ends with `MARK`.

    Elements are found by brackets and quotes alone, so a broken element does not hide the others.

    Example:
        >>> b"".join(array_elements([b'[{"a": 1},', b'{"b": 2}]'], "chats.json"))
        b'{"a": 1}\x1e{"b": 2}\x1e'
    """
    from megatron_packed_sft.records import _json_array_kernel as kernel

    state = np.zeros(kernel.STATE_SIZE, np.int64)
    num_elements = 0
    begun = False
    for block in blocks:
        if MARK in block:
            raise InvalidInputError(f"{path}: record {num_elements + 1} or a later one holds the byte 0x1E; remove it")
        buffer = np.frombuffer(block, np.uint8).copy()
        num_seen = kernel.mark_elements(buffer, state, MARK[0])
        marked = buffer[:num_seen].tobytes()
        num_elements += marked.count(MARK)
        _refuse_broken(int(state[kernel.STATUS]), num_elements, path)
        if state[kernel.STATUS] == kernel.AFTER:
            marked = marked[: marked.rfind(MARK) + 1]  # whitespace may follow the array
        if not begun:
            marked = marked.lstrip(b" \t\r\n")
            begun = bool(marked)
            if begun and marked.startswith(MARK) and num_elements == 1:
                marked, num_elements = marked[1:], 0  # an empty array: the mark is its bracket
        if marked:
            yield marked
    if state[kernel.STATUS] != kernel.AFTER:
        raise InvalidInputError(
            f"{path}: the array is not closed; record {num_elements + 1} never ends, so the file is truncated or a "
            "bracket is missing; get it again, or fix that record"
        )


def _refuse_broken(status: int, num_elements: int, path: str) -> None:
    from megatron_packed_sft.records import _json_array_kernel as kernel

    if status == kernel.BROKEN_STRING:
        raise InvalidInputError(
            f"{path}: record {num_elements + 1} has a line break inside a string; add the missing quote, or write \\n"
        )
    if status == kernel.TRAILING_BYTES:
        raise InvalidInputError(
            f"{path}: something follows the end of the array, after record {num_elements}; "
            "make it one array, or one object per line in a .jsonl file"
        )


def has_long_number(text: bytes) -> bool:
    """Return whether a text may hold a number beyond 64 bits; much faster than an exact check.

    Example:
        >>> has_long_number(b'{"id": 12345678901234567890}'), has_long_number(b'{"id": 1234567890}')
        (True, False)
    """
    return _LONG_RUN in text.translate(_ALL_DIGITS_ALIKE)


def is_depth_error(error: orjson.JSONDecodeError) -> bool:
    """Return whether a text was refused for its depth, though it may be valid JSON."""
    return error.msg.startswith("depth limit")


def parse(text: bytes, field: str = "") -> Any:
    """Return the value of a JSON text; integers are exact, whatever their size.

    Args:
        text: one JSON value.
        field: where it is in its record, for the error.

    Example:
        >>> parse(b"[36893488147419103232]")
        [36893488147419103232]
    """
    try:
        value = orjson.loads(text)  # first, because it is stricter and refuses what not even a float can hold
    except orjson.JSONDecodeError as error:
        if is_depth_error(error):
            raise too_deep(field) from None
        raise
    if not has_long_number(text):
        return value
    if is_too_deep(value):  # the other parser recurses
        raise too_deep(field)
    return json.loads(text)


def repeated_key(text: bytes) -> str | None:
    """Return a key that appears twice in one object; None if there is none, or if the text cannot be parsed.

    Slow: `orjson` silently keeps the last one, and checking every key costs a tenth of all reading or more.

    Example:
        >>> repeated_key(b'{"a": [{"role": "user", "role": "tool"}]}'), repeated_key(b'{"a": {"a": 1}}')
        ('role', None)
    """
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        found.extend(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]

    try:
        json.loads(text, object_pairs_hook=look)
    except (ValueError, RecursionError):
        return None
    return found[0] if found else None
