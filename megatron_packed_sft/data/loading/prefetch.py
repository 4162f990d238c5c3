"""A bounded look-ahead: one thread makes items while the caller uses the ones before."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_JOIN_SECONDS = 10.0

Item = TypeVar("Item")


class _Shelf(Generic[Item]):
    """What the thread and its owner share. The thread knows only this, so that the owner can be collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.finished = False  # by the thread: no more items will come
        self.closed = False  # by the owner: no more items are wanted


def _fill(shelf: _Shelf[Item], source: Iterator[Item]) -> None:
    error: BaseException | None = None
    try:
        while not shelf.closed:
            try:
                item = next(source)
            except StopIteration:
                break
            with shelf.changed:
                shelf.changed.wait_for(lambda: shelf.closed or len(shelf.items) < shelf.size)
                if not shelf.closed:
                    shelf.items.append(item)
                    shelf.changed.notify_all()
            del item  # or it would live here until the next one is made
    except BaseException as caught:  # even SystemExit: the caller is the one who waits for this item
        error = caught
    with shelf.changed:
        shelf.error, shelf.finished = error, True
        shelf.changed.notify_all()


def _stop(shelf: _Shelf[Item], thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:  # after a fork the thread is not here, and its lock may be held for ever
        return
    with shelf.changed:
        shelf.closed = True
        shelf.items.clear()
        shelf.changed.notify_all()
    if thread is not threading.current_thread():  # the collector runs in any thread
        thread.join(_JOIN_SECONDS)


class Prefetcher(Generic[Item]):
    """Iterates over `source` in a thread of its own, at most `size` items ahead.

    The thread ends when the source does, on `close`, when this object is collected, and at interpreter exit. An error
    of the source is raised here, with its own traceback, after the items that came before it.

    Args:
        source: used by the thread only.
        size: finished items to keep waiting, at least one.

    Example:
        >>> list(Prefetcher(iter("abc"), size=2))
        ['a', 'b', 'c']
    """

    def __init__(self, source: Iterator[Item], size: int) -> None:
        self.process = os.getpid()
        self._shelf: _Shelf[Item] = _Shelf(size)
        thread = threading.Thread(target=_fill, args=(self._shelf, source), name="packed-sft-prefetch", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._shelf, thread, self.process)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        shelf = self._shelf
        with shelf.changed:
            shelf.changed.wait_for(lambda: shelf.items or shelf.finished or shelf.closed)
            if shelf.items:
                item = shelf.items.popleft()
                shelf.changed.notify_all()
                return item
            error, shelf.error = shelf.error, None
        self.close()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame, which would hold it
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; what it has made is dropped.

        Example:
            >>> prefetcher = Prefetcher(iter(range(10**9)), size=1)
            >>> prefetcher.close()
        """
        self._finalizer()
