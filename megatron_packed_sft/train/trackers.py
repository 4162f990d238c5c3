"""Trackers that show the numbers of metrics.jsonl: TensorBoard, Weights & Biases, MLflow; several at once, or none.

Their files are below the run's directory, and without being told to, none of them uses the network. metrics.jsonl is
the record; these are views of it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.train.config import LoggerConfig

TENSORBOARD: Final = "tensorboard"
WANDB: Final = "wandb"
MLFLOW: Final = "mlflow"
_RUN_ID: Final = "tracker_run_id"  # kept in the run's directory, so that a resumed run goes on under the same name
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. /]")


class Tracker(Protocol):
    """Something that shows numbers over steps."""

    name: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show some numbers of a step."""

    def close(self) -> None:
        """Finish and release the files."""


def open_trackers(
    settings: LoggerConfig, output: Path, *, first_step: int, config: Mapping[str, Any]
) -> tuple[list[Tracker], list[str]]:
    """Return the trackers that were chosen, and lines for the user.

    Args:
        settings: which, and what they are told.
        output: the run's directory.
        first_step: the step that the run resumes from.
        config: the run's whole configuration, which some trackers show.

    Example:
        >>> open_trackers(LoggerConfig(names=[]), Path("runs/first"), first_step=0, config={})
        ([], [])
    """
    trackers: list[Tracker] = []
    notes: list[str] = []
    name = settings.run_name or output.resolve().name
    for kind in dict.fromkeys(settings.names):
        if kind == TENSORBOARD and importlib.util.find_spec(TENSORBOARD) is None:
            notes.append("note: TensorBoard is not installed, so there are no files for it; metrics.jsonl has it all")
        elif kind == TENSORBOARD:
            try:
                trackers.append(TensorBoardTracker(output / TENSORBOARD, first_step=first_step))
            except OSError as error:
                notes.append(f"warning: cannot write to {output / TENSORBOARD} ({error.strerror}); training goes on")
        elif kind == WANDB:
            trackers.append(WandbTracker(settings, output, name, config))
        else:
            trackers.append(MlflowTracker(settings, output, name, config))
    return trackers, notes


class TensorBoardTracker:
    """Event files in output/tensorboard."""

    name = TENSORBOARD

    def __init__(self, directory: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter  # it has no type annotations
        self._writer = make(str(directory), purge_step=first_step + 1)
        self._hook, threading.excepthook = threading.excepthook, self._hear

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

    def _hear(self, failure: threading.ExceptHookArgs) -> None:
        # What its writing thread dies of comes out of the next call, too; there is no need to print a trace.
        if not type(failure.thread).__module__.startswith(TENSORBOARD):
            self._hook(failure)


class WandbTracker:
    """Weights & Biases: files in output/wandb, sent at once or later by `wandb sync`."""

    name = WANDB

    def __init__(self, settings: LoggerConfig, output: Path, name: str, config: Mapping[str, Any]) -> None:
        wandb = load("wandb", WANDB, "logger.names=[wandb]")
        is_online = settings.wandb_mode == "online"
        with _said_in_one_sentence("wandb", "check the login, or set logger.wandb_mode=offline"):
            self._run = wandb.init(
                project=settings.project,
                name=name,
                id=_run_id(output),
                resume="allow" if is_online else None,
                mode=settings.wandb_mode,
                dir=str(output),
                config=dict(config),
                # Its console capture and git lookups are no part of what was asked for.
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MlflowTracker:
    """MLflow: files in output/mlflow, or a tracking server."""

    name = MLFLOW

    def __init__(self, settings: LoggerConfig, output: Path, name: str, config: Mapping[str, Any]) -> None:
        if settings.mlflow_uri is None:
            # MLflow 3 stores runs in a database, which needs more packages, unless it is told that files will do.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = settings.mlflow_uri or (output / MLFLOW).resolve().as_uri()
        client = load("mlflow", MLFLOW, "logger.names=[mlflow]").MlflowClient
        with _said_in_one_sentence("mlflow", f"check logger.mlflow_uri {uri}"):
            self._client = client(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(settings.project)
            number = (
                self._client.create_experiment(settings.project) if experiment is None else experiment.experiment_id
            )
            tag = {"packed_sft_run": _run_id(output)}
            earlier = self._client.search_runs([number], f"tags.packed_sft_run = '{tag['packed_sft_run']}'")
            run = earlier[0] if earlier else self._client.create_run(number, run_name=name, tags=tag)
            self._run_id = run.info.run_id
            if not earlier:
                for key, value in _flat(config):
                    self._client.log_param(self._run_id, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        for name, value in values.items():
            if math.isfinite(value):
                self._client.log_metric(self._run_id, _NOT_IN_MLFLOW_NAMES.sub("_", name), value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class _said_in_one_sentence:  # noqa: N801  # used like a function
    """Turn whatever a tracker raises while it starts into one sentence."""

    def __init__(self, package: str, remedy: str) -> None:
        self._package, self._remedy = package, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PackedSFTError):
            reason = str(error).partition("\n")[0]
            raise PackedSFTError(f"{self._package} cannot start: {reason}; {self._remedy}, or leave it out") from error


def _run_id(output: Path) -> str:
    """Return the id under which trackers know this run; a resumed run has the same."""
    file = output / _RUN_ID
    with os_errors("read", file):
        if file.exists():
            return file.read_text().strip()
    made = uuid.uuid4().hex[:12]
    replace_file(file, f"{made}\n".encode())
    return made


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_NUM_TRIES: Final = 3  # in a row; a server that does not answer may take a minute to fail


class Unwritten:
    """Counts what could not be written, by place, and warns once for each place.

    Example:
        >>> unwritten = Unwritten()
        >>> for _ in range(2):
        ...     with unwritten.tolerated("metrics.jsonl"):
        ...         raise OSError("No space left on device")
        >>> unwritten.take_warnings()
        ['warning: cannot write to metrics.jsonl (No space left on device); training goes on']
        >>> unwritten.summary()
        'not written: 2 records of metrics.jsonl'
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._num_failures: Counter[str] = Counter()  # in a row
        self._warnings: list[str] = []

    @contextmanager
    def tolerated(self, place: str, num_records: int = 1) -> Iterator[None]:
        """Count the records that the block fails to write, instead of raising what it raises.

        Args:
            place: where they should go, as a user knows it.
            num_records: how many the block writes.
        """
        try:
            yield
        except Exception as error:  # trackers raise whatever their servers and files make them
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
        """Say how much was not written; None if everything was."""
        parts = [f"{plural(count, 'record')} of {place}" for place, count in self.counts.items() if count]
        return f"not written: {', '.join(parts)}" if parts else None
