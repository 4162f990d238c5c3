"""Worker processes of this machine, which never outlive the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError

_PR_SET_PDEATHSIG = 1
_OBJECTS_BETWEEN_COLLECTIONS = 200_000  # Python's default of 700 suits programs with few objects


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect garbage less often: records are many objects without cycles, and collecting costs more than parsing."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def process_pool(num_workers: int, initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Return a pool of spawned processes; each runs `initializer(*arguments)` once.

    Spawned, because the caller may have threads (a progress bar is one) that do not survive a fork. Each worker also
    watches its parent: in Python's own pool it would wait forever for a parent that was killed.

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
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def signal_when_parent_dies(number: signal.Signals, parent: int) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux only).

    Args:
        number: the signal.
        parent: the parent's process id; if it has already ended, the signal is sent at once.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


_prctl = getattr(ctypes.CDLL(None), "prctl", None)


# Starting a process and loading its tokenizer takes as long as encoding a few megabytes.
_BYTES_PER_WORKER = 8 << 20

Task = TypeVar("Task")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs one function over many tasks, after a set-up in each process."""

    num_workers: int

    def fitting(self, num_bytes: int) -> Executor:
        """Return an executor with no more processes than this much input keeps busy, unless the user chose a number."""

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], setup: Callable[..., None], *arguments: Any
    ) -> Iterator[Result]:
        """Yield results in any order as they finish; take new tasks only as old ones are done."""

    def close(self) -> None:
        """Release what `run` keeps open between calls."""


class LocalExecutor:
    """Runs tasks in processes of this machine; with one worker, in this process.

    Args:
        num_workers: how many processes; None for one per core, or fewer for little input.

    Example:
        >>> sorted(LocalExecutor(1).run(abs, [-2, 1], int))
        [1, 2]
    """

    def __init__(self, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise InvalidInputError(f"executor.num_workers is {num_workers}; it must be at least 1")
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._is_free = num_workers is None

    def fitting(self, num_bytes: int) -> LocalExecutor:
        """Return an executor with no more processes than this much input keeps busy, unless the user chose a number."""
        return LocalExecutor(max(1, min(self.num_workers, num_bytes // _BYTES_PER_WORKER))) if self._is_free else self

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], setup: Callable[..., None], *arguments: Any
    ) -> Iterator[Result]:
        """Yield results as they finish; at most two tasks per process are queued, so memory stays bounded."""
        if self.num_workers == 1:
            setup(*arguments)
            yield from map(function, tasks)
            return
        num_workers = min(self.num_workers, len(tasks)) if isinstance(tasks, Sized) else self.num_workers
        with process_pool(max(1, num_workers), setup, *arguments) as pool:
            waiting: set[Future[Result]] = set()
            try:
                for task in tasks:
                    waiting.add(pool.submit(function, task))
                    if len(waiting) >= 2 * self.num_workers:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        yield from (future.result() for future in done)
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            except BrokenProcessPool:
                raise worker_died() from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def close(self) -> None:
        """Nothing stays open."""


def worker_died() -> PackedSFTError:
    """Return the error for a worker that was killed."""
    return PackedSFTError(
        "a worker process was killed, most likely because memory ran out; run the same command again to resume, with a "
        "smaller executor.num_workers"
    )
