"""What a memmap_v1 writer holds back: single bins until they fill a block, and starts until their place is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.bins import BinBlock, IntArray, cast_checked
from megatron_packed_sft.support.array_files import INDEX_DTYPE, INDEX_LIMIT
from megatron_packed_sft.support.atomic import os_errors, write_at

_BUFFER_BYTES = 1 << 20


class PendingBins:
    """Up to 1 MB of consecutive bins in padded form that are not written yet.

    `stage` lays a bin out for checking; `keep` makes it part of the block; `take` hands the block over.

    Example:
        >>> import numpy as np
        >>> pending = PendingBins(pack_size=4, dtype="<i4", id_limit=100, pad_id=9)
        >>> pending.keep(7, pending.stage(7, np.array([1, 2]), np.array([1, 0]), np.array([0])))
        >>> first_bin, block = pending.take()
        >>> first_bin, block.input_ids.tolist()
        (7, [[1, 2, 9, 9]])
    """

    def __init__(self, pack_size: int, dtype: str, id_limit: int, pad_id: int) -> None:
        count = max(1, _BUFFER_BYTES // (pack_size * (np.dtype(dtype).itemsize + 1)))
        self._ids = np.empty((count, pack_size), dtype)
        self._mask = np.empty((count, pack_size), np.uint8)
        self._packed_len = np.empty(count, np.uint32)
        self._seq_offsets = np.zeros(count + 1, np.uint32)
        self._starts: list[npt.NDArray[np.uint32]] = []
        self._id_limit = id_limit
        self._pad_id = pad_id
        self._first_bin = 0

    def __len__(self) -> int:
        return len(self._starts)

    def accepts(self, bin_id: int) -> bool:
        """Return whether a bin can be kept now: there is room, and it follows the last one."""
        count = len(self._starts)
        return count == 0 or (count < len(self._ids) and bin_id == self._first_bin + count)

    def stage(self, bin_id: int, ids: IntArray, mask: IntArray, starts: IntArray) -> BinBlock:
        """Return the bin as a block of one, in the shard's dtypes; values that those cannot hold are an error."""
        name = f"bin {bin_id}: "
        count, length = len(self._starts), len(ids)
        bin_ids, bin_mask = self._ids[count], self._mask[count]
        # Arrays of the right dtype are copied as they are: the caller checks the values anyway.
        same_ids = (
            ids if ids.dtype == bin_ids.dtype else cast_checked(ids, bin_ids.dtype, self._id_limit, f"{name}input_ids")
        )
        same_mask = mask if mask.dtype == np.uint8 else cast_checked(mask, np.uint8, 2, f"{name}loss_mask")
        bin_ids[:length] = same_ids
        bin_ids[length:] = self._pad_id
        bin_mask[:length] = same_mask
        bin_mask[length:] = 0
        self._packed_len[count] = length
        return BinBlock(
            self._ids[count : count + 1],
            self._mask[count : count + 1],
            self._packed_len[count : count + 1],
            np.array([0, len(starts)], np.uint32),
            cast_checked(starts, INDEX_DTYPE, INDEX_LIMIT, f"{name}seq_start_id"),
        )

    def keep(self, bin_id: int, staged: BinBlock) -> None:
        """Make the bin that was staged last part of the block."""
        count = len(self._starts)
        if count == 0:
            self._first_bin = bin_id
        self._seq_offsets[count + 1] = self._seq_offsets[count] + len(staged.seq_starts)
        self._starts.append(staged.seq_starts)

    def take(self) -> tuple[int, BinBlock]:
        """Return (first bin, block) of all kept bins; afterwards there are none. Valid until the next `stage`."""
        count = len(self._starts)
        block = BinBlock(
            self._ids[:count],
            self._mask[:count],
            self._packed_len[:count],
            self._seq_offsets[: count + 1],
            np.concatenate(self._starts),
        )
        self._starts = []
        return self._first_bin, block


_NAME = "seq_starts.spool"
_ENTRIES_AT_ONCE = 1 << 18


class StartsSpool:
    """Appends starts as they come; gives them back in the order of their bins. 12 bytes of memory per bin.

    Example:
        >>> import tempfile, numpy as np
        >>> spool = StartsSpool(Path(tempfile.mkdtemp()), num_bins=2)
        >>> spool.append(1, np.array([0, 1], np.uint32), np.array([0], np.uint32))
        >>> spool.append(0, np.array([0, 2], np.uint32), np.array([0, 7], np.uint32))
        >>> [starts.tolist() for _, starts in spool.in_bin_order()]
        [[0, 7, 0]]
    """

    def __init__(self, directory: Path, num_bins: int) -> None:
        self._path = directory / _NAME
        self._counts = np.zeros(num_bins, np.uint32)
        self._places = np.zeros(num_bins, np.int64)
        self._size = 0
        with os_errors("write", self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, first_bin: int, seq_offsets: npt.NDArray[np.uint32], seq_starts: npt.NDArray[np.uint32]) -> None:
        """Take the starts of consecutive bins; `seq_offsets` delimit them, one entry more than bins."""
        num_bins = len(seq_offsets) - 1
        self._counts[first_bin : first_bin + num_bins] = seq_offsets[1:] - seq_offsets[:-1]
        self._places[first_bin : first_bin + num_bins] = self._size + (seq_offsets[:-1] - seq_offsets[0])
        with os_errors("write", self._path, seq_starts.nbytes):
            write_at(self._fd, seq_starts.view(np.uint8).data, self._size * 4)
        self._size += len(seq_starts)

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the CSR pointers over all bins."""
        offsets = np.zeros(len(self._counts) + 1, np.int64)
        np.cumsum(self._counts, dtype=np.int64, out=offsets[1:])
        return offsets

    def in_bin_order(self) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield (position in the CSR, starts) of some bins at a time, in the order of the bins."""
        offsets = self.offsets()
        first = 0
        while first < len(self._counts):
            # As many bins as fit, and at least one.
            limit = int(np.searchsorted(offsets, offsets[first] + _ENTRIES_AT_ONCE, side="right")) - 1
            last = max(limit, first + 1)
            yield int(offsets[first]), self._gather(first, last, offsets)
            first = last

    def remove(self) -> None:
        """Delete the spool's file; the staged directory must hold nothing but the shard."""
        self.close()
        with os_errors("remove", self._path):
            os.unlink(self._path)

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _gather(self, first: int, last: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        places = self._places[first:last]
        inside = offsets[first:last] - offsets[first]
        num_entries = int(offsets[last] - offsets[first])
        low = int(places.min())
        if np.array_equal(places - low, inside):  # they arrived in order: one read
            return self._read(low, num_entries)
        counts = self._counts[first:last]
        indices = np.arange(num_entries) + np.repeat(places - inside, counts)
        high = int((places + counts).max())
        if high - low <= 4 * _ENTRIES_AT_ONCE:
            source = self._read(low, high - low)
        else:
            low, source = 0, np.memmap(self._path, np.uint32, mode="r", shape=(self._size,))
        gathered: npt.NDArray[np.uint32] = np.asarray(source[indices - low])
        return gathered

    def _read(self, first: int, count: int) -> npt.NDArray[np.uint32]:
        with os_errors("read", self._path):
            return np.frombuffer(os.pread(self._fd, count * 4, first * 4), np.uint32)
