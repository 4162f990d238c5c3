"""Whole shards in blocks, whatever the storage: straight out of its arrays where it has some, else bin by bin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_packed_sft.errors import ShardError
from megatron_packed_sft.storage.bins import BinBlock, PackedBin
from megatron_packed_sft.storage.flat_files import FlatShard
from megatron_packed_sft.storage.loss_weights import mask_and_weights
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.support.array_files import INDEX_DTYPE, WEIGHT_DTYPE

_BLOCK_BYTES = 4 << 20


def blocks_of(shard: Any, width: int, pad_id: int) -> Iterator[BinBlock]:
    """Yield all bins of a shard in order, padded to `width` with `pad_id`, in arrays that may be written to.

    Memory-mapped shards give read-only views of what they store, with their own width and padding.
    """
    bins_at_once = max(1, _BLOCK_BYTES // (width * 5))
    for start in range(0, len(shard), bins_at_once):
        stop = min(start + bins_at_once, len(shard))
        if isinstance(shard, MemmapShard):
            yield shard.block(start, stop)
        elif isinstance(shard, FlatShard):
            yield shard.block(start, stop, width, pad_id)
        else:
            yield block_of([shard[index] for index in range(start, stop)], width, pad_id)


def block_of(bins: Sequence[PackedBin], width: int, pad_id: int = 0) -> BinBlock:
    """Return bins in padded form, in arrays of their own.

    Example:
        >>> bins = [PackedBin(np.array([5, 6]), np.array([1, 0]), np.array([0]))]
        >>> block_of(bins, width=4, pad_id=9).input_ids.tolist()
        [[5, 6, 9, 9]]
    """
    for index, one in enumerate(bins):
        if not len(one.input_ids) == len(one.loss_mask) <= width:
            raise ShardError(
                f"bin {index} of a block has {len(one.input_ids)} ids and {len(one.loss_mask)} mask values, and room "
                f"for {width}; its storage is at fault"
            )
    input_ids = np.full((len(bins), width), pad_id, np.int32)
    loss_mask = np.zeros((len(bins), width), np.uint8)
    loss_weights = None
    for index, (ids, mask_or_weights, _) in enumerate(bins):
        mask, weights = mask_and_weights(mask_or_weights, f"loss_mask of bin {index} of a block")
        input_ids[index, : len(ids)] = ids
        loss_mask[index, : len(mask)] = mask
        if weights is not None and loss_weights is None:
            loss_weights = loss_mask.astype(WEIGHT_DTYPE)
        if loss_weights is not None:
            loss_weights[index, : len(mask)] = mask if weights is None else weights
    counts = [len(one.seq_start_id) for one in bins]
    return BinBlock(
        input_ids,
        loss_mask,
        np.array([len(one.input_ids) for one in bins], INDEX_DTYPE),
        np.concatenate(([0], np.cumsum(counts))).astype(INDEX_DTYPE),
        np.concatenate([np.asarray(one.seq_start_id, INDEX_DTYPE) for one in bins]),
        loss_weights,
    )


def clear_sequence_ends(block: BinBlock) -> int:
    """Set the loss mask to 0 at the last token of every sequence, in place; return how many were not 0."""
    if not block.loss_mask.flags.writeable:
        return 0  # a view of a memmap_v1 shard, where these places are 0
    from megatron_packed_sft.storage import bin_kernel

    num_cleared = int(
        bin_kernel.clear_sequence_ends(block.loss_mask, block.packed_len, block.seq_offsets, block.seq_starts)
    )
    if num_cleared and block.loss_weights is not None:
        block.loss_weights[block.loss_mask == 0] = 0
    return num_cleared
