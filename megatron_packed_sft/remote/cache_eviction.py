"""Which entries leave the cache of a node, and when: the least recently used ones first, never one that is in use.

    a download needs room ─▶ the leftovers of killed downloads go
                          ─▶ entries go, the least recently used first
                          ─▶ if what is in use is in the way: all processes unmap what is idle, and entries go again

A process that finds no room touches the file `short`; every process of the node polls it, and unmaps what it can.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.remote.locks import lock_exclusively
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors

ENTRY = "entry.json"
IN_USE, FETCHING = "in_use.lock", "fetching.lock"  # see `node_cache`
_SHORT = "short"
_POLL_SECONDS = 0.05
_SECONDS_FOR_OTHERS = 0.5  # to unmap what they do not use
_DEFAULT_SHARE = 0.8  # of what is free and what the cache has


class Entry(NamedTuple):
    """An entry of the cache, as `packed-sft cache status` shows it."""

    key: str
    url: str
    group: str
    num_bytes: int
    used: float
    in_use: bool


class CacheRoom:
    """Keeps the entries of a cache within its size.

    Args:
        directory: of the cache.
        asked_size: how many bytes all entries may take; None takes 80 % of what is free there and what the cache has.
        unmap_idle: unmaps what this process does not use at the moment.
    """

    def __init__(self, directory: Path, asked_size: int | None, unmap_idle: Callable[[], None]) -> None:
        self.entries_directory = directory / "entries"
        self._directory, self._asked_size, self._unmap_idle = directory, asked_size, unmap_idle
        self._known: dict[str, dict[str, Any]] = {}
        self._is_watching = threading.Lock()

    @property
    def size(self) -> int:
        """How many bytes the entries may take."""
        if self._asked_size is not None:
            return self._asked_size
        return int(_DEFAULT_SHARE * (shutil.disk_usage(self._directory).free + sum(n for _, n, _ in self._sizes())))

    def size_of(self, key: str) -> int:
        """Return the bytes of an entry; 0 if there is none."""
        if key not in self._known:
            self._sizes()
        return int(self._known[key]["bytes"]) if key in self._known else 0

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, the least recently used first."""
        for used, num_bytes, key in sorted((used, num_bytes, key) for key, num_bytes, used in self._sizes()):
            if key in self._known:
                with lock_exclusively(self._directory / IN_USE, key, wait=False) as is_free:
                    yield Entry(key, self._known[key]["url"], self._known[key]["group"], num_bytes, used, not is_free)

    def make_room(self, needed: int, *, ask_others: bool) -> int:
        """Evict entries until `needed` more bytes fit; return how many bytes are missing after that.

        Args:
            needed: bytes.
            ask_others: have all processes of the node unmap what they do not use, if that is in the way.
        """
        missing = self._evict_oldest(needed)
        if missing > 0 and ask_others:
            self._unmap_idle()
            missing = self._evict_oldest(needed)
            end = time.monotonic() + _SECONDS_FOR_OTHERS
            while missing > 0 and time.monotonic() < end:
                (self._directory / _SHORT).touch()
                time.sleep(_POLL_SECONDS)
                missing = self._evict_oldest(needed)
        return missing

    def _evict_oldest(self, needed: int) -> int:
        self.remove_leftovers()
        sizes = self._sizes()
        excess = sum(num_bytes for _, num_bytes, _ in sizes) + needed - self.size
        for key, num_bytes, _ in sorted(sizes, key=lambda one: one[2]):
            if excess <= 0:
                break
            if not key.startswith(".") and self.evict(key):
                excess -= num_bytes
        return excess

    def evict(self, key: str) -> bool:
        """Remove an entry unless it is in use; return whether it is gone."""
        with lock_exclusively(self._directory / IN_USE, key, wait=False) as is_free:
            if is_free:
                self.discard(key)
            return is_free

    def discard(self, key: str) -> None:
        """Remove an entry, in use or not."""
        trash = self.staging_path(key)
        with os_errors("remove", self.entries_directory / key):
            try:
                os.rename(self.entries_directory / key, trash)
            except FileNotFoundError:
                return
        shutil.rmtree(trash, ignore_errors=True)

    def staging_path(self, key: str) -> Path:
        """Return a new path beside the entries, for a download or for what is to be removed."""
        return self.entries_directory / f".{key}.{os.getpid()}-{secrets.token_hex(4)}"

    def remove_leftovers(self) -> None:
        """Remove downloads of processes that died."""
        for name in os.listdir(self.entries_directory):
            if name.startswith("."):
                key = name[1:].partition(".")[0]
                with lock_exclusively(self._directory / FETCHING, key, wait=False) as is_dead:
                    if is_dead:
                        shutil.rmtree(self.entries_directory / name, ignore_errors=True)

    def _sizes(self) -> list[tuple[str, int, float]]:
        """Return (name, bytes, time of the last use) of every entry and every download."""
        found = []
        for entry in os.scandir(self.entries_directory):
            try:
                used = entry.stat().st_mtime
                document = self._known.get(entry.name)
                if document is None:
                    file = Path(entry.path, ENTRY)
                    document = json_document.parse(file.read_bytes(), str(file))
                    if not entry.name.startswith("."):
                        self._known[entry.name] = document
                found.append((entry.name, int(document["bytes"]), used))
            except (OSError, ManifestError, KeyError):
                found.append((entry.name, 0, 0.0))  # incomplete, or removed at this moment
        return found

    def watch(self) -> None:
        """From now on, unmap what is idle whenever another process is short of room; returns at once."""
        if self._is_watching.acquire(blocking=False):
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="packed-sft-room", daemon=True).start()


def _watch(owner: weakref.ref[CacheRoom]) -> None:
    seen = None
    while (room := owner()) is not None:
        try:
            now = (room._directory / _SHORT).stat().st_mtime_ns
        except OSError:
            now = 0
        if seen is not None and now != seen:
            room._unmap_idle()
        seen = now
        del room  # or the thread would keep it alive
        time.sleep(_POLL_SECONDS)
