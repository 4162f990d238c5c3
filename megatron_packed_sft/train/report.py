"""What the user sees of a run: lines, a progress bar on a terminal, and a summary at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from signal import Signals

from tqdm import tqdm

from megatron_packed_sft.train.metrics import MetricsFile, StepRecord, Totals


class Reporter:
    """Says nothing: what all ranks but the first use.

    Example:
        >>> Reporter().on_checkpoint(Path("step_000020"))
    """

    def say(self, text: str) -> None:
        """Print a line."""

    def was_validated(self, name: str, step: int) -> bool:
        """Whether the run that is resumed has validated on a dataset after a step; only the first rank knows."""
        return False

    def on_steps(self, record: StepRecord, totals: Totals) -> None:
        """Some steps were done."""

    def on_validation(self, name: str, step: int, loss: float, num_trained: int) -> None:
        """A dataset was validated on."""

    def on_checkpoint(self, checkpoint: Path) -> None:
        """A checkpoint was published."""

    def summarize(self, stopped_by: Signals | None) -> None:
        """The run is over: finished, or stopped by a signal."""

    def close(self) -> None:
        """Nothing more will be said."""


class ConsoleReporter(Reporter):
    """Prints lines, keeps the progress bar, writes the metrics, and remembers what the summary says.

    Args:
        metrics: the run's metrics file.
        first_step: steps done before this run began.
        num_steps: steps of the whole run.

    Example:
        >>> reporter = ConsoleReporter(metrics, first_step=0, num_steps=100)  # doctest: +SKIP
    """

    def __init__(self, metrics: MetricsFile, *, first_step: int, num_steps: int) -> None:
        self._metrics = metrics
        self._first_step = first_step
        self._num_steps = num_steps
        self._step = first_step
        self._records: list[StepRecord] = []  # the first and the last
        self._num_tokens = 0
        self._seconds = 0.0
        self._data_seconds = 0.0
        self._checkpoint: Path | None = None
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(initial=first_step, total=num_steps, unit="step", disable=not is_terminal, dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def was_validated(self, name: str, step: int) -> bool:
        """What the metrics say."""
        return self._metrics.was_validated(name, step)

    def on_steps(self, record: StepRecord, totals: Totals) -> None:
        """Write the record; print it, or move the bar."""
        self._metrics.write_step(record)
        self._records = [*self._records[:1], record]
        self._num_tokens += totals.num_tokens
        self._seconds += totals.seconds
        self._data_seconds += totals.data_seconds
        if self._bar.disable:
            self.say(_line(record, self._num_steps))
        else:
            self._bar.update(record.step - self._step)
            self._bar.set_postfix_str(
                f"loss {record.loss:.4f}, {record.tokens_per_second:,.0f} tokens/s, lr {record.learning_rate:.2e}"
            )
        self._step = record.step

    def on_validation(self, name: str, step: int, loss: float, num_trained: int) -> None:
        """Write and print a validation loss."""
        self._metrics.write_validation(name, step, loss, num_trained)
        self.say(f"step {step}: loss {loss:.4f} on {name} ({num_trained:,} trained tokens)")

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Print where it is."""
        self._checkpoint = checkpoint
        self.say(f"step {self._step}: saved {checkpoint}")

    def close(self) -> None:
        """Close the bar and the metrics."""
        self._bar.close()
        self._metrics.close()

    def summarize(self, stopped_by: Signals | None) -> None:
        """Print what was done, where it is, and how to go on."""
        if not self._records:
            self.say(
                f"nothing to do: all {self._num_steps} steps were done before; raise train.steps or train.epochs to "
                "go on, or choose another output"
            )
            return
        first, last = self._records[0], self._records[-1]
        self.say(
            f"{'finished' if stopped_by is None else f'stopped by {stopped_by.name}'} at step {self._step} of "
            f"{self._num_steps}: loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}"
        )
        self.say(
            f"speed: {self._num_tokens / self._seconds:,.0f} tokens/s; waiting for data took "
            f"{self._data_seconds / self._seconds:.2%} of the time"
        )
        self.say(f"metrics: {self._metrics.path}")
        self.say(f"checkpoint: {self._checkpoint}")
        self.say("to go on: the same command (resume=auto)" + (" with more train.steps" if stopped_by is None else ""))


def _line(record: StepRecord, num_steps: int) -> str:
    return (
        f"step {record.step}/{num_steps}: loss {record.loss:.4f}, lr {record.learning_rate:.2e}, grad norm "
        f"{record.grad_norm:.3f}, {record.tokens_per_second:,.0f} tokens/s ({record.trained_tokens_per_second:,.0f} "
        f"trained), padding {record.padding_share:.1%}, data {record.data_share:.2%}, epoch {record.epoch:.3f}, "
        f"samples {record.consumed_samples:,}"
    )
