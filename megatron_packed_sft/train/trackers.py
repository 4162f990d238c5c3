"""Trackers, which show the numbers of metrics.jsonl: TensorBoard, Weights & Biases, MLflow; several at once, or none.

Their files are below the run's directory, and by default none of them uses the network: their own environment variables
(WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME) say otherwise. metrics.jsonl is the record of a
run; these are views of it, and a tracker that fails never ends a run.

To add a tracker: write a class like those below, add it to `TRACKERS`, and add conf/logger/NAME.yaml.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.wording import plural

_PROJECT: Final = "packed-sft"
_RUN_ID: Final = "tracker_run_id"  # kept in the run's directory, so that a resumed run continues under the same id
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. /]")
_NUM_TRIES: Final = 3  # in a row; a server that does not answer may take a minute to fail


class Tracker(Protocol):
    """Shows numbers over steps."""

    name: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show some numbers of a step."""

    def close(self) -> None:
        """Finish and release the files."""


class TrackedRun(NamedTuple):
    """What a tracker is told when it starts.

    Args:
        output: the run's directory; its name is the name of the run.
        first_step: the step that the run resumes from.
        config: the run's whole configuration.
    """

    output: Path
    first_step: int
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.output.resolve().name

    def id(self) -> str:
        """Return the id under which trackers know this run; a resumed run has the same."""
        file = self.output / _RUN_ID
        with os_errors("read", file):
            if file.exists():
                return file.read_text().strip()
        new = uuid.uuid4().hex[:12]
        replace_file(file, f"{new}\n".encode())
        return new


def open_trackers(names: Sequence[str], run: TrackedRun) -> tuple[list[Tracker], list[str]]:
    """Return the chosen trackers, and lines for the user.

    Args:
        names: of the trackers.
        run: what they show.

    Example:
        >>> open_trackers([], TrackedRun(Path("runs/first"), first_step=0, config={}))
        ([], [])
    """
    trackers: list[Tracker] = []
    notes: list[str] = []
    for name in dict.fromkeys(names):
        if name == TensorBoardTracker.name and importlib.util.find_spec(name) is None:  # it is on by default
            notes.append("note: TensorBoard is not installed, so it gets no files; metrics.jsonl has all numbers")
            continue
        try:
            trackers.append(TRACKERS[name](run))
        except OSError as error:
            notes.append(f"warning: cannot write to {run.output / name} ({error.strerror}); training goes on")
    return trackers, notes


class TensorBoardTracker:
    """Event files in output/tensorboard."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        create: Callable[..., Any] = SummaryWriter  # it has no type annotations
        self._writer = create(str(run.output / self.name), purge_step=run.first_step + 1)
        self._hook, threading.excepthook = threading.excepthook, self._ignore_own_thread

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that an error appears here and not in its own thread, minutes later

    def close(self) -> None:
        """Close the event file."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _ignore_own_thread(self, failure: threading.ExceptHookArgs) -> None:
        # The error that ends its writing thread is also raised by the next call, so no trace is needed.
        if not type(failure.thread).__module__.startswith(self.name):
            self._hook(failure)


class WandbTracker:
    """Weights & Biases: files in output/wandb, sent by `wandb sync`, or at once with WANDB_MODE=online."""

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        wandb = load("wandb", self.name, "logger.names=[wandb]")
        mode = os.environ.get("WANDB_MODE", "offline")
        with _start_errors(self.name, "check the login, or set WANDB_MODE=offline"):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=run.name,
                id=run.id(),
                resume="allow" if mode == "online" else None,
                mode=mode,
                dir=str(run.output),
                config=dict(run.config),
                # It should neither capture the console nor look at git.
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MlflowTracker:
    """MLflow: files in output/mlflow, or the tracking server of MLFLOW_TRACKING_URI."""

    name = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow 3 stores runs in a database, which needs more packages, unless this allows files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.output / self.name).resolve().as_uri()
        client = load("mlflow", self.name, "logger.names=[mlflow]").MlflowClient
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        with _start_errors(self.name, f"check MLFLOW_TRACKING_URI {uri}"):
            self._client = client(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(project)
            number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
            tag = {"packed_sft_run": run.id()}
            earlier = self._client.search_runs([number], f"tags.packed_sft_run = '{tag['packed_sft_run']}'")
            created = earlier[0] if earlier else self._client.create_run(number, run_name=run.name, tags=tag)
            self._run_id = created.info.run_id
            if not earlier:
                for key, value in _flat(run.config):
                    self._client.log_param(self._run_id, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        for name, value in values.items():
            if math.isfinite(value):
                self._client.log_metric(self._run_id, _NOT_IN_MLFLOW_NAMES.sub("_", name), value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


TRACKERS: Final[Mapping[str, Callable[[TrackedRun], Tracker]]] = {
    one.name: one for one in (TensorBoardTracker, WandbTracker, MlflowTracker)
}


@contextmanager
def _start_errors(package: str, remedy: str) -> Iterator[None]:
    """Say in one sentence what a tracker raises while it starts."""
    try:
        yield
    except PackedSFTError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise PackedSFTError(f"{package} cannot start: {reason}; {remedy}, or leave it out") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class LostRecords:
    """Counts the records that could not be written, by place, and warns once for each place.

    Example:
        >>> lost = LostRecords()
        >>> for _ in range(2):
        ...     with lost.tolerated("metrics.jsonl"):
        ...         raise OSError("No space left on device")
        >>> lost.take_warnings()
        ['warning: cannot write to metrics.jsonl (No space left on device); training goes on']
        >>> lost.summary()
        'not written: 2 records of metrics.jsonl'
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._num_failures: Counter[str] = Counter()  # in a row
        self._warnings: list[str] = []

    @contextmanager
    def tolerated(self, place: str, num_records: int = 1) -> Iterator[None]:
        """Count the records that the block fails to write, instead of raising its error.

        Args:
            place: where they should go, as a user knows it.
            num_records: how many the block writes.
        """
        try:
            yield
        except Exception as error:  # trackers raise what their servers and files make them raise
            if place not in self.counts:
                reason = str(error).partition("\n")[0][:300] or type(error).__name__
                self._warnings.append(f"warning: cannot write to {place} ({reason}); training goes on")
            self.counts[place] += num_records
            self._num_failures[place] += 1
        else:
            self._num_failures[place] = 0

    def is_given_up(self, place: str) -> bool:
        """Return whether a place has failed so often that trying again only costs time."""
        return self._num_failures[place] >= _NUM_TRIES

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def summary(self) -> str | None:
        """Return a line that says how much was lost; None if everything was written."""
        parts = [f"{plural(count, 'record')} of {place}" for place, count in self.counts.items() if count]
        return f"not written: {', '.join(parts)}" if parts else None
