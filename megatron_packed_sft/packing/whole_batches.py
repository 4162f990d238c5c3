"""Whole batches, and what each bin has to train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.accounting import HELD_BACK
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.problem import Int64


def hold_back(plan: PackPlan, window_offsets: Int64, global_batch: int) -> tuple[PackPlan, Int64]:
    """Leave out the emptiest bins, so that the number of bins is a multiple of `global_batch`.

    `window_offsets` are positions among the bins; they are returned as positions among those that stay.
    """
    remainder = plan.num_bins % global_batch
    if plan.num_bins < global_batch:
        raise InvalidInputError(
            f"whole_batches would hold back everything: {plan.num_bins} bins are less than a global batch of "
            f"{global_batch}; lower global_batch or leave whole_batches out"
        )
    is_out = np.zeros(plan.num_bins, np.bool_)
    is_out[np.argsort(plan.bin_room, kind="stable")[:remainder]] = True
    units_per_bin = np.diff(plan.bin_offsets)
    is_unit_out = np.repeat(is_out, units_per_bin)
    held_back = np.sort(plan.indices[is_unit_out])
    indices = plan.indices[~is_unit_out]
    num_sequences = held_back.size
    if plan.chunks is not None:
        # A sequence is dropped only when all of its pieces are.
        num_sequences = np.setdiff1d(plan.chunks.sequence[held_back], plan.chunks.sequence[indices]).size
    num_tokens = int(plan.unit_lengths[held_back].sum(dtype=np.int64))
    left = replace(
        plan,
        bin_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(units_per_bin[~is_out])]),
        indices=indices,
        accounting=plan.accounting.with_drop(HELD_BACK, num_sequences, num_tokens),
        held_back=held_back,
    )
    num_left_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_out)])
    return left, num_left_before[window_offsets]


def trained_tokens_by_bin(plan: PackPlan, trained_tokens: npt.ArrayLike | None) -> Int64:
    """Add up the trained tokens of each bin. A piece of a sequence is taken to have its share of them.

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
    per_unit = per_sequence.astype(np.int64)
    if plan.chunks is not None:
        new_tokens = (plan.unit_lengths - plan.chunks.masked_prefix).astype(np.int64)
        whole = np.zeros(num_sequences, np.int64)
        np.add.at(whole, plan.chunks.sequence, new_tokens)
        per_unit = per_unit[plan.chunks.sequence] * new_tokens // whole[plan.chunks.sequence]
    return np.add.reduceat(per_unit[plan.indices], plan.bin_offsets[:-1])
