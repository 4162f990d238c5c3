"""One file of a token stream: a flat array of ids, mapped when it is first read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.storage.read_options import MMAP, PREAD
from megatron_packed_sft.support.atomic import translated
from megatron_packed_sft.support.file_maps import LazyMaps, map_file, will_need
from megatron_packed_sft.support.file_sizes import MappedSizes, changed_size

_BLOCK_TOKENS = 1 << 20  # of a file that is read from front to back


class FlatFile(LazyMaps[npt.NDArray[Any]]):
    """A flat array of integers in a file; see `LazyMaps` for when it is mapped.

    Args:
        path: the file.
        dtype: of the ids, as NumPy's code.
        num_tokens: how many there are.
        data_offset: bytes before the first.
        size: bytes of the whole file.
    """

    def __init__(self, path: Path, dtype: str, num_tokens: int, data_offset: int, size: int) -> None:
        self.path = path
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.data_offset = data_offset
        self.size = size
        self.access = MMAP
        self._sizes: MappedSizes | None = None

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens start..stop-1 as a read-only view; a file that was cut since it was opened is an error.

        Of a map that is noticed within a second; with `access` pread, at once.
        """
        if self.access == PREAD:
            itemsize = np.dtype(self.dtype).itemsize
            data = self.read(self.data_offset + start * itemsize, (stop - start) * itemsize)
            if len(data) != (stop - start) * itemsize:
                raise changed_size(self.path, os.stat(self.path).st_size, self.size)
            return np.frombuffer(data, self.dtype)
        array = self.arrays
        if self._sizes is not None:
            self._sizes.look(time.monotonic())
        return array[start:stop]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (place of its first, tokens) of consecutive blocks from start to stop, each read ahead in one go."""
        for first in range(start, stop, _BLOCK_TOKENS):
            last = min(first + _BLOCK_TOKENS, stop)
            self.advise(first, min(last + _BLOCK_TOKENS, stop))
            yield first, self.tokens(first, last)

    def advise(self, start: int, stop: int) -> None:
        """Have the kernel read these tokens ahead: they are needed soon."""
        if self.access == MMAP:
            will_need(self.arrays[start:stop])

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the file without mapping it, for a look at a few of them."""
        fd = self._open()
        try:
            return os.pread(fd, num_bytes, offset)
        except OSError as error:
            raise translated(error, "read", self.path) from error
        finally:
            os.close(fd)

    def __repr__(self) -> str:
        return f"FlatFile({str(self.path)!r}, {self.num_tokens:,} tokens, {np.dtype(self.dtype).name})"

    def _open_arrays(self, keep: object) -> npt.NDArray[Any]:
        fd = self._open()
        try:
            if not self.num_tokens:
                return np.empty(0, self.dtype)
            self._sizes = MappedSizes()
            self._sizes.add(self.path, fd)
            data = map_file(fd, self.size, random_access=True)
        except OSError as error:
            raise translated(error, "map", self.path, self.size) from error
        finally:
            os.close(fd)
        return np.frombuffer(data, self.dtype, self.num_tokens, self.data_offset)

    def _open(self) -> int:
        try:
            # O_NONBLOCK: a FIFO under that name must not hang the reader.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ShardFileError(
                f"{self.path} is missing, although it was there when its stream was opened; put it back"
            ) from None
        except OSError as error:
            raise translated(error, "open", self.path) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
            os.close(fd)
            raise changed_size(self.path, status.st_size, self.size)
        return fd
