"""The compiled kernels of orders, in integers only: every machine gives the same order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

_BLOCK = 256  # values that stay in the first-level cache while all rounds go over them
_NEVER = np.int64(2**63 - 1)  # later than any deadline: those are below 2^62 plus the steps of one run


@kernel
def swap_or_not(
    values: npt.NDArray[np.int64],
    num_values: int,
    sums: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
) -> None:
    """Permute [0, num_values) in place: values[i] becomes its image under the keyed permutation.

    Round r pairs x with (sums[r] - x) mod num_values, and a coin that both of a pair see decides whether they swap.
    """
    for first in range(0, values.size, _BLOCK):
        block = values[first : first + _BLOCK]
        for r in range(keys.size):
            pair_sum, key = sums[r], keys[r]
            for i in range(block.size):
                value = block[i]
                partner = pair_sum - value
                # No branches here: half of them would be guessed wrong, and the loop would not be vectorised (12x).
                partner += (partner >> 63) & num_values
                # Two multiplications bring every bit of the larger value and of the key to the top bit: the coin.
                coin = np.uint64(max(value, partner)) ^ key
                coin = (coin ^ (coin >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                coin = (coin ^ (coin >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                block[i] = value + (partner - value) * np.int64(coin >> np.uint64(63))


@kernel
def schedule(
    weights: npt.NDArray[np.int64],
    total: int,
    lags: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    num_skipped: int,
    sources: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
) -> None:
    """Choose a source for each of num_skipped + sources.size samples, earliest deadline first; skip the first.

    lags[j] = weights[j] * samples so far - total * counts[j] is how far source j is behind its share, in units of
    1 / total samples; it stays inside (-total, total). Lags and counts are updated to the end of the run.
    """
    deadlines = np.full(weights.size, _NEVER)
    for j in range(weights.size):
        if weights[j] > 0:
            deadlines[j] = _steps_until(total - lags[j], weights[j])
    for step in range(1, num_skipped + sources.size + 1):
        chosen = -1
        earliest = _NEVER
        for j in range(weights.size):
            lags[j] += weights[j]
            # Not before its share has begun, or it would be a whole sample ahead.
            if lags[j] > 0 and deadlines[j] < earliest:
                earliest = deadlines[j]
                chosen = j
        if step > num_skipped:
            sources[step - num_skipped - 1] = chosen
            positions[step - num_skipped - 1] = counts[chosen]
        counts[chosen] += 1
        lags[chosen] -= total
        deadlines[chosen] = step + _steps_until(total - lags[chosen], weights[chosen])


@kernel
def _steps_until(amount: int, weight: int) -> int:
    """Return after how many steps a source that gains `weight` per step has gained `amount`."""
    return (amount + weight - 1) // weight
