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
from megatron_packed_sft.records.files import InputFile, open_file, reading
from megatron_packed_sft.records.json_files import Cut
from megatron_packed_sft.records.record import RecordError, too_many_bytes
from megatron_packed_sft.support.imports import load

_LARGEST_ROW_GROUP_SLICES = 16
_RECORDS_AT_ONCE, _FEWEST_AT_ONCE = 256, 16
# A column may hold one long text once, and refer to it thousands of times: so much may be decoded at once.
_BYTES_AT_ONCE = 1 << 30
_LARGEST_CARRIED = 32 << 20  # bytes of a slice, unless few records have more


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


def read_parquet(
    file: InputFile, start: int, stop: int, payload: bytes | None, longest: int
) -> Iterator[dict[str, Any] | RecordError]:
    """Yield the records of one slice, errors in place of those with more than `longest` bytes."""
    if payload is not None:
        ipc = load("pyarrow.ipc", "parquet", "reading Parquet")
        for batch in ipc.open_stream(payload):
            yield from _records(batch, longest)
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
        for batch in _batches(parquet, groups, _RECORDS_AT_ONCE):
            yield from _records(batch, longest)


def count_dataset(file: InputFile) -> int:
    """Return the number of records in a dataset saved by `datasets.save_to_disk`."""
    return len(_open_dataset(file.path, file.checksum))


def cut_dataset(file: InputFile, slice_bytes: int) -> Iterator[Cut]:
    """Yield ranges of records of about `slice_bytes` of a dataset saved by `datasets.save_to_disk`."""
    total = count_dataset(file)
    num_records = max(1, total * slice_bytes // max(1, file.size))
    for start in range(0, total, num_records):
        yield Cut(start, min(start + num_records, total), start + 1)


def read_dataset(file: InputFile, start: int, stop: int, longest: int) -> Iterator[dict[str, Any] | RecordError]:
    """Yield the records of one slice, errors in place of those with more than `longest` bytes."""
    dataset = _open_dataset(file.path, file.checksum)
    stored = dataset.with_format("arrow")
    for begin in range(start, stop, _RECORDS_AT_ONCE):
        end = min(begin + _RECORDS_AT_ONCE, stop)
        if stored[begin:end].nbytes <= longest:
            yield from _rows(dataset[begin:end])
            continue
        for number in range(begin, end):
            is_long = stored[number : number + 1].nbytes > longest
            yield from (too_many_bytes(longest),) if is_long else _rows(dataset[number : number + 1])


def _rows(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _decoded_cuts(parquet: Any, group: int, start: int, num_records: int) -> Iterator[Cut]:
    """Yield slices of about `num_records` that carry their records; of very long records fewer."""
    gathered: list[Any] = []
    for batch in _batches(parquet, [group], num_records):
        gathered.append(batch)
        found = sum(one.num_rows for one in gathered)
        if found >= num_records or sum(one.nbytes for one in gathered) >= _LARGEST_CARRIED:
            yield Cut(start, start + found, start + 1, _written(gathered))
            start += found
            gathered.clear()
    if gathered:
        yield Cut(start, start + sum(one.num_rows for one in gathered), start + 1, _written(gathered))


def _written(batches: list[Any]) -> bytes:
    pyarrow = load("pyarrow", "parquet", "reading Parquet")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _batches(parquet: Any, groups: list[int], num_records: int) -> Iterator[Any]:
    """Yield the records of some row groups, fewer at once where one of them may be very long."""
    largest = max([1, *(parquet.metadata.row_group(group).total_byte_size for group in groups)])
    at_once = min(num_records, max(_FEWEST_AT_ONCE, _BYTES_AT_ONCE // largest))
    plain = None
    for batch in parquet.iter_batches(at_once, row_groups=groups, use_threads=False):
        plain = plain or _without_dictionaries(batch.schema)
        yield batch if batch.schema.equals(plain) else batch.cast(plain)


def _without_dictionaries(schema: Any) -> Any:
    """Return a schema of values in place of references to them, so that sizes are those of the values."""
    pyarrow = load("pyarrow", "parquet", "reading Parquet")
    types = pyarrow.types

    def plain_field(field: Any) -> Any:
        return field.with_type(plain(field.type))

    def plain(kind: Any) -> Any:
        if types.is_dictionary(kind):
            return plain(kind.value_type)
        if types.is_struct(kind):
            return pyarrow.struct([plain_field(field) for field in kind])
        if types.is_list(kind):
            return pyarrow.list_(plain_field(kind.value_field))
        return kind

    return pyarrow.schema([plain_field(field) for field in schema], schema.metadata)


def _records(batch: Any, longest: int) -> Iterator[dict[str, Any] | RecordError]:
    for begin in range(0, batch.num_rows, _RECORDS_AT_ONCE):
        some = batch.slice(begin, _RECORDS_AT_ONCE)
        if some.nbytes <= longest:
            yield from some.to_pylist()
            continue
        for number in range(some.num_rows):
            one = some.slice(number, 1)
            yield from (too_many_bytes(longest),) if one.nbytes > longest else one.to_pylist()


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
