"""Progress of long work: a bar on a terminal, a line every 30 seconds in a log, nothing with --quiet.

Bars that exist at the same time are stacked. rich draws them without a thread, whenever work is counted.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from megatron_packed_sft.support.terminal import console, is_terminal

if TYPE_CHECKING:
    from rich import progress as rich_progress

_SECONDS_BETWEEN_DRAWINGS = 0.1


class Progress:
    """A context manager that shows the progress of one stage.

    Args:
        stage: the name of the work, such as "encode".
        total: the amount of work; None if unknown.
        unit: the unit of work, such as "bin", or "B" for bytes.
        quiet: show nothing.
        interval: seconds between two lines in a log.
        stream: where to show it; stderr by default.
        done: the amount of work done already.

    Example:
        >>> with Progress("encode", total=100, unit="B", stream=sys.stdout, interval=0.0) as progress:
        ...     progress.update(50, tokens=7)
        encode: 50 of 100 B (50 %), ... tokens=7
    """

    def __init__(
        self,
        stage: str,
        total: int | None,
        unit: str,
        *,
        quiet: bool = False,
        interval: float = 30.0,
        stream: TextIO | None = None,
        done: int = 0,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._stage, self._unit, self._interval = stage, unit, interval
        self._total, self._done = total, done
        self._notes: dict[str, int | str] = {}
        self._start = self._last = time.monotonic()
        self._silent = quiet
        self._bar: _Bar | None = None
        if not quiet and is_terminal(self._stream):
            self._bar = _Bar(self._stream, stage, total, unit, done)

    def update(self, amount: int, **notes: int | str) -> None:
        """Add finished work. Notes are shown beside it: numbers add up, a text replaces the previous one."""
        self._done += amount
        for name, value in notes.items():
            before = self._notes.get(name, 0)
            self._notes[name] = before + value if isinstance(value, int) and isinstance(before, int) else value
        if self._bar is not None:
            self._bar.move(self._done, self._shown_notes())
        elif not self._silent and time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            print(self._line(), file=self._stream, flush=True)

    def begin(self, stage: str) -> None:
        """Restart at zero for another stage over the same work."""
        self._stage, self._done, self._notes = stage, 0, {}
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            self._bar.restart(stage)

    def expect(self, total: int) -> None:
        """Replace the total with a better estimate."""
        self._total = total
        if self._bar is not None:
            self._bar.expect(total)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _shown_notes(self) -> str:
        return ", ".join(
            f"{name}={value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in self._notes.items()
        )

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self._done / seconds
        notes = f", {self._shown_notes()}" if self._notes else ""
        if self._total is None:
            return f"{self._stage}: {self._done:,} {self._unit}, {rate:,.0f} {self._unit}/s{notes}"
        share = self._done / self._total if self._total else 1.0
        left = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{self._stage}: {self._done:,} of {self._total:,} {self._unit} ({100 * share:.0f} %), "
            f"{rate:,.0f} {self._unit}/s, {max(left, 0):.0f} s left{notes}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on stdout by default, above any bars.

    Example:
        >>> say("step 1: loss 2.5")
        step 1: loss 2.5
    """
    stream = stream or sys.stdout
    for screen in list(_SCREENS.values()):  # a copy: a bar may end in another thread
        if stream.isatty():  # probably the bars' terminal, so rich must print the line
            screen.bars.console.print(text, soft_wrap=True)
            return
    print(text, file=stream, flush=True)


class _Bar:
    """One bar on the screen of its stream."""

    def __init__(self, stream: TextIO, stage: str, total: int | None, unit: str, done: int) -> None:
        self._screen = _SCREENS.get(id(stream)) or _SCREENS.setdefault(id(stream), _Screen(stream))
        self._task = self._screen.bars.add_task(stage, total=total, completed=done, before=done, unit=unit, notes="")
        self._screen.rows.add(self._task)
        self._screen.draw(now=True)

    def move(self, done: int, notes: str) -> None:
        self._screen.bars.update(self._task, completed=done, notes=notes)
        self._screen.draw()

    def restart(self, stage: str) -> None:
        self._screen.bars.reset(self._task, description=stage)
        self._screen.bars.update(self._task, notes="", before=0)
        self._screen.draw(now=True)

    def expect(self, total: int) -> None:
        self._screen.bars.update(self._task, total=total)
        self._screen.draw()

    def close(self) -> None:
        self._screen.draw(now=True)
        self._screen.bars.remove_task(self._task)
        self._screen.rows.discard(self._task)
        if not self._screen.rows:
            self._screen.bars.stop()
            _SCREENS.pop(id(self._screen.stream), None)


class _Screen:
    """All bars that a terminal currently shows."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rows: set[Any] = set()
        self.bars = _rich_bars(stream)
        self.bars.start()
        self._drawn_at = 0.0

    def draw(self, *, now: bool = False) -> None:
        """Draw the bars, at most ten times a second unless `now`."""
        if now or time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS:
            self.bars.refresh()
            self._drawn_at = time.monotonic()


_SCREENS: dict[int, _Screen] = {}  # by the identity of their stream


def _rich_bars(stream: TextIO) -> rich_progress.Progress:
    from rich import progress as rich_progress
    from rich.text import Text

    class Amount(rich_progress.ProgressColumn):
        """Work done, total, rate and notes."""

        def render(self, task: rich_progress.Task) -> Text:
            total, unit = task.total, task.fields["unit"]
            shown = _amount(task.completed, unit if total is None else "")
            shown += "" if total is None else f" of {_amount(total, unit)}"
            newly = task.completed - task.fields["before"]
            rate = f", {_amount(newly / max(task.elapsed or 0, 1e-9), unit)}/s" if newly else ""
            notes = f", {task.fields['notes']}" if task.fields["notes"] else ""
            return Text(f"{shown}{rate}{notes}", no_wrap=True, overflow="ellipsis")

    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False, style="bold"),
        rich_progress.BarColumn(bar_width=20),
        rich_progress.TaskProgressColumn(),
        Amount(),
        rich_progress.TimeRemainingColumn(compact=True),
        console=console(stream),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _amount(number: float, unit: str) -> str:
    """Return a short form of a number with its unit.

    Example:
        >>> _amount(950, "step"), _amount(43_500_000, "B"), _amount(43_500_000, ""), _amount(0.04, "step")
        ('950 step', '43.5 MB', '43.5 M', '0.04 step')
    """
    if 0 < number < 1:
        return f"{number:.2g} {unit}".rstrip()
    for size, divisor, prefix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= size:
            return f"{number / divisor:,.1f} {prefix}{'' if unit in ('', 'B') else ' '}{unit}"
    return f"{number:,.0f} {unit}".rstrip()
