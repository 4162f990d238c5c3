"""SIGTERM and Ctrl-C mean: finish the step, save, leave. All ranks must do so after the same step."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

# On Ctrl-C a terminal signals every process of the run, and torchrun then passes its own on: one wish, heard twice.
_ONE_WISH_SECONDS = 2.0


class StopRequest:
    """Notices SIGTERM and SIGINT while it is in force, and lets all ranks agree on it.

    A second Ctrl-C, some seconds later, is a KeyboardInterrupt as always.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.made_here.name
        'SIGTERM'
    """

    def __init__(self) -> None:
        self.made_here: signal.Signals | None = None
        self._made_at = 0.0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._notice) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # When a rank fails torchrun sends SIGTERM to the others. They should still say what they noticed.
        if kind is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def made_anywhere(self, device: torch.device) -> signal.Signals | None:
        """The signal that any rank got; a collective call, so that all of them leave after the same step."""
        number = torch.tensor([self.made_here or 0], device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return signal.Signals(int(number.item())) if number.item() else None

    def _notice(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.made_here is None:
            self.made_here, self._made_at = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._made_at > _ONE_WISH_SECONDS:
            raise KeyboardInterrupt
