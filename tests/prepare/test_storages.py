"""From chats to batches through the real command line, in every storage, and from each storage to each other."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft import GPTSFTPackedMultiShardDataset, create_sft_dataset, open_dataset
from tests.data.test_datasets import assert_same_batch

STORAGES = ("memmap_v1", "legacy", "parquet")
PACK_SIZE = 512


def packed_sft(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person does."""
    return subprocess.run([sys.executable, "-m", "megatron_packed_sft", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def published(chats: Path, tokenizer_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one dataset per storage, made of the same chats."""
    home = tmp_path_factory.mktemp("published")
    for storage in STORAGES:
        done = packed_sft(
            "prepare", f"input={chats}/*", f"output={home / storage}", f"work_dir={home / 'work'}", f"storage={storage}",
            f"tokenizer.path={tokenizer_path}", "template=chatml", f"packing.pack_size={PACK_SIZE}",
            "split.validation_fraction=0.1", "executor.num_workers=1", "max_drop_share=1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return home


def batches_of(path: Path, split: str) -> list[dict[str, Any]]:
    dataset = create_sft_dataset(path, split=split, seq_length=PACK_SIZE)
    assert isinstance(dataset, GPTSFTPackedMultiShardDataset)
    assert int(dataset.shard_offsets[-1]) == len(dataset) == sum(len(shard) for shard in dataset.shards)
    return [dataset.fetch_batch(range(first, min(first + 4, len(dataset)))) for first in range(0, len(dataset), 4)]


def assert_same_data(left: Path, right: Path) -> None:
    """Every batch of every split has equal keys and tensors, and the datasets say the same about their bins."""
    one, other = open_dataset(left), open_dataset(right)
    assert list(one.splits) == list(other.splits) == ["train", "validation"]
    for split in one.splits:
        assert one.figures[split].numbers() == other.figures[split].numbers()
        assert one.figures[split].tokenizer == other.figures[split].tokenizer
        for mine, theirs in zip(batches_of(left, split), batches_of(right, split), strict=True):
            assert_same_batch(mine, theirs)


@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_is_prepared_validated_and_opened_alike(published: Path, storage: str) -> None:
    done = packed_sft("validate", str(published / storage))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sound (full: 2 shards" in done.stdout
    assert open_dataset(published / storage).storage.name == storage
    assert_same_data(published / storage, published / "memmap_v1")
    if storage != "memmap_v1":  # what Megatron-Bridge expects beside the files
        metadata = json.loads((published / storage / "train" / "metadata.json").read_text())
        assert metadata[0]["pack_size"] == PACK_SIZE


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(STORAGES, 2)])
def test_every_storage_is_converted_to_every_other(published: Path, source: str, target: str, tmp_path: Path) -> None:
    done = packed_sft("convert", str(published / source), str(tmp_path / "out"), "--to", target)
    assert done.returncode == 0, done.stderr
    assert packed_sft("validate", str(tmp_path / "out"), "--quiet").returncode == 0
    assert open_dataset(tmp_path / "out").storage.name == target
    assert_same_data(tmp_path / "out", published / source)


def test_prepare_and_train_offer_the_storages_that_they_take() -> None:
    for command in ("prepare", "train"):
        done = packed_sft(command, "storage=auto", "output=x", "tokenizer.path=y" if command == "prepare" else "seed=1")
        assert done.returncode == 2
        assert "storage is 'auto'; choose one of legacy, memmap_v1, parquet" in done.stderr
