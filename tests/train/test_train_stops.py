"""What ends a run early: SIGTERM, Ctrl-C, a killed rank, a full disk. Real processes, real signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_packed_sft.train.metrics import read_metrics
from megatron_packed_sft.train.ranks import StopRequest
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
    ]


@contextmanager
def running(data: Path, output: Path, *further: str) -> Iterator[subprocess.Popen[str]]:
    """A run on two ranks that would take very long, handed out when its fifth step is done."""
    command = torchrun(2, RECIPE, *arguments(data, output, 100_000), *further)
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
    return metrics.read_bytes().count(b'"event": "step"') if metrics.exists() else 0


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(output / "metrics.jsonl")]


def test_sigterm_saves_and_leaves_and_the_rest_of_the_run_is_the_same_bit_for_bit(data: Path, tmp_path: Path) -> None:
    output, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    with running(data, output) as process:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on
        printed, _ = process.communicate(timeout=60)
    stopped_at = num_steps(output)
    assert f"stopped by SIGTERM at step {stopped_at} of 100000" in printed
    assert "to resume: run the same command again" in printed
    checkpoints = output / "checkpoints"
    assert (checkpoints / "latest").read_text() == f"step_{stopped_at:06d}\n"
    assert [entry for entry in checkpoints.iterdir() if entry.name.startswith(".")] == []

    (checkpoints / f".step_{stopped_at + 3:06d}.staging-elsewhere-1-ab").mkdir()  # another machine died while saving
    until = stopped_at + 4
    printed = run_in_turn(2, [arguments(data, output, until), arguments(data, undisturbed, until)])
    assert f"resumed from {checkpoints / f'step_{stopped_at:06d}'}\n" in printed
    assert losses(output) == losses(undisturbed)
    assert len(losses(output)) == until


def test_ctrl_c_saves_and_leaves_although_every_rank_hears_it_twice(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "interrupted"
    with running(data, output) as process:
        # A terminal signals all processes in the foreground, and torchrun then passes its own on.
        for one in [*psutil.Process(process.pid).children(), process]:
            one.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    stopped_at = num_steps(output)
    assert f"stopped by SIGINT at step {stopped_at} of 100000" in printed
    assert (output / "checkpoints" / "latest").read_text() == f"step_{stopped_at:06d}\n"
    assert "megatron_packed_sft" not in printed  # no trace of ours


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_packed_sft.train.ranks.ONE_REQUEST_SECONDS", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def ranks_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    return {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}


def frozen_while_it_writes(rank: psutil.Process) -> psutil.Process:
    """The rank, stopped in the middle of writing a checkpoint; waits for the next one."""

    def is_writing() -> bool:
        return any(file.path.endswith(".distcp") for file in rank.open_files())

    end = time.monotonic() + 60
    while time.monotonic() < end:
        if is_writing():
            rank.suspend()
            if is_writing():
                return rank
            rank.resume()
    raise AssertionError("nothing was being written for a minute")


def test_a_run_that_is_killed_while_it_saves_leaves_no_process_and_is_resumed_bit_for_bit(
    data: Path, tmp_path: Path
) -> None:
    outputs = [tmp_path / name for name in ("rank_0_killed", "rank_1_killed", "torchrun_killed", "undisturbed")]
    left = []
    for number, output in enumerate(outputs[:2]):
        with running(data, output, "checkpoint.every=1") as process:
            ranks = ranks_of(process)
            frozen_while_it_writes(ranks[number]).kill()
            printed, _ = process.communicate(timeout=60)  # also waits for whoever has its stdout
            assert psutil.wait_procs(ranks.values(), timeout=60)[1] == []
        assert process.returncode != 0
        assert f"rank {1 - number} lost the connection to another rank" in printed
        assert "run the same command again to resume from the last checkpoint" in printed
        assert "loop.py" not in printed  # no trace of ours
        left += [entry.name for entry in (output / "checkpoints").iterdir() if entry.name.startswith(".step")]

    with running(data, outputs[2], "checkpoint.every=1") as process:
        ranks = ranks_of(process)
        frozen_while_it_writes(ranks[0])
        process.kill()
        ranks[0].resume()
        assert psutil.wait_procs(ranks.values(), timeout=60)[1] == []
        process.communicate(timeout=60)

    until = max(map(num_steps, outputs)) + 3
    printed = run_in_turn(2, [arguments(data, output, until) for output in outputs])
    assert left, "rank 0 was killed while it wrote"
    for name in left:
        assert f"removed {name}, an unfinished checkpoint of a run that was killed\n" in printed
    assert losses(outputs[0]) == losses(outputs[1]) == losses(outputs[2]) == losses(outputs[3])
    assert len(losses(outputs[0])) == until
    for output in outputs:
        assert [entry.name for entry in (output / "checkpoints").iterdir() if entry.name.startswith(".")] == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(data: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        command = [sys.executable, str(RECIPE), *arguments(data, disk / "run", 1)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        checkpoints = disk / "run" / "checkpoints"
        assert re.fullmatch(
            rf"packed-sft train: error: cannot write {checkpoints / 'step_000001'}: No space left on device; it needs "
            r"[\d,]{9} bytes; free some space or choose another output, then run the same command again",
            line,
        )
        assert list(checkpoints.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
