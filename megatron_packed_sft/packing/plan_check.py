"""The invariants of a plan, checked when one is read from disk."""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.packing.plan import PackPlan


def check_plan(plan: PackPlan, name: str) -> None:
    """Refuse a plan that breaks a rule; `name` is the file it came from."""
    # In this order: each check relies on the ones before it.
    for check in (_arrays, _canonical_order, _capacity, _chunks, _extras, _counts):
        what = check(plan)
        if what:
            raise ShardFileError(f"{name} is not a sound pack plan: {what}; make it again with PackPlan.save")


def _arrays(plan: PackPlan) -> str:
    offsets = plan.bin_offsets
    if offsets.size < 2 or offsets[0] != 0 or offsets[-1] != plan.indices.size or (np.diff(offsets) < 1).any():
        return "bin_offsets does not cut indices into bins with at least one unit each"
    if plan.unit_lengths.size == 0 or plan.unit_lengths.min() < 1:
        return "a unit has no tokens"
    if plan.indices.min() < 0 or plan.indices.max() >= plan.unit_lengths.size:
        return "indices names a unit that is not there"
    if (np.bincount(plan.indices) > 1).any():
        return "a unit is in two bins"
    if plan.pack_size < 1 or plan.pad_seq_to_mult < 1 or not 1 <= plan.lower_bound <= plan.num_bins + _held_back(plan):
        return "pack_size, pad_seq_to_mult or lower_bound is out of range"
    return ""


def _held_back(plan: PackPlan) -> int:
    """Bins that were held back; each had at least one unit."""
    return 0 if plan.held_back is None else plan.held_back.size


def _canonical_order(plan: PackPlan) -> str:
    firsts = plan.indices[plan.bin_offsets[:-1]]
    is_rising = np.diff(plan.indices) > 0
    is_rising[plan.bin_offsets[1:-1] - 1] = True  # from one bin to the next
    if not is_rising.all() or (np.diff(firsts) <= 0).any():
        return "units or bins are not in canonical order"
    return ""


def _capacity(plan: PackPlan) -> str:
    is_single = np.diff(plan.bin_offsets) == 1
    over = plan.bin_room > plan.pack_size
    if (over & ~is_single).any():
        return f"bin {int(np.argmax(over & ~is_single))} holds more than pack_size"
    if int(over.sum()) > plan.accounting.num_oversized:
        return f"bin {int(np.argmax(over))} holds a sequence longer than pack_size"
    return ""


def _chunks(plan: PackPlan) -> str:
    chunks = plan.chunks
    num_sequences = plan.accounting.num_sequences
    if chunks is None:
        return "" if plan.unit_lengths.size == num_sequences else "unit_lengths has not one entry per sequence"
    sizes = {chunks.sequence.size, chunks.start.size, chunks.masked_prefix.size, plan.unit_lengths.size}
    if len(sizes) > 1:
        return "the arrays of chunks differ in length"
    if chunks.sequence.min() < 0 or chunks.sequence.max() >= num_sequences:
        return "a chunk belongs to a sequence that is not there"
    if (np.diff(chunks.sequence) < 0).any() or chunks.start.min() < 0:
        return "chunks are not ordered by sequence and start"
    same = np.diff(chunks.sequence) == 0
    if (np.diff(chunks.start)[same] <= 0).any():
        return "chunks are not ordered by sequence and start"
    if chunks.masked_prefix.min() < 0 or (chunks.masked_prefix >= plan.unit_lengths).any():
        return "a chunk trains nothing: masked_prefix is as long as the chunk"
    return ""


def _extras(plan: PackPlan) -> str:
    if plan.order is not None and not np.array_equal(np.sort(plan.order), np.arange(plan.num_bins)):
        return "order does not hold each bin once"
    if plan.global_batch is not None and plan.global_batch < 1:
        return "global_batch is below 1"
    held_back = plan.held_back
    if held_back is not None:
        if held_back.size and (held_back.min() < 0 or held_back.max() >= plan.unit_lengths.size):
            return "held_back names a unit that is not there"
        if np.isin(held_back, plan.indices).any() or np.unique(held_back).size < held_back.size:
            return "held_back names a unit twice, or one that is in a bin"
    return ""


def _counts(plan: PackPlan) -> str:
    accounting = plan.accounting
    if int(plan.bin_tokens.sum()) != accounting.num_tokens_packed:
        return f"its bins hold {int(plan.bin_tokens.sum())} tokens, not {accounting.num_tokens_packed} as noted inside"
    packed = plan.indices if plan.chunks is None else np.unique(plan.chunks.sequence[plan.indices])
    if packed.size != accounting.num_sequences_packed:
        return f"it packs {packed.size} sequences, not {accounting.num_sequences_packed} as noted inside"
    return ""
