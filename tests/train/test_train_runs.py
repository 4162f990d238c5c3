"""Whole runs in real processes: the same losses whatever the storage, the number of ranks and the interruptions."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import convert
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.checkpoint import TrainingState
from tests.train.counting_chats import VOCAB_SIZE, write_dataset, write_legacy
from tests.train.launch import Runs, run_in_turn

NUM_STEPS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    home = tmp_path_factory.mktemp("runs")
    data = write_dataset(home / "data", 40)
    noise = write_dataset(home / "noise", 40, marks_answers=False)
    legacy = write_legacy(data, home / "data.npy")
    convert(data, home / "parquet_data", to="parquet")

    def arguments(name: str, *more: str) -> list[str]:
        return [
            f"data.path={data}",
            f"output={home / name}",
            f"train.steps={NUM_STEPS}",
            "train.global_batch_size=4",
            "checkpoint.every=10",
            f"model.vocab_size={VOCAB_SIZE}",
            "optimizer.learning_rate=2e-3",
            *more,
        ]

    resume = f"resume={home / 'straight' / 'checkpoints' / 'step_000010'}"
    result = Runs(home)
    result.printed = run_in_turn(
        2,
        [
            arguments("straight", f"validation.paths=[{noise}]"),
            arguments("resumed", resume),
            arguments("legacy", "storage=legacy", f"data.path={legacy}"),
            arguments("parquet", "storage=parquet", f"data.path={home / 'parquet_data'}"),
            arguments("tensor_2", "parallel=tensor_2"),
            arguments("pipeline_2", "parallel=pipeline_2", "train.steps=4", "validation.steps=1"),
        ],
    )
    result.printed += run_in_turn(
        1,
        [
            arguments("one_rank", "validation.every=8"),
            arguments("resumed_on_one_rank", resume),
            arguments("one_rank", "validation.every=8"),
            arguments("resumed_with_other_steps", resume, "train.steps=14", "train.global_batch_size=2"),
            arguments("trained_on_noise", f"data.path={noise}"),
        ],
    )
    return result


def test_the_loss_falls_and_every_number_is_there(runs: Runs) -> None:
    records = runs.records("straight")
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert records[-1]["loss"] < 0.6 * records[0]["loss"]
    assert [record["consumed_samples"] for record in records] == list(range(4, 4 * NUM_STEPS + 1, 4))
    assert records[9]["epoch"] == 1.0
    for record in records:
        assert record["tokens_per_second"] > record["trained_tokens_per_second"] > 0
        assert 0 < record["padding_share"] < 0.2
        assert 0 <= record["data_share"] < 1
        assert record["grad_norm"] > 0
        assert record["step_seconds"] > 0
    assert records[0]["learning_rate"] == pytest.approx(2e-3)
    assert records[-1]["learning_rate"] < 2e-5


def test_a_resumed_run_has_the_same_losses_bit_for_bit(runs: Runs) -> None:
    assert runs.losses("resumed") == runs.losses("straight")[10:]
    assert runs.records("resumed")[0]["step"] == 11


def test_all_storages_give_the_same_losses_bit_for_bit(runs: Runs) -> None:
    assert runs.losses("legacy") == runs.losses("straight")
    assert runs.losses("parquet") == runs.losses("straight")


def test_one_rank_and_two_give_the_same_losses(runs: Runs) -> None:
    np.testing.assert_allclose(runs.losses("one_rank"), runs.losses("straight"), rtol=2e-4)


def test_a_checkpoint_of_two_ranks_goes_on_with_one_in_the_same_stream(runs: Runs) -> None:
    resumed, straight = runs.records("resumed_on_one_rank"), runs.records("straight")[10:]
    assert [one["consumed_samples"] for one in resumed] == [one["consumed_samples"] for one in straight]
    np.testing.assert_allclose(runs.losses("resumed_on_one_rank"), runs.losses("straight")[10:], rtol=2e-4)


def test_a_resumed_run_with_steps_of_another_size_goes_on_with_its_rows_and_its_schedule(runs: Runs) -> None:
    records = runs.records("resumed_with_other_steps")
    assert [record["step"] for record in records] == [11, 12, 13, 14]
    assert [record["consumed_samples"] for record in records] == [42, 44, 46, 48]
    rates = [record["learning_rate"] for record in records]
    assert 2e-3 > rates[0] > rates[-1] > 0


def test_tensor_parallel_ranks_give_the_same_losses(runs: Runs) -> None:
    np.testing.assert_allclose(runs.losses("tensor_2"), runs.losses("straight"), rtol=2e-4)


def test_pipeline_stages_train_and_report_to_the_first_rank(runs: Runs) -> None:
    losses = runs.losses("pipeline_2")
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    # One global batch of four bins, not the whole split of seven.
    assert runs.validations("pipeline_2")[0]["num_trained"] < 0.7 * runs.validations("straight")[0]["num_trained"]


def test_the_model_learns_what_is_marked_and_only_that(runs: Runs) -> None:
    answers = [record["loss"] for record in runs.validations("straight")]
    prompts = [record["loss"] for record in runs.validations("straight", str(runs.home / "noise"))]
    assert len(answers) == len(prompts) == 2  # at the start and at the end
    assert answers[0] == pytest.approx(np.log(VOCAB_SIZE), rel=0.05)
    assert answers[1] < 0.6 * answers[0]
    assert prompts[1] > prompts[0] - 0.05


def test_noise_that_is_marked_is_learnt_so_the_comparison_can_fail(runs: Runs) -> None:
    before, after = (record["loss"] for record in runs.validations("trained_on_noise"))
    assert before == pytest.approx(runs.validations("straight", str(runs.home / "noise"))[0]["loss"], rel=1e-5)
    assert after < 0.7 * before


def test_validation_comes_every_so_many_steps_and_at_the_end_and_not_again(runs: Runs) -> None:
    records = runs.validations("one_rank")
    assert [record["step"] for record in records] == [0, 8, 16, 20]
    assert records[0]["loss"] > records[1]["loss"] > records[2]["loss"] > records[3]["loss"]
    assert records[3]["loss"] == pytest.approx(runs.validations("straight")[-1]["loss"], rel=2e-4)


def test_only_whole_checkpoints_with_a_pointer_are_left(runs: Runs) -> None:
    checkpoints = runs.home / "straight" / "checkpoints"
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["latest", "step_000010", "step_000020"]
    assert (checkpoints / "latest").read_text() == "step_000020\n"
    assert (runs.home / "straight" / "config.yaml").read_text().startswith("packed_storage: auto\n")


def test_a_checkpoint_of_two_ranks_that_was_damaged_since_is_refused(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copytree(runs.home / "straight" / "checkpoints" / "step_000010", tmp_path / "step_000010")
    state = TrainingState.load(checkpoint)
    assert state.checksums.keys() == state.files.keys()
    assert sum(name.endswith(".distcp") for name in state.files) >= 2
    resume = [f"data.path={runs.home / 'data'}", f"output={tmp_path / 'run'}", f"resume={checkpoint}"]
    for name in state.files:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert main(resume) == 1
        assert f"{checkpoint / name} is damaged: its checksum differs" in capsys.readouterr().err
        (checkpoint / name).write_bytes(content)


def test_rank_zero_prints_once_and_says_how_to_train_longer(runs: Runs) -> None:
    assert runs.printed.count(f"saved {runs.home / 'straight' / 'checkpoints' / 'step_000020'}\n") == 1
    assert "finished at step 20 of 20: loss " in runs.printed
    assert "to train longer: the same command with more train.steps" in runs.printed
    assert "counts bins: at " in runs.printed
    assert "Warning" not in runs.printed


def test_a_finished_run_started_again_says_that_nothing_is_left(runs: Runs) -> None:
    assert "nothing to do: all 20 steps are done" in runs.printed
    assert len(runs.records("one_rank")) == NUM_STEPS
