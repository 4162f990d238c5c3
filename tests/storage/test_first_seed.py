"""The calls of the first design document work as they are written there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.data.datasets import GPTSFTPackedMemmapDataset, GPTSFTPackedMultiShardDataset
from megatron_packed_sft.errors import InvalidInputError, WriterStateError
from megatron_packed_sft.storage.convert import convert_legacy_to_memmap
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

BINS = [
    (np.array([1, 2, 3]), np.array([0, 1, 0]), np.array([0])),
    (np.array([4, 5, 6, 7]), np.array([1, 0, 1, 0]), np.array([0, 2])),
    (np.array([8, 9]), np.array([1, 0]), np.array([0])),
]
SEED_KEYS = {
    "version": "1.1",  # of the document's 1.0 everything is as it was; the checksums of bins came with 1.1
    "format": "memmap_padded_v1",
    "num_bins": 3,
    "pack_size": 10,
    "loss_mask_dtype": "|u1",  # as NumPy writes a single byte; the document has "<u1", which means the same
    "index_dtype": "<u4",
    "bins_written": 3,
}


def write(writer: Any) -> Any:
    """As in its round trip test."""
    for i, (ids, mask, starts) in enumerate(BINS):
        writer.write_bin(i, ids, mask, starts)
    return writer.finalize()


def equal_bins(path: Path, num_bins: int) -> None:
    """As in its loader test: bins of one length, so that torch can stack them."""
    writer = MemmapShardWriter(str(path), num_bins=num_bins, pack_size=64, total_seq_starts=2 * num_bins)
    mask = np.ones(50, np.uint8)
    mask[[24, 49]] = 0
    for i in range(num_bins):
        writer.write_bin(i, np.arange(50, dtype=np.int32), mask, np.array([0, 25], dtype=np.uint32))
    writer.finalize()


def test_the_memmap_writer_takes_a_dtype_and_returns_a_manifest_to_index(tmp_path: Path) -> None:
    writer = MemmapShardWriter(
        output_dir=str(tmp_path / "shard"), num_bins=3, pack_size=10, total_seq_starts=4, dtype=np.int32
    )
    manifest = write(writer)
    assert manifest["num_bins"] == 3
    assert manifest["dtype"] == "<i4"
    on_disk = json.loads((tmp_path / "shard" / "manifest.json").read_text())
    for key, value in SEED_KEYS.items():
        assert on_disk[key] == value
        assert manifest[key] == value
    input_ids = np.load(tmp_path / "shard" / "input_ids.npy", mmap_mode="r")
    assert input_ids.dtype == np.int32
    packed_len = np.load(tmp_path / "shard" / "packed_len.npy", mmap_mode="r")
    for i, (ids, _, _) in enumerate(BINS):
        assert input_ids[i, : packed_len[i]].tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [np.int32, "int32", np.dtype("<i4"), np.uint16])
def test_the_dtype_may_be_given_in_every_way_numpy_takes(tmp_path: Path, dtype: Any) -> None:
    write(MemmapShardWriter(tmp_path / "shard", 3, 10, 4, dtype=dtype))
    assert np.load(tmp_path / "shard" / "input_ids.npy", mmap_mode="r").dtype == np.dtype(dtype)


def test_a_dtype_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="dtype"):
        MemmapShardWriter(tmp_path / "shard", 3, 10, 4, dtype=np.float32)


@pytest.mark.parametrize("total_seq_starts", [4, 5, 1000])
def test_total_seq_starts_is_a_capacity(tmp_path: Path, total_seq_starts: int) -> None:
    write(MemmapShardWriter(tmp_path / "shard", num_bins=3, pack_size=10, total_seq_starts=total_seq_starts))
    assert np.load(tmp_path / "shard" / "seq_starts.npy").tolist() == [0, 0, 2, 0]


def test_more_starts_than_total_seq_starts_are_refused(tmp_path: Path) -> None:
    with (
        MemmapShardWriter(tmp_path / "shard", num_bins=3, pack_size=10, total_seq_starts=3) as writer,
        pytest.raises(WriterStateError, match="total_seq_starts is 3, but 4 sequences were written"),
    ):
        write(writer)
    assert not (tmp_path / "shard").exists()


def test_the_legacy_writer_needs_a_path_only(tmp_path: Path) -> None:
    receipt = write(LegacyPickleWriter(str(tmp_path / "packed.npy")))
    assert receipt["num_bins"] == 3
    loaded = np.load(tmp_path / "packed.npy", allow_pickle=True)
    assert [one["input_ids"] for one in loaded] == [ids.tolist() for ids, _, _ in BINS]


def test_a_legacy_file_is_converted_with_two_paths(tmp_path: Path) -> None:
    write(LegacyPickleWriter(str(tmp_path / "packed.npy")))
    manifest = convert_legacy_to_memmap(str(tmp_path / "packed.npy"), str(tmp_path / "shard"))
    assert (manifest["num_bins"], manifest["pack_size"]) == (3, 4)
    named = convert_legacy_to_memmap(legacy_npy_path=tmp_path / "packed.npy", output_dir=tmp_path / "named")
    assert named["num_bins"] == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_own_collate_works_without_a_tokenizer_and_without_warnings(tmp_path: Path, num_workers: int) -> None:
    equal_bins(tmp_path / "shard", 20)
    dataset = GPTSFTPackedMemmapDataset(str(tmp_path / "shard"), tokenizer=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "the given NumPy array is not writable"
        loader = DataLoader(dataset, batch_size=8, num_workers=num_workers, persistent_workers=num_workers > 0)
        batches = list(loader)
    assert sum(len(batch["input_ids"]) for batch in batches) == 20
    batches[0]["input_ids"][0, 0] = 7  # and it is the loader's own memory
    assert dataset[0]["input_ids"][0] == 0


def test_the_padding_id_without_a_tokenizer_is_that_of_the_manifest(tmp_path: Path) -> None:
    for name, arguments, expected in (("given", {"pad_id": 9}, 9), ("default", {}, 0)):
        write(MemmapShardWriter(tmp_path / name, 3, 10, **arguments))
        dataset = GPTSFTPackedMemmapDataset(tmp_path / name, tokenizer=None)
        assert dataset.fetch_batch([1, 2])["tokens"][1, -1] == expected
    write(LegacyPickleWriter(tmp_path / "packed.npy"))
    with pytest.raises(InvalidInputError, match="does not record a padding id; pass a tokenizer"):
        create_sft_dataset(tmp_path / "packed.npy", contract="bridge_0_6")


def test_shards_and_their_offsets_can_be_looked_at(tmp_path: Path) -> None:
    equal_bins(tmp_path / "a", 3)
    equal_bins(tmp_path / "b", 4)
    dataset = GPTSFTPackedMultiShardDataset([str(tmp_path / "a"), str(tmp_path / "b")], tokenizer=None)
    assert dataset.shard_offsets.tolist() == [0, 3, 7]
    assert [len(shard) for shard in dataset.shards] == [3, 4]
    one = GPTSFTPackedMemmapDataset(str(tmp_path / "a"), tokenizer=None)
    assert (one.manifest["num_bins"], one.manifest["pack_size"]) == (3, 64)
