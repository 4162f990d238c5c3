"""The recipe's data: the same stream from any storage, blends, tokenizers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import TokenPartWriter, convert, pack, publish_store
from megatron_packed_sft.data.bin_readers import BinReader
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.train.config import DataConfig, ParallelConfig, TrainConfig, ValidationConfig
from megatron_packed_sft.train.data import CountedBatches, open_data, training_loader, validation_loader
from tests.packed_bins import make_bins, write_shard
from tests.train.counting_chats import PACK_SIZE, VOCAB_SIZE, write_dataset, write_legacy


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset", 20)


def config_of(path: Any, storage: str = "auto", **settings: Any) -> TrainConfig:
    config = TrainConfig(packed_storage=storage, data=DataConfig(path=path, **settings))
    config.model.vocab_size = VOCAB_SIZE if storage == "legacy" else None
    return config


def first_batches(config: TrainConfig, count: int = 25) -> list[dict[str, Any]]:
    return list(itertools.islice(training_loader(open_data(config), config, num_bins=40), count))


def test_legacy_files_and_shards_give_the_same_batches_over_the_edge_of_an_epoch(dataset: Path, tmp_path: Path) -> None:
    legacy = write_legacy(dataset, tmp_path / "data.npy")
    of_shards = first_batches(config_of(str(dataset), "memmap_v1"))
    of_legacy = first_batches(config_of(str(legacy), "legacy"))
    for one, other in zip(of_shards, of_legacy, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["loss_mask"], other["loss_mask"])
        assert torch.equal(one["cu_seqlens_q"], other["cu_seqlens_q"])


@pytest.mark.parametrize("storage", ["legacy", "parquet"])
def test_a_dataset_directory_of_any_storage_brings_its_length_vocabulary_and_splits(
    storage: str, dataset: Path, tmp_path: Path
) -> None:
    convert(dataset, tmp_path / "converted", to=storage)
    data = open_data(config_of(str(tmp_path / "converted")))
    assert (data.sequence_length, data.vocab_size, list(data.validation)) == (PACK_SIZE, VOCAB_SIZE, ["validation"])
    assert open_data(config_of(str(tmp_path / "converted"), sequence_length=1024)).sequence_length == 1024
    of_shards, of_files = (first_batches(config_of(str(path))) for path in (dataset, tmp_path / "converted"))
    for one, other in zip(of_shards, of_files, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_bins_come_shuffled_unless_the_stored_order_is_wanted(dataset: Path) -> None:
    stored = [batch["tokens"].tolist() for batch in first_batches(config_of(str(dataset), shuffle=False), 20)]
    shuffled = [batch["tokens"].tolist() for batch in first_batches(config_of(str(dataset)), 20)]
    assert stored != shuffled
    assert sorted(stored) == sorted(shuffled)


def test_validation_takes_every_bin_once_and_fills_up_with_bins_without_loss(dataset: Path) -> None:
    config = config_of(str(dataset))
    config.validation = ValidationConfig(paths=[str(dataset / "validation" / "shard_000000")])
    data = open_data(config)
    assert sorted(data.validation) == sorted(["validation", *config.validation.paths])
    ranks = [
        list(validation_loader(data.validation["validation"], config, data_parallel_rank=rank, data_parallel_size=2))
        for rank in range(2)
    ]
    assert [len(batches) for batches in ranks] == [4, 4]
    assert ranks[1][-1]["loss_mask"].sum() == 0
    whole = sum(int(batch["loss_mask"].sum()) for batches in ranks for batch in batches)
    alone = validation_loader(data.validation["validation"], config)
    assert whole == sum(int(batch["loss_mask"].sum()) for batch in alone)


def test_a_token_store_is_trained_on_through_its_plan(tmp_path: Path) -> None:
    with TokenPartWriter(tmp_path / "store" / "part_000000", vocab_size=100) as writer:
        for length in range(5, 25):
            writer.append(list(range(length)), train=[0, 0] + [1] * (length - 2))
        writer.finalize()
    store = publish_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=32)
    plan.save(tmp_path / "plan.npz")
    config = config_of(str(tmp_path / "store"), "memmap_v1", plan=str(tmp_path / "plan.npz"))
    data = open_data(config)
    assert (data.vocab_size, data.sequence_length, len(data.dataset)) == (100, 32, plan.num_bins)
    batches = first_batches(config, plan.num_bins)
    assert sum(int(batch["loss_mask"].sum()) for batch in batches) == sum(range(3, 23))


def test_pipeline_stages_get_batches_of_one_shape(dataset: Path) -> None:
    config = config_of(str(dataset))
    config.parallel = ParallelConfig(pipeline=2)
    assert {batch["tokens"].shape for batch in first_batches(config)} == {(1, PACK_SIZE)}


def test_tokens_and_padding_are_counted_on_their_way(dataset: Path) -> None:
    batches = first_batches(config_of(str(dataset)), 3)
    counted = CountedBatches(iter(batches), vocab_size=VOCAB_SIZE, source=source_of(dataset))
    assert list(counted) == batches
    num_positions = sum(batch["tokens"].numel() for batch in batches)
    num_padding = sum(int(batch["padding_mask"].sum()) for batch in batches)
    assert 0 < num_padding < num_positions
    assert counted.take_counts() == (num_positions - num_padding, num_positions)
    assert counted.take_counts() == (0, 0)


def source_of(dataset: Path) -> BinReader:
    return open_data(config_of(str(dataset))).dataset.source


def test_an_id_beyond_the_models_vocabulary_never_reaches_the_model(dataset: Path) -> None:
    [batch] = first_batches(config_of(str(dataset)), 1)
    source = source_of(dataset)
    largest = int(batch["tokens"].max())
    assert next(CountedBatches(iter([batch]), vocab_size=largest + 1, source=source)) is batch
    with pytest.raises(
        InvalidInputError, match=f"has the token id {largest}.*ends at {largest - 1}; set model.vocab_size"
    ):
        next(CountedBatches(iter([batch]), vocab_size=largest, source=source))


@pytest.mark.parametrize(
    ("found", "reason"), [(VOCAB_SIZE + 44, "its manifest says that all ids are below 256"), (-7, "no id is negative")]
)
def test_an_id_that_the_manifest_excludes_is_damage_and_no_reason_for_a_larger_model(
    dataset: Path, found: int, reason: str
) -> None:
    [batch] = first_batches(config_of(str(dataset)), 1)
    batch["tokens"][0, 3] = found  # as a reader without checksums would hand it on
    source = source_of(dataset)
    with pytest.raises(ShardFileError) as caught:
        next(CountedBatches(iter([batch]), vocab_size=VOCAB_SIZE, source=source))
    assert str(caught.value) == (
        f"{source.description} has the token id {found}, and {reason}, so a file of it is damaged; "
        "packed-sft validate names the file; restore it, or prepare the data again"
    )


def test_bins_that_predict_nothing_are_a_batch_of_padding(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", [PackedBin(np.array([7]), np.array([0]), np.array([0]))] * 2, 32, vocab_size=100)
    [batch] = first_batches(config_of(str(tmp_path / "shard")), 1)
    assert batch["tokens"].shape == (1, 16)
    assert batch["padding_mask"].all()
    assert not batch["loss_mask"].any()
    counted = CountedBatches(iter([batch]), vocab_size=100, source=source_of(tmp_path / "shard"))
    next(counted)
    assert counted.take_counts() == (0, 16)


def test_a_tokenizer_that_did_not_make_the_data_is_refused(dataset: Path, tmp_path: Path) -> None:
    model = train_sentencepiece(["one two three four"] * 9, tmp_path / "small.model", vocab_size=300)
    with pytest.raises(InvalidInputError, match="was made with tokenizer 'counting'"):
        open_data(config_of(str(dataset), tokenizer=str(model)))
    assert open_data(config_of(str(dataset), tokenizer=str(model), allow_mismatch=["tokenizer"])).vocab_size > 256

    tokenizer = load_tokenizer(model)
    own = write_dataset(tmp_path / "own", 4, tokenizer=tokenizer.fingerprint)
    data = open_data(config_of(str(own), tokenizer=str(model)))
    assert data.vocab_size == tokenizer.vocab_size
    assert data.dataset.options.eos_id == tokenizer.eos_id


def test_paths_made_with_different_tokenizers_are_refused_for_training_and_for_validation(
    dataset: Path, tmp_path: Path
) -> None:
    other = write_dataset(tmp_path / "other", 4, tokenizer="other")
    sentence = r"was made with another tokenizer, 'other' .* or set data\.allow_mismatch=\[tokenizer\] if"
    for settings in ({"weights": [0.5, 0.5]}, {}):
        with pytest.raises(InvalidInputError, match=sentence):
            open_data(config_of([str(dataset), str(other)], **settings))
    both = open_data(config_of([str(dataset), str(other)], allow_mismatch=["tokenizer"]))
    assert len(both.dataset) == 24
    validated = config_of(str(dataset))
    validated.validation = ValidationConfig(paths=[str(other)])
    with pytest.raises(InvalidInputError, match=sentence):
        open_data(validated)
    validated.data.allow_mismatch = ["tokenizer"]
    assert len(open_data(validated).validation) == 2


def test_a_tokenizer_that_does_not_know_all_ids_of_bare_data_is_refused(dataset: Path, tmp_path: Path) -> None:
    model = train_sentencepiece(["one two three four"] * 9, tmp_path / "small.model", vocab_size=300)
    bins = make_bins(3, PACK_SIZE, vocab_size=50_000)
    write_shard(tmp_path / "shard", bins, PACK_SIZE, vocab_size=50_000)
    convert(tmp_path / "shard", tmp_path / "bare.npy", to="legacy")
    for path in ("shard", "bare.npy"):
        with pytest.raises(
            InvalidInputError, match=r"has the id \d{5}, but the vocabulary of this tokenizer .* ends at 296"
        ):
            open_data(config_of(str(tmp_path / path), tokenizer=str(model)))
