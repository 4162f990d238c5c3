"""Fixtures: Megatron-Core in this process as a run of one, and a run of two processes whose results tests share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.tiny_gpt import run_of_one


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's groups, for a single process."""
    with run_of_one():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset directory for the tests inside releases of Megatron-Bridge."""
    from tests.megatron.test_bridge import write_dataset

    return write_dataset(tmp_path_factory.mktemp("data") / "dataset", train=10, validation=4)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone, without Megatron's groups."""
    from tests.megatron.bridge_releases import group_of_one

    with group_of_one(tmp_path) as group:
        yield group


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
