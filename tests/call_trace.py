"""Which functions of the package a piece of code calls, in order: for walks through the code base and their figures."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Self


class Trace:
    """Records the calls into a package, in this process and all of its threads, while it is entered.

    Args:
        package: the folder of the package; a room is a folder or a module directly below it.

    Attributes:
        calls: "room/module.py::Class.function" of every function in the order of its first call.
        files: the modules that were entered, from the package.
        room_changes: how often a function of one room called one of another, by (caller's room, room).
    """

    def __init__(self, package: Path) -> None:
        self._root = f"{package}{os.sep}"
        self.calls: dict[str, None] = {}
        self.files: set[str] = set()
        self.room_changes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed lacks None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # The bodies of modules and classes are frames as well, but not calls.
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED or not self._is_ours(frame):
            return
        file = self._file(frame)
        self.files.add(file)
        self.calls.setdefault(f"{file}::{frame.f_code.co_qualname.replace('.<locals>', '')}")
        caller = frame.f_back
        while caller is not None and not self._is_ours(caller):
            caller = caller.f_back
        if caller is not None and _room(self._file(caller)) != _room(file):
            self.room_changes[_room(self._file(caller)), _room(file)] += 1

    def _is_ours(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._root)

    def _file(self, frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(self._root).replace(os.sep, "/")


def _room(file: str) -> str:
    return file.partition("/")[0]
