"""Every format gives the same records; arrays and Parquet files in all their shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.files import find_files
from megatron_packed_sft.records.json_files import MARK, array_elements
from megatron_packed_sft.records.record import RecordError, content_hash
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.records.slices import read_slice, scan_slices
from tests.records.chat_files import FORMATS, chats, lines_of, raw_records, values, write_records

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\[]{},:\n\u6771 '), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("k[],", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("slice_bytes", [1, 999, 1 << 20])
def test_all_formats_give_the_same_conversations_and_hashes(tmp_path: Path, slice_bytes: int) -> None:
    records = chats(30)
    adapt = adapter()
    expected = [adapt(record) for record in records]
    for suffix in FORMATS:
        path = write_records(tmp_path / f"a.{suffix}", records)
        assert [raw.number for raw in raw_records(path, slice_bytes)] == list(range(1, 31))
        found = [adapt(record) for record in values(path, slice_bytes)]
        assert found == expected, suffix
        assert [content_hash(record) for record in found] == [content_hash(record) for record in expected]


@settings(deadline=None)
@given(st.lists(JSON_VALUES, max_size=6), st.sampled_from([None, 1]), st.integers(1, 40))
def test_elements_of_an_array_are_found_without_parsing_them(elements: list[Any], indent: int, size: int) -> None:
    text = f" {json.dumps(elements, indent=indent, ensure_ascii=False)}\n\n".encode()
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    marked = b"".join(array_elements(blocks, "a.json"))
    assert [json.loads(element) for element in marked.split(MARK)[:-1]] == elements
    assert marked == b"" or marked.endswith(MARK)


@pytest.mark.parametrize("content", ["[]", " [ \n ] \n", "\ufeff[]"])
def test_an_empty_array_has_no_records(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert raw_records(tmp_path / "a.json") == []


def test_a_json_file_that_is_neither_an_array_nor_lines_says_what_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "data": [{"text": "one"}]\n}')
    assert "a .json file holds one array of records, or one record per line" in str(raw_records(path)[0].value)


@pytest.mark.parametrize("slice_bytes", [1, 1000])
def test_a_bad_element_is_told_with_file_and_record_and_the_rest_is_read(tmp_path: Path, slice_bytes: int) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"},\n {"text": oops},\n 5, {"text": "two"},]')
    records = raw_records(path, slice_bytes)
    assert [raw.value for raw in records if isinstance(raw.value, dict)] == [{"text": "one"}, {"text": "two"}]
    errors = [str(raw.value) for raw in records if isinstance(raw.value, RecordError)]
    assert len(errors) == 3
    assert errors[0].startswith(f"{path}, record 2: the record is not valid JSON (")
    assert errors[1] == f"{path}, record 3: the record is a number, not an object; fix or remove it"
    assert errors[2].startswith(f"{path}, record 5: the record is not valid JSON (")  # the comma at the end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"b": "never closed\n}, {"c": 1}]', "record 2 has a line break inside a string"),
        ('[{"a": 1}, {"b": 2}', "the array is not closed; record 2 never ends"),
        ('[{"a": 1}, {"b": "\\"', "the array is not closed; record 2 never ends"),
        ('[{"a": 1}] {"b": 2}', "something follows the end of the array, after record 1"),
        ('[{"a": 1}, {"b": "\x1e"}]', "record 1 or a later one holds the byte 0x1E"),
    ],
)
def test_an_array_that_is_broken_as_a_whole_is_refused_with_file_and_record(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InvalidInputError, match=rf"a\.json: {message}"):
        raw_records(tmp_path / "a.json")


@pytest.mark.parametrize("row_group_size", [1, 7, 100])
@pytest.mark.parametrize("slice_bytes", [1, 50, 2000, 1 << 20])
def test_parquet_is_whole_for_any_row_groups_and_slices(tmp_path: Path, row_group_size: int, slice_bytes: int) -> None:
    records = [{"number": number, "text": f"text {number} " * 20} for number in range(60)]
    path = write_records(tmp_path / "a.parquet", records, row_group_size=row_group_size)
    assert values(path, slice_bytes) == records
    slices = list(scan_slices(find_files(path)[0], slice_bytes))
    assert [part.start for part in slices[1:]] == [part.stop for part in slices[:-1]]
    assert len({part.key() for part in slices}) == len(slices)


def test_a_row_group_far_larger_than_a_unit_is_cut_inside_and_a_small_one_is_fetched(tmp_path: Path) -> None:
    records = [{"number": number, "text": f"text {number}"} for number in range(5000)]
    [file] = find_files(write_records(tmp_path / "a.parquet", records, row_group_size=5000))
    small, large = list(scan_slices(file, 1000)), list(scan_slices(file, 1 << 20))
    assert len(small) > 50
    assert all(part.payload for part in small)
    assert [part.payload for part in large] == [None]


def test_a_damaged_parquet_file_is_our_error(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.parquet", chats(20))
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-9], whole[: len(whole) // 2], whole[:4] + b"\xff" * 400 + whole[404:]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidInputError, match=r"a\.parquet is not a valid Parquet file.*write it again"):
            raw_records(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_can_lie_behind_a_url(tmp_path: Path, suffix: str) -> None:
    records = chats(20)
    local = write_records(tmp_path / f"a.{suffix}", records)
    memory = fsspec.filesystem("memory")
    memory.put(str(local), f"/far/a.{suffix}", recursive=True)
    try:
        assert [record["id"] for record in values(f"memory://far/a.{suffix}", 700)] == [
            record["id"] for record in records
        ]
    finally:
        memory.rm("/far", recursive=True)


def test_messages_and_tools_kept_as_json_text_in_a_table_are_parsed(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    record = {"messages": json.dumps(messages), "tools": json.dumps(tools)}
    [found] = values(write_records(tmp_path / "a.parquet", [record]))
    assert adapter()(found) == adapter()({"messages": messages, "tools": tools})


def test_lines_and_array_of_the_same_records_have_the_same_number_of_records(tmp_path: Path) -> None:
    records = chats(25)
    (tmp_path / "lines.json").write_bytes(lines_of(records))
    write_records(tmp_path / "array.json", records)
    assert values(tmp_path / "lines.json", 300) == values(tmp_path / "array.json", 300) == records


def test_a_large_row_group_of_small_records_is_cut_into_few_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_packed_sft.records.tables._BYTES_AT_ONCE", 1 << 20)  # 16 records at once
    rows = [{"text": f"{number:0100}"} for number in range(10_000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, use_dictionary=False, compression="none")
    [file] = find_files(path)
    parts = list(scan_slices(file, 50_000))
    assert len(parts) < 30
    assert [raw.value for part in parts for raw in read_slice(part)] == rows
