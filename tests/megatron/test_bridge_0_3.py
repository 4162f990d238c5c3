"""The dataset provider in Megatron-Bridge 0.3.1: its config, checks, dispatch, loaders and samplers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.megatron import bridge
from tests.megatron.bridge_releases import (
    GLOBAL_BATCH,
    NUM_STEPS,
    TARGET,
    assert_same_batch,
    expected_rows,
    installed,
    iterators_of,
    load,
    switched,
)
from tests.megatron.test_bridge import PACK_SIZE


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    with installed("0.3.1"):
        yield


def recipe() -> Any:
    """A recipe of 0.3.1 that would fine-tune on files of its own."""
    config = load("training.config")
    return config.ConfigContainer(
        model=load("models").GPTModelProvider(
            num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=PACK_SIZE
        ),
        train=config.TrainingConfig(
            micro_batch_size=1, global_batch_size=GLOBAL_BATCH, train_iters=NUM_STEPS, eval_interval=5, eval_iters=1
        ),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3),
        scheduler=config.SchedulerConfig(),
        dataset=config.FinetuningDatasetConfig(
            dataset_root="/nowhere",
            seq_length=PACK_SIZE,
            seed=77,
            num_workers=0,
            pin_memory=False,
            packed_sequence_specs=load("data.datasets.packed_sequence").PackedSequenceSpecs(packed_sequence_size=999),
        ),
        logger=config.LoggerConfig(),
        tokenizer=load("training.tokenizers.config").TokenizerConfig(),
        checkpoint=config.CheckpointConfig(),
    )


def test_yaml_alone_replaces_a_recipes_dataset_and_keeps_its_other_settings(path: Path, tmp_path: Path) -> None:
    dataset = switched(recipe(), path, tmp_path, ["dataset.max_train_samples=12"]).dataset
    assert type(dataset) is bridge.PackedSFTDatasetProvider
    assert isinstance(dataset, load("training.config").FinetuningDatasetConfig)
    assert (dataset.path, dataset.dataloader_type) == (str(path), "batch")
    assert (dataset.seq_length, dataset.seed, dataset.num_workers, dataset.max_train_samples) == (PACK_SIZE, 77, 0, 12)
    assert dataset.packed_sequence_specs.packed_sequence_size == PACK_SIZE


def test_checks_a_packed_run_as_its_own(path: Path, tmp_path: Path) -> None:
    config = switched(recipe(), path, tmp_path)
    config.validate()
    config.dataset.seq_length = 2 * PACK_SIZE
    with pytest.raises(AssertionError, match="sequence length"):
        config.validate()
    config.dataset.seq_length, config.train.micro_batch_size = PACK_SIZE, 2
    with pytest.raises(ValueError, match="Micro batch size should be 1"):
        config.validate()


def test_finds_the_provider_again_in_a_checkpoints_config(path: Path, tmp_path: Path) -> None:
    config = switched(recipe(), path, tmp_path)
    saved = config.to_dict()["dataset"]
    assert saved["_target_"] == TARGET
    assert load("utils.instantiate_utils").instantiate(saved) == config.dataset


def test_trains_on_our_samples_micro_batch_by_micro_batch(
    path: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = switched(recipe(), path, tmp_path)
    train, validation, test = iterators_of(config, alone, GLOBAL_BATCH, monkeypatch)  # resumed after one step
    assert test is None
    samples = expected_rows(path, "0.3.1")
    for step in range(1, NUM_STEPS):
        micro_batches, length = load("data.finetuning").prepare_finetuning_batch(train, GLOBAL_BATCH, PACK_SIZE)
        whole = samples.fetch_batch(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        assert length == whole["tokens"].shape[1]
        rows = list(micro_batches)
        assert len(rows) == GLOBAL_BATCH
        for number, row in enumerate(rows):
            assert_same_batch(row, {name: value[number : number + 1] for name, value in whole.items()})
    assert_same_batch(
        next(validation), expected_rows(path, "0.3.1", "validation", 2 * GLOBAL_BATCH).fetch_batch(range(GLOBAL_BATCH))
    )


def test_ranks_share_each_global_batch(path: Path) -> None:
    samples = expected_rows(path, "0.3.1")
    loaders = [
        load("data.samplers").build_pretraining_data_loader(
            samples, 0, "batch", 1, 0, True, collate_fn=samples.collate_fn, pin_memory=False,
            data_parallel_rank=rank, data_parallel_size=2, global_batch_size=GLOBAL_BATCH,
        )
        for rank in range(2)
    ]  # fmt: skip
    for step, batches in enumerate(zip(*loaders, strict=True)):
        for rank, batch in enumerate(batches):
            assert_same_batch(batch, samples.fetch_batch([step * GLOBAL_BATCH + rank, step * GLOBAL_BATCH + rank + 2]))
    assert step == NUM_STEPS - 1
