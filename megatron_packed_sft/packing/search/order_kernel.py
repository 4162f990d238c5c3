"""Shuffling that is the same on every machine and with every NumPy."""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64
from megatron_packed_sft.support.compiled import kernel


@kernel
def _mix(value: Scalar) -> Scalar:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@kernel
def shuffle_groups(values: Int32, group_offsets: Int64, seed: Scalar) -> None:
    """Shuffle each group values[offsets[g] : offsets[g + 1]] in place (Fisher-Yates)."""
    state = _mix(seed ^ np.uint64(0x9E3779B97F4A7C15))
    for group in range(group_offsets.size - 1):
        start = group_offsets[group]
        for k in range(group_offsets[group + 1] - start - 1, 0, -1):
            state += np.uint64(0x9E3779B97F4A7C15)
            # The high half times the number of choices: the bias is below 2^-32 of a choice.
            choice = np.int64(((_mix(state) >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
            kept = values[start + k]
            values[start + k] = values[start + choice]
            values[start + choice] = kept
