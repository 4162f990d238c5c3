"""A token store in an object store: fetched whole into the cache of the node, each file checked on arrival."""

from __future__ import annotations

from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.remote.copies import kept_copy
from megatron_packed_sft.remote.downloads import Contents
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.node_cache import CacheItem, NodeCache, node_cache
from megatron_packed_sft.remote.objects import object_info, read_object
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.support.json_document import MANIFEST, FileRecord
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import OFFSETS, parse_part_manifest
from megatron_packed_sft.tokens.store_index import MAX_STORE_BYTES, STORE, ListedPart, parse_store


def is_remote_store(url: str) -> bool:
    """Return whether a URL is a token store or one of its parts."""
    return object_info(child(url, STORE)) is not None or object_info(child(url, OFFSETS)) is not None


def fetch_store(url: str, cache: NodeCache | None = None) -> Path:
    """Return the local path of a token store, or of a single part; it stays there until this process ends.

    Args:
        url: of the directory.
        cache: of the node; by default the user's.
    """
    cache = cache or node_cache()
    index = child(url, STORE)
    if cache.has_document(index) or object_info(index) is not None:
        data = cache.document(index, MAX_STORE_BYTES)
        parts = parse_store(data, redacted(index))
        item = CacheItem(url, checksum(data), lambda: _store_contents(url, data, parts), url)
        return kept_copy(item, cache)
    manifest = child(url, MANIFEST)
    if object_info(child(url, OFFSETS)) is None or object_info(manifest) is None:
        raise InvalidInputError(f"{redacted(url)} is not a token store or a part of one; check the URL")
    found = checksum(cache.document(manifest, MAX_MANIFEST_BYTES))
    return kept_copy(CacheItem(url, found, lambda: _contents(url, "", [ListedPart("", found)]), url), cache)


def _store_contents(url: str, data: bytes, parts: list[ListedPart]) -> Contents:
    contents = _contents(url, "/", parts)
    files = {**contents.files, STORE: FileRecord(len(data), "")}
    return Contents(files, contents.algorithm, {**contents.ready, STORE: data})


def _contents(url: str, separator: str, parts: list[ListedPart]) -> Contents:
    """Return the files that the manifests of some parts list, with their sizes and checksums."""
    files: dict[str, FileRecord] = {}
    ready = {}
    algorithm = DEFAULT_ALGORITHM
    for part in parts:
        name = f"{part.name}{separator}{MANIFEST}"
        data = read_object(child(url, name), MAX_MANIFEST_BYTES)
        file = redacted(child(url, name))
        if checksum(data) != part.manifest_checksum:
            raise ShardError(f"{file} is not the one that {STORE} lists; publish the store again")
        manifest = parse_part_manifest(data, file)
        algorithm = manifest.checksum_algorithm or DEFAULT_ALGORITHM
        files |= {f"{part.name}{separator}{one}": record for one, record in manifest.files.items()}
        files[name] = FileRecord(len(data), "")
        ready[name] = data
    return Contents(files, algorithm, ready)
