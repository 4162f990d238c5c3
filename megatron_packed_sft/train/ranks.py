"""Have the ranks of a run act as one: one reports an error, a lost rank is explained, all stop after the same step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.support.processes import signal_when_parent_dies

if TYPE_CHECKING:
    import torch

# Messages of gloo, NCCL and torch's stores when the other end of a connection is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket (closed|error)|remote (peer|process)|"
    r"timed out|timeout|NCCL error|ncclRemoteError|process group.*abort",
    re.IGNORECASE,
)
_HEAD_START_SECONDS = 5.0
# On Ctrl-C a terminal signals every process of the run, and torchrun then forwards its own signal: one request.
ONE_REQUEST_SECONDS = 2.0


def own_rank() -> int:
    """Return this process's rank under torchrun; 0 when it runs alone."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Return the number of processes in the run; 1 when this one runs alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave_with_torchrun() -> None:
    """Save and stop this rank when torchrun is killed, which would otherwise leave its ranks running."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_when_parent_dies(signal.SIGTERM, os.getppid())


class LostRankError(PackedSFTError):
    """Another rank died, and the run with it."""


@contextmanager
def one_rank_reports() -> Iterator[None]:
    """Let rank 0 report an error that every rank runs into, such as a wrong path, before torchrun ends the others.

    An error that only another rank runs into is reported by that rank a few seconds later. When a rank is lost, ranks 0
    and 1 both say so, because the lost one may be rank 0.
    """
    try:
        yield
    except PackedSFTError as error:  # rank 0's is printed by the application, like every error
        if isinstance(error, LostRankError):
            if own_rank() == 1:
                _report(error)
            raise  # not reported to torchrun, which would take this for the cause
        _tell_torchrun(error)
        if own_rank() != 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun sends it once rank 0 has reported the error
            time.sleep(_HEAD_START_SECONDS)
            _report(error)
        raise


@contextmanager
def lost_ranks_explained() -> Iterator[None]:
    """Say in one sentence that another rank was lost, instead of the communication library's error.

    Example:
        >>> with lost_ranks_explained():
        ...     raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
        Traceback (most recent call last):
        megatron_packed_sft.train.ranks.LostRankError: rank 0 lost the connection to another rank, which died or \
hangs; check that rank's own output for the cause (killed for lack of memory?), then run the same command again to \
resume from the last checkpoint
    """
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        if not _LOST.search(str(error)):
            raise
        raise LostRankError(
            f"rank {own_rank()} lost the connection to another rank, which died or hangs; check that rank's own output "
            "for the cause (killed for lack of memory?), then run the same command again to resume from the last "
            "checkpoint"
        ) from None


class StopRequest:
    """Catches SIGTERM and SIGINT while it is entered, so that all ranks finish the step, save and stop together.

    A second Ctrl-C, a few seconds later, raises KeyboardInterrupt as usual.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.received.name
        'SIGTERM'
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # When a rank fails, torchrun sends SIGTERM to the others. They should still get to report what they saw.
        if kind is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def received_by_any_rank(self, device: torch.device) -> signal.Signals | None:
        """Return the signal that any rank received; a collective call, so that all ranks stop after the same step."""
        import torch

        number = torch.tensor([self.received or 0], device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return signal.Signals(int(number.item())) if number.item() else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._received_at > ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt


def _tell_torchrun(error: PackedSFTError) -> None:
    """Put the message into torchrun's own summary, which it prints last, below its long trace."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # then torchrun reports an unknown cause
            Path(file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))


def _report(error: PackedSFTError) -> None:
    print(f"packed-sft train: error on rank {own_rank()}: {error}", file=sys.stderr, flush=True)
