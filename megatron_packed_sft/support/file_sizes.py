"""Mapped files that somebody cuts: noticed by a look at their sizes, because reading behind the end is SIGBUS."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import ShardChangedError

# A look costs a microsecond on a local disk and more on a network's: so once per second of use.
_SECONDS_BETWEEN_LOOKS = 1.0


class _Mapped(NamedTuple):
    path: Path
    device: int
    inode: int
    size: int


class MappedSizes:
    """Looks at the sizes of mapped files, at most once per second.

    A file that was removed or replaced lives on in its map, whole. One that was cut in place is an error here; what is
    read within the second after it was cut is still SIGBUS.
    """

    def __init__(self) -> None:
        self._files: list[_Mapped] = []
        self.due = time.monotonic() + _SECONDS_BETWEEN_LOOKS  # when the next look is due

    def add(self, path: Path, fd: int) -> None:
        """Take a file that is mapped now with its present size."""
        status = os.fstat(fd)
        self._files.append(_Mapped(path, status.st_dev, status.st_ino, status.st_size))

    def look(self, now: float) -> None:
        """Refuse a file that is shorter than when it was mapped; `now` is `time.monotonic()`."""
        if now > self.due:
            for file in self._files:
                _refuse_cut(file)
            self.due = now + _SECONDS_BETWEEN_LOOKS


def _refuse_cut(file: _Mapped) -> None:
    try:
        status = os.stat(file.path)
    except OSError:
        return
    if (status.st_dev, status.st_ino) == (file.device, file.inode) and status.st_size < file.size:
        raise changed_size(file.path, status.st_size, file.size)


def changed_size(path: Path, size: int, size_before: int) -> ShardChangedError:
    """Return the error for a file whose size changed while it was in use."""
    return ShardChangedError(
        f"{path} has {size:,} bytes and had {size_before:,} when it was opened; put the file back, or open the data "
        "again if it is meant"
    )
