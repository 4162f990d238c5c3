"""The same records in every kind of file, for tests."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import zstandard

from megatron_packed_sft.records.files import find_files
from megatron_packed_sft.records.record import RecordError
from megatron_packed_sft.records.slices import SLICE_BYTES, RawRecord, read_slice, scan_slices

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "hf_dataset")


def lines_of(records: list[Any]) -> bytes:
    """Records as JSON lines."""
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def write_records(path: Path, records: list[dict[str, Any]], **parquet_options: Any) -> Path:
    """Write records in the format that the name asks for."""
    name = path.name
    if path.suffix == ".hf_dataset":
        import datasets

        datasets.Dataset.from_list(records).save_to_disk(str(path))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, **parquet_options)
    else:
        data = lines_of(records) if ".jsonl" in name else orjson.dumps(records, option=orjson.OPT_INDENT_2)
        if path.suffix == ".gz":
            data = gzip.compress(data)
        elif path.suffix == ".zst":
            data = zstandard.ZstdCompressor(write_checksum=True).compress(data)  # as the zstd command does
        path.write_bytes(data)
    return path


def raw_records(path: Any, slice_bytes: int = SLICE_BYTES) -> list[RawRecord]:
    """All records of a file, part by part."""
    return [raw for file in find_files(path) for part in scan_slices(file, slice_bytes) for raw in read_slice(part)]


def values(path: Any, slice_bytes: int = SLICE_BYTES) -> list[dict[str, Any]]:
    """All records of a file that has no bad one."""
    records = []
    for raw in raw_records(path, slice_bytes):
        assert not isinstance(raw.value, RecordError), raw.value
        records.append(raw.value)
    return records


def chats(num_records: int) -> list[dict[str, Any]]:
    """Records that differ in length and in shape: with and without tool calls, weights and other scripts."""
    records: list[dict[str, Any]] = []
    for number in range(num_records):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f'Question {number}: [a, "b"] {{}} \\ 東京\n' + "word " * (number * 7 % 60)},
            {"role": "assistant", "content": f"Answer {number}."},
        ]
        if number % 3 == 0:
            call = {"id": f"call_{number}", "type": "function", "function": {"name": "now", "arguments": {"n": number}}}
            messages.insert(1, {"role": "assistant", "content": "", "tool_calls": [call]})
            messages.insert(2, {"role": "tool", "tool_call_id": f"call_{number}", "content": "12:00"})
        records.append({"id": f"record-{number}", "messages": messages})
    return records
