"""Indexed datasets as a storage: PREFIX.idx is a shard; its documents, or windows of its tokens, are the bins."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage
from megatron_packed_sft.storage.megatron_indexed.index import INDEX, MAGIC, pair_of, read_index
from megatron_packed_sft.storage.token_stream.metadata import StreamMetadata
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum, new_hasher

if TYPE_CHECKING:
    from megatron_packed_sft.storage.validation_report import ValidationReport
    from megatron_packed_sft.support.progress import Progress

# By name, as the registry names storages: what imports megatron.core lives in that room, and nobody else pays for it.
_WRITER = ("megatron_packed_sft.megatron.indexed_writer", "IndexedDatasetWriter")


class MegatronIndexedStorage(Storage):
    """Megatron's .bin and .idx.

    Args:
        options: how to read them as a stream; None, or with `documents`, gives one bin per document.
    """

    name = "megatron_indexed"
    aliases = ("indexed_dataset",)
    summary = "Megatron's indexed datasets, PREFIX.bin and PREFIX.idx: documents without loss masks"
    one_shard_per_split = True
    keeps_masks = False

    def __init__(self, options: StreamOptions | None = None) -> None:
        self.options = options

    def recognises(self, path: Path) -> bool:
        """Return whether the path is an .idx file of Megatron, sound or not."""
        if path.suffix != INDEX or not path.is_file():
            return False
        try:
            with open(path, "rb") as file:
                return file.read(len(MAGIC)) == MAGIC or pair_of(path)[1].exists()
        except OSError:
            return False

    def shard_name(self, number: int) -> str:
        """Return the name of an .idx file."""
        return f"shard_{number:06d}{INDEX}"

    def open(self, path: Path) -> PackedShard:
        """Read the index; the tokens are mapped when they are first needed."""
        index = read_index(path)
        if self.options is None or self.options.documents:
            from megatron_packed_sft.storage.megatron_indexed.reader import IndexedDocuments

            return IndexedDocuments(index)
        from megatron_packed_sft.storage.token_stream.reader import TokenStream

        return TokenStream(path, [index.tokens], self.options, StreamMetadata(index.path, index.tokens.dtype))

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
        drop_masks: bool = False,
    ) -> PackedShardWriter:
        """Create an `IndexedDatasetWriter`; `drop_masks` accepts tokens that were not trained, and trains them."""
        module, name = _WRITER
        writer: PackedShardWriter = getattr(importlib.import_module(module), name)(
            path,
            num_bins=num_bins,
            pack_size=pack_size,
            vocab_size=vocab_size,
            pad_id=pad_id,
            overwrite=overwrite,
            provenance=provenance,
            drop_masks=drop_masks,
        )
        return writer

    def stored_bytes(self, *, num_bins: int, width: int, num_tokens: int, vocab_size: int | None) -> int:
        """Return the bytes of the tokens; the index is small beside them."""
        return num_tokens * (2 if vocab_size is not None and vocab_size < 65_500 else 4)

    def checksum(self, path: Path) -> str:
        """Return what identifies both files."""
        hasher = new_hasher(DEFAULT_ALGORITHM)
        for file in pair_of(path):
            hasher.update(file_checksum(file, DEFAULT_ALGORITHM).encode())
        return hasher.hexdigest()

    def validate(
        self, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
    ) -> BinFigures | None:
        """Look at every token; see `validate_indexed`."""
        from megatron_packed_sft.storage.megatron_indexed.validate import validate_indexed

        return validate_indexed(path, self.options or StreamOptions(), report, bar)


STORAGE = MegatronIndexedStorage()
