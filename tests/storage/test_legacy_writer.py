"""The legacy writer: what NumPy and Megatron-Bridge load from its files is what was written, or nothing is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError, StorageIOError, TargetExistsError, WriterStateError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.storage.legacy.storage import LegacyShard
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from tests.packed_bins import assert_same_bins, bins, block_of, make_bins

Row = dict[str, Any]
GOOD: Row = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0], "seq_start_id": [0, 2]}


def as_rows(packed: list[PackedBin]) -> list[Row]:
    """Bins as Megatron-Bridge has them in memory: dicts of lists."""
    return [dict(zip(GOOD, (field.tolist() for field in row), strict=True)) for row in packed]


def load(path: Path) -> list[Row]:
    return list(np.load(path, allow_pickle=True))


@settings(max_examples=40, deadline=None)
@given(drawn=bins(vocab_size=2**31), data=st.data())
def test_what_we_write_numpy_loads_equal(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, list[PackedBin]], data: st.DataObject
) -> None:
    pack_size, rows = drawn
    path = tmp_path_factory.mktemp("legacy") / "packed.npy"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(rows))))) or [0]
    blocks = [*zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    with LegacyPickleWriter(path, WriterOptions(num_bins=len(rows), pack_size=pack_size)) as writer:
        for start, stop in blocks:
            if stop - start == 1 and data.draw(st.booleans()):
                writer.write_bin(start, *rows[start])
            elif stop > start:
                writer.write_block(start, block_of(rows[start:stop], pack_size, pad_id=3))
        totals = writer.finalize()
    assert load(path) == as_rows(rows)
    assert all(type(value) is int for row in load(path) for field in row.values() for value in field)
    assert_same_bins(LegacyShard(path), rows)
    assert totals == {
        "format": "legacy_npy_pickle",
        "num_bins": len(rows),
        "num_sequences": sum(len(row.seq_start_id) for row in rows),
        "num_tokens": sum(len(row.input_ids) for row in rows),
        "num_loss_tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "pack_size": pack_size,
        "max_seqs_per_bin": max(len(row.seq_start_id) for row in rows),
        "max_seq_len": max(int(np.diff([*row.seq_start_id, len(row.input_ids)]).max()) for row in rows),
        "min_packed_len": min(len(row.input_ids) for row in rows),
        "num_bytes": path.stat().st_size,
    }
    assert os.listdir(path.parent) == ["packed.npy"]


@pytest.mark.parametrize("num_bins", [999, 1000, 1001, 2000])
def test_bins_around_the_batches_of_a_pickle_come_back_equal(tmp_path: Path, num_bins: int) -> None:
    rows = make_bins(num_bins, 6, vocab_size=300)
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=num_bins)) as writer:
        for index, row in enumerate(rows):
            writer.write_bin(index, *row)
        writer.finalize()
    assert load(tmp_path / "packed.npy") == as_rows(rows)
    assert_same_bins(LegacyShard(tmp_path / "packed.npy"), rows)


def test_ids_of_any_type_and_slices_of_a_larger_csr_are_written_equal(tmp_path: Path) -> None:
    rows = make_bins(6, 10, vocab_size=60_000)
    for dtype in ("<u2", "<i4", "<i8", ">i4"):
        whole = block_of(rows, 10, dtype=dtype)
        with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=4, overwrite=True)) as writer:
            part = block_of(rows[2:], 10, dtype=dtype)
            offsets = whole.seq_offsets[2:7]
            writer.write_block(
                0, type(whole)(part.input_ids, part.loss_mask, part.packed_len, offsets, part.seq_starts)
            )
            writer.finalize()
        assert load(tmp_path / "packed.npy") == as_rows(rows[2:])


def test_blocks_larger_than_the_buffer_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_packed_sft.storage.legacy.writer._BUFFER_BYTES", 500)
    rows = make_bins(50, 40)
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=50)) as writer:
        writer.write_block(0, block_of(rows[:40], 40))
        writer.write_block(40, block_of(rows[40:], 40))
        writer.finalize()
    assert load(tmp_path / "packed.npy") == as_rows(rows)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss_mask": [1, 0, 2, 0]}, "bin 1: loss_mask is 2 at position 2, not 0 or 1"),
        ({"loss_mask": [1, 0, 300, 0]}, "bin 1: loss_mask is 300 at position 2"),
        ({"loss_mask": [1, 0]}, "bin 1: loss_mask has 2 entries, but input_ids has 4"),
        ({"loss_mask": [1, 0, 1, 1]}, "bin 1: loss_mask is 1 at position 3, the last token of a sequence"),
        ({"input_ids": [5, 6, 100, 8]}, r"bin 1: input_ids is 100 at position 2, not in 0\.\.99"),
        ({"input_ids": [5, 6, -1, 8]}, "bin 1: input_ids is -1 at position 2"),
        ({"input_ids": []}, "bin 1: input_ids is empty"),
        ({"input_ids": [0.5]}, "bin 1: input_ids has shape .* type float64"),
        ({"input_ids": [1] * 5, "loss_mask": [0] * 5}, "bin 1: input_ids has 5 tokens, more than pack_size 4"),
        ({"seq_start_id": []}, "bin 1: seq_start_id is empty"),
        ({"seq_start_id": [1, 2]}, "bin 1: seq_starts begin with 1, not 0"),
        ({"seq_start_id": [0, 0]}, "bin 1: seq_starts do not increase at entry 1"),
        ({"seq_start_id": [0, 4]}, "bin 1: seq_starts entry 1 is not below its length 4"),
    ],
)
def test_a_wrong_bin_is_refused_and_the_writer_goes_on(tmp_path: Path, change: Row, sentence: str) -> None:
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=2, pack_size=4, vocab_size=100)) as writer:
        writer.write_bin(0, **GOOD)
        with pytest.raises(InvalidInputError, match=f"^{sentence}"):
            writer.write_bin(1, **{**GOOD, **change})
        writer.write_bin(1, **GOOD)
        assert writer.finalize()["num_tokens"] == 8
    assert load(tmp_path / "packed.npy") == [GOOD, GOOD]


def test_a_block_with_one_wrong_bin_or_unfitting_arrays_is_refused_whole(tmp_path: Path) -> None:
    rows = make_bins(3, 8)
    block = block_of(rows, 8)
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=3)) as writer:
        block.loss_mask[2, 7] = 2
        with pytest.raises(InvalidInputError, match=r"^bin 2: loss_mask is "):
            writer.write_block(0, block)
        narrow = type(block)(
            block.input_ids, block.loss_mask[:, :7], block.packed_len, block.seq_offsets, block.seq_starts
        )
        with pytest.raises(InvalidInputError, match=r"block at bin 0: input_ids \(3, 8\), loss_mask \(3, 7\)"):
            writer.write_block(0, narrow)
        writer.write_block(0, block_of(rows, 8))
        writer.finalize()
    assert load(tmp_path / "packed.npy") == as_rows(rows)


def test_bins_out_of_turn_are_refused_by_number(tmp_path: Path) -> None:
    rows = make_bins(5, 8)
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=5)) as writer:
        writer.write_bin(0, *rows[0])
        with pytest.raises(WriterStateError, match="bin 3 came before bin 1; write bins in their order"):
            writer.write_bin(3, *rows[3])
        writer.write_bin(1, *rows[1])
        with pytest.raises(WriterStateError, match="bin 1 was written already; write each bin once"):
            writer.write_bin(1, *rows[1])
        with pytest.raises(WriterStateError, match="bin 0 was written already"):
            writer.write_block(0, block_of(rows, 8))
        with pytest.raises(WriterStateError, match=r"bin 2 was never written \(3 of 5 bins are missing\)"):
            writer.finalize()
        for first in (-1, 5):
            with pytest.raises(InvalidInputError, match=rf"bins {first}\.\.{first} are not within 0\.\.4"):
                writer.write_bin(first, *rows[0])
        writer.write_block(2, block_of(rows[2:], 8))
        writer.finalize()
        with pytest.raises(WriterStateError, match="is closed; open a new one"):
            writer.write_bin(0, *rows[0])
        with pytest.raises(WriterStateError, match="is closed; open a new one"):
            writer.finalize()
        writer.abort()
    assert load(tmp_path / "packed.npy") == as_rows(rows)


def test_leaving_without_finalize_or_by_an_exception_leaves_nothing(tmp_path: Path) -> None:
    rows = make_bins(3, 8)
    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=3)) as writer:
        writer.write_bin(0, *rows[0])
    assert os.listdir(tmp_path) == []
    with (
        pytest.raises(InvalidInputError),
        LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=3)) as writer,
    ):
        writer.write_bin(0, [], [], [])
    assert os.listdir(tmp_path) == []
    writer.abort()
    with pytest.raises(WriterStateError, match="is closed; open a new one"):
        writer.write_bin(1, *rows[1])


def test_a_published_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "packed.npy"
    path.write_bytes(b"precious")
    with pytest.raises(TargetExistsError, match=r"packed\.npy exists already"):
        LegacyPickleWriter(path, WriterOptions(num_bins=1))
    assert path.read_bytes() == b"precious"
    with LegacyPickleWriter(path, WriterOptions(num_bins=1, overwrite=True)) as writer:
        writer.write_bin(0, **GOOD)
        assert path.read_bytes() == b"precious"
        writer.finalize()
    assert load(path) == [GOOD]
    assert os.listdir(tmp_path) == ["packed.npy"]


@pytest.mark.parametrize("arguments", [{"num_bins": 0}, {"num_bins": -1}, {"num_bins": 1, "vocab_size": 0}])
def test_a_writer_of_nothing_is_refused(tmp_path: Path, arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=r"num_bins is|vocab_size is"):
        LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(**arguments))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "link"])
def test_a_disk_that_fails_leaves_nothing_and_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    rows = make_bins(3, 8)

    def complete(writer: LegacyPickleWriter) -> None:
        for index in (1, 2):
            writer.write_bin(index, *rows[index])
        writer.finalize()

    def fail(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    with LegacyPickleWriter(tmp_path / "packed.npy", WriterOptions(num_bins=3)) as writer:
        writer.write_bin(0, *rows[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            with pytest.raises(StorageIOError, match=r"packed\.npy: Input/output error"):
                complete(writer)
        with pytest.raises(WriterStateError):
            writer.finalize()
        assert os.listdir(tmp_path) == []
