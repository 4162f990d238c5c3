"""The checksums of single bins, so that a bin can be verified when it is read: bin_checksums.npy.

    column 0   input_ids     the bytes of input_ids[bin, :packed_len]
    column 1   loss_mask     the bytes of loss_mask[bin, :packed_len]
    column 2   index         packed_len, the two entries of seq_offsets and the bin's seq_starts, each as <u4
    column 3   loss_weights  the bytes of loss_weights[bin, :packed_len]; only in a shard with weights

Each is XXH3-64 with seed 0. Together they cover everything that decides a bin: a wrong length changes all columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.support.checksum import span_checksums

Checksums = npt.NDArray[np.uint64]
INPUT_IDS = 0
LOSS_MASK = 1
INDEX = 2
LOSS_WEIGHTS = 3
_NUM_INDEX_NUMBERS = 3  # before a bin's starts

# Which file a column vouches for. The index is kept in three.
FILES = {INPUT_IDS: layout.INPUT_IDS, LOSS_MASK: layout.LOSS_MASK, LOSS_WEIGHTS: layout.LOSS_WEIGHTS}


def checksums_of_array(padded: npt.NDArray[Any], packed_len: npt.NDArray[np.uint32]) -> Checksums:
    """Return the checksums of bins in one of the large arrays, without their padding."""
    addresses = padded.ctypes.data + np.arange(len(padded)) * padded.strides[0]
    return span_checksums(addresses, packed_len.astype(np.int64) * padded.itemsize)


def checksums_of_index(
    packed_len: npt.NDArray[np.uint32], seq_offsets: npt.NDArray[np.integer[Any]], seq_starts: npt.NDArray[np.uint32]
) -> Checksums:
    """Return the checksums of the index of consecutive bins.

    Args:
        packed_len: of these bins.
        seq_offsets: one entry more, as in the whole shard.
        seq_starts: of these bins.
    """
    num_bins = len(packed_len)
    offsets = seq_offsets.astype(np.int64)
    counts = np.diff(offsets)
    places = offsets[:-1] - offsets[0] + np.arange(num_bins) * _NUM_INDEX_NUMBERS
    message = np.empty(len(seq_starts) + num_bins * _NUM_INDEX_NUMBERS, "<u4")
    message[places] = packed_len
    message[places + 1] = offsets[:-1]
    message[places + 2] = offsets[1:]
    message[np.arange(len(seq_starts)) + np.repeat(np.arange(1, num_bins + 1) * _NUM_INDEX_NUMBERS, counts)] = (
        seq_starts
    )
    return span_checksums(message.ctypes.data + places * 4, (counts + _NUM_INDEX_NUMBERS) * 4)


def checksums_of_block(block: BinBlock) -> Checksums:
    """Return all columns of consecutive bins; the offsets of the block are those of the whole shard."""
    columns = [
        checksums_of_array(block.input_ids, block.packed_len),
        checksums_of_array(block.loss_mask, block.packed_len),
        checksums_of_index(block.packed_len, block.seq_offsets, block.seq_starts),
    ]
    if block.loss_weights is not None:
        columns.append(checksums_of_array(block.loss_weights, block.packed_len))
    return np.stack(columns, axis=1)


def checksums_of_bin(
    ids: npt.NDArray[Any],
    mask: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.float32] | None,
    first: int,
    starts: npt.NDArray[np.uint32],
) -> list[int]:
    """Return all columns of one bin, without compiled code: for the first bin that somebody looks at.

    Args:
        ids, mask, weights: of the bin, without padding.
        first: the bin's entry of seq_offsets.
        starts: of its sequences.

    Example:
        >>> checksums = checksums_of_bin(np.array([5, 6], "<i4"), np.array([1, 0], "u1"), None, 0, np.array([0], "<u4"))
        >>> [f"{one:016x}" for one in checksums]
        ['e2d593246baa1915', 'ab94ac0ace7276c0', 'fb54cb6322be3888']
    """
    numbers = np.array([len(ids), first, first + len(starts)], "<u4")
    index = numbers.tobytes() + starts.tobytes()
    parts: list[Any] = [ids, mask, index] if weights is None else [ids, mask, index, weights]
    return [xxhash.xxh3_64_intdigest(part) for part in parts]
