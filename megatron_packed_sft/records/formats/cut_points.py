"""Where to cut a stream of rows into pieces: decided by byte offsets alone, so equal content is cut alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record_error import Location

LONGEST_ROW_BYTES = 256 << 20


class Piece(NamedTuple):
    """A part of a file: [start, stop) in bytes or rows, its first row counted from 1, and its bytes if carried."""

    start: int
    stop: int
    first_row: int
    payload: bytes | None = None


def cut_stream(
    blocks: Iterable[bytes], separator: bytes, slice_bytes: int, *, carry: bool, path: str, noun: str
) -> Iterator[Piece]:
    r"""Cut a stream behind the first separator that makes a piece at least `slice_bytes` long.

    Args:
        blocks: the stream, in blocks of any sizes.
        separator: one byte, at the end of each row; the last row may go without.
        slice_bytes: least length of a piece, but for the last.
        carry: whether pieces bring their bytes along.
        path: for errors.
        noun: `line` or `row`, for errors.

    Example:
        >>> [piece[:3] for piece in cut_stream([b"a\nbb", b"b\nc"], b"\n", 2, carry=True, path="a.jsonl", noun="line")]
        [(0, 2, 1), (2, 6, 2), (6, 7, 3)]
    """
    block_start = 0
    row_start = 0  # where the row begins that is not finished yet
    start = 0
    first_row = 1
    num_rows = 0
    parts: list[bytes] = []
    for block in blocks:
        position = 0
        while True:
            found = block.find(separator, max(position, start + slice_bytes - 1 - block_start))
            end = found + 1 if found >= 0 else len(block)
            num_rows += block.count(separator, position, end)
            if carry:
                parts.append(block[position:end])
            position = end
            if found < 0:
                break
            stop = block_start + end
            yield Piece(start, stop, first_row, b"".join(parts) if carry else None)
            start, first_row, num_rows = stop, first_row + num_rows, 0
            parts.clear()
        last = block.rfind(separator)
        if last >= 0:
            row_start = block_start + last + 1
        block_start += len(block)
        if block_start - row_start > LONGEST_ROW_BYTES:
            raise InvalidInputError(
                f"{Location(path, first_row + num_rows, noun)} is longer than {LONGEST_ROW_BYTES >> 20} MB; "
                "split it, or check that this is a file of rows"
            )
    if block_start > start:
        yield Piece(start, block_start, first_row, b"".join(parts) if carry else None)
