"""dataset.json: splits of shards, published together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_packed_sft import DatasetWriter, open_dataset
from megatron_packed_sft.errors import InvalidInputError, TargetExistsError
from tests.packed_bins import assert_same_bins, files_of, make_bins

ROWS = make_bins(6, 16)


def write_dataset(path: Path, **options: bool) -> None:
    with DatasetWriter(path, **options) as dataset:
        for split, number in (("validation", 0), ("train", 1), ("train", 0)):
            with dataset.shard_writer(split, number, num_bins=3, pack_size=16) as writer:
                for index in range(3):
                    writer.write_bin(index, *ROWS[number * 3 + index])
                writer.finalize()
        dataset.finalize(provenance={"seed": 1}, card="# Card\n")


def test_shards_come_back_in_order_with_totals_and_provenance(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    assert list(dataset.splits) == ["train", "validation"]
    assert_same_bins([row for shard in dataset.open_shards("train") for row in shard], ROWS)
    assert dataset.figures["train"]["num_bins"] == 6
    assert dataset.figures["train"]["num_tokens"] == sum(len(row.input_ids) for row in ROWS)
    assert dataset.provenance == {"seed": 1}
    assert (tmp_path / "dataset" / "README.md").read_text() == "# Card\n"
    assert sorted(os.listdir(tmp_path)) == ["dataset"]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "one")
    write_dataset(tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_an_unknown_split_lists_the_known_ones(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    with pytest.raises(InvalidInputError, match="no split 'test'; choose one of train, validation"):
        open_dataset(tmp_path / "dataset").open_shards("test")


def test_an_empty_dataset_a_bad_split_name_and_an_existing_target_are_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "empty") as dataset, pytest.raises(InvalidInputError, match="would hold no shard"):
        dataset.finalize()
    with DatasetWriter(tmp_path / "bad") as dataset, pytest.raises(InvalidInputError, match="is not a plain name"):
        dataset.shard_writer("../train", 0, num_bins=1, pack_size=8)
    assert os.listdir(tmp_path) == []
    write_dataset(tmp_path / "dataset")
    with pytest.raises(TargetExistsError):
        DatasetWriter(tmp_path / "dataset")
    write_dataset(tmp_path / "dataset", overwrite=True)
