"""One door to both storages for reading: `open_shard`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from megatron_packed_sft.errors import ShardError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard, open_memmap_shard


class PackedShard(Protocol):
    """What every reader of packed bins offers: its length and its bins, as read-only arrays."""

    path: Path

    def __len__(self) -> int:
        """How many bins there are."""
        ...

    @property
    def pack_size(self) -> int:
        """No bin is longer."""
        ...

    def __getitem__(self, index: int) -> PackedBin:
        """Bin `index`, 0 <= index < len."""
        ...

    def __iter__(self) -> Iterator[PackedBin]:
        """All bins in order."""
        ...


def open_shard(path: str | os.PathLike[str]) -> MemmapShard | PackedShard:
    """Open packed data for reading: a memmap_v1 shard directory, or a legacy .npy file.

    A shard directory is checked and opened in a millisecond whatever its size; nothing is mapped until the first
    read. A legacy file is parsed whole (its pickle is never executed).

    Example:
        >>> shard = open_shard("out/shard_000000")  # doctest: +SKIP
        >>> len(shard), shard[0].input_ids.dtype  # doctest: +SKIP
        (20000, dtype('uint16'))
    """
    location = Path(os.path.abspath(path))
    if location.suffix == ".npy" and not location.is_dir():
        from megatron_packed_sft.storage.legacy.reader import LegacyShard

        return LegacyShard(location)
    if location.suffix in (".parquet", ".pq") and not location.is_dir():
        raise ShardError(f"{location} is Parquet, which has no random access; turn it into shards: packed-sft convert")
    return open_memmap_shard(location)
