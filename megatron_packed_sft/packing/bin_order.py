"""In which order bins are read: shuffled, or grouped into steps of even cost. What is in a bin never changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import Int32, Int64
from megatron_packed_sft.support.drop_reasons import DropReason


def shuffled(num_bins: int, group_offsets: Int64, seed: int) -> Int32:
    """Return 0..num_bins-1, each group shuffled on its own."""
    from megatron_packed_sft.packing.search.fit_kernel import shuffle_groups

    order = np.arange(num_bins, dtype=np.int32)
    shuffle_groups(order, np.asarray(group_offsets, np.int64), np.uint64(seed))
    return order


def balanced(costs: Int64, global_batch: int, seed: int) -> Int32:
    """Sort bins by cost, cut them into steps, and shuffle the steps; a short step comes last.

    Inside a step bins stay sorted: with gradient accumulation, the bins that run at the same time are then the most
    alike. Bins of equal cost are shuffled, so that steps do not follow the data.

    Example:
        >>> order = balanced(np.array([1, 9, 2, 8]), global_batch=2, seed=0)
        >>> sorted(map(sorted, order.reshape(2, 2).tolist()))
        [[0, 2], [1, 3]]
    """
    num_bins = costs.size
    order = shuffled(num_bins, np.array([0, num_bins]), seed)
    order = order[np.argsort(-costs[order], kind="stable")]
    num_whole = num_bins // global_batch
    whole = order[: num_whole * global_batch].reshape(num_whole, global_batch)
    # Another seed than above: the same one would undo part of the mixing when a step is a single bin.
    turns = shuffled(num_whole, np.array([0, num_whole]), seed ^ 0x5DEECE66D)
    return np.concatenate([whole[turns].ravel(), order[num_whole * global_batch :]]).astype(np.int32)


def hold_back(plan: PackPlan, window_offsets: Int64, global_batch: int) -> tuple[PackPlan, Int64]:
    """Leave out the emptiest bins, so that the number of bins is a multiple of `global_batch`.

    `window_offsets` are positions among the bins; they are returned as positions among those that stay.
    """
    remainder = plan.num_bins % global_batch
    if plan.num_bins < global_batch:
        raise InvalidInputError(
            f"whole_batches would hold back everything: {plan.num_bins} bins are fewer than a global batch of "
            f"{global_batch}; lower global_batch or turn whole_batches off"
        )
    is_out = np.zeros(plan.num_bins, np.bool_)
    is_out[np.argsort(plan.bin_room, kind="stable")[:remainder]] = True
    items_per_bin = np.diff(plan.bin_offsets)
    is_item_out = np.repeat(is_out, items_per_bin)
    held_back = np.sort(plan.indices[is_item_out])
    indices = plan.indices[~is_item_out]
    num_sequences = held_back.size
    if plan.chunks is not None:
        # A sequence is dropped only when all of its chunks are.
        num_sequences = np.setdiff1d(plan.chunks.sequence[held_back], plan.chunks.sequence[indices]).size
    num_tokens = int(plan.item_lengths[held_back].sum(dtype=np.int64))
    left = replace(
        plan,
        bin_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(items_per_bin[~is_out])]),
        indices=indices,
        accounting=plan.accounting.with_drop(DropReason.HELD_BACK, num_sequences, num_tokens),
        held_back=held_back,
    )
    num_left_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_out)])
    return left, num_left_before[window_offsets]


def trained_tokens_by_bin(plan: PackPlan, trained_tokens: npt.ArrayLike | None) -> Int64:
    """Add up the trained tokens of each bin. A chunk counts in proportion to its new tokens.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> trained_tokens_by_bin(pack([3, 1, 4], pack_size=4), [1, 1, 2]).tolist()
        [2, 2]
    """
    per_sequence = np.asarray(trained_tokens)
    num_sequences = plan.accounting.num_sequences
    if per_sequence.shape != (num_sequences,) or per_sequence.dtype.kind not in "iu" or per_sequence.min() < 0:
        raise InvalidInputError(
            f"trained_tokens must hold one count >= 0 for each of the {num_sequences} sequences, "
            f"not {per_sequence.dtype} with shape {per_sequence.shape}"
        )
    per_item = per_sequence.astype(np.int64)
    if plan.chunks is not None:
        new_tokens = (plan.item_lengths - plan.chunks.masked_prefix).astype(np.int64)
        whole = np.zeros(num_sequences, np.int64)
        np.add.at(whole, plan.chunks.sequence, new_tokens)
        per_item = per_item[plan.chunks.sequence] * new_tokens // whole[plan.chunks.sequence]
    return np.add.reduceat(per_item[plan.indices], plan.bin_offsets[:-1])
