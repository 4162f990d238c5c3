"""Fixtures: Megatron-Core in this process as a run of one, and a run of two processes whose results tests share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.tiny_gpt import run_of_one


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's groups, for a single process."""
    with run_of_one():
        yield


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tests/megatron/two_ranks.py has filled, once for all workers of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_ranks"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "output").exists():
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", "2", "-m", "tests.megatron.two_ranks", str(folder)]
            root = Path(__file__).parents[2]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
            (folder / "output").write_text(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    output = (folder / "output").read_text()
    assert output.startswith("exit code 0\n"), output
    return folder
