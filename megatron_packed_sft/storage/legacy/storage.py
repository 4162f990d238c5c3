"""The pickled .npy as a storage: one file per split, read into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.token_stream.files import is_stream

if TYPE_CHECKING:
    from megatron_packed_sft.storage.legacy.reader import LegacyShard

_LARGEST_SHORT_VOCABULARY = 1 << 16  # pickled ids below it take three bytes, others five; a mask entry takes two


class LegacyStorage(Storage):
    """Megatron-Bridge's and NeMo's pickled .npy."""

    name = "legacy"
    aliases = ("legacy_npy_pickle",)
    summary = "Megatron-Bridge's and NeMo's pickled .npy files"
    in_memory = True
    one_shard_per_split = True

    def recognises(self, path: Path) -> bool:
        """Return whether the path has the suffix .npy, unless it is a flat array of integers: a token stream."""
        return path.suffix == ".npy" and not path.is_dir() and not is_stream(path)

    def shard_name(self, number: int) -> str:
        """Return the name of a file."""
        return f"shard_{number:06d}.npy"

    def open(self, path: Path) -> LegacyShard:
        """Read a file into memory; its pickle is never executed."""
        from megatron_packed_sft.storage.legacy.reader import LegacyShard

        return LegacyShard(path)

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create a `LegacyPickleWriter`."""
        from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter

        return LegacyPickleWriter(path, options)

    def stored_bytes(self, *, num_bins: int, width: int, num_tokens: int, vocab_size: int | None) -> int:
        """Return about what the pickle takes; bins are not padded."""
        is_short = vocab_size is not None and vocab_size <= _LARGEST_SHORT_VOCABULARY
        return num_tokens * (5 if is_short else 7)

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return the number of bins in the file's header, and what Megatron-Bridge's metadata beside it says."""
        from megatron_packed_sft.storage.figures import PackMetadata
        from megatron_packed_sft.storage.legacy.reader import read_num_bins

        return {"num_bins": read_num_bins(path), **PackMetadata.recorded_beside(path)}

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return Megatron-Bridge's metadata file."""
        from megatron_packed_sft.storage.figures import PackMetadata

        return PackMetadata.file_beside(figures)


STORAGE = LegacyStorage()
