"""The cache of a node: shards of object stores on a local disk, fetched once for all processes that read them.

    CACHE/
      entries/KEY/entry.json, shard_000000/   one shard, verified; KEY is of its URL and checksum
      entries/KEY/durable                     it would survive a loss of power
      entries/.KEY.4711-9f3c/                 a download; removed by the next process if its own was killed
      documents/KEY                           dataset.json files, with the tag that the store gave them
      fetching.lock                           a byte is locked while its shard is downloaded
      in_use.lock                             a byte is locked, by any number of processes, while its shard is mapped
      room.lock                               locked while somebody makes room
      short                                   touched by a process that finds none: the others unmap what they can

The least recently used shards leave first; one that is mapped stays. The locks of a process that dies are gone with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, ManifestError, StorageIOError
from megatron_packed_sft.remote.ahead import FetchAhead, NoRoomError
from megatron_packed_sft.remote.cache_upkeep import (
    DURABLE,
    POLL_SECONDS,
    SHORT,
    boot,
    kept_document,
    make_durable,
    make_durable_later,
    recorded_boot,
    soon,
    watch_room,
)
from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.filesystem import base_name, missing_error
from megatron_packed_sft.remote.objects import object_info, read_object
from megatron_packed_sft.remote.range_locks import RangeLocks, alone
from megatron_packed_sft.remote.sizes import parse_size
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.file_maps import POOL
from megatron_packed_sft.support.own_directories import user_cache
from megatron_packed_sft.support.paths import local_path, redacted
from megatron_packed_sft.support.wording import byte_count

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "PACKED_SFT_CACHE_DIR"
SIZE_VARIABLE = "PACKED_SFT_CACHE_SIZE"
_ENTRY = "entry.json"
_SECONDS_FOR_OTHERS = 0.5
_DEFAULT_SHARE = 0.8  # of what is free and what the cache has


class CacheItem(NamedTuple):
    """Something that the cache can hold.

    Args:
        url: of a shard or file.
        identity: its checksum; another one is another item, so that a republished dataset is not mixed up.
        contents: asked when it must be downloaded.
        group: what it belongs to, for `packed-sft cache status`: the URL of the dataset.
    """

    url: str
    identity: str
    contents: Callable[[], Contents]
    group: str

    @property
    def key(self) -> str:
        """The name of its entry."""
        return checksum(f"{self.url}\0{self.identity}".encode())


class Entry(NamedTuple):
    """A shard in the cache, as `status` tells of it."""

    key: str
    url: str
    group: str
    num_bytes: int
    used: float
    in_use: bool


class Hold:
    """Keeps a shard in the cache for as long as this object lives; whatever maps its files holds on to one."""

    def __init__(self, cache: NodeCache, key: str, path: Path) -> None:
        self.path = path
        self._finalizer = weakref.finalize(self, cache._let_go, key, os.getpid())
        self._finalizer.atexit = False

    def release(self) -> None:
        """Let the shard go now."""
        self._finalizer()


class NodeCache:
    """A directory of shards, shared by all processes of a node; see `node_cache`.

    Args:
        directory: on a local disk; created if it is not there.
        size: how many bytes all shards may take; None takes 80 % of what is free there and what the cache has.
    """

    def __init__(self, directory: Path, size: int | None = None) -> None:
        self.directory = directory
        with os_errors("create", directory):
            self._entries.mkdir(parents=True, exist_ok=True)
            (directory / "documents").mkdir(exist_ok=True)
        self.asked_size = size
        self._in_use = RangeLocks(directory / "in_use.lock")
        self._mutex = threading.Lock()
        self._num_holds: dict[str, int] = {}
        self._released: deque[str] = deque()
        self._known: dict[str, dict[str, Any]] = {}
        self._sound: set[str] = set()
        self._fetched: deque[Path] = deque()  # what is not durable yet
        self._warned = self._is_watching = False
        self.ahead = FetchAhead(self)

    @property
    def size(self) -> int:
        """How many bytes the shards may take."""
        if self.asked_size is not None:
            return self.asked_size
        return int(_DEFAULT_SHARE * (shutil.disk_usage(self.directory).free + sum(n for _, n, _ in self._sizes())))

    def hold(self, item: CacheItem) -> Hold:
        """Return a shard's local path, held; it is downloaded now if it is not there, by one process of the node."""
        key = item.key
        self._retain(key)
        self._heed_others()
        try:
            if not self._is_there(key):
                self._fetch(item, wait=True)
            os.utime(self._entries / key)
            self.ahead.used(key)
        except BaseException:
            self._let_go(key, os.getpid())
            raise
        return Hold(self, key, self.path_of(item))

    def _heed_others(self) -> None:
        """Watch from now on for processes that are short of room."""
        with self._mutex:
            is_first, self._is_watching = not self._is_watching, True
        if is_first:
            threading.Thread(target=watch_room, args=(weakref.ref(self),), name="packed-sft-room", daemon=True).start()

    def try_fetch(self, item: CacheItem) -> Hold | None:
        """Download a shard ahead of its use and hold it; None when another process is at it.

        Raises:
            NoRoomError: everything in the cache is in use, or as much of it as would have to go.
        """
        self._retain(item.key)
        try:
            if self._is_there(item.key) or self._fetch(item, wait=False):
                return Hold(self, item.key, self.path_of(item))
        except BaseException:
            self._let_go(item.key, os.getpid())
            raise
        self._let_go(item.key, os.getpid())
        return None

    def adopt(self, item: CacheItem, path: Path, num_bytes: int) -> bool:
        """Move what was written here, and sent to the store, into the cache; False if there is no room for it."""
        with alone(self.directory / "fetching.lock", item.key, wait=False) as is_mine:
            if not is_mine or self._is_there(item.key):
                return False
            staging = self._reserve(item, num_bytes, is_needed=False) if num_bytes <= self.size else None
            if staging is None:
                return False
            try:
                os.rename(path, staging / (base_name(item.url) or "data"))
                os.rename(staging, self._entries / item.key)
            except OSError:  # another file system
                shutil.rmtree(staging, ignore_errors=True)
                return False
            return True

    def size_of(self, key: str) -> int:
        """Return the bytes of a shard that is there."""
        if key not in self._known:
            self._sizes()
        return int(self._known[key]["bytes"]) if key in self._known else 0

    def path_of(self, item: CacheItem) -> Path:
        """Return where an item is, if it is there."""
        return self._entries / item.key / (base_name(item.url) or "data")

    def has(self, item: CacheItem) -> bool:
        """Return whether an item is there now; only `hold` makes it stay."""
        return self._is_there(item.key)

    def document(self, url: str, limit: int) -> bytes:
        """Return a small object, such as dataset.json: fetched when it is new or changed, once per node.

        When the store cannot be reached, the copy of the last time is taken, with a warning.
        """
        key = checksum(url.encode())
        file, tag_file = self.directory / "documents" / key, self.directory / "documents" / f"{key}.tag"
        with alone(self.directory / "fetching.lock", key):
            copy = kept_document(file, tag_file)
            try:
                info = object_info(url) if copy is None else soon(url)
            except StorageIOError as error:
                if copy is None:
                    raise
                logger.warning("%s; taking the copy in the cache", error)
                return copy[0]
            if info is None:
                raise missing_error(f"{redacted(url)} does not exist; check the URL")
            if copy is not None and info.tag and copy[1] == info.tag:
                return copy[0]
            data = read_object(url, limit)
            with os_errors("write", file):  # not durable: what a loss of power cuts does not have its checksum
                tag_file.unlink(missing_ok=True)
                file.write_bytes(data)
                tag_file.write_text(f"{checksum(data)} {info.tag}")
            return data

    def has_document(self, url: str) -> bool:
        """Return whether there is a copy of a small object, of now or of earlier."""
        return (self.directory / "documents" / checksum(url.encode())).exists()

    def entries(self) -> Iterator[Entry]:
        """Yield what is in the cache, the least recently used first."""
        for used, num_bytes, key in sorted((used, num_bytes, key) for key, num_bytes, used in self._sizes()):
            if key.startswith(".") or key not in self._known:
                continue
            document = self._known[key]
            with alone(self.directory / "in_use.lock", key, wait=False) as is_free:
                yield Entry(key, document["url"], document["group"], num_bytes, used, not is_free)

    def evict(self, key: str) -> bool:
        """Remove a shard unless it is in use; return whether it is gone."""
        with alone(self.directory / "in_use.lock", key, wait=False) as is_free:
            if not is_free:
                return False
            self._discard(key)
            return True

    def _discard(self, key: str) -> None:
        trash = self._entries / f".{key}.{os.getpid()}-{secrets.token_hex(4)}"
        with os_errors("remove", self._entries / key):
            try:
                os.rename(self._entries / key, trash)
            except FileNotFoundError:
                return
        shutil.rmtree(trash, ignore_errors=True)

    @property
    def _entries(self) -> Path:
        return self.directory / "entries"

    def _is_there(self, key: str) -> bool:
        return (self._entries / key / _ENTRY).exists() and (key in self._sound or self._is_sound(key))

    def _is_sound(self, key: str) -> bool:
        """Return whether a shard cannot have lost bytes: it was made durable, or there was no reboot since then."""
        folder = self._entries / key
        try:
            is_sound = (folder / DURABLE).exists() or recorded_boot(folder / _ENTRY) in (None, boot())
        except (OSError, ManifestError):
            return False
        if is_sound:
            self._sound.add(key)
        return is_sound

    def _fetch(self, item: CacheItem, *, wait: bool) -> bool:
        with alone(self.directory / "fetching.lock", item.key, wait=wait) as is_mine:
            if not is_mine:
                return False
            if self._is_there(item.key):  # another process has just finished
                return True
            contents, path_name = item.contents(), base_name(item.url) or "data"
            staging = self._reserve(item, contents.num_bytes, is_needed=wait)
            if staging is None:
                raise NoRoomError(f"{self.directory} has no room for {redacted(item.url)} at this moment")
            path = self._entries / item.key
            try:
                with os_errors("create", staging):
                    download(item.url, contents, staging / path_name, durable=boot() is None)
                with os_errors("publish", staging):
                    if path.exists():  # not sound, so nobody uses it
                        self._discard(item.key)
                    os.rename(staging, path)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            if boot() is not None:
                self._make_durable_later(path)
            return True

    def make_durable(self) -> None:
        """Wait until the disk has all that this process has fetched."""
        while self._fetched:
            make_durable(self._fetched.popleft())

    def _make_durable_later(self, path: Path) -> None:
        """Leave it to the kernel to write a shard to disk, which may be slower than the network, and then note it."""
        with self._mutex:
            is_first = not self._fetched
            self._fetched.append(path)
        if is_first:
            threading.Thread(
                target=make_durable_later, args=(weakref.ref(self),), name="packed-sft-fsync", daemon=True
            ).start()

    def _reserve(self, item: CacheItem, num_bytes: int, *, is_needed: bool) -> Path | None:
        """Make room for a shard, and return the directory to download it into, which counts from now on.

        One that is not needed yet gets room only where nothing in use is in the way.
        """
        limit = self.size
        if num_bytes > limit:
            raise InvalidInputError(
                f"{redacted(item.url)} has {byte_count(num_bytes)}, more than the whole cache of {byte_count(limit)}; "
                f"set cache_size to at least {byte_count(num_bytes)}, or prepare smaller shards (shard_megabytes)"
            )
        with alone(self.directory / "room.lock", "0"):
            missing = self._make_room(num_bytes, limit)
            if missing > 0 and not is_needed:
                return None
            if missing > 0:
                missing = self._make_room_with_others(num_bytes, limit)
            if missing > 0 and not self._warned:
                self._warned = True
                logger.warning(
                    "the cache %s is %s over its size: all shards in it are in use; raise cache_size, or set "
                    "shard_window to visit fewer shards at a time",
                    self.directory,
                    byte_count(missing),
                )
            staging = self._entries / f".{item.key}.{os.getpid()}-{secrets.token_hex(4)}"
            document = {"url": redacted(item.url), "group": redacted(item.group), "bytes": num_bytes, "boot": boot()}
            with os_errors("create", staging):
                staging.mkdir()
                (staging / _ENTRY).write_bytes(json_document.render(document))
        return staging

    def _make_room(self, needed: int, limit: int) -> int:
        """Evict until `needed` more bytes fit; return how many bytes are missing after that."""
        self.remove_leftovers()
        sizes = self._sizes()
        excess = sum(num_bytes for _, num_bytes, _ in sizes) + needed - limit
        for key, num_bytes, _ in sorted(sizes, key=lambda one: one[2]):
            if excess <= 0:
                break
            if not key.startswith(".") and self.evict(key):
                excess -= num_bytes
        return excess

    def _make_room_with_others(self, needed: int, limit: int) -> int:
        """Make room once more, after all processes of the node have unmapped what they do not use at this moment."""
        self.unmap()
        missing = self._make_room(needed, limit)
        end = time.monotonic() + _SECONDS_FOR_OTHERS
        while missing > 0 and time.monotonic() < end:
            (self.directory / SHORT).touch()
            time.sleep(POLL_SECONDS)
            missing = self._make_room(needed, limit)
        return missing

    def unmap(self) -> None:
        """Unmap the shards of this process, and let go those that were fetched ahead; they are mapped when needed."""
        POOL.unmap_all(lambda shard: shard.holder is not None)
        self.ahead.let_go()

    def remove_leftovers(self) -> None:
        """Remove downloads whose processes died: nobody else sees how much of the disk they take."""
        for name in os.listdir(self._entries):
            if name.startswith("."):
                with alone(self.directory / "fetching.lock", name[1:].partition(".")[0], wait=False) as is_dead:
                    if is_dead:
                        shutil.rmtree(self._entries / name, ignore_errors=True)

    def _sizes(self) -> list[tuple[str, int, float]]:
        """Return (name, bytes, time of the last use) of every entry and every download."""
        found = []
        for entry in os.scandir(self._entries):
            try:
                used = entry.stat().st_mtime
                if entry.name not in self._known:
                    file = Path(entry.path, _ENTRY)
                    document = json_document.parse(file.read_bytes(), str(file))
                    if not entry.name.startswith("."):
                        self._known[entry.name] = document
                else:
                    document = self._known[entry.name]
                found.append((entry.name, int(document["bytes"]), used))
            except (OSError, ManifestError, KeyError):
                found.append((entry.name, 0, 0.0))  # begun, removed at this moment, or cut by a loss of power
        return found

    def _retain(self, key: str) -> None:
        with self._mutex:
            self._settle()
            count = self._num_holds.get(key, 0)
            if count == 0:
                self._in_use.share(key)
            self._num_holds[key] = count + 1

    def _let_go(self, key: str, process: int) -> None:
        if os.getpid() != process:  # a fork has the same lock, which is its parent's to release
            return
        self._released.append(key)
        # The garbage collector may call this while the same thread is in `_retain`; then that one settles it.
        if self._mutex.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._mutex.release()

    def _settle(self) -> None:
        while self._released:
            key = self._released.popleft()
            self._num_holds[key] -= 1
            if not self._num_holds[key]:
                del self._num_holds[key]
                self._in_use.release(key)


_CACHES: dict[tuple[Path, int | None], NodeCache] = {}
_CACHES_LOCK = threading.Lock()


def node_cache(directory: str | os.PathLike[str] | None = None, size: str | int | None = None) -> NodeCache:
    """Return this process's handle on the cache of the node.

    Args:
        directory: of the cache; by default $PACKED_SFT_CACHE_DIR, else packed-sft in the user's cache directory.
        size: such as 200GB; by default $PACKED_SFT_CACHE_SIZE, else 80 % of what is free there and what it has.

    Example:
        >>> import tempfile
        >>> node_cache(tempfile.mkdtemp(), "2GB").size
        2000000000
    """
    chosen = directory or os.environ.get(DIRECTORY_VARIABLE) or default_directory()
    given = size if size is not None else os.environ.get(SIZE_VARIABLE) or None
    key = (local_path(chosen, "cache_dir"), None if given is None else parse_size(given, "cache_size"))
    with _CACHES_LOCK:
        if key not in _CACHES:
            _CACHES[key] = NodeCache(*key)
        return _CACHES[key]


def default_directory() -> Path:
    """Return packed-sft in the user's cache directory."""
    cache = user_cache()
    if cache is None:
        raise InvalidInputError("this user has no home, so no place for a cache; set XDG_CACHE_HOME to a directory")
    return Path(cache, "packed-sft")


def _start_anew_after_fork() -> None:
    # The locks of the parent's descriptors are the parent's; threads of it may have held its mutexes.
    global _CACHES_LOCK
    _CACHES.clear()
    _CACHES_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_start_anew_after_fork)
