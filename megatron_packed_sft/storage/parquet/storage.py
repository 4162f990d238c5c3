"""Packed Parquet as a storage: one file per shard, read into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage

if TYPE_CHECKING:
    from megatron_packed_sft.storage.parquet.reader import ParquetShard


class ParquetStorage(Storage):
    """Megatron-Bridge's packed Parquet."""

    name = "parquet"
    summary = "Megatron-Bridge's packed Parquet files"
    in_memory = True

    def recognises(self, path: Path) -> bool:
        """Return whether the path has one of Parquet's suffixes."""
        return path.suffix in (".parquet", ".pq") and not path.is_dir()

    def shard_name(self, number: int) -> str:
        """Return the name of a file; Megatron-Bridge looks for `.idx.parquet`."""
        return f"shard_{number:06d}.idx.parquet"

    def open(self, path: Path) -> ParquetShard:
        """Read a file into memory."""
        from megatron_packed_sft.storage.parquet.reader import ParquetShard

        return ParquetShard(path)

    def create_writer(
        self,
        path: str | os.PathLike[str],
        *,
        num_bins: int,
        pack_size: int,
        vocab_size: int | None = None,
        pad_id: int = 0,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> PackedShardWriter:
        """Create a `ParquetShardWriter`."""
        from megatron_packed_sft.storage.parquet.writer import ParquetShardWriter

        return ParquetShardWriter(
            path,
            num_bins=num_bins,
            pack_size=pack_size,
            vocab_size=vocab_size,
            pad_id=pad_id,
            overwrite=overwrite,
            provenance=provenance,
        )

    def stored_bytes(self, *, num_bins: int, width: int, num_tokens: int, vocab_size: int | None) -> int:
        """Return an estimate: ids take the bits of the vocabulary, and a mask compresses to almost nothing."""
        bits = ((vocab_size or 1 << 17) - 1).bit_length()
        return num_tokens * (bits + 1) // 8

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what the file's footer counts, and what Megatron-Bridge's metadata beside it says."""
        from megatron_packed_sft.storage.pack_metadata import PackMetadata
        from megatron_packed_sft.storage.parquet.reader import read_footer

        return {**read_footer(path), **PackMetadata.recorded_beside(path)}

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return Megatron-Bridge's metadata file."""
        from megatron_packed_sft.storage.pack_metadata import PackMetadata

        return PackMetadata.file_beside(figures)


STORAGE = ParquetStorage()
