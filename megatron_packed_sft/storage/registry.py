"""The storages by name, and the two ways to use one: `open_shard` and `create_shard_writer`.

Built-in storages are one line each below; other packages add theirs with `register_storage` or with an entry point in
the group `megatron_packed_sft.storages` (see `plugins`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardError
from megatron_packed_sft.plugins import Registry
from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.megatron_indexed.index import indexed_path
from megatron_packed_sft.support.paths import local_path

DEFAULT_STORAGE = "memmap_v1"

_HOME = "megatron_packed_sft.storage"
STORAGES: Registry[Storage] = Registry(
    "storages",
    "storage",
    {
        "memmap_v1": f"{_HOME}.memmap_v1.storage:STORAGE",
        "legacy": f"{_HOME}.legacy.storage:STORAGE",
        "parquet": f"{_HOME}.parquet:STORAGE",
        "token_stream": f"{_HOME}.token_stream.storage:STORAGE",
        "megatron_indexed": f"{_HOME}.megatron_indexed.storage:STORAGE",
    },
)


def register_storage(storage: Storage, *, replace: bool = False) -> None:
    """Add a storage to those that the factory, `prepare`, `convert` and `validate` know.

    Args:
        storage: the storage; it is found by its `name` and its `aliases`.
        replace: let it replace a storage with the same name.
    """
    for name in (storage.name, *storage.aliases):
        taken = _find(name)
        if taken is not None and (not replace or taken.name != storage.name):
            raise InvalidInputError(
                f"storage {name!r} is registered already; choose another name, or pass replace=True"
            )
    STORAGES.register(storage.name, storage, replace=replace)


def storage_named(name: str) -> Storage:
    """Return the storage with this name or alias; an unknown name is an error that lists the known ones.

    Example:
        >>> storage_named("legacy_npy_pickle").name
        'legacy'
    """
    found = _find(name)
    if found is None:
        raise InvalidInputError(STORAGES.unknown(name))
    return found


def dataset_storage(name: str) -> Storage:
    """Return the storage with this name; raise an error if dataset directories cannot use it.

    Example:
        >>> dataset_storage("megatron_indexed")
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: storage 'megatron_indexed' keeps no loss masks, so a dataset \
directory cannot use it; write memmap_v1, then run packed-sft convert --to megatron_indexed
    """
    storage = storage_named(name)
    if not storage.keeps_masks:
        raise InvalidInputError(
            f"storage {storage.name!r} keeps no loss masks, so a dataset directory cannot use it; write "
            f"{DEFAULT_STORAGE}, then run packed-sft convert --to {storage.name}"
        )
    storage.refuse_read_only()
    return storage


def storage_names() -> tuple[str, ...]:
    """Return the names of all storages, without importing any.

    Example:
        >>> storage_names()[:3]
        ('memmap_v1', 'legacy', 'parquet')
    """
    return STORAGES.names()


def storage_of(path: Path) -> Storage | None:
    """Return the storage that can read `path`, or None. Built-in storages are tried first."""
    return next((storage for storage in STORAGES.usable() if storage.recognises(path)), None)


def shards_inside(directory: Path) -> list[tuple[Path, Storage]]:
    """Return the shards directly inside a directory, sorted by name."""
    try:
        entries = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return [(path, storage) for path in entries if (storage := storage_of(path)) is not None]


def open_shard(path: str | os.PathLike[str]) -> PackedShard:
    """Open one shard of any storage for reading.

    A memmap_v1 shard of any size is checked and opened in about a millisecond and mapped at the first read. Legacy and
    Parquet files are read into memory (a legacy file's pickle is never executed).
    """
    location = indexed_path(local_path(path))
    storage = storage_of(location)
    if storage is None:
        raise not_a_shard(location)
    return storage.open(location)


def create_shard_writer(
    packed_storage: str,
    output: str | os.PathLike[str],
    *,
    num_bins: int,
    pack_size: int,
    vocab_size: int | None = None,
    pad_id: int = 0,
    overwrite: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> PackedShardWriter:
    """Create a writer of one shard: a directory for `memmap_v1`, a .npy file for `legacy`, a Parquet file.

    Args:
        packed_storage: the name of a storage.
        output: the shard to publish.
        num_bins, pack_size, vocab_size, pad_id, overwrite: see `WriterOptions`.
        provenance: tokenizer, chat_template_fingerprint, plan_fingerprint and pad_seq_to_mult, for the manifest of
            storages that have one.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with create_shard_writer("memmap_v1", f"{home}/shard", num_bins=1, pack_size=4) as writer:
        ...     writer.write_bin(0, [1, 2], [1, 0], [0])
        ...     _ = writer.finalize()
    """
    options = WriterOptions(
        num_bins=num_bins,
        pack_size=pack_size,
        vocab_size=vocab_size,
        pad_id=pad_id,
        overwrite=overwrite,
        provenance=provenance or {},
    )
    return storage_named(packed_storage).create_writer(output, options)


def not_a_shard(path: Path) -> PackedSFTError:
    """Return the error for a path that no storage recognises; its message says what the path is instead."""
    from megatron_packed_sft.storage.dataset_directory import DATASET

    if not os.path.lexists(path):
        return ShardError(f"{path} does not exist; check the path")
    if (path / DATASET).exists():
        return InvalidInputError(f"{path} is a dataset directory, not a shard; open it with create_sft_dataset")
    if shards_inside(path):
        return InvalidInputError(f"{path} is a directory of shards, not a shard; open it with create_sft_dataset")
    return ShardError(f"{path} is not packed data of a known storage ({', '.join(STORAGES.names())}); check the path")


def _find(name: str) -> Storage | None:
    if name in STORAGES:
        return STORAGES[name]
    return next((storage for storage in STORAGES.usable() if name in storage.aliases), None)
