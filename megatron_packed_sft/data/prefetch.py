"""The loader's thread: a bounded look-ahead, and page-locked memory that a GPU can copy from."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

from megatron_packed_sft.errors import InvalidInputError

_JOIN_SECONDS = 10.0

Item = TypeVar("Item")


class _Queue(Generic[Item]):
    """What the thread and its owner share. The thread holds nothing else, so that the owner can be collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.finished = False  # by the thread: no more items will come
        self.closed = False  # by the owner: no more items are wanted


def _fill(queue: _Queue[Item], items: Iterator[Item]) -> None:
    error: BaseException | None = None
    try:
        while not queue.closed:
            try:
                item = next(items)
            except StopIteration:
                break
            with queue.changed:
                queue.changed.wait_for(lambda: queue.closed or len(queue.items) < queue.size)
                if not queue.closed:
                    queue.items.append(item)
                    queue.changed.notify_all()
            del item  # or it would live here until the next one is made
    except BaseException as caught:  # even SystemExit: the caller waits for this item
        error = caught
    with queue.changed:
        queue.error, queue.finished = error, True
        queue.changed.notify_all()


def _stop(queue: _Queue[Item], thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:  # after a fork the thread is gone, and its lock may be held forever
        return
    with queue.changed:
        queue.closed = True
        queue.items.clear()
        queue.changed.notify_all()
    if thread is not threading.current_thread():  # the garbage collector runs in any thread
        thread.join(_JOIN_SECONDS)


class Prefetcher(Generic[Item]):
    """Iterate over `items` in a thread, at most `size` items ahead.

    The thread ends when the items do, on `close`, when this object is collected, and at interpreter exit. An error of
    the iterator is raised here, with its own traceback, after the items before it.

    Args:
        items: used by the thread only.
        size: finished items to keep waiting, at least one.

    Example:
        >>> list(Prefetcher(iter("abc"), size=2))
        ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[Item], size: int) -> None:
        self.process = os.getpid()
        self._queue: _Queue[Item] = _Queue(size)
        thread = threading.Thread(target=_fill, args=(self._queue, items), name="packed-sft-prefetch", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue, thread, self.process)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        queue = self._queue
        with queue.changed:
            queue.changed.wait_for(lambda: queue.items or queue.finished or queue.closed)
            if queue.items:
                item = queue.items.popleft()
                queue.changed.notify_all()
                return item
            error, queue.error = queue.error, None
        self.close()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame, which would hold it
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; finished items are dropped."""
        self._finalizer()


def cuda_device_to_pin_for(pin_memory: bool | Literal["auto"]) -> int | None:
    """Return the CUDA device of this thread, or None if nothing is to be pinned."""
    if pin_memory not in (True, False, "auto"):
        raise InvalidInputError(f"pin_memory is {pin_memory!r}; use True, False or 'auto'")
    torch = sys.modules.get("torch")  # without torch there are no tensors to pin
    has_cuda = torch is not None and torch.cuda.is_available()
    if pin_memory is True and not has_cuda:
        raise InvalidInputError("pin_memory=True needs torch with CUDA, which is not available; use 'auto'")
    return torch.cuda.current_device() if torch is not None and has_cuda and pin_memory else None


def use_cuda_device(device: int) -> None:
    """Make this thread lock pages for the right device: a new thread starts with device 0."""
    sys.modules["torch"].cuda.set_device(device)


def pinned(value: Any) -> Any:
    """Return the same batch with everything that can be pinned in page-locked memory.

    Example:
        >>> pinned({"token_count": [3, 4]})
        {'token_count': [3, 4]}
    """
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pinned(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pinned, value))
    if isinstance(value, list | tuple):
        return type(value)(map(pinned, value))
    return value
