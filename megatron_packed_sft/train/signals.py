"""SIGTERM means: finish the step, save, leave. All ranks must do so after the same step."""

from __future__ import annotations

import signal
from types import FrameType

import torch


class StopRequest:
    """Notices SIGTERM while it is in force, and lets all ranks agree on it.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.was_made_here
        True
    """

    def __init__(self) -> None:
        self.was_made_here = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # When a rank fails torchrun sends SIGTERM to the others. They should still say what they noticed.
        if kind is None:
            signal.signal(signal.SIGTERM, self._before)

    def was_made_anywhere(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop; a collective call, so that all of them leave after the same step."""
        flag = torch.tensor([int(self.was_made_here)], device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.was_made_here = True
