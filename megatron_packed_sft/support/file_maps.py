"""Read-only file maps that cost no file descriptor, and a bounded pool of them.

Python's own `mmap` keeps a duplicate of the descriptor while the map lives: five per shard, which limits a process to
about 200 shards under the usual limit of 1,024. Here the descriptor is closed at once; the map lives until the last
array over it is gone. The kernel's own limit is 65,530 maps per process, so a pool keeps the number of mapped shards
bounded: a shard that was not used recently is unmapped, and mapped again on demand.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

MAX_MAPPED_SHARDS = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, size: int, *, random_access: bool = False, keep: object = None) -> npt.NDArray[np.uint8]:
    """Map the first `size` bytes of an open file, read-only; the descriptor may be closed afterwards.

    Args:
        fd: a regular file of at least `size` bytes (the caller checks; otherwise reading raises SIGBUS).
        size: the number of bytes, at least one.
        random_access: tell the kernel not to read ahead (MADV_RANDOM): rows are picked in shuffled order.
        keep: lives as long as the map.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryFile() as file:
        ...     _ = file.write(b"abc"); file.flush()
        ...     array = map_file(file.fileno(), 3)
        >>> bytes(array)
        b'abc'
    """
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    buffer = (ctypes.c_ubyte * size).from_address(address)
    buffer.keep = keep  # type: ignore[attr-defined]
    # At interpreter exit the kernel unmaps; running it from atexit could pull pages from under a live array.
    weakref.finalize(buffer, _libc.munmap, address, size).atexit = False
    if random_access:
        _libc.madvise(address, size, mmap.MADV_RANDOM)
    # Through a read-only view, so that NumPy refuses to make the array writable (a write would be SIGSEGV).
    return np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)


def will_need(array: npt.NDArray[Any]) -> None:
    """Tell the kernel to read the pages of a mapped, C-contiguous array now, without waiting for them.

    Example:
        >>> import numpy as np
        >>> will_need(np.zeros(10))  # harmless on memory that is not a file's
    """
    if array.nbytes:
        start = array.ctypes.data & ~(mmap.PAGESIZE - 1)
        _libc.madvise(start, array.ctypes.data + array.nbytes - start, mmap.MADV_WILLNEED)


Arrays = TypeVar("Arrays")


class Holder(Protocol):
    """Makes sure that files exist before they are mapped."""

    def hold(self) -> object:
        """Wait until the files exist; they stay while the returned object lives."""


class LazyMaps(abc.ABC, Generic[Arrays]):
    """An object whose arrays are mapped at the first use, in each process separately, and may be unmapped at any time.

    Threads may share it; it survives fork, spawn and pickling (the arrays stay behind).
    """

    recently_used: bool = False
    holder: Holder | None = None  # of files in the node cache; None for the user's own files
    _arrays: Arrays | None = None

    @property
    def arrays(self) -> Arrays:
        """The mapped arrays, read-only."""
        arrays = self._arrays
        if arrays is None:
            return self._map()
        self.recently_used = True  # used again since it was mapped: the pool unmaps others first
        return arrays

    @property
    def is_mapped(self) -> bool:
        """Whether the arrays are mapped now, in this process."""
        return self._arrays is not None

    def unmap(self) -> None:
        """Drop this object's maps; arrays handed out stay valid, and the next use maps again."""
        with POOL.lock:
            POOL.remove(self)
            self._arrays = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}

    @abc.abstractmethod
    def _open_arrays(self, keep: object) -> Arrays:
        """Check the files again and map them; `keep` must live as long as the maps."""

    def _map(self) -> Arrays:
        keep = None if self.holder is None else self.holder.hold()  # may take a download: not under the lock
        with POOL.lock:
            arrays = self._arrays
            if arrays is None:  # otherwise another thread was faster
                arrays = self._arrays = self._open_arrays(keep)
                self.recently_used = False
                POOL.add(self)
            return arrays


class MapPool:
    """Keeps at most `limit` shards mapped in this process (second chance: the hot path only sets a flag).

    Example:
        >>> MapPool(limit=2).limit
        2
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = threading.RLock()
        # The oldest first. Weak: a dataset that is gone leaves no map behind.
        self._mapped: OrderedDict[weakref.ref[LazyMaps[Any]], None] = OrderedDict()

    def add(self, shard: LazyMaps[Any]) -> None:
        """Register a shard that has just been mapped; unmap others if there are too many. Call under `lock`."""
        while len(self._mapped) >= self.limit:
            oldest, _ = self._mapped.popitem(last=False)
            other = oldest()
            if other is not None and other.recently_used:
                other.recently_used = False
                self._mapped[oldest] = None
            elif other is not None:
                other.unmap()
        self._mapped[weakref.ref(shard)] = None

    def remove(self, shard: LazyMaps[Any]) -> None:
        """Forget a shard that is not mapped any more. Call under `lock`."""
        self._mapped.pop(weakref.ref(shard), None)

    def unmap_all(self, condition: Callable[[LazyMaps[Any]], bool]) -> None:
        """Unmap the shards that satisfy a condition; they are mapped again when they are used."""
        with self.lock:
            for one in list(self._mapped):
                shard = one()
                if shard is not None and condition(shard):
                    shard.unmap()


POOL = MapPool(MAX_MAPPED_SHARDS)


def _renew_lock_after_fork() -> None:
    # Another thread may have held it at the moment of the fork; that thread does not exist in the child.
    POOL.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock_after_fork)
