"""When something goes wrong on several ranks at once: one clear sentence instead of a heap of traces."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let rank 0 report an error that all ranks find, such as a wrong path: torchrun ends the others meanwhile.

    An error that only another rank finds is reported by that rank, a few seconds later.

    Example:
        >>> with first_rank_speaks():
        ...     pass
    """
    try:
        yield
    except PackedSFTError:
        if own_rank() != 0:
            time.sleep(_HEAD_START_SECONDS)
        raise


@contextmanager
def lost_ranks_explained() -> Iterator[None]:
    """Turn what the communication library says when another rank has gone into one sentence.

    Example:
        >>> with lost_ranks_explained():
        ...     raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
        Traceback (most recent call last):
        megatron_packed_sft.errors.PackedSFTError: rank 0 lost the connection to another rank, which has ended or \
hangs: look at that rank's own output for the reason (killed for lack of memory?), then run the same command again: it \
goes on from the last checkpoint
    """
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        if not _LOST.search(str(error)):
            raise
        raise PackedSFTError(
            f"rank {own_rank()} lost the connection to another rank, which has ended or hangs: look at that rank's "
            "own output for the reason (killed for lack of memory?), then run the same command again: it goes on from "
            "the last checkpoint"
        ) from None
