"""Local processes: the same results for any number of them, bounded queues, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.config import ExecutorConfig
from megatron_packed_sft.prepare.executor import create_executor
from megatron_packed_sft.support.processes import LocalExecutor

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_every_task_is_done_once(num_workers: int) -> None:
    done = LocalExecutor(num_workers).run(abs, range(-50, 0), int)
    assert sorted(done) == list(range(1, 51))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tasks_are_taken_only_as_results_are_used(num_workers: int) -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = LocalExecutor(num_workers).run(abs, tasks(), int)
    next(results)
    assert taken <= 2 * num_workers
    results.close()  # type: ignore[attr-defined]  # a generator


def test_little_input_begins_few_processes_unless_the_user_said_how_many() -> None:
    all_cores = LocalExecutor().num_workers
    assert LocalExecutor().fitting(1000).num_workers == 1
    assert LocalExecutor().fitting(10**12).num_workers == all_cores
    assert LocalExecutor(7).fitting(1000).num_workers == 7


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(LocalExecutor(2).run(int, ["1", "x"], int))


def test_a_worker_that_dies_is_one_sentence() -> None:
    with pytest.raises(PackedSFTError, match=r"a worker process was killed.* run the same command again"):
        list(LocalExecutor(2).run(os._exit, [3], int))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from megatron_packed_sft.support.processes import LocalExecutor\n"
        "if __name__ == '__main__':\n"
        "    for pid in LocalExecutor(2).run(eval, ['__import__(\"os\").getpid()'] * 4, int):\n"
        "        print(pid, flush=True)\n"
        "        time.sleep(60)\n"
    )
    file = tmp_path / "parent.py"
    file.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)  # it lives
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")


def test_unknown_kinds_and_counts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"executor.kind is 'cloud'"):
        create_executor(ExecutorConfig("cloud"))
    with pytest.raises(InvalidInputError, match=r"executor.num_workers is 0"):
        create_executor(ExecutorConfig("local", 0))
    with pytest.raises(InvalidInputError, match=r"executor.index is for executor=array; add that, or leave"):
        create_executor(ExecutorConfig("local", index=1))
