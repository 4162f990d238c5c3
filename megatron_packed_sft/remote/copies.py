"""Local copies of files and folders of a store: fetched once into the cache, kept until the process ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.downloads import Contents
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.node_cache import CacheItem, Hold, NodeCache, node_cache
from megatron_packed_sft.remote.objects import list_objects, object_info
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.wording import byte_count

_HELD: dict[str, Hold] = {}  # copies whose paths were returned
_ORIGINS: dict[str, str] = {}  # their paths -> their URLs


def kept_copy(item: CacheItem, cache: NodeCache) -> Path:
    """Fetch an item into the cache and return its local path; it stays there until this process ends."""
    hold = _HELD[item.key] = cache.hold(item)
    _ORIGINS[str(hold.path)] = item.url.rstrip("/")
    return hold.path


def origin_of(path: str) -> str:
    """Return the URL of a copy, or of a file in one, for use on other nodes; return any other path unchanged.

    Example:
        >>> origin_of("/models/tokenizer")
        '/models/tokenizer'
    """
    for copy, url in _ORIGINS.items():
        if path == copy or path.startswith(f"{copy}/"):
            return url + path.removeprefix(copy)
    return path


def copy_of(
    url: str,
    cache: NodeCache | None = None,
    *,
    wanted: Callable[[str], bool] = bool,
    most_bytes: int | None = None,
    kind: str = "a file or a folder",
) -> Path:
    """Fetch a file or folder of a store and return its local path; a copy is reused while sizes and tags are the same.

    Args:
        url: of an object, or of a folder.
        cache: of the node; by default the user's.
        wanted: which objects of a folder, by their names there.
        most_bytes: refuse to fetch more.
        kind: what it should be, for the error if it is missing.
    """
    cache = cache or node_cache()
    info = object_info(url)
    found = {"": info} if info is not None else {name: one for name, one in list_objects(url).items() if wanted(name)}
    if not found:
        raise InvalidInputError(f"{redacted(url)} is not {kind}; check the URL")
    for name in filter(None, found):
        child(url, name)  # refuses names that lead elsewhere
    contents = Contents({name: FileRecord(one.size, "") for name, one in found.items()}, DEFAULT_ALGORITHM)
    if most_bytes is not None and contents.num_bytes > most_bytes:
        raise InvalidInputError(
            f"{redacted(url)} has {byte_count(contents.num_bytes)}, too much for {kind}; check the URL"
        )
    # Without tags, the store does not show whether an object changed: it is fetched each time.
    seen = time.time_ns()
    listed = "\n".join(f"{name}\0{one.size}\0{one.tag or seen}" for name, one in sorted(found.items()))
    return kept_copy(CacheItem(url, checksum(listed.encode()), lambda: contents, url), cache)
