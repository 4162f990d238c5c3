"""The cache of a node: shards of object stores on a local disk, downloaded once for all processes that read them.

    CACHE/
      entries/KEY/entry.json, shard_000000/   one shard; KEY is the checksum of its URL and its own checksum
      entries/.KEY.4711-9f3c/                 a download, renamed to KEY when it is complete and checked
      documents/KEY                           dataset.json files, with the tag that the store gave them
      fetching.lock                           one byte per KEY, locked by the process that downloads it
      in_use.lock                             one byte per KEY, locked by every process that has it mapped
      room.lock                               locked while a process makes room (`cache_eviction`)
      short                                   touched by a process that finds no room

    hold(shard):  lock KEY in in_use.lock ─▶ is it there? ─ yes ─▶ its path
                                                └─ no ─▶ lock KEY in fetching.lock ─▶ make room ─▶ download ─▶ rename

The kernel releases the locks of a process that dies. Entries are not fsynced: after a loss of power, an entry whose
files do not have their sizes is downloaded again, and bins are compared with their checksums when they are read.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import InvalidInputError, ManifestError, StorageIOError
from megatron_packed_sft.remote.cache_eviction import ENTRY, FETCHING, IN_USE, CacheRoom, Entry
from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.fetch_ahead import FetchAhead, NoRoomError
from megatron_packed_sft.remote.filesystem import base_name, missing_error
from megatron_packed_sft.remote.locks import LockFile, lock_exclusively
from megatron_packed_sft.remote.objects import ObjectInfo, object_info, read_object
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
_SECONDS_FOR_AN_ANSWER = 10.0  # to the question whether a copy is still current; some clients would ask for minutes
_FACTORS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_FACTORS |= {f"{p}iB".upper(): 1024**n for n, p in enumerate("KMGT", 1)}


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

    @property
    def name(self) -> str:
        """The name of its directory or file in the entry."""
        return base_name(self.url) or "data"


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
        directory: on a local disk; created if it does not exist.
        size: how many bytes all shards may take; None takes 80 % of what is free there and what the cache has.
    """

    def __init__(self, directory: Path, size: int | None = None) -> None:
        self.directory = directory
        self.asked_size = size
        self.ahead = FetchAhead(self)
        ahead = weakref.ref(self.ahead)
        self._room = CacheRoom(directory, size, lambda: _unmap_idle(ahead()))
        with os_errors("create", directory):
            self._room.entries_directory.mkdir(parents=True, exist_ok=True)
            (directory / "documents").mkdir(exist_ok=True)
        self._in_use = LockFile(directory / IN_USE)
        self._mutex = threading.Lock()
        self._num_holds: dict[str, int] = {}
        self._released: deque[str] = deque()
        self._whole: set[str] = set()
        self._warned = False

    @property
    def size(self) -> int:
        """How many bytes the shards may take."""
        return self._room.size

    def hold(self, item: CacheItem) -> Hold:
        """Return a shard's local path, held; if it is missing, one process of the node downloads it now."""
        self._retain(item.key)
        self._room.watch()
        try:
            if not self.has(item):
                self._fetch(item, wait=True)
            os.utime(self._entry(item.key))
            self.ahead.used(item.key)
        except BaseException:
            self._let_go(item.key, os.getpid())
            raise
        return Hold(self, item.key, self.path_of(item))

    def try_fetch(self, item: CacheItem) -> Hold | None:
        """Download a shard ahead of its use and hold it; None when another process is downloading it.

        Raises:
            NoRoomError: too much of the cache is in use.
        """
        self._retain(item.key)
        try:
            if self.has(item) or self._fetch(item, wait=False):
                return Hold(self, item.key, self.path_of(item))
        except BaseException:
            self._let_go(item.key, os.getpid())
            raise
        self._let_go(item.key, os.getpid())
        return None

    def _fetch(self, item: CacheItem, *, wait: bool) -> bool:
        with lock_exclusively(self.directory / FETCHING, item.key, wait=wait) as is_mine:
            if not is_mine:
                return False
            if self.has(item):  # another process has just finished
                return True
            contents = item.contents()
            sizes = {name: record.bytes for name, record in contents.files.items()}
            staging = self._reserve(item, sizes, is_needed=wait)
            if staging is None:
                raise NoRoomError(f"{self.directory} has no room for {redacted(item.url)} at this moment")
            try:
                with os_errors("create", staging):
                    download(item.url, contents, staging / item.name, durable=False)
                with os_errors("publish", staging):
                    self._room.discard(item.key)  # an entry that is not whole, which no process can use
                    os.rename(staging, self._entry(item.key))
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            return True

    def adopt(self, item: CacheItem, path: Path) -> bool:
        """Move files that were made here, and sent to the store, into the cache; return False if there is no room."""
        sizes = _file_sizes(path)
        with lock_exclusively(self.directory / FETCHING, item.key, wait=False) as is_mine:
            if not is_mine or self.has(item) or sum(sizes.values()) > self.size:
                return False
            staging = self._reserve(item, sizes, is_needed=False)
            if staging is None:
                return False
            try:
                os.rename(path, staging / item.name)
                os.rename(staging, self._entry(item.key))
            except OSError:  # another file system
                shutil.rmtree(staging, ignore_errors=True)
                return False
            return True

    def _reserve(self, item: CacheItem, sizes: Mapping[str, int], *, is_needed: bool) -> Path | None:
        """Make room for a shard, and return the directory to download it into, which counts from now on.

        A shard that is not needed yet gets None instead of room if what is in use is in the way.
        """
        num_bytes, limit = sum(sizes.values()), self.size
        if num_bytes > limit:
            raise InvalidInputError(
                f"{redacted(item.url)} has {byte_count(num_bytes)}, more than the whole cache of {byte_count(limit)}; "
                f"set cache_size to at least {byte_count(num_bytes)}, or prepare smaller shards (shard_megabytes)"
            )
        with lock_exclusively(self.directory / "room.lock", "0"):
            missing = self._room.make_room(num_bytes, ask_others=is_needed)
            if missing > 0 and not is_needed:
                return None
            if missing > 0 and not self._warned:
                self._warned = True
                logger.warning(
                    "the cache %s is %s over its size, since all shards in it are in use; raise cache_size, or set "
                    "shard_window to visit fewer shards at a time",
                    self.directory,
                    byte_count(missing),
                )
            staging = self._room.staging_path(item.key)
            document = {"url": redacted(item.url), "group": redacted(item.group), "bytes": num_bytes, "files": sizes}
            with os_errors("create", staging):
                staging.mkdir()
                (staging / ENTRY).write_bytes(json_document.render(document))
        return staging

    def has(self, item: CacheItem) -> bool:
        """Return whether an item is complete now; only `hold` makes it stay."""
        key = item.key
        if not (self._entry(key) / ENTRY).exists():
            return False
        if key not in self._whole and self._is_whole(item):
            self._whole.add(key)
        return key in self._whole

    def _is_whole(self, item: CacheItem) -> bool:
        """Return whether all files have their sizes, which a loss of power may have cut."""
        try:
            file = self._entry(item.key) / ENTRY
            document = json_document.parse(file.read_bytes(), str(file))
            return bool(document["files"] == _file_sizes(self.path_of(item)))
        except (OSError, ManifestError, KeyError):
            return False

    def size_of(self, key: str) -> int:
        """Return the bytes of a shard that is there."""
        return self._room.size_of(key)

    def path_of(self, item: CacheItem) -> Path:
        """Return where an item is, if it is there."""
        return self._entry(item.key) / item.name

    def _entry(self, key: str) -> Path:
        return self._room.entries_directory / key

    def entries(self) -> Iterator[Entry]:
        """Yield what is in the cache, the least recently used first."""
        return self._room.entries()

    def evict(self, key: str) -> bool:
        """Remove a shard unless it is in use; return whether it is gone."""
        return self._room.evict(key)

    def remove_leftovers(self) -> None:
        """Remove downloads of processes that died."""
        self._room.remove_leftovers()

    def document(self, url: str, limit: int) -> bytes:
        """Return a small object, such as dataset.json: fetched when it is new or changed, once per node.

        If the store cannot be reached, this returns the copy of the last time, with a warning.
        """
        file = self._document_file(url)
        tag_file = file.with_suffix(".tag")
        with lock_exclusively(self.directory / FETCHING, file.name):
            copy = _kept_document(file, tag_file)
            try:
                info = object_info(url) if copy is None else _object_info_soon(url)
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
            with os_errors("write", file):  # not fsynced: what a loss of power cuts does not have its checksum
                tag_file.unlink(missing_ok=True)
                file.write_bytes(data)
                tag_file.write_text(f"{checksum(data)} {info.tag}")
            return data

    def has_document(self, url: str) -> bool:
        """Return whether there is a copy of a small object, current or not."""
        return self._document_file(url).exists()

    def _document_file(self, url: str) -> Path:
        return self.directory / "documents" / checksum(url.encode())

    def _retain(self, key: str) -> None:
        with self._mutex:
            self._settle()
            count = self._num_holds.get(key, 0)
            if count == 0:
                self._in_use.lock_shared(key)
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
                self._in_use.unlock(key)


def _unmap_idle(ahead: FetchAhead | None) -> None:
    """Unmap the shards of this process, and let go of those that were fetched ahead; both come back when needed."""
    POOL.unmap_all(lambda shard: shard.holder is not None)
    if ahead is not None:
        ahead.let_go()


def _file_sizes(path: Path) -> dict[str, int]:
    """Return name -> bytes of the files below a directory, or of a single file, whose name is empty."""
    if path.is_file():
        return {"": path.stat().st_size}
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


def _kept_document(file: Path, tag_file: Path) -> tuple[bytes, str] | None:
    """Return the copy of a document and the tag that its store gave it; None if there is none, or half of one."""
    try:
        data = file.read_bytes()
        found, _, tag = tag_file.read_text(encoding="utf-8", errors="replace").partition(" ")
    except OSError:
        return None
    return (data, tag) if found == checksum(data) else None


def _object_info_soon(url: str) -> ObjectInfo | None:
    """Return what the store reports about an object, asked once; an error if it does not answer within seconds."""
    answers: list[ObjectInfo | StorageIOError | None] = []

    def ask() -> None:
        try:
            answers.append(object_info(url, num_attempts=1))
        except StorageIOError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="packed-sft-look", daemon=True)
    thread.start()
    thread.join(_SECONDS_FOR_AN_ANSWER)
    if not answers:
        raise StorageIOError(
            f"cannot look at {redacted(url)}: no answer for {_SECONDS_FOR_AN_ANSWER:.0f} seconds; check the network "
            "and the store"
        )
    if isinstance(answers[0], StorageIOError):
        raise answers[0]
    return answers[0]


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
        raise InvalidInputError("this user has no home directory to keep a cache in; set XDG_CACHE_HOME to a directory")
    return Path(cache, "packed-sft")


def _start_anew_after_fork() -> None:
    # The locks of the parent's descriptors are the parent's; threads of it may have held its mutexes.
    global _CACHES_LOCK
    _CACHES.clear()
    _CACHES_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_start_anew_after_fork)


def parse_size(text: str | int, name: str) -> int:
    """Return the bytes of a size such as 200GB or 64MiB.

    Example:
        >>> parse_size("200GB", "cache_size"), parse_size("1.5MiB", "cache_size"), parse_size(10, "cache_size")
        (200000000000, 1572864, 10)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(text).upper())
    suffix = found[2] if found else ""
    suffix = suffix if suffix in _FACTORS else f"{suffix}B"  # 200G
    if found is None or suffix not in _FACTORS:
        raise InvalidInputError(f"{name} is {text!r}; give a size such as 200GB or 64MiB")
    size = int(float(found[1]) * _FACTORS[suffix])
    if size < 1:
        raise InvalidInputError(f"{name} is {text!r}; it must be at least one byte")
    return size
