"""The dataset provider in Megatron-Bridge 0.6.2: its allow-list, overrides, dispatch, loaders and samplers."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.data.options import BatchOptions
from megatron_packed_sft.errors import InvalidInputError
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
from tests.megatron.test_bridge import EOS, PACK_SIZE


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    with installed("0.6.2"):
        yield


@dataclasses.dataclass
class Recipe:
    """As much of a recipe of 0.6.2 as overrides and loaders look at."""

    dataset: Any
    model: Any
    train: Any
    validation: Any


def make_recipe() -> Recipe:
    """Its dataset is any dataclass: the overrides replace it."""
    fields = {"seq_length": PACK_SIZE, "seed": 77, "num_workers": 0, "persistent_workers": False, "pin_memory": False}
    dataset = dataclasses.make_dataclass("RecipeDataset", fields)(**fields)
    train = SimpleNamespace(
        train_samples=None, train_iters=NUM_STEPS, global_batch_size=GLOBAL_BATCH, micro_batch_size=1,
        num_epochs=None, exit_signal=None, exit_signal_handler_for_dataloader=False,
    )  # fmt: skip
    validation = SimpleNamespace(
        eval_interval=5, eval_iters=1, skip_train=False, eval_global_batch_size=None, eval_micro_batch_size=None
    )
    return Recipe(dataset, None, train, validation)


def make_provider(path: Path, tmp_path: Path, **overrides: Any) -> Any:
    """The dataset of the recipe once it is switched, the rest of it being left alone."""
    recipe = dataclasses.make_dataclass("Recipe", ["dataset"])(make_recipe().dataset)
    return switched(recipe, path, tmp_path, [f"+dataset.{key}={value}" for key, value in overrides.items()]).dataset


def test_refuses_the_target_until_it_is_allowed() -> None:
    instantiation = load("utils.instantiate_utils")
    config = {"_target_": TARGET, "path": "my_dataset", "seq_length": PACK_SIZE}
    with pytest.raises(instantiation.InstantiationException, match="not in the allowlist"):
        instantiation.instantiate(config)
    bridge.allow_as_target()
    provider = instantiation.instantiate(config)
    assert type(provider) is bridge.PackedSFTDatasetProvider
    assert isinstance(provider, load("data.base").DatasetProvider)
    with pytest.raises(instantiation.InstantiationException, match="not in the allowlist"):
        instantiation.instantiate({"_target_": "megatron_packed_sft_of_somebody_else.Provider"})


def test_sees_that_data_is_packed_and_how(path: Path) -> None:
    provider = bridge.PackedSFTDatasetProvider(path=str(path), seq_length=PACK_SIZE)
    provider.pad_cu_seqlens = True  # recipes in Python set fields later
    specs = provider.offline_packing_specs
    assert provider.enable_offline_packing
    assert isinstance(specs, load("data.packing.config").PackedSequenceSpecs)
    assert (specs.packed_sequence_size, specs.pad_cu_seqlens) == (PACK_SIZE, True)


def test_what_a_recipe_writes_into_the_specs_stays_and_is_followed(path: Path) -> None:
    provider = bridge.PackedSFTDatasetProvider(path=str(path), seq_length=PACK_SIZE, pad_to_max_length=True)
    provider.offline_packing_specs.pad_cu_seqlens = True  # as Megatron-Bridge's recipes do
    provider.offline_packing_specs.tokenizer_model_name = "mine"
    assert provider.offline_packing_specs is provider.offline_packing_specs
    assert provider.offline_packing_specs.tokenizer_model_name == "mine"
    context = SimpleNamespace(train_samples=4, valid_samples=0, test_samples=0, tokenizer=EOS)
    train, _, _ = provider.build_datasets(context)
    assert train.options.pad_cu_seqlens
    provider.seq_length = 2 * PACK_SIZE
    assert provider.offline_packing_specs.packed_sequence_size == 2 * PACK_SIZE
    provider.offline_packing_specs.packed_sequence_size = 7
    with pytest.raises(InvalidInputError, match=r"packed_sequence_size is 7, and dataset\.seq_length is 64"):
        provider.build_datasets(context)


def test_copies_of_a_provider_have_specs_of_their_own(path: Path) -> None:
    provider = bridge.PackedSFTDatasetProvider(path=str(path), seq_length=PACK_SIZE)
    provider.offline_packing_specs.pad_cu_seqlens = True
    copied = copy.deepcopy(provider)
    copied.offline_packing_specs.pad_cu_seqlens = False
    assert provider.offline_packing_specs.pad_cu_seqlens
    assert dataclasses.replace(provider, seed=3).seed == 3


def test_epochs_get_a_clear_sentence(path: Path, alone: Any) -> None:
    recipe = make_recipe()
    recipe.train.num_epochs = 2.0
    recipe.dataset = bridge.PackedSFTDatasetProvider(path=str(path), seq_length=PACK_SIZE, dataloader_type="batch")
    with pytest.raises(ValueError, match="num_epochs is only supported for finite GPTSFTDatasetConfig"):  # Bridge's own
        load("data.loaders").build_train_valid_test_datasets_for_num_epochs(recipe, lambda *_: None)
    none = SimpleNamespace(train_samples=0, valid_samples=0, test_samples=0, tokenizer=EOS)  # what it would ask for
    with pytest.raises(InvalidInputError, match=r"set train\.train_iters instead, to what .*iterations_of\(path"):
        recipe.dataset.build_datasets(none)
    assert bridge.iterations_of(str(path), 2.0, GLOBAL_BATCH) == 5


def test_trains_on_our_samples_in_our_order(
    path: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.allow_as_target()
    recipe = make_recipe()
    recipe.dataset = make_provider(path, tmp_path)
    assert recipe.dataset.dataloader_type == "single"
    train, validation, _ = iterators_of(recipe, alone, GLOBAL_BATCH, monkeypatch)  # resumed after one step
    samples = expected_rows(path, "0.6.2")
    for index in range(GLOBAL_BATCH, NUM_STEPS * GLOBAL_BATCH):
        assert_same_batch(next(train), samples.fetch_batch([index]))
    assert_same_batch(next(validation), expected_rows(path, "0.6.2", "validation", 2 * GLOBAL_BATCH).fetch_batch([0]))


def test_global_batches_work_too_and_their_second_shuffle_is_told(
    path: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge.allow_as_target()
    recipe = make_recipe()
    recipe.dataset = make_provider(path, tmp_path, dataloader_type="batch", pad_to_max_length=True)
    with caplog.at_level(logging.WARNING, logger=bridge.__name__):
        train, _, _ = iterators_of(recipe, alone, 0, monkeypatch)
    assert "dataloader_type=single" in caplog.text
    seen = []
    for _ in range(NUM_STEPS):
        micro_batches, length = load("data.batch_utils").prepare_finetuning_batch(train, GLOBAL_BATCH, PACK_SIZE)
        assert length == PACK_SIZE
        seen += [row["tokens"].numpy().tobytes() for row in micro_batches]
    samples = create_sft_dataset(path, EOS, PACK_SIZE, contract=BatchOptions("bridge_0_6", pad_to_max_length=True))
    each_row = [samples.fetch_batch([row])["tokens"].numpy().tobytes() for row in range(len(samples))]
    assert sorted(seen) == sorted(2 * each_row)  # 20 samples are two epochs of 10 rows, in whatever order
