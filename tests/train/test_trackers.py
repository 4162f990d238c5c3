"""Trackers: each gets the numbers of metrics.jsonl, in files below the run's directory, without the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft.errors import MissingDependencyError
from megatron_packed_sft.train.trackers import TrackedRun, open_trackers

ROOT = Path(__file__).parents[2]

# In a process of its own: the trackers start helpers, and warn about themselves.
SCRIPT = """
import pathlib, sys
from megatron_packed_sft.train.trackers import TrackedRun, open_trackers
for first_step in (0, 2):
    run = TrackedRun(pathlib.Path(sys.argv[1]), first_step, {"a": {"b": 1}})
    trackers, notes = open_trackers(sys.argv[2].split(","), run)
    for step in (first_step + 1, first_step + 2):
        for tracker in trackers:
            tracker.log({"train/loss": 2.5, "validation/maths:x": 1.25, "train/none": float("nan")}, step)
    for tracker in trackers:
        tracker.close()
"""


def log_to(names: str, output: Path, **environment: str) -> None:
    """Log four steps in two runs, the second of which resumes the first; any use of the network fails."""
    output.mkdir()
    proxy = "http://127.0.0.1:9"
    shut = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "http_proxy": proxy, "https_proxy": proxy, "NO_PROXY": ""}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "PYTHONPATH": path, **shut, **environment}
    command = [sys.executable, "-c", SCRIPT, str(output), names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=known, cwd=output, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_and_biases_writes_offline_files_that_can_be_sent_later(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log_to("wandb", tmp_path / "run", HOME=str(tmp_path / "home"))
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # one id: sent later, both are one run
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_mlflow_writes_files_and_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    log_to("mlflow", tmp_path / "run")
    [metric] = (tmp_path / "run" / "mlflow").glob("*/*/metrics/train/loss")
    assert [line.split()[1:] for line in metric.read_text().splitlines()] == [
        ["2.5", str(step)] for step in range(1, 5)
    ]
    assert list((tmp_path / "run" / "mlflow").glob("*/*/metrics/validation/maths_x"))
    assert [file.read_text() for file in (tmp_path / "run" / "mlflow").glob("*/*/params/a.b")] == ["1"]


def test_several_trackers_at_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    log_to("tensorboard,wandb", tmp_path / "run", HOME=str(tmp_path / "home"))
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(
        MissingDependencyError, match=rf"logger.names=\[{name}\] needs the package {name}.*sft\[{name}\]"
    ):
        open_trackers([name], TrackedRun(tmp_path, 0, {}))


def test_no_trackers_leave_no_files(tmp_path: Path) -> None:
    assert open_trackers([], TrackedRun(tmp_path, 0, {})) == ([], [])
    assert not list(tmp_path.iterdir())
