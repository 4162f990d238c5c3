"""A word for whoever waits: clients ask a store that is away again by themselves, for minutes and in silence."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

PATIENCE = 15.0  # seconds without an answer before it is mentioned
_LONGEST_PAUSE = 1.0
_SILENCE = 60.0  # seconds between two mentions: many threads may wait for one store

_waiting: dict[int, tuple[float, str]] = {}  # requests under way: when they began, and what for
_numbers = itertools.count()
_started = threading.Event()


@contextlib.contextmanager
def watched(action: str, shown: str) -> Iterator[None]:
    """Warn while the block runs if it takes long.

    Args:
        action: what is done with it, such as "read".
        shown: the URL as it may be shown.

    Example:
        >>> with watched("read", "s3://bucket/key"):
        ...     len(_waiting)
        1
    """
    number = next(_numbers)
    _waiting[number] = time.monotonic(), f"{action} {shown}"
    if not _started.is_set():
        _started.set()
        threading.Thread(target=_watch, name="packed-sft-waiting", daemon=True).start()
    try:
        yield
    finally:
        _waiting.pop(number, None)


def _watch() -> None:
    last = -_SILENCE
    while True:
        time.sleep(min(PATIENCE / 4, _LONGEST_PAUSE))
        now = time.monotonic()
        start, what = min(list(_waiting.values()), default=(now, ""))
        if now - start > PATIENCE and now - last > _SILENCE:
            last = now
            logger.warning("no answer for %.0f seconds to the request to %s; it is tried again", now - start, what)


def _start_anew_after_fork() -> None:
    _waiting.clear()  # the parent's
    _started.clear()


os.register_at_fork(after_in_child=_start_anew_after_fork)
