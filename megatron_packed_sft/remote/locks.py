"""Many locks in one file, one byte each. A process that dies, in whatever way, loses its locks.

They are Linux's locks of open file descriptions: unlike flock, they need one descriptor for any number of locks, and
unlike POSIX locks, they also keep two descriptors of one process apart.
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


class LockFile:
    """A file of locks, opened by this process.

    Example:
        >>> import tempfile; file = Path(tempfile.mkdtemp(), "locks")
        >>> locks, others = LockFile(file), LockFile(file)
        >>> locks.lock_shared("ab"), others.lock_exclusively("ab", wait=False), others.lock_exclusively("cd")
        (True, False, True)
    """

    def __init__(self, path: Path) -> None:
        with os_errors("open", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lock_shared(self, key: str) -> bool:
        """Take a lock together with other processes; wait while one of them has it exclusively."""
        return self._set(_WAIT, fcntl.F_RDLCK, key)

    def lock_exclusively(self, key: str, *, wait: bool = True) -> bool:
        """Take a lock that no other process has; return False if one has it and `wait` is False."""
        return self._set(_WAIT if wait else _TRY, fcntl.F_WRLCK, key)

    def unlock(self, key: str) -> None:
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
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process has it
            return False
        return True


@contextlib.contextmanager
def lock_exclusively(path: Path, key: str, *, wait: bool = True) -> Iterator[bool]:
    """Lock a key of a lock file while the block runs; yield False if it is taken and `wait` is False.

    Example:
        >>> import tempfile; file = Path(tempfile.mkdtemp(), "locks")
        >>> with lock_exclusively(file, "ab"), lock_exclusively(file, "ab", wait=False) as is_mine:
        ...     is_mine
        False
    """
    locks = LockFile(path)  # a descriptor of its own, so that threads of one process exclude each other, too
    try:
        yield locks.lock_exclusively(key, wait=wait)
    finally:
        locks.close()
