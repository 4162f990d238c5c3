"""Report a run to the user: progress bars on a terminal, lines in a log, and a summary at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_packed_sft.data.order.blend import SourceProgress
from megatron_packed_sft.support import progress
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.support.terminal import is_terminal, show_json
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.train.metrics import MetricsFile, StepRecord, Totals, perplexity_of

NO_COPIES: Mapping[str, Any] = MappingProxyType({})


class EarlyEnd(NamedTuple):
    """Why a run ends before its last step, and what to do about it."""

    reason: str
    advice: str


class Reporter:
    """Reports nothing: for all ranks but the first."""

    def say(self, text: str) -> None:
        """Print a line."""

    def was_validated(self, name: str, step: int) -> bool:
        """Return whether the resumed run validated on a dataset after a step; only the first rank knows."""
        return False

    def validation_losses(self, name: str) -> list[float]:
        """Return the losses on a dataset that the resumed run recorded; only the first rank knows."""
        return []

    def on_steps(self, record: StepRecord, totals: Totals) -> None:
        """Report the steps since the last record."""

    def on_validation_start(self, name: str, step: int, num_bins: int) -> None:
        """Report that validation on a dataset begins."""

    def on_validation_progress(self, num_bins: int) -> None:
        """Report that validation has taken so many more bins."""

    def on_validation_end(self, name: str, step: int, loss: float, num_trained: int) -> None:
        """Report the loss on a dataset."""

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Report a published checkpoint."""

    def on_samples(self, file: Path) -> None:
        """Report the file with the model's answers."""

    def summarize(self, end: EarlyEnd | None, copies: Mapping[str, Any] = NO_COPIES) -> None:
        """Report the end of the run: finished, or why it ended early; and its copies."""

    def close(self) -> None:
        """Release the bars and files."""


class ConsoleReporter(Reporter):
    """Prints lines or moves progress bars, writes the metrics, and collects what the summary needs.

    Args:
        metrics: the run's metrics file.
        first_step: steps done before this run began.
        num_steps: steps of the whole run.
        as_json: print the summary as JSON on stdout, and everything else on stderr.
    """

    def __init__(self, metrics: MetricsFile, *, first_step: int, num_steps: int, as_json: bool = False) -> None:
        self._metrics = metrics
        self._first_step = first_step
        self._num_steps = num_steps
        self._step = first_step
        self._records: list[StepRecord] = []  # the first and the last
        self._num_tokens = 0
        self._seconds = 0.0
        self._data_seconds = 0.0
        self._checkpoint: Path | None = None
        self._validations: dict[str, dict[str, Any]] = {}
        self._as_json = as_json
        self._is_terminal = is_terminal(sys.stderr)
        self._bar = self._new_bar("train", total=num_steps, unit="step", done=first_step)
        self._validation_bar: Progress | None = None

    def say(self, text: str) -> None:
        """Print a line, above the bars while there are any."""
        try:
            progress.say(text, stream=sys.stderr if self._as_json else sys.stdout)
        except BrokenPipeError:
            raise  # the reader of the pipe has exited, which ends a command
        except OSError as error:  # a log on a full disk
            with self._metrics.lost.tolerated("the log"):
                raise error

    def was_validated(self, name: str, step: int) -> bool:
        """Return whether metrics.jsonl has the validation."""
        return self._metrics.was_validated(name, step)

    def validation_losses(self, name: str) -> list[float]:
        """Return the losses in metrics.jsonl."""
        return self._metrics.validation_losses(name)

    def on_steps(self, record: StepRecord, totals: Totals) -> None:
        """Write the record; move the bar, or print a line."""
        self._metrics.write_step(record)
        self._warn()
        self._records = [*self._records[:1], record]
        self._num_tokens += totals.num_tokens
        self._seconds += totals.seconds
        self._data_seconds += totals.data_seconds
        if not self._is_terminal:
            self.say(_line(record, self._num_steps))
        else:
            self._bar.update(
                record.step - self._step,
                loss=f"{record.loss:.4f}", speed=f"{record.tokens_per_second:,.0f} tokens/s",
                lr=f"{record.learning_rate:.2e}",
            )  # fmt: skip
        self._step = record.step

    def on_validation_start(self, name: str, step: int, num_bins: int) -> None:
        """Show a bar of its own, or print a line."""
        if self._is_terminal:
            self._validation_bar = self._new_bar(f"validating on {name}", total=num_bins, unit="bin")
        else:
            self.say(f"step {step}: validating on {name}, {plural(num_bins, 'bin')}")

    def on_validation_progress(self, num_bins: int) -> None:
        """Move the bar."""
        if self._validation_bar is not None:
            self._validation_bar.update(num_bins)

    def on_validation_end(self, name: str, step: int, loss: float, num_trained: int) -> None:
        """Write and print the loss."""
        self._close_validation_bar()
        self._metrics.write_validation(name, step, loss, num_trained)
        self._warn()
        self._validations[name] = {"step": step, "loss": _finite(loss), "num_trained": num_trained}
        self.say(
            f"step {step}: loss {loss:.4f} on {name} ({num_trained:,} trained tokens), perplexity "
            f"{perplexity_of(loss):,.2f}"
        )

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Print its path."""
        self._checkpoint = checkpoint
        self.say(f"step {self._step}: saved {checkpoint}")

    def on_samples(self, file: Path) -> None:
        """Print its path."""
        self.say(f"step {self._step}: the model's answers are in {file}")

    def close(self) -> None:
        """Close the bars and the metrics."""
        self._close_validation_bar()
        self._bar.close()
        self._metrics.close()
        self._warn()

    def _warn(self) -> None:
        for warning in self._metrics.lost.take_warnings():
            self.say(warning)

    def summarize(self, end: EarlyEnd | None, copies: Mapping[str, Any] = NO_COPIES) -> None:
        """Print what was done, where it is, and how to resume."""
        self._close_validation_bar()
        self._bar.close()
        if self._as_json:
            show_json({**self._summary(end), **copies})
            return
        if not self._records:
            done = f"all {self._num_steps} steps are done; raise train.steps or train.epochs to train longer, or choose"
            self.say(f"nothing to do: {done} another output" if end is None else f"nothing to do: {end.advice}")
            return
        first, last = self._records[0], self._records[-1]
        self.say(
            f"{'finished' if end is None else f'stopped by {end.reason}'} at step {self._step} of "
            f"{self._num_steps}: loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}"
        )
        self.say(
            f"speed: {self._num_tokens / self._seconds:,.0f} tokens/s; waiting for data took "
            f"{self._data_seconds / self._seconds:.2%} of the time"
        )
        if last.sources:
            self.say(f"blend: {', '.join(_progress(name, source) for name, source in last.sources.items())}")
        self.say(f"metrics: {self._metrics.path}")
        self.say(f"checkpoint: {self._checkpoint}")
        if copies.get("num_copies_skipped"):
            num_skipped = plural(copies["num_copies_skipped"], "checkpoint")
            self.say(f"not copied: {num_skipped}, because a newer one was saved before the upload could start")
        self.say("to train longer: the same command with more train.steps" if end is None else end.advice)
        if lost := self._metrics.lost.summary():
            self.say(lost)

    def _summary(self, end: EarlyEnd | None) -> dict[str, Any]:
        """Return the summary for programs."""
        first, last = (self._records[0], self._records[-1]) if self._records else (None, None)
        return {
            "finished": end is None,
            "stopped_by": None if end is None else end.reason,
            "step": self._step,
            "num_steps": self._num_steps,
            "first_step": self._first_step,
            "first_loss": None if first is None else _finite(first.loss),
            "loss": None if last is None else _finite(last.loss),
            "validation": self._validations,
            "tokens_per_second": self._num_tokens / self._seconds if self._seconds else None,
            "data_share": self._data_seconds / self._seconds if self._seconds else None,
            "metrics": str(self._metrics.path),
            "num_not_written": dict(self._metrics.lost.counts),
            "checkpoint": None if self._checkpoint is None else str(self._checkpoint),
        }

    def _new_bar(self, stage: str, *, total: int, unit: str, done: int = 0) -> Progress:
        # Without a terminal, a line for every record says more than one about the progress.
        return Progress(stage, total, unit, quiet=not self._is_terminal, done=done)

    def _close_validation_bar(self) -> None:
        if self._validation_bar is not None:
            self._validation_bar.close()
            self._validation_bar = None


def _progress(name: str, source: SourceProgress) -> str:
    return f"{name} {source.share:.2%} ({plural(source.num_samples, 'bin')}, {source.epochs:.2f} epochs)"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no NaN


def _line(record: StepRecord, num_steps: int) -> str:
    return (
        f"step {record.step}/{num_steps}: loss {record.loss:.4f}, lr {record.learning_rate:.2e}, grad norm "
        f"{record.grad_norm:.3f}, {record.tokens_per_second:,.0f} tokens/s ({record.trained_tokens_per_second:,.0f} "
        f"trained), padding {record.padding_share:.1%}, data {record.data_share:.2%}, epoch {record.epoch:.3f}, "
        f"samples {record.consumed_samples:,}"
    )
