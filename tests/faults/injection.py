"""Stops the n-th system call that changes the disk: by SIGKILL, or with an error number."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

# Everything the storage layer may use to change what is on disk.
_CALLS = ("mkdir", "open", "posix_fallocate", "pwrite", "write", "fsync", "rename", "link", "unlink")


class Injector:
    """Counts the disk-changing calls of `os`, and acts at one of them.

    Args:
        step: act at this call, counted from 0; None only counts.
        error: raise OSError with this number; None kills the process.
        after: let the call happen first (for writes: only the first half of it).
    """

    def __init__(self, step: int | None = None, *, error: int | None = None, after: bool = False) -> None:
        self._step = step
        self._error = error
        self._after = after
        self._originals: dict[str, Callable[..., Any]] = {}
        self.calls: list[str] = []

    def __enter__(self) -> Injector:
        for name in _CALLS:
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name, self._originals[name]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return original(*arguments, **options)  # reading changes nothing
            self.calls.append(name)
            if len(self.calls) - 1 != self._step:
                return original(*arguments, **options)
            if self._after:
                if name == "pwrite":
                    fd, data, offset = arguments
                    original(fd, memoryview(data)[: len(data) // 2], offset)
                else:
                    with contextlib.suppress(OSError):  # such as mkdir of a directory that is there
                        original(*arguments, **options)
            if self._error is not None:
                raise OSError(self._error, os.strerror(self._error))
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return call
