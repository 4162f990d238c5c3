"""How far a stage is: a bar on a terminal, a line now and then in a log, nothing when asked to be quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm


class Progress:
    """A bar for one stage, counted in `unit`; a context manager. A total of None is not known beforehand.

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
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._stage, self._unit, self._interval = stage, unit, interval
        self._total, self._done = total, 0
        self._notes: dict[str, int] = {}
        self._start = self._last = time.monotonic()
        self._bar: tqdm[Any] | None = None
        self._silent = quiet
        if not quiet and self._stream.isatty():
            self._bar = tqdm(total=total, unit=unit, unit_scale=True, desc=stage, file=self._stream, leave=False)

    def update(self, amount: int, **notes: int) -> None:
        """Count further work done; notes are shown with their sums."""
        self._done += amount
        for name, value in notes.items():
            self._notes[name] = self._notes.get(name, 0) + value
        if self._bar is not None:
            self._bar.set_postfix({name: f"{value:,}" for name, value in self._notes.items()}, refresh=False)
            self._bar.update(amount)
        elif not self._silent and time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            print(self._line(), file=self._stream, flush=True)

    def begin(self, stage: str) -> None:
        """Start again for another stage over the same work."""
        self._stage, self._done, self._notes = stage, 0, {}
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            self._bar.set_description(stage, refresh=False)
            self._bar.set_postfix(refresh=False)
            self._bar.reset()

    def expect(self, total: int) -> None:
        """Correct what was expected, when it could only be guessed before."""
        self._total = total
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self._done / seconds
        notes = "".join(f", {name}={value:,}" for name, value in self._notes.items())
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
        if self._bar is not None:
            self._bar.close()
