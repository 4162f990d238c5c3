"""Flat files of tokens as a storage: a directory of them is one shard, and its windows are the bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, Storage
from megatron_packed_sft.storage.token_stream.files import is_stream
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from megatron_packed_sft.storage.token_stream.reader import TokenStream
    from megatron_packed_sft.storage.validate import ValidationReport
    from megatron_packed_sft.support.progress import Progress


class TokenStreamStorage(Storage):
    """Directories of flat .npy or .bin files; read-only.

    Args:
        options: how to read streams; `create_sft_dataset` and the recipe pass their own.
    """

    name = "token_stream"
    summary = "flat .npy or .bin files of token ids, cut into windows (read-only)"
    is_flat = True
    stream_options = frozenset(("pack_sequences", "documents", "file_pattern", "dtype"))

    def __init__(self, options: StreamOptions | None = None) -> None:
        self.options = options or StreamOptions()

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a flat file of ids, or a directory of such files without packed data."""
        return is_stream(path)

    def shard_name(self, number: int) -> str:
        """Return the name of a directory."""
        return f"shard_{number:06d}"

    def configured(self, options: StreamOptions) -> TokenStreamStorage:
        """Return this storage with other options for reading streams."""
        return TokenStreamStorage(options)

    def as_one_shard(self, paths: Sequence[Path]) -> tuple[Storage, Sequence[Path]]:
        """Return how to read the files of one directory as one stream: one dtype, skipping files that are too short."""
        if len({path.parent for path in paths}) > 1 or any(path.is_dir() for path in paths):
            return self, paths
        names = tuple(path.name for path in paths)
        return TokenStreamStorage(replace(self.options, file_pattern=None, file_names=names)), [paths[0].parent]

    def describe(self, paths: Sequence[Path], shards: Sequence[PackedShard]) -> str:
        """Return the first path and the number of files."""
        num_files = sum(shard.num_files for shard in shards)
        return f"token stream {paths[0]}{' ...' if len(paths) > 1 else ''}, {plural(num_files, 'file')}"

    def open(self, path: Path) -> TokenStream:
        """Open a stream; nothing is mapped yet."""
        from megatron_packed_sft.storage.token_stream.reader import open_token_stream

        return open_token_stream(path, self.options)

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what headers and metadata record: dtype, files, tokens, and the number of windows."""
        stream = self.open(path)
        return {
            **vars(stream.figures),
            "dtype": stream.dtype,
            "num_files": len(stream.files),
            "num_tokens_in_files": stream.num_tokens,
            "notes": [*stream.warnings, *stream.notes],
        }

    def validate(
        self, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
    ) -> BinFigures | None:
        """Check every token; see `validate_stream`."""
        from megatron_packed_sft.storage.token_stream.validate import validate_stream

        return validate_stream(path, self.options, report, bar)


STORAGE = TokenStreamStorage()
