"""Records that are too long or too deep, and files that never end: one sentence each."""

from __future__ import annotations

import os
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.encode_worker import read_record
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.record import DEEPEST, RecordError, is_too_deep
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.records.slices import FileSlice, RawRecord, read_slice, scan_slices
from tests.records.chat_files import FORMATS, raw_records, write_records

LIMIT = 1000


def records_within(path: Path, limit: int, slice_bytes: int = 1 << 20) -> list[Any]:
    return [
        raw.value
        for file in find_files(path)
        for part in scan_slices(file, slice_bytes, max_record_bytes=limit)
        for raw in read_slice(part)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_with_too_many_bytes_is_an_error_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    rows = [{"text": "short"}, {"text": "x" * 3000}, {"text": "shorter"}]
    path = write_records(tmp_path / f"a.{name}", rows)
    for slice_bytes in (1, 1 << 20):
        one, error, two = records_within(path, LIMIT, slice_bytes)
        assert (one, two) == (rows[0], rows[2])
        noun = "line" if "jsonl" in name else "record"
        assert str(error).endswith(
            f"{noun} 2: the record has more than max_record_bytes=1,000 bytes; split it, remove it, or raise "
            "max_record_bytes"
        )
    assert records_within(path, 5000) == rows


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json"])
def test_a_very_long_record_is_never_held_in_memory(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_packed_sft.records.slices._PORTION_BYTES", 1 << 20)
    rows = [{"text": "short"}, {"text": "x" * (24 << 20)}, {"text": "shorter"}]
    [file] = find_files(write_records(tmp_path / f"a.{suffix}", rows))
    raw_records(write_records(tmp_path / f"b.{suffix}", rows[:1]))  # loads the kernel, which takes more
    tracemalloc.start()
    parts = list(scan_slices(file, 1 << 20, max_record_bytes=1 << 20))
    values = [raw.value for part in parts for raw in read_slice(part)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [values[0], values[2]] == [rows[0], rows[2]]
    assert isinstance(values[1], RecordError)
    assert peak < 16 << 20


LINES = st.lists(st.sampled_from([b"", b" ", b"\t\r", b'{"a": 1}', b"{}", b'  {"b": 22222}']), max_size=40)


@settings(deadline=None)
@given(LINES, st.booleans())
def test_blank_lines_keep_the_numbers_of_the_others(lines: list[bytes], ends: bool) -> None:
    text = b"\n".join(lines) + b"\n" * ends
    file = InputFile("a.jsonl.gz", "jsonl", "gzip", 1, "")
    for padding in (b"", b"\n" * 500):  # few blank lines, and nothing but them
        found = [raw.number for raw in read_slice(FileSlice(file, 0, 0, len(text), 1, text + padding))]
        assert found == [number for number, line in enumerate(lines, 1) if line.strip()]


def nested(depth: int, inner: Any = 1) -> Any:
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def nested_text(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


TOO_DEEP = "is nested more than 100 levels deep; flatten it, or remove the record"


@pytest.mark.parametrize("depth", [500, 2000, 100_000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_deeply_nested_record_is_an_error_and_never_a_recursion(tmp_path: Path, name: str, depth: int) -> None:
    call = f'{{"type": "function", "function": {{"name": "f", "arguments": {nested_text(depth)}}}}}'
    rows = [f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}', '{"text": "fine"}']
    (tmp_path / name).write_text("\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]")
    deep, fine = raw_records(tmp_path / name)
    assert fine.value == {"text": "fine"}
    read = read_record(deep, adapter())
    assert TOO_DEEP in str(read)
    assert ("line 1" if name == "a.jsonl" else "record 1") in str(read)


@pytest.mark.parametrize("depth", [500, 2000])
def test_json_text_inside_a_record_may_not_be_deep_either(depth: int) -> None:
    text = nested_text(depth)
    answer = {"role": "assistant", "content": "Hi"}
    for record in (
        {"messages": [answer], "tools": f"[{text}]"},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}]},
        {"messages": f'[{{"role": "assistant", "content": {text}}}]'},
    ):
        read = read_record(RawRecord(record, InputFile("a.jsonl", "jsonl", None, 1, ""), 7), adapter())
        assert isinstance(read, RecordError)
        assert str(read).startswith("a.jsonl, line 7: ")


def test_depth_is_told_exactly() -> None:
    assert not is_too_deep(nested(DEEPEST))
    assert is_too_deep(nested(DEEPEST + 1))
    assert is_too_deep(nested(100_000))


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device", "a file of the kernel"])
def test_what_never_ends_is_refused_before_it_is_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            server.bind(str(path))
        else:
            path.symlink_to("/dev/zero" if kind == "a device" else "/proc/self/mounts")
        for given in (path, tmp_path / "*.jsonl"):
            with pytest.raises(InvalidInputError, match=rf"a\.jsonl is {kind}; write its content to a regular file"):
                find_files(given)
