"""Download shards before they are needed, in the order in which they will be, by threads of the process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_packed_sft.errors import PackedSFTError

if TYPE_CHECKING:
    from megatron_packed_sft.remote.node_cache import CacheItem, Hold, NodeCache

logger = logging.getLogger(__name__)

_SHARE = 0.5  # of the cache that may be held for later
NUM_SHARDS_AT_ONCE = 3  # downloads: while one is checked, others arrive
_PAUSE = 0.05  # seconds, while other processes fetch all that is wanted


class NoRoomError(Exception):
    """There is no room in the cache for a shard that is not needed yet; only `FetchAhead` sees this error."""


class FetchAhead:
    """Downloads what a process will need soon, and holds each shard until it is used for the first time."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = weakref.ref(cache)
        self._changed = threading.Condition()
        self._wanted: dict[str, CacheItem] = {}
        self._held: dict[str, tuple[Hold, int]] = {}
        self._threads: set[threading.Thread] = set()

    def want(self, items: Iterable[CacheItem]) -> None:
        """Schedule downloads, in this order; return at once."""
        with self._changed:
            for item in items:
                if item.key not in self._held:
                    self._wanted.setdefault(item.key, item)
            while len(self._threads) < min(len(self._wanted), NUM_SHARDS_AT_ONCE):
                thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="packed-sft-ahead", daemon=True)
                self._threads.add(thread)
                thread.start()

    def used(self, key: str) -> None:
        """Let go of a shard: the process holds it by itself now."""
        if key in self._wanted or key in self._held:
            with self._changed:
                self._wanted.pop(key, None)
                self._held.pop(key, None)

    def let_go(self) -> None:
        """Let go of everything, because the room is needed."""
        with self._changed:
            held, self._held = self._held, {}
        for hold, _ in held.values():
            hold.release()

    def step(self) -> float | None:
        """Download one shard; return how long to pause, or None when there is nothing left to do."""
        cache = self._cache()
        with self._changed:
            if cache is None or not self._wanted:
                self._threads.discard(threading.current_thread())
                return None
            if sum(size for _, size in self._held.values()) >= _SHARE * cache.size:
                return _PAUSE
            items = list(self._wanted.values())
        for item in items:
            try:
                hold = cache.try_fetch(item)
            except NoRoomError:  # nor for the next ones: looking for room costs a look at every entry
                return _PAUSE
            except PackedSFTError as error:  # the error is raised when the shard is needed
                logger.debug("not fetched ahead: %s", error)
                with self._changed:
                    self._wanted.pop(item.key, None)
                return 0.0
            if hold is not None:
                with self._changed:
                    if self._wanted.pop(item.key, None) is not None:
                        self._held[item.key] = hold, cache.size_of(item.key)
                return 0.0
        return _PAUSE


def _work(owner: weakref.ref[FetchAhead]) -> None:
    while (ahead := owner()) is not None:
        pause = ahead.step()
        del ahead  # or the thread would keep it alive
        if pause is None:
            return
        if pause:
            threading.Event().wait(pause)
