"""Opening and reading memmap_v1 shards: everything is checked before the first byte is mapped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.disk.checked_files import CheckedDirectory, CheckedFile
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.disk.file_maps import LazyMaps, will_need
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.errors import ShardChangedError, ShardFileError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES, ShardManifest, parse_manifest
from megatron_packed_sft.storage.registry import not_a_shard
from megatron_packed_sft.support.paths import local_path


class CheckedShard(NamedTuple):
    """An open shard directory: the manifest and its files, in the order of `layout.ARRAY_FILES`, weights last."""

    manifest: ShardManifest
    manifest_checksum: str
    files: tuple[CheckedFile, ...]


@contextlib.contextmanager
def checked_shard(path: Path) -> Iterator[CheckedShard]:
    """Open a shard's files and check all of them against the manifest; they are closed when the block is left."""
    with CheckedDirectory.open(path) as directory:
        data = directory.read(MANIFEST, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(data, str(path / MANIFEST))
        records = manifest.files or {}
        *others, starts = layout.shard_arrays(
            manifest.num_bins, manifest.pack_size, manifest.num_sequences or 0, manifest.dtype
        )
        files = [directory.array(spec, records.get(spec.name)) for spec in others]
        if manifest.num_sequences is None:  # seed-only manifests do not record it; the CSR's last pointer does
            starts = starts._replace(shape=(_last_pointer(files[-1]),))
        files.append(directory.array(starts, records.get(starts.name)))
        if manifest.has_weights:
            weights = layout.weights_array(manifest.num_bins, manifest.pack_size)
            files.append(directory.array(weights, records.get(weights.name)))
        yield CheckedShard(manifest, checksum(data), tuple(files))


def _last_pointer(seq_offsets: CheckedFile) -> int:
    with os_errors("read", seq_offsets.path):
        return int.from_bytes(os.pread(seq_offsets.fd, 4, seq_offsets.size - 4), "little")


def open_memmap_shard(path: str | os.PathLike[str]) -> MemmapShard:
    """Open a memmap_v1 shard directory; only the manifest and the headers are read."""
    location = local_path(path)
    if not layout.is_shard(location):
        raise not_a_shard(location)
    with checked_shard(location) as checked:
        return MemmapShard(location, checked.manifest, checked.manifest_checksum)


class MemmapShard(LazyMaps[BinBlock]):
    """An open shard. Its arrays are read-only views of the files, shared by all processes of the machine.

    `arrays` is all of it as one block; see `LazyMaps` for when it is mapped. A shard that was replaced on disk is
    refused when it would be mapped again; maps that exist keep showing the old bytes, whole.

    Give torch a copy (`shard.bin(i, copy=True)`, or `torch.tensor(view)`): `torch.from_numpy` on a read-only view
    warns, and an in-place operation on the result would kill the process.
    """

    def __init__(self, path: Path, manifest: ShardManifest, manifest_checksum: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = manifest_checksum  # it holds those of the files: so it identifies the content

    def __len__(self) -> int:
        return self.manifest.num_bins

    @property
    def pack_size(self) -> int:
        """The width of the arrays; no bin is longer."""
        return self.manifest.pack_size

    @property
    def figures(self) -> BinFigures:
        """What the manifest records of all bins."""
        return self.manifest.figures

    def __getitem__(self, index: int) -> PackedBin:
        return self.bin(index)

    def __iter__(self) -> Iterator[PackedBin]:
        return (self.bin(index) for index in range(len(self)))

    def bin(self, index: int, *, copy: bool = False) -> PackedBin:
        """Return bin `index`, as read-only views or as arrays of your own."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: bin {index} of {len(self)}")
        arrays = self.arrays
        length = int(arrays.packed_len[index])
        first, last = int(arrays.seq_offsets[index]), int(arrays.seq_offsets[index + 1])
        starts = arrays.seq_starts[first:last]
        # Cheap, and enough that a damaged index is an error here and never a wrong bin.
        if not 1 <= length <= self.pack_size:
            raise self._damaged(layout.PACKED_LEN, index)
        if not first < last <= len(arrays.seq_starts):
            raise self._damaged(layout.SEQ_OFFSETS, index)
        if starts[0] != 0 or starts[-1] >= length:
            raise self._damaged(layout.SEQ_STARTS, index)
        masks = arrays.loss_mask if arrays.loss_weights is None else arrays.loss_weights
        ids, mask = arrays.input_ids[index, :length], masks[index, :length]
        return PackedBin(ids.copy(), mask.copy(), starts.copy()) if copy else PackedBin(ids, mask, starts)

    def block(self, start: int, stop: int) -> BinBlock:
        """Return bins start..stop-1 in padded form, as read-only views."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"{self.path}: bins {start}..{stop - 1} of {len(self)}")
        arrays = self.arrays
        first, last = int(arrays.seq_offsets[start]), int(arrays.seq_offsets[stop])
        return BinBlock(
            arrays.input_ids[start:stop],
            arrays.loss_mask[start:stop],
            arrays.packed_len[start:stop],
            arrays.seq_offsets[start : stop + 1],
            arrays.seq_starts[first:last],
            None if arrays.loss_weights is None else arrays.loss_weights[start:stop],
        )

    def advise(self, bins: Iterable[int]) -> None:
        """Have the kernel read these bins ahead: they are needed soon."""
        arrays = self.arrays
        for index in bins:
            will_need(arrays.input_ids[index])
            will_need(arrays.loss_mask[index])
            if arrays.loss_weights is not None:
                will_need(arrays.loss_weights[index])

    def __repr__(self) -> str:
        return f"MemmapShard({str(self.path)!r}, {len(self)} bins of {self.pack_size})"

    def _open_arrays(self, keep: object) -> BinBlock:
        with checked_shard(self.path) as checked:
            if checked.manifest_checksum != self.fingerprint:
                raise ShardChangedError(f"{self.path} was replaced since it was opened; open it again")
            return BinBlock(*(file.map(keep) for file in checked.files))

    def _damaged(self, name: str, index: int) -> ShardFileError:
        return ShardFileError(f"{self.path / name} is damaged at bin {index}; run `packed-sft validate` on the shard")
