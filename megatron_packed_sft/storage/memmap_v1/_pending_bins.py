"""Single bins collected into a block, so that a writer's cost per bin is one check and one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.bins import BinBlock, IntArray, cast_checked
from megatron_packed_sft.support import npy

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
            cast_checked(starts, npy.INDEX_DTYPE, npy.INDEX_LIMIT, f"{name}seq_start_id"),
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
