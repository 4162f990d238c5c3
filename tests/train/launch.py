"""Start real training processes: torchrun for several ranks, plain Python for one."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_packed_sft.support.processes import signal_when_parent_dies
from megatron_packed_sft.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "sft.py"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def torchrun(num_ranks: int, *arguments: str | Path) -> list[str]:
    """The command line of torchrun, on a port of its own."""
    return [*_TORCHRUN, "--standalone", "--nproc-per-node", str(num_ranks), *map(str, arguments)]


def environment() -> dict[str, str]:
    """Without what pytest's own surroundings may say about ranks; one thread per rank."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _end_with_parent() -> None:
    signal_when_parent_dies(signal.SIGTERM, os.getppid())


class Runs:
    """Where the runs of a test file are, what they printed, and what they recorded."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.printed = ""

    def records(self, name: str, event: str = "step") -> list[dict[str, Any]]:
        return read_metrics(self.home / name / "metrics.jsonl", event)

    def losses(self, name: str) -> list[float]:
        return [record["loss"] for record in self.records(name)]

    def validations(self, name: str, data: str = "validation") -> list[dict[str, Any]]:
        return [record for record in self.records(name, "validation") if record["name"] == data]


class Trainers:
    """Processes of run_in_turn.py, which stay for the next test: megatron.core takes ten seconds to import."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.environment = environment()
        self._folder = Path(tempfile.mkdtemp(prefix="trainers"))
        self._num_requests = 0
        arguments = [str(Path(__file__).with_name("run_in_turn.py")), str(self._folder)]
        command = [sys.executable, *arguments] if num_ranks == 1 else torchrun(num_ranks, *arguments)
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, preexec_fn=_end_with_parent
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, runs: list[list[str]], timeout: float) -> str:
        """Do the runs and return what all ranks printed."""
        self._num_requests += 1
        request = self._folder / f"{self._num_requests:04d}.json"
        request.with_suffix(".part").write_text(json.dumps(runs))
        request.with_suffix(".part").rename(request)
        answers = [request.with_suffix(f".{rank}") for rank in range(self.num_ranks)]
        end = time.monotonic() + timeout
        while self.is_running() and time.monotonic() < end and not all(answer.exists() for answer in answers):
            time.sleep(0.02)
        output = request.with_suffix(".out")
        printed = output.read_text() if output.exists() else ""
        codes = [answer.read_text() if answer.exists() else "none" for answer in answers]
        if codes != ["0"] * self.num_ranks:
            log = (self._folder / "log").read_text()
            self.stop()
            raise AssertionError(f"exit codes {', '.join(codes)}\n{printed}\n{log}")
        return printed

    def stop(self) -> None:
        if self.is_running():
            self._process.terminate()  # torchrun passes it on
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_trainers: dict[int, Trainers] = {}


@atexit.register
def _stop_all() -> None:
    for trainers in _trainers.values():
        trainers.stop()


def run_in_turn(num_ranks: int, runs: list[list[str]], timeout: float = 200) -> str:
    """Do several runs in the same processes; returns what they printed."""
    trainers = _trainers.get(num_ranks)
    if trainers is None or not trainers.is_running() or trainers.environment != environment():
        if trainers is not None:
            trainers.stop()
        trainers = _trainers[num_ranks] = Trainers(num_ranks)
    return trainers.run(runs, timeout)
