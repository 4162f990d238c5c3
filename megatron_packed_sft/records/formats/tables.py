"""Rows of Parquet files and of Hugging Face datasets, by ranges of rows.

Parquet is cut between row groups, which readers fetch by themselves. A row group far larger than a unit (some writers
make one per file) is decoded once, by the process that scans, and carried along in pieces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.records.formats.cut_points import Piece
from megatron_packed_sft.records.streams import open_file, reading
from megatron_packed_sft.support.dependencies import load

_LARGEST_ROW_GROUP_UNITS = 16
_ROWS_AT_ONCE = 256


def cut_parquet(file: InputFile, slice_bytes: int) -> Iterator[Piece]:
    """Ranges of rows of about `slice_bytes` before compression, from the file's metadata.

    Example:
        >>> list(cut_parquet(find_files("chats.parquet")[0], 4 << 20))  # doctest: +SKIP
        [Piece(start=0, stop=2000, first_row=1, payload=None)]
    """
    with _open_parquet(file.path) as parquet:
        start = row = num_bytes = 0
        for group_number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(group_number)
            is_large = group.total_byte_size > _LARGEST_ROW_GROUP_UNITS * slice_bytes
            if row > start and (is_large or num_bytes >= slice_bytes):
                yield Piece(start, row, start + 1)
                start, num_bytes = row, 0
            row += group.num_rows
            if is_large:
                num_rows = max(1, group.num_rows * slice_bytes // group.total_byte_size)
                yield from _decoded_pieces(parquet, group_number, start, num_rows)
                start = row
            num_bytes += 0 if is_large else group.total_byte_size
        if row > start:
            yield Piece(start, row, start + 1)


def count_parquet(file: InputFile) -> int:
    """How many rows a Parquet file has.

    Example:
        >>> count_parquet(find_files("chats.parquet")[0])  # doctest: +SKIP
        2000
    """
    with _open_parquet(file.path) as parquet:
        return int(parquet.metadata.num_rows)


def read_parquet(file: InputFile, start: int, stop: int, payload: bytes | None) -> Iterator[dict[str, Any]]:
    """The rows of one piece.

    Example:
        >>> list(read_parquet(find_files("chats.parquet")[0], 0, 1, None))  # doctest: +SKIP
        [{'text': 'Hello'}]
    """
    if payload is not None:
        ipc = load("pyarrow.ipc", "parquet", "reading Parquet")
        for batch in ipc.open_stream(payload):
            yield from _rows(batch)
        return
    with _open_parquet(file.path) as parquet:
        groups = []
        row = 0
        for group_number in range(parquet.metadata.num_row_groups):
            if start <= row < stop:
                groups.append(group_number)
            row += parquet.metadata.row_group(group_number).num_rows
        if row < stop:
            raise InvalidInputError(f"{file.path} has {row} rows now; it changed while it was read; start again")
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=groups, use_threads=False):
            yield from _rows(batch)


def count_dataset(file: InputFile) -> int:
    """How many rows a dataset saved by `datasets.save_to_disk` has.

    Example:
        >>> count_dataset(find_files("saved_chats")[0])  # doctest: +SKIP
        2000
    """
    return len(_open_dataset(file.path, file.checksum))


def cut_dataset(file: InputFile, slice_bytes: int) -> Iterator[Piece]:
    """Ranges of rows of about `slice_bytes` of a dataset saved by `datasets.save_to_disk`.

    Example:
        >>> list(cut_dataset(find_files("saved_chats")[0], 4 << 20))  # doctest: +SKIP
        [Piece(start=0, stop=2000, first_row=1, payload=None)]
    """
    total = count_dataset(file)
    num_rows = max(1, total * slice_bytes // max(1, file.size))
    for start in range(0, total, num_rows):
        yield Piece(start, min(start + num_rows, total), start + 1)


def read_dataset(file: InputFile, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """The rows of one piece.

    Example:
        >>> list(read_dataset(find_files("saved_chats")[0], 0, 1))  # doctest: +SKIP
        [{'text': 'Hello'}]
    """
    dataset = _open_dataset(file.path, file.checksum)
    for begin in range(start, stop, _ROWS_AT_ONCE):
        columns = dataset[begin : min(begin + _ROWS_AT_ONCE, stop)]
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def _decoded_pieces(parquet: Any, group: int, start: int, num_rows: int) -> Iterator[Piece]:
    pyarrow = load("pyarrow", "parquet", "reading Parquet")
    for batch in parquet.iter_batches(num_rows, row_groups=[group], use_threads=False):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield Piece(start, start + batch.num_rows, start + 1, sink.getvalue().to_pybytes())
        start += batch.num_rows


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield from batch.slice(begin, _ROWS_AT_ONCE).to_pylist()


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    pyarrow = load("pyarrow", "parquet", "reading Parquet")
    parquet = load("pyarrow.parquet", "parquet", "reading Parquet")
    with reading(path), open_file(path) as file:
        try:
            yield parquet.ParquetFile(file)
        except PackedSFTError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # the operating system's; pyarrow's own for damaged pages have no number
            reason = str(error).partition("\n")[0]
            raise InvalidInputError(f"{path} is not a sound Parquet file: {reason}; write it again") from error


@functools.lru_cache(maxsize=4)
def _open_dataset(path: str, checksum: str) -> Any:
    # The checksum is part of the cache's key: another dataset may appear under the same path.
    datasets = load("datasets", "datasets", "reading folders saved by `datasets`")
    try:
        return datasets.load_from_disk(path).with_format(None)
    except PackedSFTError:
        raise
    except Exception as error:  # pyarrow's, datasets' own or the file system's; all mean the same here
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"{path} is not a sound saved dataset: {reason}; save it again") from error
