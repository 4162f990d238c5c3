"""The arrays of an open shard: all of them mapped, or the index in memory and bins read when they are asked for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.read_options import ALWAYS, FIRST_READ, NEVER
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checked_files import CheckedFile
from megatron_packed_sft.support.file_sizes import MappedSizes, changed_size

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

_LARGE = (layout.INPUT_IDS, layout.LOSS_MASK, layout.LOSS_WEIGHTS)

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
    ids, mask, packed_len, seq_offsets, seq_starts = (sound[name] for name in layout.ARRAY_FILES)
    weights, checksums = sound.get(layout.LOSS_WEIGHTS), sound.get(layout.BIN_CHECKSUMS)
    return ShardArrays(ids, mask, packed_len, seq_offsets, seq_starts, weights, checksums, **how)
