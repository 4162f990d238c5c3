"""When something goes wrong on several ranks at once: one clear sentence instead of a heap of traces."""

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

from megatron_packed_sft.errors import PackedSFTError

# What gloo, NCCL and torch's stores say when the other end of a connection is gone.
_LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket (closed|error)|remote (peer|process)|"
    r"timed out|timeout|NCCL error|ncclRemoteError|process group.*abort",
    re.IGNORECASE,
)
_HEAD_START_SECONDS = 5.0


def own_rank() -> int:
    """This process among those that torchrun started; 0 when it runs alone.

    Example:
        >>> own_rank()
        0
    """
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Processes of the run; 1 when it runs alone.

    Example:
        >>> num_ranks()
        1
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


class LostRankError(PackedSFTError):
    """Another rank has gone, and with it the run."""


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let rank 0 report an error that all ranks find, such as a wrong path: torchrun ends the others meanwhile.

    An error that only another rank finds is reported by that rank, a few seconds later. When a rank is lost, rank 0
    says so, and rank 1, because the lost one may be rank 0.

    Example:
        >>> with first_rank_speaks():
        ...     pass
    """
    try:
        yield
    except PackedSFTError as error:  # rank 0's is printed where all errors are
        if isinstance(error, LostRankError):
            if own_rank() == 1:
                _say(error)
            raise  # without a word to torchrun, which would take it for the cause
        _tell_torchrun(error)
        if own_rank() != 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what torchrun sends when rank 0 has reported it
            time.sleep(_HEAD_START_SECONDS)
            _say(error)
        raise


def _tell_torchrun(error: PackedSFTError) -> None:
    """Put the sentence into torchrun's own summary, which it prints last, below many lines of its own trace."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # torchrun then says that it does not know
            Path(file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))


def _say(error: PackedSFTError) -> None:
    print(f"packed-sft train: error on rank {own_rank()}: {error}", file=sys.stderr, flush=True)


@contextmanager
def lost_ranks_explained() -> Iterator[None]:
    """Turn what the communication library says when another rank has gone into one sentence.

    Example:
        >>> with lost_ranks_explained():
        ...     raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
        Traceback (most recent call last):
        megatron_packed_sft.train.failures.LostRankError: rank 0 lost the connection to another rank, which has ended \
or hangs: look at that rank's own output for the reason (killed for lack of memory?), then run the same command again: \
it goes on from the last checkpoint
    """
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        if not _LOST.search(str(error)):
            raise
        raise LostRankError(
            f"rank {own_rank()} lost the connection to another rank, which has ended or hangs: look at that rank's "
            "own output for the reason (killed for lack of memory?), then run the same command again: it goes on from "
            "the last checkpoint"
        ) from None
