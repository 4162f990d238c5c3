"""Megatron-Bridge reads what we write: its released Parquet class opens our files, and every batch is equal to ours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import convert, create_sft_dataset, open_dataset, validate
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.records.samples import sample_conversations
from tests.dataset_options import grouped
from tests.oracle.bridge import CONTRACT_OF, VERSIONS, load, own_random_state
from tests.packed_bins import make_bins, write_shard

EOS = 2
PACK_SIZE = 96
PREPARED_PACK_SIZE = 2048
ROW_GROUP = 500


def open_with_bridge(version: str, path: str | Path, **options: Any) -> Any:
    """Bridge's own class, opened on a path as its users name it."""
    with own_random_state():
        return load(version).parquet_dataset(
            file_path=str(path),
            tokenizer=SimpleNamespace(eos_id=EOS),
            prompt_template="{input} {output}",
            label_key="output",
            truncation_field="input",
            **options,
        )


def assert_equal_batches(
    version: str, theirs: str | Path, ours: str | Path, *, max_seq_length: int = PACK_SIZE, **options: Any
) -> None:
    """Compare every key of every batch, padding samples included: the type, the shape, and `torch.equal`."""
    released = open_with_bridge(version, theirs, max_seq_length=max_seq_length, **options)
    options.pop("pack_metadata_file_path", None)  # ours knows these figures itself
    dataset = create_sft_dataset(
        ours, EOS, seq_length=max_seq_length, **grouped(contract=CONTRACT_OF[version], **options)
    )
    assert len(released) == len(dataset)
    for first in range(0, len(dataset), 64):
        indices = [*range(first, min(first + 64, len(dataset)))]
        if options.get("answer_only_loss", True):  # else it trains padding samples; see test_bridge_batches
            indices.append(-1)
        expected = released.collate_fn([released[index] for index in indices])
        batch = dataset.fetch_batch(indices)
        assert set(batch) == set(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert batch[key].dtype == value.dtype, key
                assert torch.equal(batch[key], value), key
            else:
                assert batch[key] == value, key
    released.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_one_converted_file_of_several_row_groups_gives_bridges_batches(version: str, tmp_path: Path) -> None:
    bins = make_bins(2 * ROW_GROUP + 3, PACK_SIZE, vocab_size=100_000)
    write_shard(tmp_path / "shard", bins, PACK_SIZE, pad_id=EOS)
    convert(tmp_path / "shard", tmp_path / "bins.idx.parquet", to="parquet")
    assert_equal_batches(version, tmp_path / "bins.idx.parquet", tmp_path / "bins.idx.parquet")
    assert_equal_batches(version, tmp_path / "bins.idx.parquet", tmp_path / "shard", answer_only_loss=False)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("named_by", ["directory", "glob"])
def test_several_converted_shards_give_bridges_batches(version: str, named_by: str, tmp_path: Path) -> None:
    bins = make_bins(40, PACK_SIZE, seed=1)
    for number in range(4):
        write_shard(tmp_path / "shards" / f"shard_{number}", bins[number * 10 : number * 10 + 10], PACK_SIZE)
    convert(tmp_path / "shards", tmp_path / "dataset", to="parquet")
    split = tmp_path / "dataset" / "train"
    theirs = split if named_by == "directory" else split / "shard_*.idx.parquet"
    assert_equal_batches(version, theirs, tmp_path / "dataset")
    assert_equal_batches(version, theirs, tmp_path / "shards", pad_to_max_length=True)
    assert_equal_batches(version, theirs, theirs, return_cu_seqlen=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized records, packed by `packed-sft prepare storage=parquet` into two shards of a megabyte."""
    home = tmp_path_factory.mktemp("prepared")
    texts = [message["content"] for chat in sample_conversations(100, seed=1) for message in chat.messages]
    tokenizer = train_sentencepiece([text for text in texts if text], home / "sp.model", vocab_size=600)
    rng = np.random.default_rng(2)
    with open(home / "records.jsonl", "w") as file:
        for length in rng.integers(1500, PREPARED_PACK_SIZE, 500).tolist():
            record = {"input_ids": rng.integers(0, 600, length).tolist(), "loss_mask": [1] * length}
            file.write(json.dumps(record) + "\n")
    arguments = [f"input={home / 'records.jsonl'}", f"output={home / 'data'}", f"tokenizer.path={tokenizer}"]
    arguments += ["storage=parquet", "shard_megabytes=1", f"packing.pack_size={PREPARED_PACK_SIZE}"]
    assert main(["prepare", *arguments]) == 0
    return home / "data"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_prepare_writes_gives_bridges_batches_with_the_metadata_beside_it(version: str, prepared: Path) -> None:
    split = prepared / "train"
    assert len(open_dataset(prepared).entries("train")) > 1
    assert validate(prepared).ok
    length = PREPARED_PACK_SIZE
    assert_equal_batches(version, split, prepared, max_seq_length=length)
    assert_equal_batches(
        version,
        split,
        prepared,
        max_seq_length=length,
        pad_to_max_length=True,
        pad_cu_seqlens=True,
        pack_metadata_file_path=str(split / "metadata.json"),
    )
