"""`packing_mode=static` in the recipe (seed 003): whole runs, and what is refused before they start."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import TokenPartWriter, pack, publish_store
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.config import DataConfig, ParallelConfig, TrainConfig, ValidationConfig
from megatron_packed_sft.train.config_checks import check_config
from megatron_packed_sft.train.data import open_data, training_loader, validation_loader
from tests.train.launch import RECIPE, Runs, environment, run_in_turn, torchrun

LENGTH = 128
VOCAB_SIZE = 100
FUNCTION = "tests.train.static_samples.make_samples"
RANKS = "megatron_packed_sft.train.data.num_ranks"


def write_store(path: Path, seed: int = 0, num_sequences: int = 60) -> Path:
    """Short sequences, one that fills a pack and one longer than a pack."""
    rng = np.random.default_rng(seed)
    with TokenPartWriter(path / "part_000000", vocab_size=VOCAB_SIZE) as writer:
        for length in [*rng.integers(5, 60, num_sequences).tolist(), LENGTH, 200]:
            writer.append(rng.integers(3, 90, length), train=[0, 0] + [1] * (length - 2))
        writer.finalize()
    publish_store(path)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("data") / "store")


def config_of(store: Path, output: Path, **settings: Any) -> TrainConfig:
    own = {name: settings.pop(name) for name in list(settings) if hasattr(TrainConfig(), name)}
    data = DataConfig(path=str(store), sequence_length=LENGTH, **settings)
    config = TrainConfig(packing_mode="static", data=data, output=str(output), **own)
    config.model.vocab_size = VOCAB_SIZE
    return config


def batches_of(config: TrainConfig, count: int) -> list[dict[str, Any]]:
    return list(itertools.islice(training_loader(open_data(config), config), count))


def arguments(store: Path, output: Path, *more: str) -> list[str]:
    return [
        f"data.path={store}",
        f"data.sequence_length={LENGTH}",
        "packing_mode=static",
        f"model.vocab_size={VOCAB_SIZE}",
        f"output={output}",
        "train.steps=6",
        "train.global_batch_size=4",
        "checkpoint.every=3",
        "logger=none",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Runs:
    home = tmp_path_factory.mktemp("runs")
    held_out = write_store(home / "held_out", seed=1, num_sequences=10)
    samples = (f"data.samples={FUNCTION}", "data.allow_code=true")
    checkpoint = home / "store" / "checkpoints" / "step_000003"
    result = Runs(home)
    result.printed = run_in_turn(
        2,
        [
            arguments(store, home / "store", f"validation.paths={{own: {held_out}}}"),
            arguments(store, home / "samples", *samples, f"validation.paths={{own: {held_out}}}"),
            arguments(store, home / "resumed", f"resume={checkpoint}"),
            arguments(store, home / "dropped", "dataloader_drop_last=true", "packing_allow_single_long=false"),
            arguments(store, home / "batch", "train.steps=2", "train.global_batch_size=8"),
            arguments(
                store,
                home / "implied",
                "train.steps=2",
                "train.global_batch_size=null",
                "train.gradient_accumulation=6",
            ),
        ],
    )
    return result


def test_a_run_plans_at_its_start_and_says_what_it_planned(runs: Runs, store: Path) -> None:
    plan = open_static_plan(store, runs.home / "plan")
    assert (
        f"N_raw_packs={plan.num_bins} N_aligned_packs={plan.num_bins + 1} world_size=2 drop_last=False" in runs.printed
    )
    assert "static packs: pad_needed=1 repeated_packs=[0]" in runs.printed
    assert f"raw_plan={plan.fingerprint} aligned_plan=" in runs.printed
    assert "static packs: 1 of 62 samples is longer than a pack of 128 (index 61): packed alone" in runs.printed
    assert "drop_last=True" in runs.printed
    assert "(index 61): left out" in runs.printed
    assert all(loss > 0 for name in ("store", "dropped") for loss in runs.losses(name))


def open_static_plan(store: Path, output: Path) -> Any:
    from megatron_packed_sft import open_token_store

    return pack(open_token_store(store).lengths, pack_size=LENGTH, overflow="single")


def test_a_token_store_and_a_function_that_returns_its_samples_give_the_same_losses(runs: Runs) -> None:
    assert runs.losses("samples") == runs.losses("store")
    validations = [[one["loss"] for one in runs.validations(name, "own")] for name in ("samples", "store")]
    assert validations[0] == validations[1] != []
    assert len(list((runs.home / "samples" / "sample_lengths").iterdir())) == 2  # of training and of validation


def test_a_static_run_resumes_bit_for_bit(runs: Runs) -> None:
    assert runs.losses("resumed") == runs.losses("store")[3:]


def test_a_static_run_resumed_on_another_number_of_ranks_is_told_why_not(
    runs: Runs, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = f"resume={runs.home / 'store' / 'checkpoints' / 'step_000003'}"
    assert main(arguments(store, runs.home / "one_rank", resume)) == 2
    said = capsys.readouterr().err
    assert "the state is from another run" in said
    assert "static packs are aligned to the data-parallel ranks, so their number counts, too" in said


def test_ranks_that_open_different_samples_are_stopped(runs: Runs, store: Path) -> None:
    function = "data.samples=tests.train.static_samples.make_other_on_each_rank"
    command = torchrun(2, RECIPE, *arguments(store, runs.home / "torn", function, "data.allow_code=true"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    assert "rank 1 opened other data than rank 0" in done.stderr


def test_the_static_plan_is_the_one_that_a_plan_file_would_hold(store: Path, tmp_path: Path) -> None:
    plan = open_static_plan(store, tmp_path)
    plan.save(tmp_path / "plan.npz")
    planned = TrainConfig(data=DataConfig(path=str(store), plan=str(tmp_path / "plan.npz")))
    for one, other in zip(batches_of(config_of(store, tmp_path), 30), batches_of(planned, 30), strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["loss_mask"], other["loss_mask"])


def test_packs_are_aligned_to_the_data_parallel_ranks_and_not_to_all_processes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_raw = open_static_plan(store, tmp_path).num_bins
    for num_ranks, parallel, drop_last, num_packs in (
        (4, ParallelConfig(), False, -(-num_raw // 4) * 4),
        (4, ParallelConfig(), True, num_raw // 4 * 4),
        (4, ParallelConfig(tensor=2), False, -(-num_raw // 2) * 2),
        (4, ParallelConfig(tensor=2, pipeline=2), False, num_raw),
    ):
        monkeypatch.setattr(RANKS, lambda count=num_ranks: count)
        config = config_of(store, tmp_path, dataloader_drop_last=drop_last, parallel=parallel)
        assert len(open_data(config).dataset) == num_packs


def test_validation_takes_raw_samples_too_and_every_one_of_them_once(store: Path, tmp_path: Path) -> None:
    config = config_of(store, tmp_path, validation=ValidationConfig(paths={"same": str(store)}))
    data = open_data(config)
    num_trained = sum(int(batch["loss_mask"].sum()) for batch in validation_loader(data.validation["same"], config))
    assert num_trained == sum(int(batch["loss_mask"].sum()) for batch in batches_of(config, len(data.dataset)))


def test_sequences_are_aligned_for_context_parallelism_when_the_run_starts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RANKS, lambda: 2)
    data = open_data(config_of(store, tmp_path, parallel=ParallelConfig(context=2)))
    assert data.dataset.source.figures.pad_seq_to_mult == 4


def test_effective_batch_size_is_honored_after_packing_forces_batch_size_1(runs: Runs) -> None:
    """GIVEN effective_batch_size (train.global_batch_size) 8, a step of packs that run one by one takes 8 of them."""
    assert [record["consumed_samples"] for record in runs.records("batch")] == [8, 16]
    assert "bins per step: 8, forward passes per step and rank: 4, ranks: 2" in runs.printed


def test_the_global_effective_batch_is_preserved_when_effective_batch_size_is_unset(runs: Runs) -> None:
    """GIVEN train.global_batch_size=null, 6 packs per rank x 2 ranks are 12."""
    assert [record["consumed_samples"] for record in runs.records("implied")] == [12, 24]
    assert "bins per step: 12, forward passes per step and rank: 6, ranks: 2" in runs.printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing_mode": "dynamic"}, "packing_mode is 'dynamic'; choose from prepared, static"),
        ({"sequence_length": None}, r"packing_mode=static needs data\.sequence_length"),
        ({"sequence_length": 0}, r"data\.sequence_length is 0; it must be at least 1"),
        ({"weights": [1.0]}, r"so data\.weights has no meaning"),
        ({"plan": "plan.npz"}, r"so data\.plan has no meaning"),
        ({"path": ["a", "b"]}, r"so a list in data\.path has no meaning"),
        ({"packed_storage": "memmap_v1"}, "so packed_storage=memmap_v1 has no meaning"),
        ({"samples": FUNCTION}, r"would import and call code of that name; set data\.allow_code=true"),
        (
            {"packing_mode": "prepared", "dataloader_drop_last": True},
            "dataloader_drop_last goes with packing_mode=stat",
        ),
        ({"packing_mode": "prepared", "samples": FUNCTION}, r"data\.samples goes with packing_mode=static"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_key(settings: dict[str, Any], message: str) -> None:
    config = TrainConfig(packing_mode="static", data=DataConfig(path="store", sequence_length=LENGTH))
    for name, value in settings.items():
        setattr(config.data if hasattr(config.data, name) else config, name, value)
    with pytest.raises(InvalidInputError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("training.packing_length=4096", "training.packing_length is not a key; use data.sequence_length"),
        ("packing_length=4096", "packing_length is not a key; use data.sequence_length"),
        ("template.max_length=4096", "template.max_length is not a key; use data.sequence_length"),
        ("global_max_length=4096", "global_max_length is not a key; use data.sequence_length"),
        ("training.packing=true", "training.packing is not a key; use packing_mode"),
        ("training.packing_mode=static", "training.packing_mode is not a key; did you mean packing_mode?"),
        ("training.dataloader_drop_last=true", "is not a key; did you mean dataloader_drop_last?"),
        ("training.packing_allow_single_long=true", "is not a key; did you mean packing_allow_single_long?"),
        ("training.effective_batch_size=64", "training.effective_batch_size is not a key; use train.global_batch_size"),
    ],
)
def test_the_seeds_spelling_of_a_key_is_answered_with_ours(
    key: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data.path=store", key]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make_samples", "is not a dotted name; write my_package.my_function"),
        ("no_such_package.make", "cannot be imported .*; check the name, install its package, or add its folder"),
        ("tests.train.static_samples.nothing", "has no attribute 'nothing'.*check the name"),
        ("tests.train.static_samples.make_anonymous", r"\(list\) has no fingerprint; give it one"),
    ],
)
def test_a_function_that_gives_no_samples_is_refused(function: str, message: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_data(config_of(store, tmp_path, samples=function, allow_code=True))


def test_the_recipes_text_model_refuses_images(store: Path, tmp_path: Path) -> None:
    config = config_of(store, tmp_path, samples="tests.train.static_samples.make_pictures", allow_code=True)
    with pytest.raises(InvalidInputError, match="has pixel_values, and this consumer reads text only"):
        batches_of(config, 1)


def test_a_static_plan_without_packs_fails_before_anything_is_trained(store: Path, tmp_path: Path) -> None:
    config = config_of(store, tmp_path, packing_allow_single_long=False)
    config.data.sequence_length = 4
    with pytest.raises(InvalidInputError, match="static packing produced no packs"):
        open_data(config)
