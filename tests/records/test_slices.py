"""How files are cut into slices, and how slices are read."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.files import find_files
from megatron_packed_sft.records.json_files import cut_stream
from megatron_packed_sft.records.record import RecordError, content_hash
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.records.slices import read_slice, scan_slices
from tests.records.chat_files import FORMATS, chats, lines_of, raw_records, values, write_records

TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\r\n", b"defgh"]), max_size=60).map(b"".join)


@settings(deadline=None)
@given(TEXT, st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_pieces_are_the_stream_cut_behind_line_breaks_whatever_the_blocks(
    text: bytes, slice_bytes: int, sizes: list[int]
) -> None:
    blocks, position = [], 0
    while position < len(text):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(text[position : position + size])
        position += size
    pieces = list(cut_stream(blocks, b"\n", slice_bytes, carry=True))
    assert b"".join(piece.payload or b"" for piece in pieces) == text
    assert pieces == list(cut_stream([text] * bool(text), b"\n", slice_bytes, carry=True))
    for piece in pieces:
        assert piece.payload == text[piece.start : piece.stop]
        assert piece.first_record == text[: piece.start].count(b"\n") + 1
    for piece in pieces[:-1]:
        assert piece.payload is not None
        assert piece.payload.endswith(b"\n")
        shorter = piece.payload[:-1]
        assert len(piece.payload) >= slice_bytes
        assert b"\n" not in shorter[slice_bytes - 1 :]  # and cut at the first chance


@pytest.mark.parametrize("slice_bytes", [1, 100, 1000, 1 << 20])
def test_plain_and_compressed_lines_are_cut_into_the_same_units(tmp_path: Path, slice_bytes: int) -> None:
    records = chats(40)
    cuts = []
    for suffix in ("jsonl", "jsonl.gz", "jsonl.zst"):
        [file] = find_files(write_records(tmp_path / f"a.{suffix}", records))
        slices = list(scan_slices(file, slice_bytes))
        assert all((part.payload is None) == (suffix == "jsonl") for part in slices)
        read = [[(raw.number, raw.value) for raw in read_slice(part)] for part in slices]
        cuts.append([(part.number, part.start, part.stop, part.first_record) for part in slices] + read)
    assert cuts[0] == cuts[1] == cuts[2]


@pytest.mark.parametrize("suffix", FORMATS)
def test_units_depend_on_the_content_of_the_file_and_on_nothing_else(tmp_path: Path, suffix: str) -> None:
    write_records(tmp_path / f"a.{suffix}", chats(50))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"a.{suffix}").rename(tmp_path / "elsewhere" / f"b.{suffix}")
    write_records(tmp_path / f"a.{suffix}", chats(50))
    [first] = find_files(tmp_path / f"a.{suffix}")
    [second] = find_files(tmp_path / "elsewhere" / f"b.{suffix}")
    keys = [part.key() for part in scan_slices(first, 500)]
    assert len(set(keys)) == len(keys) >= 1
    if suffix != "hf_dataset":  # its files carry random fingerprints
        assert keys == [part.key() for part in scan_slices(second, 500)]
    assert keys == [part.key() for part in scan_slices(first, 500)]


@pytest.mark.parametrize("suffix", FORMATS)
def test_units_travel_to_other_processes_and_are_read_in_any_order(tmp_path: Path, suffix: str) -> None:
    records = chats(50)
    [file] = find_files(write_records(tmp_path / f"a.{suffix}", records))
    sent = [pickle.dumps(part) for part in scan_slices(file, 700)]
    read = {}
    for data in reversed(sent):
        for raw in read_slice(pickle.loads(data)):
            assert isinstance(raw.value, dict)
            read[raw.where.number] = raw.value["id"]
    assert read == {number + 1: record["id"] for number, record in enumerate(records)}


def test_line_breaks_of_all_kinds_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \t\n{"text": "two"}\n\n\n{"text": "three"}')
    for slice_bytes in (1, 20, 1000):
        assert [(raw.number, raw.value) for raw in raw_records(path, slice_bytes)] == [
            (1, {"text": "one"}),
            (4, {"text": "two"}),
            (7, {"text": "three"}),
        ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"  "])
def test_a_file_without_records_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert raw_records(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("slice_bytes", [1, 30, 1000])
def test_a_bad_line_is_told_with_file_and_line_and_the_rest_is_read(
    tmp_path: Path, suffix: str, slice_bytes: int
) -> None:
    data = b'{"text": "one"}\n{"text": oops}\n\n[1]\n{"text": "\xff"}\n{"text": "two"}\nnull\n{"text": "three"}\n'
    path = tmp_path / f"a.{suffix}"
    path.write_bytes({"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[suffix](data))
    records = raw_records(path, slice_bytes)
    assert [raw.value for raw in records if isinstance(raw.value, dict)] == [
        {"text": text} for text in ("one", "two", "three")
    ]
    errors = [str(raw.value) for raw in records if isinstance(raw.value, RecordError)]
    assert errors[0].startswith(f"{path}, line 2: the record is not valid JSON (")
    assert errors[0].endswith("at character 10); fix or remove it")
    assert errors[1] == f"{path}, line 4: the record is a list, not an object; fix or remove it"
    assert errors[2].startswith(f"{path}, line 5: the record is not UTF-8 (0xFF at byte 11); write the file in UTF-8")
    assert errors[3] == f"{path}, line 7: the record is null, not an object; fix or remove it"
    assert len(errors) == 4


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_a_compressed_file_cut_anywhere_or_damaged_is_our_error(tmp_path: Path, suffix: str) -> None:
    path = write_records(tmp_path / f"a.{suffix}", chats(30))
    whole = path.read_bytes()
    for length in [*range(1, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match=rf"a\.{suffix} is truncated or damaged.*get the file again"):
            raw_records(path)
    path.write_bytes(b"no compression at all")
    with pytest.raises(InvalidInputError, match="is truncated or damaged"):
        raw_records(path)
    path.write_bytes(whole[:100] + b"\0\0\0\0\0\0\0\0" + whole[108:])
    with pytest.raises(InvalidInputError, match="is truncated or damaged"):
        raw_records(path)


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_compressed_files_laid_end_to_end_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    records = chats(12)
    parts = [write_records(tmp_path / f"{half}.{suffix}", records[half * 6 : half * 6 + 6]) for half in range(2)]
    (tmp_path / f"both.{suffix}").write_bytes(b"".join(part.read_bytes() for part in parts))
    assert values(tmp_path / f"both.{suffix}") == records


def test_integers_beyond_64_bits_are_exact_or_an_error_and_never_another_number(tmp_path: Path) -> None:
    large = 123456789012345678901234567890
    path = tmp_path / "a.jsonl"
    for arguments in ({"n": large}, json.dumps({"n": large})):
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        path.write_text(f"{json.dumps({'id': large, 'text': 'one'})}\n{json.dumps({'messages': [call]})}\n")
        beside, inside = values(path)
        assert beside["id"] == large
        content_hash(adapter()(beside))
        with pytest.raises(RecordError, match=r"64-bit range\); write such values as strings"):
            content_hash(adapter()(inside))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("9" * 5000, "is not valid JSON (number is infinity"),
        ("[" * 1000 + "9" * 30 + "]" * 1000, "is nested more than 100 levels deep"),
    ],
)
def test_numbers_that_cannot_be_read_are_told_with_their_line(tmp_path: Path, value: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{{"text": "two", "id": {value}}}\n')
    good, bad = raw_records(tmp_path / "a.jsonl")
    assert good.value == {"text": "one"}
    assert f"a.jsonl, line 2: the record {problem}" in str(bad.value)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_a_file_of_lines_asks_for_another_name(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(chats(3), indent=indent))
    assert "line 1: the record is " in str(raw_records(tmp_path / "a.jsonl")[0].value)
    assert "a file that holds one array must be named .json; rename it" in str(
        raw_records(tmp_path / "a.jsonl")[0].value
    )


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "json.gz"])
def test_scanning_a_compressed_file_holds_a_unit_and_not_the_file(tmp_path: Path, suffix: str) -> None:
    text = "far more than what is held at once " * 2000
    peaks = []
    for num_records in (50, 500):
        records = [{"number": number, "text": text} for number in range(num_records)]
        [file] = find_files(write_records(tmp_path / f"{num_records}.{suffix}", records))
        list(scan_slices(file, 1 << 18))  # kernels and modules are loaded now
        tracemalloc.start()
        num_bytes = sum(part.stop - part.start for part in scan_slices(file, 1 << 18))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num_bytes > num_records * len(text)
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 9 << 20 < num_bytes // 3


def test_a_file_cut_while_it_is_read_is_our_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(chats(10)))
    [part] = scan_slices(find_files(path)[0])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInputError, match="it changed while it was being read"):
        list(read_slice(part))


def test_a_unit_has_at_least_one_byte(tmp_path: Path) -> None:
    [file] = find_files(write_records(tmp_path / "a.jsonl", chats(1)))
    with pytest.raises(InvalidInputError, match="slice_bytes is 0"):
        list(scan_slices(file, 0))
