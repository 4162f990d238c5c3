"""memmap_v1 as a storage: a directory of array files and a manifest per shard."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES, is_shard, parse_manifest, shard_arrays
from megatron_packed_sft.support.array_files import id_dtype_for
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import checksum as checksum_of
from megatron_packed_sft.support.json_document import MANIFEST, FileRecord
from megatron_packed_sft.support.paths import redacted

if TYPE_CHECKING:
    from megatron_packed_sft.remote.downloads import Contents
    from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
    from megatron_packed_sft.storage.validate import ValidationReport
    from megatron_packed_sft.support.progress import Progress


class MemmapStorage(Storage):
    """Padded arrays that are memory-mapped: opening costs nothing, and any bin is one read away."""

    name = "memmap_v1"
    summary = "memory-mapped shards"
    has_manifest = True
    keeps_weights = True
    takes_any_order = True

    def recognises(self, path: Path) -> bool:
        """Return whether there is a manifest, or an array of a shard without one."""
        return is_shard(path)

    def shard_name(self, number: int) -> str:
        """Return the directory name of a shard."""
        return f"shard_{number:06d}"

    def open(self, path: Path) -> MemmapShard:
        """Open a shard; nothing is mapped yet."""
        from megatron_packed_sft.storage.memmap_v1.reader import open_memmap_shard

        return open_memmap_shard(path)

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create a `MemmapShardWriter`; the provenance goes into the manifest."""
        from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

        if options.num_bins is None or options.pack_size is None:
            raise InvalidInputError("a memmap_v1 shard has a fixed size; give num_bins and pack_size")
        return MemmapShardWriter(
            path,
            options.num_bins,
            options.pack_size,
            vocab_size=options.vocab_size,
            pad_id=options.pad_id,
            overwrite=options.overwrite,
            **options.provenance,
        )

    def stored_bytes(self, figures: BinFigures) -> int:
        """Return the bytes of all arrays, padding included."""
        dtype = id_dtype_for(figures.vocab_size)
        specs = shard_arrays(
            figures.num_bins, figures.pack_size, figures.least_sequences, dtype, has_weights=figures.has_weights
        )
        return sum(spec.nbytes for spec in specs.values())

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what the manifest says; no other file is opened."""
        with CheckedDirectory.open(path) as directory:
            manifest = parse_manifest(directory.read(MANIFEST, MAX_MANIFEST_BYTES), str(path / MANIFEST))
        return {
            **vars(manifest.figures),
            "dtype": manifest.dtype,
            "plan_fingerprint": manifest.plan_fingerprint,
            "created_by": manifest.created_by,
            "bin_checksum_algorithm": manifest.bin_checksum_algorithm,
        }

    def checksum(self, path: Path) -> str:
        """Return the checksum of the manifest, which holds those of the arrays."""
        with CheckedDirectory.open(path) as directory:
            return checksum_of(directory.read(MANIFEST, MAX_MANIFEST_BYTES))

    def contents(self, url: str, checksum: str, num_bytes: int | None, read: Callable[[str, int], bytes]) -> Contents:
        """Return the files that the manifest lists."""
        from megatron_packed_sft.remote.downloads import Contents
        from megatron_packed_sft.remote.filesystem import child

        data = read(MANIFEST, MAX_MANIFEST_BYTES)
        file = redacted(child(url, MANIFEST))
        if checksum_of(data) != checksum:
            raise ShardError(f"{file} is not the manifest that dataset.json lists; publish the dataset again")
        manifest = parse_manifest(data, file)
        files = {**manifest.files, MANIFEST: FileRecord(len(data), "")}
        return Contents(files, manifest.checksum_algorithm, {MANIFEST: data})

    def validate(
        self, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
    ) -> BinFigures | None:
        """Check names, manifest, headers and, at level `full`, every byte and every bin."""
        from megatron_packed_sft.storage.memmap_v1.validate import validate_shard

        return validate_shard(path, report, bar)


STORAGE = MemmapStorage()
