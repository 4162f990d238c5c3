"""Weights in shards: written only when they say something, checked like everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import DatasetWriter, convert, open_dataset, open_shard, validate
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, UnsupportedFormatError
from megatron_packed_sft.storage.bins import block_of
from megatron_packed_sft.storage.memmap_v1 import writer as writer_module
from megatron_packed_sft.storage.memmap_v1.manifest import ARRAY_FILES
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from megatron_packed_sft.support import json_document
from tests.packed_bins import assert_same_bins, files_of, make_bins, write_shard
from tests.storage.storage_checks import with_weights

PLAIN = make_bins(30, 16, seed=2)
MIXED = [with_weights(one) if index in (7, 8, 20) else one for index, one in enumerate(PLAIN)]


def opened(path: Path) -> MemmapShard:
    shard = open_shard(path)
    assert isinstance(shard, MemmapShard)
    return shard


def test_the_bytes_do_not_depend_on_the_order_or_on_how_bins_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_BLOCK_BYTES", 40)  # bins without weights are filled in two at a time
    write_shard(tmp_path / "one_by_one", MIXED, 16, vocab_size=1000)
    with MemmapShardWriter(tmp_path / "backwards", 30, 16, vocab_size=1000) as writer:
        for index in reversed(range(30)):
            writer.write_bin(index, *MIXED[index])
        writer.finalize()
    with MemmapShardWriter(tmp_path / "blocks", 30, 16, vocab_size=1000) as writer:
        for first in (20, 0, 10):
            writer.write_block(first, block_of(MIXED[first : first + 10], 16))
        writer.finalize()
    assert files_of(tmp_path / "one_by_one") == files_of(tmp_path / "backwards") == files_of(tmp_path / "blocks")
    assert_same_bins(open_shard(tmp_path / "blocks"), MIXED)
    header = (tmp_path / "blocks" / "loss_weights.npy").read_bytes()[:4096]
    assert header.endswith(b"\n")
    weights = np.load(tmp_path / "blocks" / "loss_weights.npy")
    assert (weights.dtype.str, weights.shape) == ("<f4", (30, 16))
    assert np.array_equal(weights > 0, np.load(tmp_path / "blocks" / "loss_mask.npy") == 1)


def test_a_shard_whose_weights_are_all_0_or_1_is_the_shard_without_weights(tmp_path: Path) -> None:
    write_shard(tmp_path / "plain", PLAIN, 16)
    ones = [one._replace(loss_mask=one.loss_mask.astype(np.float32)) for one in PLAIN]
    write_shard(tmp_path / "ones", ones, 16)
    with MemmapShardWriter(tmp_path / "blocks", 30, 16) as writer:
        block = block_of(PLAIN, 16)
        writer.write_block(0, replace(block, loss_weights=block.loss_mask.astype(np.float64)))
        writer.finalize()
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "ones") == files_of(tmp_path / "blocks")


def test_the_manifest_says_what_a_reader_must_know(tmp_path: Path) -> None:
    manifest = write_shard(tmp_path / "shard", MIXED, 16)
    document = json.loads((tmp_path / "shard" / "manifest.json").read_text())
    assert (document["version"], document["loss_weights_dtype"]) == ("1.1", "<f4")
    assert document["sum_loss_weights"] == sum(float(one.loss_mask.sum(dtype=np.float64)) for one in MIXED)
    assert sorted(document["files"]) == sorted([*ARRAY_FILES, "loss_weights.npy"])
    assert manifest.num_loss_tokens == sum(int((one.loss_mask > 0).sum()) for one in MIXED)
    assert manifest.figures.has_weights


def edit_manifest(path: Path, **changes: object) -> None:
    document = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_bytes(json_document.render({k: v for k, v in document.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"version": "1.2"}, UnsupportedFormatError, "version is '1.2', and this release reads '1.1'"),
        ({"loss_weights_dtype": "<f8"}, UnsupportedFormatError, "loss_weights_dtype is '<f8', not '<f4'"),
        ({"bin_checksum_algorithm": "crc32"}, UnsupportedFormatError, "algorithm is 'crc32', not 'xxh3_64'"),
        ({"bin_checksum_algorithm": None}, PackedSFTError, "bin_checksum_algorithm is missing"),
        ({"loss_weights_dtype": None}, PackedSFTError, "files must list exactly.*'loss_weights.npy' is wrong"),
        ({"sum_loss_weights": -1.0}, PackedSFTError, "sum_loss_weights is -1.0, not a decimal number"),
        ({"sum_loss_weights": "many"}, PackedSFTError, "sum_loss_weights is 'many'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], error: type[Exception], problem: str
) -> None:
    write_shard(tmp_path / "shard", MIXED, 16)
    edit_manifest(tmp_path / "shard", **changes)
    with pytest.raises(error, match=problem):
        open_shard(tmp_path / "shard")
    assert not validate(tmp_path / "shard").ok


def test_missing_or_foreign_weights_are_found(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", MIXED, 16)
    write_shard(tmp_path / "plain", PLAIN, 16)
    (tmp_path / "plain" / "loss_weights.npy").write_bytes((tmp_path / "shard" / "loss_weights.npy").read_bytes())
    assert [finding.message for finding in validate(tmp_path / "plain").findings] == [
        "is not part of the dataset; move it away"
    ]
    (tmp_path / "shard" / "loss_weights.npy").unlink()
    with pytest.raises(PackedSFTError, match=r"loss_weights.npy"):
        open_shard(tmp_path / "shard")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_validate_names_the_bin_and_the_position_of_an_unsound_weight(tmp_path: Path, value: float) -> None:
    write_shard(tmp_path / "shard", MIXED, 16)
    place = int(np.flatnonzero(MIXED[7].loss_mask)[0])
    data = np.load(tmp_path / "shard" / "loss_weights.npy")
    data[7, place] = value
    whole = (tmp_path / "shard" / "loss_weights.npy").read_bytes()
    (tmp_path / "shard" / "loss_weights.npy").write_bytes(whole[:4096] + data.tobytes())
    findings = validate(tmp_path / "shard").findings
    assert (findings[0].bin, findings[0].field) == (7, "loss_weights")
    assert f"at position {place}, where loss_mask is 1" in findings[0].message
    assert "does not match its checksum" in findings[1].message
    writer = MemmapShardWriter(tmp_path / "again", 30, 16)
    with writer, pytest.raises(InvalidInputError, match=r"bin 7: loss_weights is .* at position"):
        writer.write_block(0, replace(block_of(MIXED, 16), loss_weights=data))


def test_a_weight_where_nothing_is_predicted_is_refused(tmp_path: Path) -> None:
    with MemmapShardWriter(tmp_path / "shard", 1, 4) as writer:
        with pytest.raises(InvalidInputError, match="last token of a sequence"):
            writer.write_bin(0, [1, 2, 3], [0.5, 0.5, 0.5], [0])
        with pytest.raises(InvalidInputError, match="loss_mask is nan at position 1"):
            writer.write_bin(0, [1, 2, 3], [0.5, float("nan"), 0], [0])
        short = next(one for one in PLAIN if len(one.input_ids) < 4)
        block = block_of([short], 4)
        with pytest.raises(InvalidInputError, match="loss_weights has shape"):
            writer.write_block(0, replace(block, loss_weights=np.zeros((1, 16), np.float32)))
        in_the_padding = np.array([[0, 0, 0, 0.5]], np.float32)
        with pytest.raises(InvalidInputError, match=r"bin 0: loss_weights is 0.5 at position 3, where loss_mask is 0"):
            writer.write_block(0, replace(block, loss_mask=block.loss_mask * 0, loss_weights=in_the_padding))


def test_a_dataset_says_the_sum_of_its_weights_if_any_shard_has_some(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "dataset") as dataset:
        for split, number, bins in (("train", 0, PLAIN[:7]), ("train", 1, MIXED[7:]), ("validation", 0, PLAIN[:7])):
            with dataset.shard_writer(split, number, num_bins=len(bins), pack_size=16, vocab_size=1000) as writer:
                for index, one in enumerate(bins):
                    writer.write_bin(index, *one)
                writer.finalize()
        dataset.finalize()
    figures = open_dataset(tmp_path / "dataset").figures
    assert figures["train"].has_weights
    assert figures["train"].sum_loss_weights == sum(float(one.loss_mask.sum(dtype=np.float64)) for one in MIXED)
    assert not figures["validation"].has_weights
    assert (
        "sum_loss_weights"
        not in json.loads((tmp_path / "dataset" / "dataset.json").read_text())["splits"]["validation"]
    )
    assert validate(tmp_path / "dataset").ok


@pytest.mark.parametrize("to", ["legacy", "parquet"])
def test_converting_to_a_storage_without_weights_is_refused_in_one_sentence(tmp_path: Path, to: str) -> None:
    write_shard(tmp_path / "shard", MIXED, 16)
    with pytest.raises(InvalidInputError, match=f"shard has loss weights .* {to} keeps only 0 and 1; use memmap_v1"):
        convert(tmp_path / "shard", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
