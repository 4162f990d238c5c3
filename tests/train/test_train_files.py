"""The files of a run: checkpoints found and refused, metrics that continue."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardFileError
from megatron_packed_sft.megatron.weights.layout import ModelShape
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.train.checkpoint import (
    STATE,
    CheckpointDirectory,
    TrainingState,
    find_checkpoint,
    recorded_model,
    refuse_damaged,
    refuse_other_model,
)
from megatron_packed_sft.train.config import TrainConfig
from megatron_packed_sft.train.metrics import (
    METRICS,
    MetricsFile,
    StepRecord,
    Totals,
    read_metrics,
    step_record,
)
from megatron_packed_sft.train.report import ConsoleReporter, EarlyEnd
from megatron_packed_sft.train.trackers import TensorBoardTracker, TrackedRun, open_trackers
from tests.terminal import on_terminal, screen
from tests.train.sound_states import MODEL, SCHEDULER


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert directory.newest() is None
    for name in ("step_000020", "step_1000000", "step_000100", ".step_9000000.staging-host-1-ab", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_8000000").touch()  # a file is not a checkpoint
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
    state = TrainingState(step=20, data={"seed": 7}, scheduler={**SCHEDULER, "max_lr": 0.1 + 0.2}, model=MODEL)
    (tmp_path / STATE).write_bytes(state.to_bytes())
    assert TrainingState.load(tmp_path) == state
    (tmp_path / STATE).write_bytes(state.to_bytes().replace(b'"step": 20', b'"step": 30'))
    with pytest.raises(ManifestError, match="was damaged or edited"):
        TrainingState.load(tmp_path)
    (tmp_path / STATE).unlink()
    with pytest.raises(InvalidInputError, match="is not a checkpoint of this recipe: it has no"):
        TrainingState.load(tmp_path)


def test_a_checkpoint_with_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    state = TrainingState(step=20, data={}, scheduler=SCHEDULER, model=MODEL, files={"__0_0.distcp": 8})
    (tmp_path / STATE).write_bytes(state.to_bytes())
    with pytest.raises(ShardFileError, match=r"__0_0\.distcp is missing; restore it, or remove"):
        TrainingState.load(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"1234")
    with pytest.raises(ShardFileError, match=r"__0_0\.distcp has 4 bytes instead of 8"):
        TrainingState.load(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"12345678")
    assert TrainingState.load(tmp_path) == state


def test_a_checkpoint_with_a_changed_byte_is_refused_by_the_rank_that_reads_the_file(tmp_path: Path) -> None:
    names = ["a.distcp", "b.distcp", "c.distcp"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    checksums = {name: checksum((tmp_path / name).read_bytes()) for name in names}
    for rank in range(2):
        refuse_damaged(tmp_path, checksums, rank=rank, num_ranks=2)
    damaged = bytearray((tmp_path / "b.distcp").read_bytes())
    damaged[50] ^= 1
    (tmp_path / "b.distcp").write_bytes(damaged)
    refuse_damaged(tmp_path, checksums, rank=0, num_ranks=2)
    with pytest.raises(ShardFileError, match=r"b\.distcp is damaged: its checksum differs; restore it, or remove"):
        refuse_damaged(tmp_path, checksums, rank=1, num_ranks=2)


def test_other_frozen_parameters_or_another_weight_decay_are_another_model() -> None:
    config = TrainConfig()
    shape = ModelShape.of_sizes(num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, vocab_size=256)
    before = recorded_model(shape, config)
    config.model.dropout = 0.1  # not part of the shape
    refuse_other_model(Path("step_000020"), before, recorded_model(shape, config))
    config.model.freeze = ["embeddings"]
    config.optimizer.no_weight_decay = ["norms"]
    with pytest.raises(InvalidInputError) as caught:
        refuse_other_model(Path("step_000020"), before, recorded_model(shape, config))
    assert "model.freeze was [] and is ['embeddings'] now" in str(caught.value)
    assert "optimizer.no_weight_decay was ['biases', 'norms'] and is ['norms'] now" in str(caught.value)


def make_record(step: int) -> tuple[StepRecord, Totals]:
    totals = Totals(num_steps=1, loss_sum=6, num_trained=3, num_tokens=8, num_positions=16, seconds=2, data_seconds=0.1)
    return step_record(
        totals, step=step, learning_rate=1e-4, grad_norm=1.0, consumed_samples=4 * step, num_samples=8
    ), totals


def write_steps(metrics: MetricsFile, steps: range) -> None:
    for step in steps:
        metrics.write_step(make_record(step)[0])


def test_metrics_of_a_resumed_run_continue_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricsFile(tmp_path, first_step=0) as metrics:
        write_steps(metrics, range(1, 26))
        metrics.write_validation("validation", 20, 2.5, 100)
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"event": "step", "st')  # killed while writing
    with MetricsFile(tmp_path, first_step=20) as metrics:
        write_steps(metrics, range(21, 24))
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == list(range(1, 24))
    assert read_metrics(tmp_path / METRICS, "validation") == [
        {
            "event": "validation",
            "step": 20,
            "name": "validation",
            "loss": 2.5,
            "perplexity": math.exp(2.5),
            "num_trained": 100,
        }
    ]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    forged = (b'{"event": "step", "step": "x"}\n', b'{"event": "validation", "step": 1, "loss": []}\n')
    for damage in (b"not JSON\n", b'{"event": "step"}\n', b"[]\n", b"[" * 100_000 + b"\n", *forged):
        with MetricsFile(tmp_path, first_step=0) as metrics:
            write_steps(metrics, range(1, 3))
        with open(tmp_path / METRICS, "ab") as file:
            file.write(damage)
        with pytest.raises(InvalidInputError, match=r"metrics\.jsonl, line 3 is not a metrics record; remove the line"):
            MetricsFile(tmp_path, first_step=2)
        with pytest.raises(InvalidInputError, match="line 3 is not a metrics record"):
            read_metrics(tmp_path / METRICS)


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


def report_a_step(folder: Path) -> None:
    record, totals = make_record(1)
    reporter = ConsoleReporter(MetricsFile(folder, first_step=0), first_step=0, num_steps=4)
    reporter.on_validation_start("validation", 0, 12)
    reporter.on_validation_progress(6)
    reporter.on_validation_end("validation", 0, 2.5, 100)
    reporter.on_steps(record, totals)
    reporter.summarize(None)
    reporter.close()


# Drawn every time, as if every step took long.
REPORT_A_STEP = """
import pathlib, sys
from megatron_packed_sft.support import progress
from tests.train.test_train_files import report_a_step
progress._SECONDS_BETWEEN_DRAWINGS = 0.0
report_a_step(pathlib.Path(sys.argv[1]))
"""


def test_on_a_terminal_a_progress_bar_moves(tmp_path: Path) -> None:
    shown = on_terminal(tmp_path, columns=200, program=[sys.executable, "-c", REPORT_A_STEP])
    assert shown.code == 0, shown.text
    bar = r"train +[━╸╺]+ +25% 1 of 4 step, .*loss 2.0000, speed 4 tokens/s, lr 1.00e-04"
    assert re.search(bar, shown.plain), shown.plain
    assert re.search(r"validating on validation +[━╸╺]+ +50% 6 of 12 bin", shown.plain), shown.plain
    seen = screen(shown.text)
    assert seen[0] == "step 0: loss 2.5000 on validation (100 trained tokens), perplexity 12.18"
    assert seen[1].startswith("finished at step 1 of 4: loss 2.0000")
    assert seen[2].startswith("speed: ")
    assert "━" not in "".join(seen)  # the bars are gone


def test_without_a_terminal_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_a_step(tmp_path)
    printed = capsys.readouterr().out
    assert "step 0: validating on validation, 12 bins\n" in printed
    assert "step 1/4: loss 2.0000, lr 1.00e-04, grad norm 1.000, 4 tokens/s (2 trained)" in printed


def test_tensorboard_gets_the_same_numbers_when_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(TrackedRun(tmp_path, 0, {}))
    with MetricsFile(tmp_path, first_step=0, trackers=[tracker]) as metrics:
        write_steps(metrics, range(1, 4))
        metrics.write_validation("validation", 3, 2.5, 100)
    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    assert [(one.step, one.value) for one in written.Scalars("train/loss")] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert [(one.step, one.value) for one in written.Scalars("validation/validation")] == [(3, 2.5)]
    names = {"learning_rate", "grad_norm", "tokens_per_second", "trained_tokens_per_second", "padding_share", "epoch"}
    assert {f"train/{name}" for name in names} <= set(written.Tags()["scalars"])


def test_as_json_the_summary_is_all_that_stdout_gets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, totals = make_record(1)
    reporter = ConsoleReporter(MetricsFile(tmp_path, first_step=0), first_step=0, num_steps=4, as_json=True)
    reporter.on_validation_end("validation", 0, math.nan, 0)
    reporter.on_steps(record, totals)
    reporter.on_checkpoint(tmp_path / "step_000001")
    reporter.summarize(EarlyEnd("SIGTERM", "run the same command again to resume"))
    reporter.close()
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["finished"], summary["stopped_by"], summary["step"], summary["loss"]) == (False, "SIGTERM", 1, 2.0)
    assert summary["validation"] == {"validation": {"step": 0, "loss": None, "num_trained": 0}}
    assert summary["checkpoint"] == str(tmp_path / "step_000001")
    assert "step 1/4: loss 2.0000" in printed.err


class Failing:
    """A tracker whose server is gone."""

    name = "failing"
    num_calls = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.num_calls += 1
        raise ConnectionError("no route to host\nand a trace of many lines")

    def close(self) -> None:
        self.log({}, 0)


def report_steps(metrics: MetricsFile, num_steps: int) -> None:
    reporter = ConsoleReporter(metrics, first_step=0, num_steps=num_steps)
    for step in range(1, num_steps + 1):
        reporter.on_steps(*make_record(step))
    reporter.on_validation_end("validation", num_steps, 2.5, 100)
    reporter.on_checkpoint(Path("step_000001"))
    reporter.summarize(None)
    reporter.close()


def test_a_tracker_that_fails_is_one_warning_and_a_count_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Failing()
    report_steps(MetricsFile(tmp_path, first_step=0, trackers=[tracker]), 5)
    printed = capsys.readouterr().out
    assert printed.count("warning: cannot write to failing (no route to host); training goes on\n") == 1
    assert printed.splitlines()[-1] == "not written: 6 records of failing"
    assert tracker.num_calls == 4  # given up after three; and closed
    assert len(read_metrics(tmp_path / METRICS)) == 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # TensorBoard's, when it cannot write the rest
def test_metrics_and_tensorboard_on_a_full_disk_are_counted_and_go_on_when_there_is_room(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = TensorBoardTracker(TrackedRun(small_disk, 0, {}))
    metrics = MetricsFile(small_disk, first_step=0, trackers=[tracker])
    write_steps(metrics, range(1, 3))
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    write_steps(metrics, range(3, 40))
    [about_metrics, about_tensorboard] = sorted(metrics.lost.take_warnings())
    assert re.fullmatch(
        r"warning: cannot write to metrics.jsonl \(cannot write .*metrics.jsonl: No space left on device; free some "
        r"space or choose another disk\); training goes on",
        about_metrics,
    )
    assert about_tensorboard.startswith("warning: cannot write to tensorboard (")
    ballast.unlink()
    write_steps(metrics, range(40, 42))
    metrics.close()
    steps = [record["step"] for record in read_metrics(small_disk / METRICS)]  # every line is whole
    assert steps[:2] == [1, 2]
    assert steps[-2:] == [40, 41]
    assert len(steps) + metrics.lost.counts[METRICS] == 41


def test_metrics_whose_file_is_removed_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = MetricsFile(tmp_path, first_step=0)
    metrics.path.unlink()
    report_steps(metrics, 2)
    printed = capsys.readouterr().out
    assert printed.count("No such file or directory; check the path); training goes on\n") == 1
    assert printed.splitlines()[-1] == "not written: 3 records of metrics.jsonl"


def test_metrics_that_cannot_even_be_started_do_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS).mkdir()  # even root cannot write to that
    (tmp_path / "tensorboard").touch()
    trackers, notes = open_trackers(["tensorboard"], TrackedRun(tmp_path, 0, {}))
    assert (trackers, len(notes)) == ([], 1)
    assert notes[0].startswith(f"warning: cannot write to {tmp_path / 'tensorboard'} (")
    report_steps(MetricsFile(tmp_path, first_step=0), 2)
    assert capsys.readouterr().out.splitlines()[-1] == "not written: 3 records of metrics.jsonl"
