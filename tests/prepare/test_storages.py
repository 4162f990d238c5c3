"""From chats to batches through the real command line, in every storage, and from each storage to each other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft import create_sft_dataset, open_dataset
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.data.datasets import GPTSFTPackedMultiShardDataset
from tests.data.test_datasets import assert_same_batch

STORAGES = ("memmap_v1", "legacy", "parquet")
PACK_SIZE = 512


def packed_sft(*arguments: object) -> None:
    """Run a command that must succeed."""
    assert main([str(one) for one in arguments]) == 0


@pytest.fixture(scope="module")
def published(chats: Path, tokenizer_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one dataset per storage, made of the same chats."""
    home = tmp_path_factory.mktemp("published")
    settings = [f"input={chats}/*", f"tokenizer.path={tokenizer_path}", "template=chatml", "executor.num_workers=1"]
    settings += [f"packing.pack_size={PACK_SIZE}", "split.validation_fraction=0.1", "max_drop_share=1"]
    for storage in STORAGES:
        packed_sft("prepare", *settings, f"output={home / storage}", f"work_dir={home / 'work'}", f"storage={storage}")
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
def test_every_storage_is_prepared_validated_and_opened_alike(
    published: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packed_sft("validate", published / storage)
    assert "sound (full: 2 shards" in capsys.readouterr().out
    assert open_dataset(published / storage).storage.name == storage
    assert_same_data(published / storage, published / "memmap_v1")
    if storage != "memmap_v1":  # what Megatron-Bridge expects beside the files
        metadata = json.loads((published / storage / "train" / "metadata.json").read_text())
        assert metadata[0]["pack_size"] == PACK_SIZE


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(STORAGES, 2)])
def test_every_storage_is_converted_to_every_other(published: Path, source: str, target: str, tmp_path: Path) -> None:
    packed_sft("convert", published / source, tmp_path / "out", "--to", target)
    packed_sft("validate", tmp_path / "out", "--quiet")
    assert open_dataset(tmp_path / "out").storage.name == target
    assert_same_data(tmp_path / "out", published / source)


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_prepare_and_train_offer_the_storages_that_they_take(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "storage=auto", "output=x"]) == 2
    assert (
        "storage is 'auto'; choose one of legacy, megatron_indexed, memmap_v1, parquet, token_stream"
        in capsys.readouterr().err
    )
