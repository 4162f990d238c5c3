"""Processes that never outlive the one that started them, not even when that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any

_PR_SET_PDEATHSIG = 1
_OBJECTS_BETWEEN_COLLECTIONS = 200_000  # Python's own 700 are for programs that keep few


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Look for cycles less often: records are many objects without any, and looking takes longer than parsing them."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def process_pool(num_workers: int, initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool of spawned processes; each runs `initializer(*arguments)` once.

    Spawned, because the caller may have threads (a progress bar has one), which a fork would cut off. A worker of
    Python's own pool waits forever when its parent is killed: it holds both ends of the queue that it reads from.

    Example:
        >>> with process_pool(2, int) as pool:  # doctest: +SKIP
        ...     pool.submit(len, "four").result()
        4
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_workers, context, _start_worker, (initializer, arguments))


def _start_worker(initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    initializer(*arguments)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def signal_when_parent_dies(number: signal.Signals, parent: int) -> None:
    """Ask the system to send this process a signal when the one that started it ends. Only Linux can.

    Args:
        number: the signal.
        parent: the parent's process id; if that is not the parent any more, the signal comes at once.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


_prctl = getattr(ctypes.CDLL(None), "prctl", None)
