"""Open and read memmap_v1 shards: everything is checked before the first byte is mapped."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import PackedSFTError, ShardChangedError, ShardFileError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
from megatron_packed_sft.storage.memmap_v1.manifest import (
    ARRAY_FILES,
    BIN_CHECKSUMS,
    FILES,
    INPUT_IDS,
    LOSS_MASK,
    LOSS_WEIGHTS,
    MAX_MANIFEST_BYTES,
    PACKED_LEN,
    SEQ_OFFSETS,
    SEQ_STARTS,
    ShardManifest,
    checksums_array,
    checksums_of_bin,
    checksums_of_block,
    is_shard,
    parse_manifest,
    shard_arrays,
    weights_array,
)
from megatron_packed_sft.storage.read_options import ALWAYS, FIRST_READ, NEVER, PREAD, ReadOptions
from megatron_packed_sft.storage.registry import not_a_shard
from megatron_packed_sft.support import file_maps
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checked_files import CheckedDirectory, CheckedFile
from megatron_packed_sft.support.checksum import checksum, file_checksum
from megatron_packed_sft.support.file_maps import LazyMaps, will_need
from megatron_packed_sft.support.file_sizes import MappedSizes, changed_size
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import local_path

# Where the arrays of a shard lie in memory, as compiled code takes it; see `ShardArrays.addresses`.
IDS_ADDRESS = 0
MASK_ADDRESS = 1
WEIGHTS_ADDRESS = 2  # 0: no weights
LENGTHS_ADDRESS = 3
OFFSETS_ADDRESS = 4
STARTS_ADDRESS = 5
CHECKSUMS_ADDRESS = 6  # 0: there is nothing to compare bins with
VERIFIED_ADDRESS = 7  # 0: bins are always compared
NUM_BINS = 8
PACK_SIZE = 9
NUM_STARTS = 10
ID_BYTES = 11
NUM_CHECKSUMS = 12  # of each bin
NUM_ADDRESSES = 13

_LARGE = (INPUT_IDS, LOSS_MASK, LOSS_WEIGHTS)

Bins = tuple[npt.NDArray[Any], npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]


@dataclass(frozen=True, eq=False)
class ShardArrays(BinBlock):
    """All bins of a shard as one block, read-only.

    With `access: pread` the large arrays are empty (no bins), and `files` reads bins.
    """

    checksums: npt.NDArray[np.uint64] | None = None  # [num_bins, 3 or 4]; None: not recorded
    sizes: MappedSizes | None = None  # of mapped files
    files: BinFiles | None = None
    verify: str = FIRST_READ
    verified: npt.NDArray[np.uint8] = field(init=False)  # 1: this process has compared the bin with its checksums
    lengths_view: memoryview = field(init=False)
    offsets_view: memoryview = field(init=False)
    verified_view: memoryview = field(init=False)
    addresses: npt.NDArray[np.int64] = field(init=False)  # where everything lies: [NUM_ADDRESSES]

    def __post_init__(self) -> None:
        # A byte per bin: threads may set it twice, to the same value.
        object.__setattr__(self, "verified", np.zeros(0 if self.checksums is None else len(self), np.uint8))
        # Python's own integers, without NumPy's scalars in between: half the time of reading one bin.
        object.__setattr__(self, "lengths_view", self.packed_len.data)
        object.__setattr__(self, "offsets_view", self.seq_offsets.data)
        object.__setattr__(self, "verified_view", self.verified.data)
        # Not a cached_property: in Python 3.11 it has a lock, which a fork may copy while another thread holds it.
        object.__setattr__(self, "addresses", self._addresses())

    def wants_check(self, index: int) -> bool:
        """Return whether a bin must be compared with its checksums now."""
        if self.checksums is None or self.verify == NEVER:
            return False
        return self.verify == ALWAYS or not self.verified_view[index]

    def bin_at(self, index: int, length: int) -> Bins:
        """Return ids, mask and weights of one bin, without padding."""
        if self.files is None:
            weights = None if self.loss_weights is None else self.loss_weights[index, :length]
            return self.input_ids[index, :length], self.loss_mask[index, :length], weights
        ids, mask, weights = self.files.block(index, index + 1)
        return ids[0, :length], mask[0, :length], None if weights is None else weights[0, :length]

    def padded(self, start: int, stop: int) -> Bins:
        """Return ids, mask and weights of bins start..stop-1: read-only views, or arrays of their own."""
        if self.files is not None:
            return self.files.block(start, stop)
        weights = None if self.loss_weights is None else self.loss_weights[start:stop]
        return self.input_ids[start:stop], self.loss_mask[start:stop], weights

    def _addresses(self) -> npt.NDArray[np.int64]:
        """Return where everything lies; valid while this object lives."""
        arrays = (
            *(self.input_ids, self.loss_mask, self.loss_weights),
            *(self.packed_len, self.seq_offsets, self.seq_starts, self.checksums, self.verified),
        )
        places = [0 if array is None else array.ctypes.data for array in arrays]
        if self.verify == NEVER:
            places[CHECKSUMS_ADDRESS] = 0
        if self.verify == ALWAYS:
            places[VERIFIED_ADDRESS] = 0
        num_checksums = 0 if self.checksums is None else self.checksums.shape[1]
        shape = (len(self), self.input_ids.shape[1], len(self.seq_starts), self.input_ids.itemsize, num_checksums)
        return np.array([*places, *shape], np.int64)

    def addresses_of(self, large: Bins) -> npt.NDArray[np.int64]:
        """Return the addresses with those of other large arrays, which hold some of the bins."""
        addresses = self.addresses.copy()
        addresses[:LENGTHS_ADDRESS] = [0 if array is None else array.ctypes.data for array in large]
        return addresses


class BinFiles:
    """Reads bins of a shard from its open files. A file that was cut is an error, in whatever moment."""

    def __init__(self, files: Sequence[CheckedFile], keep: object) -> None:
        self._files: list[CheckedFile] = []
        self._keep = keep
        for file in files:
            with os_errors("open", file.path):
                fd = os.dup(file.fd)
            weakref.finalize(self, os.close, fd)  # at once: the next file may be one too many
            self._files.append(file._replace(fd=fd))

    def bins(self, numbers: Sequence[int]) -> Bins:
        """Return these bins in padded form, in arrays of their own."""
        return self._read([(number, 1) for number in numbers])

    def block(self, start: int, stop: int) -> Bins:
        """Return bins start..stop-1 in padded form, in arrays of their own."""
        return self._read([(start, stop - start)])

    def advise(self, numbers: Iterable[int]) -> None:
        """Have the kernel read these bins ahead."""
        for number in numbers:
            for file in self._files:
                bin_bytes = file.header.shape[1] * np.dtype(file.header.dtype).itemsize
                place = file.header.data_offset + number * bin_bytes
                os.posix_fadvise(file.fd, place, bin_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, runs: Sequence[tuple[int, int]]) -> Bins:
        arrays = []
        for file in self._files:
            width = file.header.shape[1]
            array = np.empty((sum(count for _, count in runs), width), file.header.dtype)
            bin_bytes = width * array.itemsize
            view, place = array.reshape(-1).view(np.uint8).data, 0
            for first, count in runs:
                end = place + count * bin_bytes
                read_fully(file, view[place:end], file.header.data_offset + first * bin_bytes)
                place = end
            arrays.append(array)
        return arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None


def read_fully(file: CheckedFile, view: memoryview, offset: int) -> None:
    """Fill a buffer from a place of a file; a file that ends before is an error."""
    filled = 0
    while filled < len(view):
        with os_errors("read", file.path):
            count = os.preadv(file.fd, [view[filled:]], offset + filled)
        if count == 0:
            raise changed_size(file.path, os.fstat(file.fd).st_size, file.size)
        filled += count


def map_arrays(files: Mapping[str, CheckedFile], keep: object, verify: str) -> ShardArrays:
    """Map all files of a shard."""
    sizes = MappedSizes()
    for file in files.values():
        sizes.add(file.path, file.fd)
    mapped = {name: file.map(keep) for name, file in files.items()}
    return _arrays(mapped, verify=verify, sizes=sizes)


def read_arrays(files: Mapping[str, CheckedFile], keep: object, verify: str) -> ShardArrays:
    """Read the index of a shard into memory, and keep the large files open."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, file in files.items():
        if name in _LARGE:
            found[name] = np.empty((0, file.header.shape[1]), file.header.dtype)
        else:
            found[name] = array = np.empty(file.header.shape, file.header.dtype)
            read_fully(file, array.reshape(-1).view(np.uint8).data, file.header.data_offset)
        found[name].flags.writeable = False
    return _arrays(found, verify=verify, files=BinFiles([files[name] for name in _LARGE if name in files], keep))


def _arrays(found: Mapping[str, npt.NDArray[Any]], **how: Any) -> ShardArrays:
    # Headers of odd length, which other programs may write, leave numbers at odd addresses: a copy has none.
    sound = {name: array if array.flags.aligned else array.copy() for name, array in found.items()}
    ids, mask, packed_len, seq_offsets, seq_starts = (sound[name] for name in ARRAY_FILES)
    weights, checksums = sound.get(LOSS_WEIGHTS), sound.get(BIN_CHECKSUMS)
    return ShardArrays(ids, mask, packed_len, seq_offsets, seq_starts, weights, checksums, **how)


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
        *others, starts = shard_arrays(
            manifest.num_bins, manifest.pack_size, manifest.num_sequences or 0, manifest.dtype
        )
        files = {spec.name: directory.array(spec, records.get(spec.name)) for spec in others}
        if manifest.num_sequences is None:  # seed-only manifests do not record it; the CSR's last pointer does
            starts = starts._replace(shape=(_last_pointer(files[SEQ_OFFSETS]),))
        optional = []
        if manifest.has_weights:
            optional.append(weights_array(manifest.num_bins, manifest.pack_size))
        if manifest.has_bin_checksums:
            optional.append(checksums_array(manifest.num_bins, has_weights=manifest.has_weights))
        for spec in (starts, *optional):
            files[spec.name] = directory.array(spec, records.get(spec.name))
        yield CheckedShard(manifest, checksum(data), files)


def _last_pointer(seq_offsets: CheckedFile) -> int:
    with os_errors("read", seq_offsets.path):
        return int.from_bytes(os.pread(seq_offsets.fd, 4, seq_offsets.size - 4), "little")


def open_memmap_shard(path: str | os.PathLike[str]) -> MemmapShard:
    """Open a memmap_v1 shard directory; only the manifest and the headers are read."""
    location = local_path(path)
    if not is_shard(location):
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
            raise self.damaged(PACKED_LEN, index)
        if not first < last <= len(arrays.seq_starts):
            raise self.damaged(SEQ_OFFSETS, index)
        starts = arrays.seq_starts[first:last]
        if starts[0] != 0 or starts[-1] >= length:
            raise self.damaged(SEQ_STARTS, index) if arrays.checksums is None else self.unverified(index)
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
            for name in (PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS, BIN_CHECKSUMS):
                if records and algorithm and file_checksum(self.path / name, algorithm) != records[name].checksum:
                    return name
        arrays = self.arrays
        length, first, last = arrays.lengths_view[index], *arrays.offsets_view[index : index + 2]
        assert arrays.checksums is not None
        found = checksums_of_bin(*arrays.bin_at(index, length), first, arrays.seq_starts[first:last])
        wrong = [
            column for column, recorded in enumerate(arrays.checksums[index].tolist()) if found[column] != recorded
        ]
        return next((FILES.get(column, SEQ_STARTS) for column in wrong), None)

    def _verify_block(self, arrays: ShardArrays, start: int, block: BinBlock) -> None:
        stop = start + len(block)
        if arrays.checksums is None or not any(arrays.wants_check(index) for index in range(start, stop)):
            return
        bad = np.flatnonzero((block.packed_len < 1) | (block.packed_len > self.pack_size))
        if bad.size:
            raise self.damaged(PACKED_LEN, start + int(bad[0]))
        bad = np.flatnonzero(block.seq_offsets[1:] <= block.seq_offsets[:-1])
        if bad.size or int(block.seq_offsets[-1]) > len(arrays.seq_starts):
            raise self.damaged(SEQ_OFFSETS, start + (int(bad[0]) if bad.size else len(block) - 1))
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
