"""The dataset provider without Megatron-Bridge: what its fields mean, and what it says when something is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packed_sft import DatasetWriter, convert, create_sft_dataset
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.megatron import bridge
from megatron_packed_sft.megatron.bridge import PackedSFTSettings, contract_of
from tests.packed_bins import make_bins, write_shard

EOS = 2
PACK_SIZE = 32
NUM_ROWS = {"train": 10, "validation": 4}
CONTEXT = SimpleNamespace(train_samples=24, valid_samples=8, test_samples=8, tokenizer=EOS)


def write_dataset(path: Path, seed: int = 0, **num_rows: int) -> Path:
    """A dataset directory with the splits named."""
    with DatasetWriter(path) as writer:
        for number, (split, count) in enumerate((num_rows or NUM_ROWS).items()):
            rows = make_bins(count, PACK_SIZE, seed=10 * seed + number)
            write_shard(writer.shard_path(split, 0), rows, PACK_SIZE, pad_id=EOS)
        writer.finalize()
    return path


def settings(path: Any, **fields: Any) -> PackedSFTSettings:
    return PackedSFTSettings(**{"path": path, "seq_length": PACK_SIZE, "contract": "bridge_0_6", **fields})


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return str(write_dataset(tmp_path / "dataset"))


def test_datasets_are_as_long_as_the_run_asks_for_and_absent_splits_are_left_out(dataset: str) -> None:
    train, validation, test = settings(dataset).build_datasets(CONTEXT)
    assert train is not None
    assert validation is not None
    assert (len(train), len(validation), test) == (24, 8, None)
    expected = create_sft_dataset(dataset, EOS, PACK_SIZE, max_num_samples=24, seed=1234)
    assert [train[i]["input_ids"].tolist() for i in range(24)] == [expected[i]["input_ids"].tolist() for i in range(24)]
    assert len({tuple(validation[index]["input_ids"].tolist()) for index in range(8)}) == NUM_ROWS["validation"]


def test_batches_have_the_leading_dimension_on_every_tensor(dataset: str) -> None:
    train, _, _ = settings(dataset, pad_to_max_length=True).build_datasets(CONTEXT)
    assert train is not None
    batch = train.collate_fn([train[index] for index in range(6)])
    assert batch["tokens"].shape == (6, PACK_SIZE)
    assert {len(value) for value in batch.values() if value is not None} == {6}


def test_a_blend_weighs_training_and_validates_on_all_that_have_the_split(dataset: str, tmp_path: Path) -> None:
    other = str(write_dataset(tmp_path / "other", seed=1, train=3))
    context = SimpleNamespace(**{**vars(CONTEXT), "train_samples": 100})
    train, validation, _ = settings([dataset, other], weights=[0.25, 0.75]).build_datasets(context)
    assert train is not None
    assert validation is not None
    few = create_sft_dataset(other, EOS, PACK_SIZE)
    rows_of_other = {tuple(few[index]["input_ids"].tolist()) for index in range(len(few))}
    drawn = [tuple(train[index]["input_ids"].tolist()) for index in range(100)]
    assert sum(row in rows_of_other for row in drawn) == 75
    assert len(validation.source) == NUM_ROWS["validation"]


@pytest.mark.parametrize("kind", ["shard", "legacy"])
def test_what_has_no_splits_is_never_evaluated_on(dataset: str, tmp_path: Path, kind: str) -> None:
    path = Path(dataset) / "train" / "shard_000000"
    if kind == "legacy":
        convert(path, tmp_path / "rows.npy", to="legacy")
        path = tmp_path / "rows.npy"
    train, validation, test = settings(str(path)).build_datasets(CONTEXT)
    assert train is not None
    assert (validation, test) == (None, None)


def test_evaluation_data_may_lie_elsewhere_or_be_left_out(dataset: str, tmp_path: Path) -> None:
    other = str(write_dataset(tmp_path / "other", seed=1, validation=3, test=2))
    _, validation, test = settings(dataset, validation_path=other, test_path=other).build_datasets(CONTEXT)
    assert validation is not None
    assert test is not None
    assert (len(validation.source), len(test.source)) == (3, 2)
    _, validation, test = settings(dataset, do_validation=False, do_test=False).build_datasets(CONTEXT)
    assert (validation, test) == (None, None)


def test_no_samples_asked_for_is_no_dataset(dataset: str) -> None:
    context = SimpleNamespace(train_samples=8, valid_samples=0, test_samples=0, tokenizer=EOS)
    assert settings(dataset).build_datasets(context)[1:] == (None, None)


def test_training_goes_round_after_max_train_samples(dataset: str) -> None:
    train, _, _ = settings(dataset, max_train_samples=6, dataloader_type="batch").build_datasets(CONTEXT)
    assert train is not None
    assert len(train) == 6
    with pytest.raises(
        InvalidInputError, match=r"max_train_samples is 6, the run needs 24 samples, and dataset\.dataloader"
    ):
        settings(dataset, max_train_samples=6, dataloader_type="single").build_datasets(CONTEXT)


def test_arguments_of_a_recipe_go_through_but_cannot_switch_padding_off(dataset: str) -> None:
    kwargs = {"pad_to_max_length": False, "answer_only_loss": False, "chat": True}
    train, _, _ = settings(dataset, pad_to_max_length=True, dataset_kwargs=kwargs).build_datasets(CONTEXT)
    assert train is not None
    assert train.options.pad_to_max_length
    assert not train.options.answer_only_loss
    with pytest.raises(InvalidInputError, match="typo is not an argument of a packed dataset"):
        settings(dataset, dataset_kwargs={"typo": 1}).build_datasets(CONTEXT)


def test_a_mask_that_lets_sequences_see_each_other_is_refused(dataset: str) -> None:
    with pytest.raises(InvalidInputError, match=r"return_cu_seqlen is false.*see each other; leave the key out"):
        settings(dataset, dataset_kwargs={"return_cu_seqlen": False}).build_datasets(CONTEXT)


def groups(context: int, tensor: int = 1) -> SimpleNamespace:
    """Process groups of these sizes, as Megatron-Bridge passes them."""
    sizes = {"cp": context, "tp": tensor}
    return SimpleNamespace(**{name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})


def test_data_that_context_parallel_ranks_cannot_share_is_refused_with_what_to_run(dataset: str) -> None:
    context = SimpleNamespace(**vars(CONTEXT), pg_collection=groups(2))
    with pytest.raises(InvalidInputError) as caught:
        settings(dataset).build_datasets(context)
    assert "padded to a multiple of 1" in str(caught.value)
    assert str(caught.value).endswith("--overwrite 'packing.for_parallel={context:2}'")


def test_batches_are_padded_to_what_tensor_parallel_ranks_share(dataset: str) -> None:
    context = SimpleNamespace(**vars(CONTEXT), pg_collection=groups(1, tensor=24))
    train, _, _ = settings(dataset, seq_length=2 * PACK_SIZE).build_datasets(context)
    assert train is not None
    assert train.options.pad_seq_length_to_mult == 48
    assert train.fetch_batch([0])["tokens"].shape[1] == 48


def test_passes_over_the_data_are_so_many_iterations(dataset: str) -> None:
    assert bridge.iterations_of(dataset, 1, 4) == 3
    assert bridge.iterations_of([dataset, dataset], 1.5, 4) == 8
    with pytest.raises(InvalidInputError, match="num_epochs 0 must be above 0"):
        bridge.iterations_of(dataset, 0, 4)


@pytest.mark.parametrize("field", ["path", "seq_length"])
def test_what_is_missing_is_said_when_datasets_are_built(dataset: str, field: str) -> None:
    incomplete = settings(**{"path": dataset, field: None})
    with pytest.raises(InvalidInputError, match=f"dataset.{field} is not set"):
        incomplete.build_datasets(CONTEXT)


@pytest.mark.parametrize(
    ("version", "contract"),
    [
        ("0.6.0rc1", "bridge_0_6"),
        ("0.6.2+abc1234", "bridge_0_6"),
        ("0.7.0", "bridge_main"),
        ("0.10.1", "bridge_main"),
        ("1.0", "bridge_main"),
    ],
)
def test_the_version_decides_the_contract(version: str, contract: str) -> None:
    assert contract_of(version) == contract


@pytest.mark.parametrize("version", ["0.3.1", "0.5.1", "unknown"])
def test_versions_before_0_6_are_refused(version: str) -> None:
    with pytest.raises(MissingDependencyError, match=f"Megatron-Bridge {version} is too old"):
        contract_of(version)


def test_without_megatron_bridge_only_using_the_provider_fails(dataset: str) -> None:
    for use in (
        lambda: bridge.PackedSFTDatasetProvider,
        bridge.allow_as_target,
        lambda: settings(dataset, contract="auto").build_datasets(CONTEXT),
    ):
        with pytest.raises(MissingDependencyError, match="needs Megatron-Bridge, which is not installed"):
            use()
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = bridge.nonsense
