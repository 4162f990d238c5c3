"""The files of a run: checkpoints found and refused, metrics that continue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardFileError
from megatron_packed_sft.train.checkpoint import STATE, CheckpointDirectory, TrainingState, find_checkpoint
from megatron_packed_sft.train.metrics import METRICS, MetricsFile, Totals, read_metrics, step_record


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert directory.newest() is None
    for name in ("step_000020", "step_1000000", "step_000100", ".step_9000000.staging-host-1-ab", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_8000000").touch()  # a file is no checkpoint
    assert directory.newest() == tmp_path / "step_1000000"
    assert find_checkpoint("auto", directory) == tmp_path / "step_1000000"
    assert find_checkpoint(str(tmp_path / "step_1000000"), directory) == tmp_path / "step_1000000"
    assert find_checkpoint(str(tmp_path / "step_000020"), CheckpointDirectory(tmp_path / "new")) == (
        tmp_path / "step_000020"
    )
    with pytest.raises(InvalidInputError, match="already has checkpoints up to step_1000000"):
        find_checkpoint(str(tmp_path / "step_000020"), directory)
    with pytest.raises(InvalidInputError, match="choose another output"):
        find_checkpoint("never", directory)


def test_a_training_state_comes_back_and_damage_is_noticed(tmp_path: Path) -> None:
    state = TrainingState(step=20, data={"seed": 7}, scheduler={"max_lr": 0.1 + 0.2}, model={"num_layers": 2})
    (tmp_path / STATE).write_bytes(state.to_bytes())
    assert TrainingState.load(tmp_path) == state
    (tmp_path / STATE).write_bytes(state.to_bytes().replace(b'"step": 20', b'"step": 30'))
    with pytest.raises(ManifestError, match="was damaged or edited"):
        TrainingState.load(tmp_path)
    (tmp_path / STATE).unlink()
    with pytest.raises(InvalidInputError, match="is not a checkpoint of this recipe: it has no"):
        TrainingState.load(tmp_path)


def test_a_checkpoint_with_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    state = TrainingState(step=20, data={}, scheduler={}, model={}, files={"__0_0.distcp": 8})
    (tmp_path / STATE).write_bytes(state.to_bytes())
    with pytest.raises(ShardFileError, match=r"__0_0\.distcp is missing, and 8 were written; restore it, or remove"):
        TrainingState.load(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"1234")
    with pytest.raises(ShardFileError, match=r"__0_0\.distcp has 4 bytes, and 8 were written"):
        TrainingState.load(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"12345678")
    assert TrainingState.load(tmp_path) == state


def write_steps(metrics: MetricsFile, steps: range) -> None:
    totals = Totals(num_steps=1, loss_sum=6, num_trained=3, num_tokens=8, num_positions=16, seconds=2, data_seconds=0.1)
    for step in steps:
        record = step_record(
            totals, step=step, learning_rate=1e-4, grad_norm=1.0, consumed_samples=4 * step, num_samples=8
        )
        metrics.write_step(record)


def test_metrics_of_a_resumed_run_go_on_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricsFile(tmp_path, first_step=0) as metrics:
        write_steps(metrics, range(1, 26))
        metrics.write_validation("validation", 20, 2.5, 100)
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"event": "step", "st')  # killed while writing
    with MetricsFile(tmp_path, first_step=20) as metrics:
        write_steps(metrics, range(21, 24))
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == list(range(1, 24))
    assert read_metrics(tmp_path / METRICS, "validation") == [
        {"event": "validation", "step": 20, "name": "validation", "loss": 2.5, "num_trained": 100}
    ]


def test_a_new_run_starts_a_new_metrics_file(tmp_path: Path) -> None:
    for _ in range(2):
        with MetricsFile(tmp_path, first_step=0) as metrics:
            write_steps(metrics, range(1, 3))
    assert len(read_metrics(tmp_path / METRICS)) == 2


def test_a_loss_without_trained_tokens_is_null(tmp_path: Path) -> None:
    with MetricsFile(tmp_path, first_step=0) as metrics:
        totals = Totals(
            num_steps=1, loss_sum=0, num_trained=0, num_tokens=8, num_positions=16, seconds=1, data_seconds=0
        )
        metrics.write_validation("validation", 0, totals.loss, totals.num_trained)
    assert json.loads((tmp_path / METRICS).read_bytes())["loss"] is None
