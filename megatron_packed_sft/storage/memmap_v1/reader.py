"""Open and read memmap_v1 shards: everything is checked before the first byte is mapped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import PackedSFTError, ShardChangedError, ShardFileError
from megatron_packed_sft.storage.bins import BinBlock, PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import (
    ALWAYS,
    FIRST_READ,
    NEVER,
    Lengths,
    PackedShard,
    ReadOptions,
    lengths_of_index,
)
from megatron_packed_sft.storage.memmap_v1.manifest import (
    BIN_CHECKSUMS,
    FILES,
    INPUT_IDS,
    LOSS_MASK,
    LOSS_WEIGHTS,
    MAX_MANIFEST_BYTES,
    PACKED_LEN,
    SEQ_OFFSETS,
    SEQ_STARTS,
    Checksums,
    ShardManifest,
    checksums_of_bin,
    checksums_of_block,
    is_shard,
    parse_manifest,
)
from megatron_packed_sft.storage.registry import not_a_shard
from megatron_packed_sft.support import file_maps
from megatron_packed_sft.support.checked_files import CheckedDirectory, CheckedFile
from megatron_packed_sft.support.checksum import checksum, file_checksum
from megatron_packed_sft.support.file_maps import LazyMaps, will_need
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


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardArrays(BinBlock):
    """All bins of a shard as one block: read-only maps of its files."""

    checksums: Checksums  # [num_bins, 3 or 4]
    verify: str = FIRST_READ
    verified: npt.NDArray[np.uint8] = field(init=False)  # 1: this process has compared the bin with its checksums
    lengths_view: memoryview = field(init=False)
    offsets_view: memoryview = field(init=False)
    verified_view: memoryview = field(init=False)
    addresses: npt.NDArray[np.int64] = field(init=False)  # of all arrays: [NUM_ADDRESSES]

    def __post_init__(self) -> None:
        # A byte per bin: threads may set it twice, to the same value.
        object.__setattr__(self, "verified", np.zeros(len(self), np.uint8))
        # Memoryviews give Python's integers directly, which halves the time of reading one bin.
        object.__setattr__(self, "lengths_view", self.packed_len.data)
        object.__setattr__(self, "offsets_view", self.seq_offsets.data)
        object.__setattr__(self, "verified_view", self.verified.data)
        # Not a cached_property: in Python 3.11 it has a lock, which a fork may copy while another thread holds it.
        object.__setattr__(self, "addresses", self._addresses())

    def wants_check(self, index: int) -> bool:
        """Return whether a bin must be compared with its checksums now."""
        return self.verify != NEVER and (self.verify == ALWAYS or not self.verified_view[index])

    def _addresses(self) -> npt.NDArray[np.int64]:
        """Return the addresses of all arrays, and their sizes; valid while this object lives."""
        arrays = (
            *(self.input_ids, self.loss_mask, self.loss_weights),
            *(self.packed_len, self.seq_offsets, self.seq_starts, self.checksums, self.verified),
        )
        places = [0 if array is None else array.ctypes.data for array in arrays]
        if self.verify == NEVER:
            places[CHECKSUMS_ADDRESS] = 0
        if self.verify == ALWAYS:
            places[VERIFIED_ADDRESS] = 0
        shape = (*self.input_ids.shape, len(self.seq_starts), self.input_ids.itemsize, self.checksums.shape[1])
        return np.array([*places, *shape], np.int64)


class CheckedShard(NamedTuple):
    """An open shard directory: the manifest and its files by name, in the order of the format."""

    manifest: ShardManifest
    manifest_checksum: str
    files: Mapping[str, CheckedFile]


@contextlib.contextmanager
def checked_shard(path: Path) -> Iterator[CheckedShard]:
    """Open a shard's files and check all of them against the manifest; they are closed when the block is left."""
    with CheckedDirectory.open(path) as directory:
        data = directory.read(MANIFEST, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(data, str(path / MANIFEST))
        files = {spec.name: directory.array(spec, manifest.files[spec.name]) for spec in manifest.arrays()}
        yield CheckedShard(manifest, checksum(data), files)


def open_memmap_shard(path: str | os.PathLike[str]) -> MemmapShard:
    """Open a memmap_v1 shard directory; only the manifest and the headers are read."""
    location = local_path(path)
    if not is_shard(location):
        raise not_a_shard(location)
    with checked_shard(location) as checked:
        return MemmapShard(location, checked.manifest, checked.manifest_checksum)


class MemmapShard(LazyMaps[ShardArrays], PackedShard):
    """An open shard. Its arrays are read-only views of the files, shared by all processes of the machine.

    `arrays` is all of it as one block; see `LazyMaps` for when it is mapped. A shard that was replaced on disk is
    refused when it would be mapped again; existing maps keep showing the complete old bytes. Bins are compared with
    their checksums when they are first read; see `ReadOptions`. A file that is truncated in place while it is mapped
    ends the process (SIGBUS).

    Give torch a copy (`shard.bin(i, copy=True)`, or `torch.tensor(view)`): `torch.from_numpy` on a read-only view
    warns, and an in-place operation on the result would kill the process.
    """

    def __init__(self, path: Path, manifest: ShardManifest, manifest_checksum: str) -> None:
        self.path = path
        self.manifest = manifest
        self.reading = ReadOptions()
        self._manifest_checksum = manifest_checksum
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

    @property
    def fingerprint(self) -> str:
        """The checksum of the manifest, which holds those of the files."""
        return self._manifest_checksum

    @property
    def vocab_bound(self) -> int:
        """What every id is below, as the manifest says."""
        return self.manifest.id_limit

    def read_with(self, options: ReadOptions) -> None:
        """Choose how bins are read from now on."""
        with file_maps.POOL.lock:  # no other thread maps it in between
            if options != self.reading:
                self.unmap()
            self.reading = options

    def __getitem__(self, index: int) -> PackedBin:
        return self.bin(index)

    def bin(self, index: int, *, copy: bool = False) -> PackedBin:
        """Return bin `index`, as read-only views or as arrays of your own."""
        if not 0 <= index < self._num_bins:
            raise IndexError(f"{self.path}: bin {index} of {len(self)}")
        arrays = self.arrays
        length = arrays.lengths_view[index]
        first, last = arrays.offsets_view[index], arrays.offsets_view[index + 1]
        # Enough that a damaged index is an error here, and that nothing behind the arrays is read.
        if not 1 <= length <= self.manifest.pack_size:
            raise self._damaged(PACKED_LEN, index)
        if not first < last <= len(arrays.seq_starts):
            raise self._damaged(SEQ_OFFSETS, index)
        starts = arrays.seq_starts[first:last]
        if starts[0] != 0 or starts[-1] >= length:
            raise self._unverified(index)
        ids, mask = arrays.input_ids[index, :length], arrays.loss_mask[index, :length]
        weights = None if arrays.loss_weights is None else arrays.loss_weights[index, :length]
        if arrays.wants_check(index):
            if checksums_of_bin(ids, mask, weights, first, starts) != arrays.checksums[index].tolist():
                raise self._unverified(index)
            arrays.verified_view[index] = 1
        masks = mask if weights is None else weights
        return PackedBin(ids.copy(), masks.copy(), starts.copy()) if copy else PackedBin(ids, masks, starts)

    def block(self, start: int, stop: int) -> BinBlock:
        """Return bins start..stop-1 in padded form: the large arrays as read-only views."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"{self.path}: bins {start}..{stop - 1} of {len(self)}")
        arrays = self.arrays
        # Copies: what is checked below is what is used, even while another process writes to the files.
        lengths, offsets = arrays.packed_len[start:stop].copy(), arrays.seq_offsets[start : stop + 1].copy()
        starts = arrays.seq_starts[int(offsets[0]) : int(offsets[-1])]
        weights = None if arrays.loss_weights is None else arrays.loss_weights[start:stop]
        block = BinBlock(arrays.input_ids[start:stop], arrays.loss_mask[start:stop], lengths, offsets, starts, weights)
        self._verify_block(arrays, start, block)
        return block

    def blocks(self, width: int, pad_id: int) -> Iterator[BinBlock]:
        """Yield all bins in order, as read-only views of what is stored."""
        return (self.block(start, stop) for start, stop in self.block_ranges(width))

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch; reads the index only."""
        arrays = self.arrays
        counts = np.diff(arrays.seq_offsets.astype(np.int64))
        return int((arrays.packed_len.astype(np.int64) - counts).max())

    def sequence_lengths(self) -> tuple[Lengths, Lengths]:
        """Return the lengths of all sequences and their number in each bin; reads the index only."""
        arrays = self.arrays
        return lengths_of_index(arrays.packed_len, arrays.seq_offsets, arrays.seq_starts, self.path)

    def mapped_bins(self) -> ShardArrays:
        """Return all bins with their addresses, for compiled code."""
        return self.arrays

    def advise(self, bins: Iterable[int]) -> None:
        """Have the kernel read these bins ahead: they are needed soon."""
        arrays = self.arrays
        for index in bins:
            will_need(arrays.input_ids[index])
            will_need(arrays.loss_mask[index])
            if arrays.loss_weights is not None:
                will_need(arrays.loss_weights[index])

    def damaged_bin(self, index: int, problem: Literal["length", "sequences", "checksum"]) -> PackedSFTError:
        """Return the error for a bin that compiled code found to be damaged: it names the file."""
        if problem == "checksum":
            return self._unverified(index)
        return self._damaged(PACKED_LEN if problem == "length" else SEQ_OFFSETS, index)

    def __repr__(self) -> str:
        return f"MemmapShard({str(self.path)!r}, {len(self)} bins of {self.pack_size})"

    def _damaged(self, name: str, index: int) -> ShardFileError:
        return ShardFileError(f"{self.path / name} is damaged at bin {index}; run `packed-sft validate` on the shard")

    def _unverified(self, index: int) -> PackedSFTError:
        """Return the error for a bin that does not match its checksums: it names the file that was damaged."""
        try:
            name = self._damaged_file(index)
        except PackedSFTError as error:  # a file is missing or truncated, which explains it
            return error
        if name is None:
            return ShardFileError(
                f"{self.path}: bin {index} did not match its checksum when it was read, and does now; check whether "
                "another process writes to the shard, and whether memory, disk and network are sound"
            )
        remedy = "restore the shard from its original, and run `packed-sft validate` on it"
        if self.holder is not None:
            remedy = "it is a copy from an object store: run `packed-sft cache clear` to fetch it again"
        return ShardFileError(
            f"{self.path / name} is damaged at bin {index}, which does not match the checksum that was written with "
            f"it; {remedy}"
        )

    def _damaged_file(self, index: int) -> str | None:
        """Find the file: the small ones are read again as a whole; of the large ones, the wrong column tells.

        None if nothing is wrong when it is read again.
        """
        with checked_shard(self.path) as checked:
            manifest = checked.manifest
            for name in (PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS, BIN_CHECKSUMS):
                if file_checksum(self.path / name, manifest.checksum_algorithm) != manifest.files[name].checksum:
                    return name
        arrays = self.arrays
        length, first, last = arrays.lengths_view[index], *arrays.offsets_view[index : index + 2]
        weights = None if arrays.loss_weights is None else arrays.loss_weights[index, :length]
        ids, mask = arrays.input_ids[index, :length], arrays.loss_mask[index, :length]
        found = checksums_of_bin(ids, mask, weights, first, arrays.seq_starts[first:last])
        recorded = arrays.checksums[index].tolist()
        wrong = [column for column, value in enumerate(recorded) if found[column] != value]
        return next((FILES.get(column, SEQ_STARTS) for column in wrong), None)

    def _verify_block(self, arrays: ShardArrays, start: int, block: BinBlock) -> None:
        stop = start + len(block)
        if not any(arrays.wants_check(index) for index in range(start, stop)):
            return
        bad = np.flatnonzero((block.packed_len < 1) | (block.packed_len > self.pack_size))
        if bad.size:
            raise self._damaged(PACKED_LEN, start + int(bad[0]))
        bad = np.flatnonzero(block.seq_offsets[1:] <= block.seq_offsets[:-1])
        if bad.size or int(block.seq_offsets[-1]) > len(arrays.seq_starts):
            raise self._damaged(SEQ_OFFSETS, start + (int(bad[0]) if bad.size else len(block) - 1))
        wrong = (checksums_of_block(block) != arrays.checksums[start:stop]).any(axis=1)
        if wrong.any():
            raise self._unverified(start + int(wrong.argmax()))
        arrays.verified[start:stop] = 1

    def _open_arrays(self, keep: object) -> ShardArrays:
        with checked_shard(self.path) as checked:
            if checked.manifest_checksum != self._manifest_checksum:
                raise ShardChangedError(f"{self.path} was replaced since it was opened; open it again")
            mapped: dict[str, npt.NDArray[Any]] = {name: file.map(keep) for name, file in checked.files.items()}
        return ShardArrays(
            input_ids=mapped[INPUT_IDS],
            loss_mask=mapped[LOSS_MASK],
            packed_len=mapped[PACKED_LEN],
            seq_offsets=mapped[SEQ_OFFSETS],
            seq_starts=mapped[SEQ_STARTS],
            loss_weights=mapped.get(LOSS_WEIGHTS),
            checksums=mapped[BIN_CHECKSUMS],
            verify=self.reading.verify,
        )
