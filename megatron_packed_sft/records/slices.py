"""Files cut into slices for many processes; where to cut depends on the file alone.

    scan_slices(file)         in one process: where to cut
    read_slice(file_slice)    in any process: the records of one slice

| format | a slice is | its content |
|---|---|---|
| JSON lines | a range of bytes that ends with a line | read by the worker |
| JSON lines, gzip or zstd | a range of the decompressed bytes that ends with a line | carried |
| JSON array | a range of whole elements | carried |
| Parquet | whole row groups; parts of very large ones | read by the worker; carried |
| Hugging Face dataset | a range of records | read by the worker |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records import json_files, tables
from megatron_packed_sft.records.files import InputFile, read_blocks, read_range
from megatron_packed_sft.records.json_files import LEFT_OUT, MARK, Cut, array_elements, cut_stream
from megatron_packed_sft.records.record import (
    MAX_RECORD_BYTES,
    Location,
    RecordError,
    kind_of,
    too_deep,
    too_many_bytes,
)
from megatron_packed_sft.support.wording import shortened

SLICE_BYTES = 4 << 20
_NEWLINE = b"\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PORTION_BYTES = 64 << 20  # of a slice; only one with a very long record has more


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A part of a file that one worker reads, encodes and stores.

    Args:
        file: the file it is a part of.
        number: position of the slice in its file, from 0.
        start: first byte of the (decompressed) lines or elements; for tables the first record, from 0.
        stop: end of that range.
        first_record: number of its first line or record, from 1.
        payload: the content, if a worker cannot read a part of the file directly.
        max_record_bytes: records with more are errors, and are not parsed.
    """

    file: InputFile
    number: int
    start: int
    stop: int
    first_record: int
    payload: bytes | None = field(default=None, repr=False)
    max_record_bytes: int = MAX_RECORD_BYTES

    def key(self) -> str:
        """Return a name for the content: equal files cut at the same places have equal keys, whatever their paths.

        Example:
            >>> FileSlice(InputFile("chats.jsonl", "jsonl", None, 90, "c0ffee"), 0, 0, 90, 1).key()
            'c0ffee:0-90'
        """
        return f"{self.file.checksum}:{self.start}-{self.stop}"


class RawRecord(NamedTuple):
    """A parsed record, or what is wrong with it; the records after it are read either way.

    Args:
        value: the parsed object, or the error with its location.
        file: the file it came from.
        number: its line or record number, from 1.
    """

    value: dict[str, Any] | RecordError
    file: InputFile
    number: int

    @property
    def where(self) -> Location:
        """File and line, for errors; built on demand, because most records never need it."""
        return Location(self.file.path, self.number, "line" if self.file.format == "jsonl" else "record")


def scan_slices(
    file: InputFile,
    slice_bytes: int = SLICE_BYTES,
    on_read: Callable[[int], None] | None = None,
    *,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[FileSlice]:
    r"""Cut a file into slices of about `slice_bytes`; the file is streamed, never held in memory.

    Args:
        file: the file to cut.
        slice_bytes: minimum size of every slice but the last.
        on_read: called with the number of stored bytes read, after each block.
        max_record_bytes: records with more are errors, and are not parsed.

    Example:
        >>> import tempfile, pathlib
        >>> from megatron_packed_sft.records.files import find_files
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = path.write_text('{"text": "One"}\n{"text": "Two"}\n{"text": "Three"}\n')
        >>> [(one.start, one.stop, one.first_record) for one in scan_slices(find_files(path)[0], slice_bytes=20)]
        [(0, 32, 1), (32, 50, 3)]
    """
    if slice_bytes < 1:
        raise InvalidInputError(f"slice_bytes is {slice_bytes}; it must be at least 1")
    for number, cut in enumerate(_cuts(file, slice_bytes, on_read, max_record_bytes)):
        yield FileSlice(file, number, *cut, max_record_bytes)


def read_slice(file_slice: FileSlice) -> Iterator[RawRecord]:
    r"""Yield the records of a slice, in order, each with its location; blank lines are skipped.

    Example:
        >>> file = InputFile("a.jsonl.gz", "jsonl", "gzip", 60, "c0ffee")
        >>> records = list(read_slice(FileSlice(file, 0, 0, 25, 1, b'{"text": "One"}\n\n{"text"\n')))
        >>> records[0].value, str(records[0].where)
        ({'text': 'One'}, 'a.jsonl.gz, line 1')
        >>> print(records[1].value)
        a.jsonl.gz, line 3: the record is not valid JSON (unexpected end of data at character 8); fix or remove it
    """
    file = file_slice.file
    if file.format in ("jsonl", "json"):
        yield from _parsed_records(file_slice)
        return
    longest = file_slice.max_record_bytes
    if file.format == "parquet":
        records = tables.read_parquet(file, file_slice.start, file_slice.stop, file_slice.payload, longest)
    else:
        records = tables.read_dataset(file, file_slice.start, file_slice.stop, longest)
    for number, value in enumerate(records, file_slice.first_record):
        yield _located(RawRecord(value, file, number))


def first_repeated_key(file_slice: FileSlice, num_records: int) -> str | None:
    r"""Return a sentence about a key that one of the first records names twice; None if none does.

    Example:
        >>> file = InputFile("a.jsonl.gz", "jsonl", "gzip", 60, "c0ffee")
        >>> first_repeated_key(FileSlice(file, 0, 0, 32, 1, b'{"text": "One", "text": "Two"}\n'), 4)
        "a.jsonl.gz, line 1: the key 'text' appears twice in one object, and only the last one counts"
    """
    if file_slice.file.format not in ("jsonl", "json"):
        return None
    for number, record in islice(_raw_records(file_slice), num_records):
        key = json_files.repeated_key(record) if len(record) <= file_slice.max_record_bytes else None
        if key is not None:
            where = RawRecord({}, file_slice.file, number).where
            return f"{where}: the key {shortened(repr(key))} appears twice in one object, and only the last one counts"
    return None


def _cuts(
    file: InputFile, slice_bytes: int, on_read: Callable[[int], None] | None, max_record_bytes: int
) -> Iterator[Cut]:
    if file.format in ("parquet", "hf_dataset"):
        cut_table = tables.cut_parquet if file.format == "parquet" else tables.cut_dataset
        cuts = cut_table(file, slice_bytes)
        return cuts if on_read is None else _reported(file, cuts, on_read)
    blocks = read_blocks(file.path, file.compression, on_read)
    if file.format == "json":
        elements = array_elements(blocks, file.path)
        return cut_stream(elements, MARK, slice_bytes, carry=True, longest=max_record_bytes)
    return cut_stream(blocks, _NEWLINE, slice_bytes, carry=file.compression is not None, longest=max_record_bytes)


def _reported(file: InputFile, cuts: Iterator[Cut], on_read: Callable[[int], None]) -> Iterator[Cut]:
    """Report progress on a table: each slice counts as its records' share of the stored bytes."""
    num_records = (tables.count_parquet if file.format == "parquet" else tables.count_dataset)(file)
    for cut in cuts:
        on_read(file.size * cut.stop // num_records - file.size * cut.start // num_records)
        yield cut


def _parsed_records(file_slice: FileSlice) -> Iterator[RawRecord]:
    file = file_slice.file
    longest = file_slice.max_record_bytes
    for text, records in _portions_of_records(file_slice):
        parse = json_files.parse if json_files.has_long_number(text) else orjson.loads
        for number, record in records:
            value = too_many_bytes(longest) if len(record) > longest else _parsed(parse, record, file, number)
            yield _located(RawRecord(value, file, number))


def _portions_of_records(file_slice: FileSlice) -> Iterator[tuple[bytes, Iterator[tuple[int, bytes]]]]:
    """Yield portions of a slice, each with the numbers and bytes of its records; blank lines are none."""
    is_lines = file_slice.file.format == "jsonl"
    separator = _NEWLINE if is_lines else MARK
    first = file_slice.first_record
    for text in _whole_records(_portions(file_slice), separator, file_slice.max_record_bytes):
        records = enumerate(text.removesuffix(separator).split(separator), first)
        yield text, (one for one in records if one[1] and not one[1].isspace()) if is_lines else records
        first += text.count(separator)


def _raw_records(file_slice: FileSlice) -> Iterator[tuple[int, bytes]]:
    return chain.from_iterable(records for _, records in _portions_of_records(file_slice))


def _located(raw: RawRecord) -> RawRecord:
    """Return a record whose error, if it is one, has its location."""
    return raw._replace(value=raw.value.at(raw.where)) if isinstance(raw.value, RecordError) else raw


def _portions(file_slice: FileSlice) -> Iterator[bytes]:
    """Yield the bytes of a slice, usually at once."""
    file = file_slice.file
    if file_slice.payload is not None:
        portions: Iterable[bytes] = (file_slice.payload,)
    else:
        starts = range(file_slice.start, file_slice.stop, _PORTION_BYTES)
        portions = (read_range(file.path, start, min(start + _PORTION_BYTES, file_slice.stop)) for start in starts)
    is_first = file.format == "jsonl" and file_slice.start == 0
    for portion in portions:
        yield portion.removeprefix(_BYTE_ORDER_MARK) if is_first else portion
        is_first = False


def _whole_records(portions: Iterable[bytes], separator: bytes, longest: int) -> Iterator[bytes]:
    """Yield portions that end where a record does; of a record that is too long, little more than the limit."""
    rest = b""
    for portion in portions:
        text = rest + portion if rest else portion
        end = text.rfind(separator) + 1
        rest = text[end:]
        if len(rest) > longest:
            rest = rest[:longest] + LEFT_OUT
        if end:
            yield text if end == len(text) else text[:end]
    if rest:
        yield rest


def _parsed(parse: Callable[[bytes], Any], record: bytes, file: InputFile, number: int) -> dict[str, Any] | RecordError:
    try:
        value = parse(record)
    except orjson.JSONDecodeError as error:
        if json_files.is_depth_error(error):
            return too_deep()
        return _not_utf8(record) or RecordError(
            "", f"is not valid JSON ({error.msg} at character {error.pos + 1}); {_remedy(file, record, number)}"
        )
    except RecordError as error:
        return error
    if type(value) is not dict:
        return RecordError("", f"is {kind_of(value)}, not an object; {_remedy(file, record, number)}")
    return value


def _not_utf8(record: bytes) -> RecordError | None:
    """Return the error for a record in another encoding; orjson reports a wrong place for it."""
    try:
        record.decode()
    except UnicodeDecodeError as error:
        at, byte = error.start + 1, record[error.start]
        return RecordError(
            "", f"is not UTF-8 (0x{byte:02X} at byte {at:,}); write the file in UTF-8, or remove the record"
        )
    return None


def _remedy(file: InputFile, record: bytes, number: int) -> str:
    """Return what to do about a bad record; a bad first line often means that the file name has the wrong suffix."""
    if file.format == "jsonl" and number == 1:
        if file.path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json"):
            return "a .json file holds one array of records, or one record per line; make it one of these"
        if record.lstrip().startswith(b"["):
            return "a file that holds one array must be named .json; rename it, or write one record per line"
    if b"}\r" in record.strip():
        return "end lines with \\n, not with \\r alone"
    return "fix or remove it"
