"""One shard straight to an object store, with the arguments of the first seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_packed_sft.remote.filesystem import given_url
from megatron_packed_sft.remote.uploads import uploading
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter


def write_memmap_to_cloud(
    output_fs: Any,
    output_dir: str | os.PathLike[str],
    num_bins: int,
    pack_size: int,
    total_seq_starts: int | None,
    write_fn: Callable[[MemmapShardWriter], object],
) -> ShardManifest:
    """Write one memmap_v1 shard to a file system of fsspec, and return its manifest.

    The shard is written to local scratch and uploaded: the arrays first, each checked in the store, the manifest last.

    Args:
        output_fs: an fsspec file system; on a local one the shard is written where it belongs.
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
