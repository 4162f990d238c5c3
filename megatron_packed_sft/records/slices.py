"""Work for many processes: files cut into units, by rules that look at the file alone.

    scan_slices(file)    in one process: where to cut
    read_slice(unit)     in any process: the rows of one piece

| format | a unit is |
|---|---|
| JSON lines | a range of bytes that ends with a line; the reader fetches it |
| JSON lines, gzip or zstd | the same range of the decompressed lines, carried along |
| JSON array | the same of its elements, carried along |
| Parquet | a range of rows: whole row groups that the reader fetches; parts of very large ones are carried along |
| Hugging Face dataset | a range of rows that the reader fetches |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.records.formats import json_text, tables
from megatron_packed_sft.records.formats.cut_points import Piece, cut_stream
from megatron_packed_sft.records.formats.json_array import MARK, array_elements
from megatron_packed_sft.records.record_error import Location, RecordError, kind_of
from megatron_packed_sft.records.streams import read_blocks, read_range

UNIT_BYTES = 4 << 20
_NEWLINE = b"\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A piece of a file that is read, encoded and stored as one.

    Args:
        file: where it lies.
        number: of the unit in its file, from 0.
        start: first byte of the (decompressed) lines or elements; of tables, first row from 0.
        stop: end of that range.
        first_row: number of its first line or row, from 1.
        payload: the content, where readers cannot fetch a part of the file by themselves.
    """

    file: InputFile
    number: int
    start: int
    stop: int
    first_row: int
    payload: bytes | None = field(default=None, repr=False)

    def key(self) -> str:
        """A name for the content: equal files cut at the same places have equal keys, wherever they lie.

        Example:
            >>> FileSlice(InputFile("chats.jsonl", "jsonl", None, 90, "c0ffee"), 0, 0, 90, 1).key()
            'c0ffee:0-90'
        """
        return f"{self.file.checksum}:{self.start}-{self.stop}"


class RawRecord(NamedTuple):
    """A row as it lies in the file, or what is wrong with it; those after it are read all the same.

    Args:
        value: the parsed object, or the error with its place.
        file: where it lies.
        number: of its line or row, from 1.
    """

    value: dict[str, Any] | RecordError
    file: InputFile
    number: int

    @property
    def where(self) -> Location:
        """File and line, for errors; made when asked for, since most rows are never asked."""
        return Location(self.file.path, self.number, "line" if self.file.format == "jsonl" else "row")


def scan_slices(
    file: InputFile, slice_bytes: int = UNIT_BYTES, on_read: Callable[[int], None] | None = None
) -> Iterator[FileSlice]:
    r"""Cut a file into units of about `slice_bytes`; the file is streamed, never held.

    Args:
        file: what to cut.
        slice_bytes: least size of a unit, but for the last.
        on_read: told how many stored bytes the units so far took, again and again.

    Example:
        >>> import tempfile, pathlib
        >>> from megatron_packed_sft.records.files import find_files
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = path.write_text('{"text": "One"}\n{"text": "Two"}\n{"text": "Three"}\n')
        >>> [(unit.start, unit.stop, unit.first_row) for unit in scan_slices(find_files(path)[0], slice_bytes=20)]
        [(0, 32, 1), (32, 50, 3)]
    """
    if slice_bytes < 1:
        raise InvalidInputError(f"slice_bytes is {slice_bytes}; it must be at least 1")
    for number, piece in enumerate(_pieces(file, slice_bytes, on_read)):
        yield FileSlice(file, number, *piece)


def read_slice(unit: FileSlice) -> Iterator[RawRecord]:
    r"""The rows of a unit, in order, each with its place; blank lines are passed over.

    Example:
        >>> file = InputFile("a.jsonl.gz", "jsonl", "gzip", 60, "c0ffee")
        >>> rows = list(read_slice(FileSlice(file, 0, 0, 25, 1, b'{"text": "One"}\n\n{"text"\n')))
        >>> rows[0].value, str(rows[0].where)
        ({'text': 'One'}, 'a.jsonl.gz, line 1')
        >>> print(rows[1].value)
        a.jsonl.gz, line 3: the row is not valid JSON (unexpected end of data at character 8); mend or remove it
    """
    file = unit.file
    if file.format in ("jsonl", "json"):
        yield from _parsed_rows(unit)
        return
    if file.format == "parquet":
        rows = tables.read_parquet(file, unit.start, unit.stop, unit.payload)
    else:
        rows = tables.read_dataset(file, unit.start, unit.stop)
    for number, value in enumerate(rows, unit.first_row):
        yield RawRecord(value, file, number)


def _pieces(file: InputFile, slice_bytes: int, on_read: Callable[[int], None] | None) -> Iterator[Piece]:
    if file.format in ("parquet", "hf_dataset"):
        cut = tables.cut_parquet if file.format == "parquet" else tables.cut_dataset
        pieces = cut(file, slice_bytes)
        return pieces if on_read is None else _told_by_rows(file, pieces, on_read)
    blocks = read_blocks(file.path, file.compression, on_read)
    if file.format == "json":
        elements = array_elements(blocks, file.path)
        return cut_stream(elements, MARK, slice_bytes, carry=True, path=file.path, noun="row")
    return cut_stream(blocks, _NEWLINE, slice_bytes, carry=file.compression is not None, path=file.path, noun="line")


def _told_by_rows(file: InputFile, pieces: Iterator[Piece], on_read: Callable[[int], None]) -> Iterator[Piece]:
    """Pieces of a table; each is taken to hold its rows' share of the stored bytes."""
    num_rows = (tables.count_parquet if file.format == "parquet" else tables.count_dataset)(file)
    for piece in pieces:
        on_read(file.size * piece.stop // num_rows - file.size * piece.start // num_rows)
        yield piece


def _parsed_rows(unit: FileSlice) -> Iterator[RawRecord]:
    file = unit.file
    text = read_range(file.path, unit.start, unit.stop) if unit.payload is None else unit.payload
    is_lines = file.format == "jsonl"
    if is_lines and unit.start == 0:
        text = text.removeprefix(_BYTE_ORDER_MARK)
    separator = _NEWLINE if is_lines else MARK
    parse = json_text.parse if json_text.has_long_number(text) else orjson.loads
    for number, row in enumerate(text.removesuffix(separator).split(separator), unit.first_row):
        if is_lines and (not row or row.isspace()):
            continue
        try:
            value = parse(row)
        except orjson.JSONDecodeError as error:
            value = _not_utf8(row) or RecordError(
                "", f"is not valid JSON ({error.msg} at character {error.pos + 1}); {_remedy(file, row, number)}"
            )
        except RecordError as error:
            value = error
        else:
            if type(value) is not dict:
                value = RecordError("", f"is {kind_of(value)}, not an object; {_remedy(file, row, number)}")
        raw = RawRecord(value, file, number)
        yield raw if type(value) is dict else raw._replace(value=value.at(raw.where))


def _not_utf8(row: bytes) -> RecordError | None:
    """The error for a row in another encoding; orjson gives a wrong place and speaks of surrogates."""
    try:
        row.decode()
    except UnicodeDecodeError as error:
        at, byte = error.start + 1, row[error.start]
        return RecordError(
            "", f"is not UTF-8 (0x{byte:02X} at byte {at:,}); write the file in UTF-8, or remove the row"
        )
    return None


def _remedy(file: InputFile, row: bytes, number: int) -> str:
    """What to do about a bad row; the first line often shows that the file is of another kind than its name says."""
    if file.format == "jsonl" and number == 1:
        if file.path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json"):
            return "a .json file is one array of rows, or one row per line; make it one of these"
        if row.lstrip().startswith(b"["):
            return "a file that is one array has to be called .json; rename it, or write one row per line"
    return "mend or remove it"
