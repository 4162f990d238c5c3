"""Records of Parquet files and Hugging Face datasets, by range.

Parquet is cut between row groups, which workers read by themselves. A row group far larger than a slice (some writers
make one per file) is decoded once, by the scanning process, and carried in slices.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.records.formats.json_files import Cut
from megatron_packed_sft.records.streams import open_file, reading
from megatron_packed_sft.support.dependencies import load

_LARGEST_ROW_GROUP_SLICES = 16
_RECORDS_AT_ONCE = 256


def cut_parquet(file: InputFile, slice_bytes: int) -> Iterator[Cut]:
    """Yield ranges of records of about `slice_bytes` before compression, from the file's metadata."""
    with _open_parquet(file.path) as parquet:
        start = record = num_bytes = 0
        for group_number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(group_number)
            is_large = group.total_byte_size > _LARGEST_ROW_GROUP_SLICES * slice_bytes
            if record > start and (is_large or num_bytes >= slice_bytes):
                yield Cut(start, record, start + 1)
                start, num_bytes = record, 0
            record += group.num_rows
            if is_large:
                num_records = max(1, group.num_rows * slice_bytes // group.total_byte_size)
                yield from _decoded_cuts(parquet, group_number, start, num_records)
                start = record
            num_bytes += 0 if is_large else group.total_byte_size
        if record > start:
            yield Cut(start, record, start + 1)


def count_parquet(file: InputFile) -> int:
    """Return the number of records in a Parquet file."""
    with _open_parquet(file.path) as parquet:
        return int(parquet.metadata.num_rows)


def read_parquet(file: InputFile, start: int, stop: int, payload: bytes | None) -> Iterator[dict[str, Any]]:
    """Yield the records of one slice."""
    if payload is not None:
        ipc = load("pyarrow.ipc", "parquet", "reading Parquet")
        for batch in ipc.open_stream(payload):
            yield from _records(batch)
        return
    with _open_parquet(file.path) as parquet:
        groups = []
        record = 0
        for group_number in range(parquet.metadata.num_row_groups):
            if start <= record < stop:
                groups.append(group_number)
            record += parquet.metadata.row_group(group_number).num_rows
        if record < stop:
            raise InvalidInputError(
                f"{file.path} has {record} records now: it changed while it was being read; run again"
            )
        for batch in parquet.iter_batches(_RECORDS_AT_ONCE, row_groups=groups, use_threads=False):
            yield from _records(batch)


def count_dataset(file: InputFile) -> int:
    """Return the number of records in a dataset saved by `datasets.save_to_disk`."""
    return len(_open_dataset(file.path, file.checksum))


def cut_dataset(file: InputFile, slice_bytes: int) -> Iterator[Cut]:
    """Yield ranges of records of about `slice_bytes` of a dataset saved by `datasets.save_to_disk`."""
    total = count_dataset(file)
    num_records = max(1, total * slice_bytes // max(1, file.size))
    for start in range(0, total, num_records):
        yield Cut(start, min(start + num_records, total), start + 1)


def read_dataset(file: InputFile, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one slice."""
    dataset = _open_dataset(file.path, file.checksum)
    for begin in range(start, stop, _RECORDS_AT_ONCE):
        columns = dataset[begin : min(begin + _RECORDS_AT_ONCE, stop)]
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def _decoded_cuts(parquet: Any, group: int, start: int, num_records: int) -> Iterator[Cut]:
    pyarrow = load("pyarrow", "parquet", "reading Parquet")
    for batch in parquet.iter_batches(num_records, row_groups=[group], use_threads=False):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield Cut(start, start + batch.num_rows, start + 1, sink.getvalue().to_pybytes())
        start += batch.num_rows


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    for begin in range(0, batch.num_rows, _RECORDS_AT_ONCE):
        yield from batch.slice(begin, _RECORDS_AT_ONCE).to_pylist()


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
                raise  # from the operating system; pyarrow's errors about damaged pages have no errno
            reason = str(error).partition("\n")[0]
            raise InvalidInputError(f"{path} is not a valid Parquet file: {reason}; write it again") from error


@functools.lru_cache(maxsize=4)
def _open_dataset(path: str, checksum: str) -> Any:
    # The checksum is part of the cache key: another dataset may appear at the same path.
    datasets = load("datasets", "datasets", "reading folders saved by `datasets`")
    try:
        return datasets.load_from_disk(path).with_format(None)
    except PackedSFTError:
        raise
    except Exception as error:  # pyarrow, datasets and file systems raise many types
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"{path} is not a valid saved dataset: {reason}; save it again") from error
