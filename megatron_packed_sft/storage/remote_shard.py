"""Shards in object stores: fetched into the node's cache and checked, or written to an fsspec file system."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.copies import copy_of, kept_copy
from megatron_packed_sft.remote.downloads import Contents
from megatron_packed_sft.remote.fetch_ahead import NUM_SHARDS_AT_ONCE
from megatron_packed_sft.remote.filesystem import child, given_url
from megatron_packed_sft.remote.node_cache import CacheItem, Hold, NodeCache, node_cache
from megatron_packed_sft.remote.objects import object_info, read_object
from megatron_packed_sft.remote.uploads import refuse_unfinished, uploading
from megatron_packed_sft.storage.interface import Storage
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES, ShardManifest
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from megatron_packed_sft.storage.registry import storage_named
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.wording import byte_count


@dataclass(frozen=True)
class RemoteShard:
    """One shard in an object store. It can be pickled; each process opens the cache itself.

    Args:
        storage: the shard's storage.
        url: the shard's address.
        checksum: the checksum in dataset.json.
        num_bytes: the size of a shard that is one file.
        group: the URL of the dataset.
        cache_directory, cache_size: where the node's cache is, and its limit.
    """

    storage: Storage
    url: str
    checksum: str
    num_bytes: int | None
    group: str
    cache_directory: Path
    cache_size: int | None

    @property
    def cache(self) -> NodeCache:
        """The node's cache."""
        return node_cache(self.cache_directory, self.cache_size)

    @functools.cached_property
    def item(self) -> CacheItem:
        """The shard's key in the cache."""
        return CacheItem(self.url, self.checksum, lambda: self.contents, self.group)

    @property
    def path(self) -> Path:
        """The local path after fetching."""
        return self.cache.path_of(self.item)

    def hold(self) -> Hold:
        """Fetch the shard if needed; it stays in the cache while the returned object lives."""
        hold = self.cache.hold(self.item)
        self.__dict__.pop("contents", None)  # kept for thousands of shards they would add up
        return hold

    @functools.cached_property
    def contents(self) -> Contents:
        """The files listed in its manifest, which is read once per fetch, however often the cache asks."""

        def read(name: str, limit: int) -> bytes:
            return read_object(child(self.url, name), limit)

        return self.storage.contents(self.url, self.checksum, self.num_bytes, read)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("item", "contents")}


def local_copy(url: str, cache: NodeCache | None = None) -> Path:
    """Fetch a single shard or file from an object store, check it, and return its local path; it stays in the cache.

    A memmap_v1 shard is checked against its manifest, other files against the store's metadata.
    """
    cache = cache or node_cache()
    if object_info(child(url, MANIFEST)) is not None:
        data = cache.document(child(url, MANIFEST), MAX_MANIFEST_BYTES)
        shard = RemoteShard(
            storage_named("memmap_v1"), url, checksum(data), None, url, cache.directory, cache.asked_size
        )
        return kept_copy(shard.item, cache)
    if object_info(url) is None:
        if any(letter in url for letter in "*?["):
            raise InvalidInputError(f"{redacted(url)} is a pattern, which works for local paths only; name each URL")
        refuse_unfinished(url)
        raise InvalidInputError(f"{redacted(url)} is not a dataset, shard or file; check the URL")
    return copy_of(url, cache)


def fetch_dataset(
    url: str,
    cache: NodeCache,
    splits: Sequence[str] = (),
    *,
    on_total: Callable[[int], object] | None = None,
    on_bytes: Callable[[int], object] | None = None,
) -> tuple[int, int]:
    """Fetch the shards of a dataset into the cache; return their number and total bytes.

    Args:
        url: the dataset's address.
        cache: the node's cache.
        splits: the splits to fetch; empty for all.
        on_total: called with the bytes of all shards before the first is fetched.
        on_bytes: called with the bytes of each shard once it has been fetched.
    """
    from megatron_packed_sft.storage.dataset_directory import open_dataset

    dataset = open_dataset(url, cache)
    shards = [
        shard
        for split in splits or dataset.splits
        for entry in dataset.entries(split)
        if (shard := dataset.remote_shard(split, entry)) is not None
    ]
    with ThreadPoolExecutor(NUM_SHARDS_AT_ONCE, thread_name_prefix="packed-sft-prefetch") as threads:
        sizes = list(threads.map(_num_bytes, shards))
        num_bytes, limit = sum(sizes), cache.size
        if num_bytes > limit:
            raise InvalidInputError(
                f"{redacted(url)} has {byte_count(num_bytes)}, more than the whole cache of {byte_count(limit)}; raise "
                "cache_size, or let training fetch shards as it needs them"
            )
        if on_total is not None:
            on_total(num_bytes)
        holds = []  # kept until all are fetched, so that no shard evicts another
        try:
            for size, hold in zip(sizes, threads.map(RemoteShard.hold, shards), strict=True):
                holds.append(hold)
                if on_bytes is not None:
                    on_bytes(size)
        except BaseException:  # including Ctrl-C: do not wait for shards that have not been started
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    return len(shards), num_bytes


def _num_bytes(shard: RemoteShard) -> int:
    """Return the size of a shard, from the cache or from its manifest."""
    return shard.cache.size_of(shard.item.key) if shard.cache.has(shard.item) else shard.contents.num_bytes


def write_memmap_to_cloud(
    output_fs: Any,
    output_dir: str | os.PathLike[str],
    num_bins: int,
    pack_size: int,
    total_seq_starts: int | None,
    write_fn: Callable[[MemmapShardWriter], object],
) -> ShardManifest:
    """Write one memmap_v1 shard to an fsspec file system, and return its manifest.

    The shard is written to local scratch space and uploaded: first the arrays, each verified in the store, then the
    manifest.

    Args:
        output_fs: an fsspec file system; on a local one the shard is written in place, without a copy.
        output_dir: the shard's path there.
        num_bins, pack_size, total_seq_starts: as in `MemmapShardWriter`.
        write_fn: called with the writer; writes all bins.

    Example:
        >>> import fsspec
        >>> def write(writer):
        ...     writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])
        >>> write_memmap_to_cloud(fsspec.filesystem("memory"), "/shards/one", 1, 8, 1, write).num_tokens
        3
    """
    protocols = (output_fs.protocol,) if isinstance(output_fs.protocol, str) else tuple(output_fs.protocol)
    if "file" in protocols:
        return _written(os.fspath(output_dir), num_bins, pack_size, total_seq_starts, write_fn)
    with given_url(output_fs, os.fspath(output_dir)) as url, uploading(url) as local:
        return _written(os.fspath(local), num_bins, pack_size, total_seq_starts, write_fn)


def _written(
    path: str,
    num_bins: int,
    pack_size: int,
    total_seq_starts: int | None,
    write_fn: Callable[[MemmapShardWriter], object],
) -> ShardManifest:
    with MemmapShardWriter(path, num_bins, pack_size, total_seq_starts) as writer:
        write_fn(writer)
        return writer.finalize()
