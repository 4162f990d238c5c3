"""Opening and reading memmap_v1 shards: everything is checked before the first byte is mapped."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_packed_sft.errors import PackedSFTError, ShardChangedError, ShardFileError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.bin_checksums import FILES, checksums_of_bin, checksums_of_block
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES, ShardManifest, parse_manifest
from megatron_packed_sft.storage.memmap_v1.open_arrays import ShardArrays, map_arrays, read_arrays
from megatron_packed_sft.storage.read_options import PREAD, ReadOptions
from megatron_packed_sft.storage.registry import not_a_shard
from megatron_packed_sft.support import file_maps
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checked_files import CheckedDirectory, CheckedFile
from megatron_packed_sft.support.checksum import checksum, file_checksum
from megatron_packed_sft.support.file_maps import LazyMaps, will_need
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import local_path

# A shard that is read through open files holds three of them: at most 128 shards at a time, under a limit of 1,024.
_PLACES_OF_OPEN_FILES = 8


class CheckedShard(NamedTuple):
    """An open shard directory: the manifest and its files by name, in the order of the layout, optional ones last."""

    manifest: ShardManifest
    manifest_checksum: str
    files: Mapping[str, CheckedFile]


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
        files = {spec.name: directory.array(spec, records.get(spec.name)) for spec in others}
        if manifest.num_sequences is None:  # seed-only manifests do not record it; the CSR's last pointer does
            starts = starts._replace(shape=(_last_pointer(files[layout.SEQ_OFFSETS]),))
        optional = []
        if manifest.has_weights:
            optional.append(layout.weights_array(manifest.num_bins, manifest.pack_size))
        if manifest.has_bin_checksums:
            optional.append(layout.checksums_array(manifest.num_bins, has_weights=manifest.has_weights))
        for spec in (starts, *optional):
            files[spec.name] = directory.array(spec, records.get(spec.name))
        yield CheckedShard(manifest, checksum(data), files)


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


class MemmapShard(LazyMaps[ShardArrays]):
    """An open shard. Its arrays are read-only views of the files, shared by all processes of the machine.

    `arrays` is all of it as one block; see `LazyMaps` for when it is mapped. A shard that was replaced on disk is
    refused when it would be mapped again; maps that exist keep showing the old bytes, whole. Bins are compared with
    their checksums when they are first read; see `ReadOptions`.

    Give torch a copy (`shard.bin(i, copy=True)`, or `torch.tensor(view)`): `torch.from_numpy` on a read-only view
    warns, and an in-place operation on the result would kill the process.
    """

    def __init__(self, path: Path, manifest: ShardManifest, manifest_checksum: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = manifest_checksum  # it holds those of the files: so it identifies the content
        self.reading = ReadOptions()
        self._num_bins = manifest.num_bins

    def __len__(self) -> int:
        return self._num_bins

    @property
    def pack_size(self) -> int:
        """The width of the arrays; no bin is longer."""
        return self.manifest.pack_size

    @property
    def figures(self) -> BinFigures:
        """What the manifest records of all bins."""
        return self.manifest.figures

    def read_with(self, options: ReadOptions) -> None:
        """Choose how bins are read from now on."""
        with file_maps.POOL.lock:  # no other thread maps it in between
            if options != self.reading:
                self.unmap()
            self.reading = options
            self.num_places = _PLACES_OF_OPEN_FILES if options.access == PREAD else 1

    def __getitem__(self, index: int) -> PackedBin:
        return self.bin(index)

    def __iter__(self) -> Iterator[PackedBin]:
        return (self.bin(index) for index in range(len(self)))

    def bin(self, index: int, *, copy: bool = False) -> PackedBin:
        """Return bin `index`, as read-only views or as arrays of your own."""
        if not 0 <= index < self._num_bins:
            raise IndexError(f"{self.path}: bin {index} of {len(self)}")
        arrays = self.arrays
        if arrays.sizes is not None:
            arrays.sizes.look(time.monotonic())
        length = arrays.lengths_view[index]
        first, last = arrays.offsets_view[index], arrays.offsets_view[index + 1]
        # Enough that a damaged index of a shard without checksums is an error here and never read behind the arrays.
        if not 1 <= length <= self.manifest.pack_size:
            raise self.damaged(layout.PACKED_LEN, index)
        if not first < last <= len(arrays.seq_starts):
            raise self.damaged(layout.SEQ_OFFSETS, index)
        starts = arrays.seq_starts[first:last]
        if starts[0] != 0 or starts[-1] >= length:
            raise self.damaged(layout.SEQ_STARTS, index) if arrays.checksums is None else self.unverified(index)
        ids, mask, weights = arrays.bin_at(index, length)
        if arrays.checksums is not None and arrays.wants_check(index):
            if checksums_of_bin(ids, mask, weights, first, starts) != arrays.checksums[index].tolist():
                raise self.unverified(index)
            arrays.verified_view[index] = 1
        masks = mask if weights is None else weights
        return PackedBin(ids.copy(), masks.copy(), starts.copy()) if copy else PackedBin(ids, masks, starts)

    def block(self, start: int, stop: int) -> BinBlock:
        """Return bins start..stop-1 in padded form: the large arrays as read-only views."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"{self.path}: bins {start}..{stop - 1} of {len(self)}")
        arrays = self.arrays
        if arrays.sizes is not None:
            arrays.sizes.look(time.monotonic())
        ids, mask, weights = arrays.padded(start, stop)
        # Copies: what is checked below is what is used, even while somebody writes to the files.
        lengths, offsets = arrays.packed_len[start:stop].copy(), arrays.seq_offsets[start : stop + 1].copy()
        starts = arrays.seq_starts[int(offsets[0]) : int(offsets[-1])]
        block = BinBlock(ids, mask, lengths, offsets, starts, weights)
        self._verify_block(arrays, start, block)
        return block

    def advise(self, bins: Iterable[int]) -> None:
        """Have the kernel read these bins ahead: they are needed soon."""
        arrays = self.arrays
        if arrays.files is not None:
            arrays.files.advise(bins)
            return
        for index in bins:
            will_need(arrays.input_ids[index])
            will_need(arrays.loss_mask[index])
            if arrays.loss_weights is not None:
                will_need(arrays.loss_weights[index])

    def __repr__(self) -> str:
        return f"MemmapShard({str(self.path)!r}, {len(self)} bins of {self.pack_size})"

    def damaged(self, name: str, index: int) -> ShardFileError:
        """Return the error for a bin whose entry of a file cannot be right."""
        return ShardFileError(f"{self.path / name} is damaged at bin {index}; run `packed-sft validate` on the shard")

    def unverified(self, index: int) -> PackedSFTError:
        """Return the error for a bin that does not match its checksums: it names the file that was damaged."""
        try:
            name = self._damaged_file(index)
        except PackedSFTError as error:  # a file is gone or cut: that is the news
            return error
        if name is None:
            return ShardFileError(
                f"{self.path}: bin {index} did not match its checksum when it was read, and does now; see whether "
                "somebody writes to the shard, or whether memory, disk or network give wrong bytes"
            )
        remedy = "restore the shard from its original, and run `packed-sft validate` on it"
        if self.holder is not None:
            remedy = "it is a copy of an object store's: fetch it again after `packed-sft cache clear`"
        return ShardFileError(
            f"{self.path / name} is damaged at bin {index}, which does not match the checksum that was written with "
            f"it; {remedy}"
        )

    def _damaged_file(self, index: int) -> str | None:
        """Find the file: the small ones are read again as a whole, and for the large ones the columns tell.

        None if nothing is wrong when it is read again.
        """
        with checked_shard(self.path) as checked:
            algorithm, records = checked.manifest.checksum_algorithm, checked.manifest.files
            for name in (layout.PACKED_LEN, layout.SEQ_OFFSETS, layout.SEQ_STARTS, layout.BIN_CHECKSUMS):
                if records and algorithm and file_checksum(self.path / name, algorithm) != records[name].checksum:
                    return name
        arrays = self.arrays
        length, first, last = arrays.lengths_view[index], *arrays.offsets_view[index : index + 2]
        assert arrays.checksums is not None
        found = checksums_of_bin(*arrays.bin_at(index, length), first, arrays.seq_starts[first:last])
        wrong = [
            column for column, recorded in enumerate(arrays.checksums[index].tolist()) if found[column] != recorded
        ]
        return next((FILES.get(column, layout.SEQ_STARTS) for column in wrong), None)

    def _verify_block(self, arrays: ShardArrays, start: int, block: BinBlock) -> None:
        stop = start + len(block)
        if arrays.checksums is None or not any(arrays.wants_check(index) for index in range(start, stop)):
            return
        bad = np.flatnonzero((block.packed_len < 1) | (block.packed_len > self.pack_size))
        if bad.size:
            raise self.damaged(layout.PACKED_LEN, start + int(bad[0]))
        bad = np.flatnonzero(block.seq_offsets[1:] <= block.seq_offsets[:-1])
        if bad.size or int(block.seq_offsets[-1]) > len(arrays.seq_starts):
            raise self.damaged(layout.SEQ_OFFSETS, start + (int(bad[0]) if bad.size else len(block) - 1))
        wrong = (checksums_of_block(block) != arrays.checksums[start:stop]).any(axis=1)
        if wrong.any():
            raise self.unverified(start + int(wrong.argmax()))
        arrays.verified[start:stop] = 1

    def _open_arrays(self, keep: object) -> ShardArrays:
        with checked_shard(self.path) as checked:
            if checked.manifest_checksum != self.fingerprint:
                raise ShardChangedError(f"{self.path} was replaced since it was opened; open it again")
            open_arrays = read_arrays if self.reading.access == PREAD else map_arrays
            return open_arrays(checked.files, keep, self.reading.verify)
