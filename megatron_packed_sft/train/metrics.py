"""The metrics of a run: summed over micro batches and ranks, and written as one JSON object per line.

rank 0   loss sum, denominator, trained tokens, tokens, positions ─┐
rank 1   loss sum, denominator, trained tokens, tokens, positions ─┴─ all-reduce ─▶ loss = sum / denominator, exactly

The denominator is the number of trained tokens, the sum of their weights, or the number of conversations.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.data.order.blend import SourceProgress
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.train.trackers import LostRecords, Tracker

METRICS: Final = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The metrics of the steps since the last record.

    Args:
        step: the last of these steps, counted from 1.
        loss: mean over the trained tokens of all ranks, by their weights, or over the conversations.
        learning_rate, grad_norm: of the last step.
        tokens_per_second, trained_tokens_per_second: over all ranks.
        padding_share: share of positions without a token.
        data_share: share of the time that the slowest rank waited for batches.
        step_seconds: mean duration of a step.
        epoch: passes over the data so far.
        consumed_samples: bins so far.
        loss_kind: what the loss is a mean over: `per_token`, `weighted_per_token` or `per_conversation`.
        sources: of a blend, by name: the weight now, and the share of all bins, bins and epochs so far.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    trained_tokens_per_second: float
    padding_share: float
    data_share: float
    step_seconds: float
    epoch: float
    consumed_samples: int
    loss_kind: str = "per_token"
    sources: Mapping[str, SourceProgress] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the steps since the last record, and over all ranks."""

    num_steps: int
    loss_sum: float
    num_trained: int
    num_tokens: int
    num_positions: int
    seconds: float
    data_seconds: float
    denominator: float | None = None  # of the loss, if it is not the number of trained tokens

    @property
    def loss(self) -> float:
        """The mean; NaN when nothing was trained."""
        denominator = self.num_trained if self.denominator is None else self.denominator
        return self.loss_sum / denominator if denominator else float("nan")


class StepMeter:
    """Sums what steps report, on the device and without synchronising, until `take` reduces it over all ranks.

    Args:
        device: where the losses are.
        is_counted: whether this rank adds to the sums; of several ranks that do the same work, only one may.
    """

    def __init__(self, device: torch.device, *, is_counted: bool) -> None:
        self._device = device
        self._is_counted = is_counted
        self._restart()

    def _restart(self) -> None:
        self._loss = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._counts = [0, 0]
        self._num_steps = 0
        self._seconds = [0.0, 0.0]

    def add_losses(self, losses: list[torch.Tensor]) -> None:
        """Add (loss sum, denominator, trained tokens) of micro batches."""
        if self._is_counted:
            for loss in losses:
                self._loss += loss.detach().to(torch.float64)

    def add_step(self, *, num_tokens: int, num_positions: int, seconds: float, data_seconds: float) -> None:
        """Add what a step read, how long it took, and how much of that it waited for data."""
        self._num_steps += 1
        self._seconds[0] += seconds
        self._seconds[1] += data_seconds
        if self._is_counted:
            self._counts[0] += num_tokens
            self._counts[1] += num_positions

    def take(self) -> Totals:
        """Return the sums over all ranks since the last call; a collective call."""
        sums = torch.cat([self._loss, torch.tensor(self._counts, dtype=torch.float64, device=self._device)])
        torch.distributed.all_reduce(sums)
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        loss_sum, denominator, num_trained, num_tokens, num_positions = sums.tolist()
        seconds, data_seconds = slowest.tolist()
        totals = Totals(
            num_steps=self._num_steps,
            loss_sum=loss_sum,
            denominator=denominator,
            num_trained=round(num_trained),
            num_tokens=round(num_tokens),
            num_positions=round(num_positions),
            seconds=seconds,
            data_seconds=data_seconds,
        )
        self._restart()
        return totals


def step_record(
    totals: Totals,
    *,
    step: int,
    learning_rate: float,
    grad_norm: float,
    consumed_samples: int,
    num_samples: int,
    loss_kind: str = "per_token",
    sources: Mapping[str, SourceProgress] | None = None,
) -> StepRecord:
    """Turn sums into a record.

    Example:
        >>> totals = Totals(num_steps=1, loss_sum=6.0, num_trained=3, num_tokens=8, num_positions=16, seconds=2.0,
        ...                 data_seconds=0.1)
        >>> record = step_record(totals, step=1, learning_rate=1e-4, grad_norm=1.0, consumed_samples=4, num_samples=8)
        >>> record.loss, record.padding_share, record.tokens_per_second, record.epoch
        (2.0, 0.5, 4.0, 0.5)
    """
    return StepRecord(
        step=step,
        loss=totals.loss,
        loss_kind=loss_kind,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        tokens_per_second=totals.num_tokens / totals.seconds,
        trained_tokens_per_second=totals.num_trained / totals.seconds,
        padding_share=1 - totals.num_tokens / totals.num_positions,
        data_share=totals.data_seconds / totals.seconds,
        step_seconds=totals.seconds / totals.num_steps,
        epoch=consumed_samples / num_samples,
        consumed_samples=consumed_samples,
        sources=sources or {},
    )


class MetricsFile:
    """The metrics.jsonl of a run, whose numbers also go to trackers. Records that cannot be written are only counted.

    Args:
        directory: the run's directory.
        first_step: the step that the run resumes from; records after it are removed. 0 starts a new file.
        trackers: shown the same numbers; closed with the file.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first_step: int, trackers: Sequence[Tracker] = ()) -> None:
        self.path = Path(directory) / METRICS
        before = self._lines() if first_step else ()
        kept = [(line, record) for line, record in before if record["step"] <= first_step]
        self._validations = [record for _, record in kept if record["event"] == "validation"]
        self._kept = b"".join(line for line, _ in kept)
        self._file: io.FileIO | None = None
        self._trackers = tuple(trackers)
        self.lost = LostRecords()
        with self.lost.tolerated(METRICS, num_records=0):
            self._open()

    def write_step(self, record: StepRecord) -> None:
        """Write the record of one or more steps."""
        values = asdict(record)
        sources = values.pop("sources")
        self._write("step", {**values, "sources": sources} if sources else values)
        numbers = {name: value for name, value in values.items() if name not in ("step", "loss_kind")}
        drawn = {f"train/{name}": value for name, value in numbers.items()}
        for source, progress in sources.items():
            drawn |= {f"sources/{source.strip('/')}/{name}": value for name, value in progress.items()}
        self._draw(drawn, record.step)

    def write_validation(self, name: str, step: int, loss: float, num_trained: int) -> None:
        """Write a validation loss."""
        perplexity = perplexity_of(loss)
        numbers = {"loss": loss, "perplexity": perplexity, "num_trained": num_trained}
        self._write("validation", {"step": step, "name": name, **numbers})
        name = name.strip("/")
        self._draw({f"validation/{name}": loss, f"validation_perplexity/{name}": perplexity}, step)

    def was_validated(self, name: str, step: int) -> bool:
        """Return whether the resumed run recorded the loss on this dataset after this step."""
        return any((record.get("name"), record["step"]) == (name, step) for record in self._validations)

    def validation_losses(self, name: str) -> list[float]:
        """Return the losses on this dataset that the resumed run recorded, in their order."""
        losses = [record.get("loss") for record in self._validations if record.get("name") == name]
        return [math.nan if loss is None else loss for loss in losses]

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            with self.lost.tolerated(METRICS, num_records=0):
                self._file.close()
        for tracker in self._trackers:
            with self.lost.tolerated(tracker.name, num_records=0):
                tracker.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        # JSON has no NaN: the loss of a batch without trained tokens is null.
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with self.lost.tolerated(METRICS), os_errors("write", self.path):
            self._append(json.dumps({"event": event, **plain}).encode() + b"\n")

    def _open(self) -> io.FileIO:
        """Return the open file, created again if the disk was full when the run began."""
        if self._file is None:
            replace_file(self.path, self._kept)
            with os_errors("open", self.path):
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
        return self._file

    def _append(self, line: bytes) -> None:
        # One write per line, so that a reader never sees half of it.
        file = self._open()
        before = os.fstat(file.fileno())
        if before.st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was deleted")
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "half a line was written")
        except OSError:
            os.ftruncate(file.fileno(), before.st_size)
            raise

    def _draw(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            with self.lost.tolerated(tracker.name):
                if self.lost.is_given_up(tracker.name):
                    raise PackedSFTError("it failed too often")
                tracker.log(values, step)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the lines of the resumed run with their parsed records."""
        if not self.path.exists():
            return
        with os_errors("read", self.path):
            lines = self.path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):  # a killed run may leave half a line
                yield line, _parsed(line, self.path, number)


def perplexity_of(loss: float) -> float:
    """Return the perplexity, e to the mean loss.

    Example:
        >>> round(perplexity_of(math.log(256)))
        256
    """
    return math.exp(loss) if loss < 700 else math.inf


def read_metrics(path: str | os.PathLike[str], event: str = "step") -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl: `step` or `validation` events."""
    with os_errors("read", path), open(path, "rb") as file:
        records = [_parsed(line, path, number) for number, line in enumerate(file, start=1)]
    return [record for record in records if record["event"] == event]


def _parsed(line: bytes, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        is_number = isinstance(record.get("loss", 0.0), int | float | None)
        if "event" in record and type(record.get("step")) is int and is_number:
            return record
    except (ValueError, AttributeError, RecursionError):
        pass
    raise InvalidInputError(
        f"{os.fspath(path)}, line {number} is not a metrics record; remove the line, or move the file away"
    )
