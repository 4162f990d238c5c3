"""What ends a run early: SIGTERM, a killed rank. Real processes, real signals."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_packed_sft.train.metrics import read_metrics
from tests.train.counting_chats import write_dataset
from tests.train.launch import RECIPE, environment, run_in_turn, torchrun


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("stops") / "data", 40)


def arguments(data: Path, output: Path, num_steps: int) -> list[str]:
    # A constant rate, so that runs of different lengths have the same losses.
    return [
        f"data.path={data}",
        f"output={output}",
        f"train.steps={num_steps}",
        "train.global_batch_size=4",
        "checkpoint.every=3",
        "optimizer.decay_style=constant",
        "optimizer.warmup_share=0",
        "validation.at_start=false",
    ]


@contextmanager
def running(data: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on two ranks that would take very long, handed out when its fifth step is done."""
    command = torchrun(2, RECIPE, *arguments(data, output, 100_000))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    try:
        end = time.monotonic() + 120
        while num_steps(output) < 5:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "five steps took more than two minutes"
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()


def num_steps(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(output / "metrics.jsonl")]


def test_sigterm_saves_and_leaves_and_the_rest_of_the_run_is_the_same_bit_for_bit(data: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    with running(data, output) as process:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on
        printed, _ = process.communicate(timeout=60)
    stopped_at = num_steps(output)
    assert f"stopped by SIGTERM at step {stopped_at} of 100000" in printed
    assert "to go on: the same command (resume=auto)" in printed
    checkpoints = output / "checkpoints"
    assert (checkpoints / "latest").read_text() == f"step_{stopped_at:06d}\n"
    assert [entry for entry in checkpoints.iterdir() if entry.name.startswith(".")] == []

    (checkpoints / f".step_{stopped_at + 3:06d}.staging-elsewhere-1-ab").mkdir()  # another machine died while saving
    until = stopped_at + 4
    printed = run_in_turn(2, [arguments(data, output, until), arguments(data, undisturbed, until)])
    assert f"resumed from {checkpoints / f'step_{stopped_at:06d}'}\n" in printed
    assert losses(output) == losses(undisturbed)
    assert len(losses(output)) == until


def test_a_killed_rank_gives_the_others_one_clear_sentence(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path / "killed") as process:
        ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
        ranks[1].kill()
        printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "packed-sft train: error: rank 0 lost the connection to another rank" in printed
    assert "run the same command again: it goes on from the last checkpoint" in printed
    assert "loop.py" not in printed  # no trace of ours
