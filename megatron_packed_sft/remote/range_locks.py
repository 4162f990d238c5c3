"""Many locks in one file: one byte each, held by processes and gone when they die, however they die.

They are Linux's locks of open file descriptions: unlike flock they need one descriptor for any number of locks, and
unlike POSIX locks they also keep two descriptors of one process apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from megatron_packed_sft.support.atomic import os_errors

_TRY = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
_WAIT = getattr(fcntl, "F_OFD_SETLKW", fcntl.F_SETLKW)


class RangeLocks:
    """One file of locks, open in this process.

    Example:
        >>> import tempfile; file = Path(tempfile.mkdtemp(), "locks")
        >>> locks, others = RangeLocks(file), RangeLocks(file)
        >>> locks.share("ab"), others.try_exclusive("ab"), others.try_exclusive("cd")
        (True, False, True)
    """

    def __init__(self, path: Path) -> None:
        with os_errors("open", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def share(self, key: str) -> bool:
        """Hold a lock together with others; waits while somebody holds it alone."""
        return self._set(_WAIT, fcntl.F_RDLCK, key)

    def exclusive(self, key: str) -> bool:
        """Hold a lock alone; waits until nobody else holds it."""
        return self._set(_WAIT, fcntl.F_WRLCK, key)

    def try_exclusive(self, key: str) -> bool:
        """Hold a lock alone, or return False at once when somebody else holds it."""
        return self._set(_TRY, fcntl.F_WRLCK, key)

    def release(self, key: str) -> None:
        """Give a lock back."""
        self._set(_TRY, fcntl.F_UNLCK, key)

    def close(self) -> None:
        """Give all locks of this object back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, command: int, kind: int, key: str) -> bool:
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, int(key[:15], 16), 1, 0)
        try:
            fcntl.fcntl(self._fd, command, request)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody else holds it
            return False
        return True


@contextlib.contextmanager
def alone(path: Path, key: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock alone while the block runs; yields False when it is taken and `wait` is False.

    Example:
        >>> import tempfile; file = Path(tempfile.mkdtemp(), "locks")
        >>> with alone(file, "ab"), alone(file, "ab", wait=False) as also:
        ...     also
        False
    """
    locks = RangeLocks(path)  # a descriptor of its own, so that threads of one process exclude each other, too
    try:
        yield locks.exclusive(key) if wait else locks.try_exclusive(key)
    finally:
        locks.close()
