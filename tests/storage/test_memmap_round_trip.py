"""What goes in comes out: arbitrary bins, in any order, singly and as blocks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import open_shard, validate
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from tests.packed_bins import assert_same_bins, bins, block_of, files_of, make_bins, write_shard


@settings(max_examples=60, deadline=None)
@given(data=st.data(), packed=bins())
def test_bins_written_in_any_order_are_read_back_element_by_element(data: st.DataObject, packed) -> None:
    pack_size, rows = packed
    order = data.draw(st.permutations(range(len(rows))))
    vocab_size = data.draw(st.sampled_from([None, 70_000]))
    with tempfile.TemporaryDirectory() as home:
        with MemmapShardWriter(f"{home}/shard", len(rows), pack_size, vocab_size=vocab_size) as writer:
            for index in order:
                writer.write_bin(index, *rows[index])
            manifest = writer.finalize()
        shard = open_shard(f"{home}/shard")
        assert_same_bins(shard, rows)
        assert manifest.num_sequences == sum(len(row.seq_start_id) for row in rows)
        assert manifest.num_tokens == sum(len(row.input_ids) for row in rows)
        assert manifest.num_loss_tokens == sum(int(row.loss_mask.sum()) for row in rows)
        assert manifest.min_packed_len == min(len(row.input_ids) for row in rows)
        assert manifest.max_seqs_per_bin == max(len(row.seq_start_id) for row in rows)
        report = validate(f"{home}/shard")
        assert report.ok, report.findings


@settings(max_examples=25, deadline=None)
@given(data=st.data(), packed=bins(vocab_size=500))
def test_blocks_in_any_order_give_the_same_bytes_as_single_bins(data: st.DataObject, packed) -> None:
    pack_size, rows = packed
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1))) if len(rows) > 1 else [])
    pieces = data.draw(st.permutations(list(zip([0, *cuts], [*cuts, len(rows)], strict=True))))
    with tempfile.TemporaryDirectory() as home:
        write_shard(Path(home, "single"), rows, pack_size, vocab_size=500, pad_id=7)
        with MemmapShardWriter(f"{home}/blocks", len(rows), pack_size, vocab_size=500, pad_id=7) as writer:
            for first, last in pieces:
                writer.write_block(first, block_of(rows[first:last], pack_size, pad_id=7, dtype="<u2"))
            writer.finalize()
        assert files_of(Path(home, "single")) == files_of(Path(home, "blocks"))


def test_ids_of_a_small_vocabulary_take_two_bytes_and_others_four(tmp_path: Path) -> None:
    rows = make_bins(3, 16)
    assert write_shard(tmp_path / "small", rows, 16, vocab_size=65_536).dtype == "<u2"
    assert write_shard(tmp_path / "large", rows, 16, vocab_size=65_537).dtype == "<i4"
    assert write_shard(tmp_path / "unknown", rows, 16).dtype == "<i4"
    assert open_shard(tmp_path / "small")[0].input_ids.dtype == np.uint16


def test_rows_of_the_large_arrays_start_on_page_borders_and_plain_numpy_reads_them(tmp_path: Path) -> None:
    rows = make_bins(4, 1024)
    write_shard(tmp_path / "shard", rows, 1024)
    for name in ("input_ids", "loss_mask"):
        array = np.load(tmp_path / "shard" / f"{name}.npy", mmap_mode="r")
        assert array.offset == 4096
        np.testing.assert_array_equal(array[2, : len(rows[2].input_ids)], getattr(rows[2], name))


def test_a_slice_of_a_shard_can_be_written_as_it_is(tmp_path: Path) -> None:
    rows = make_bins(9, 32)
    write_shard(tmp_path / "source", rows, 32)
    source = open_shard(tmp_path / "source")
    with MemmapShardWriter(tmp_path / "part", 4, 32) as writer:
        writer.write_block(0, source.block(3, 7))
        writer.finalize()
    assert_same_bins(open_shard(tmp_path / "part"), rows[3:7])


def test_starts_that_arrive_far_out_of_order_find_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_packed_sft.storage.memmap_v1 import write_buffers as starts_spool

    monkeypatch.setattr(starts_spool, "_ENTRIES_AT_ONCE", 3)
    rows = make_bins(40, 16, seed=8)
    order = np.random.default_rng(1).permutation(40)
    with MemmapShardWriter(tmp_path / "shard", 40, 16) as writer:
        for index in order.tolist():
            writer.write_bin(index, *rows[index])
        writer.finalize()
    assert_same_bins(open_shard(tmp_path / "shard"), rows)


def test_both_checksum_algorithms_validate(tmp_path: Path) -> None:
    manifest = write_shard(tmp_path / "shard", make_bins(3, 8), 8, checksum_algorithm="sha256")
    assert manifest.files is not None
    assert len(manifest.files["input_ids.npy"].checksum) == 64
    assert validate(tmp_path / "shard").ok


def test_block_indexing_gives_single_bins() -> None:
    rows = make_bins(5, 12)
    block = block_of(rows, 12)
    assert_same_bins([block[i] for i in range(5)], rows)
    shifted = BinBlock(block.input_ids, block.loss_mask, block.packed_len, block.seq_offsets + 7, block.seq_starts)
    assert_same_bins([shifted[i] for i in range(5)], rows)
    with pytest.raises(IndexError):
        block[5]
