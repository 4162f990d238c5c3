"""The compiled kernels of orders, in integers only: every machine gives the same order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import inner_kernel, kernel

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
    ends: npt.NDArray[np.int64],
) -> None:
    """Choose a source for each of num_skipped + sources.size samples, earliest deadline first; skip the first.

    weights[k, j] are those of source j in stage k, and ends[k] the steps after which stage k is over. lags[j] = what is
    due to source j so far - total * counts[j] is how far it is behind its share, in units of 1 / total samples; it
    stays inside (-total, total). Lags and counts are updated to the end of the run.
    """
    deadlines = np.empty(lags.size, np.int64)
    stage = 0
    for j in range(lags.size):
        deadlines[j] = _deadline(weights, ends, j, stage, 0, total - lags[j])
    for step in range(1, num_skipped + sources.size + 1):
        if step > ends[stage]:
            stage += 1
        chosen = -1
        earliest = _NEVER
        for j in range(lags.size):
            lags[j] += weights[stage, j]
            # Not before its share has begun, or it would be a whole sample ahead. A share that the weights never
            # complete has no deadline, and comes when nothing else may.
            if lags[j] > 0 and (deadlines[j] < earliest or chosen < 0):
                earliest = deadlines[j]
                chosen = j
        if step > num_skipped:
            sources[step - num_skipped - 1] = chosen
            positions[step - num_skipped - 1] = counts[chosen]
        counts[chosen] += 1
        lags[chosen] -= total
        deadlines[chosen] = _deadline(weights, ends, chosen, stage, step, total - lags[chosen])


@inner_kernel
def _deadline(
    weights: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], source: int, stage: int, step: int, amount: int
) -> int:
    """Return the step by which a source has gained `amount`, counted from `step` in `stage`."""
    while True:
        weight = weights[stage, source]
        if weight > 0:
            num_steps = (amount + weight - 1) // weight
            if num_steps <= ends[stage] - step:
                return int(step + num_steps)
            amount -= weight * (ends[stage] - step)  # no overflow: it is less than the amount
        stage += 1
        if stage == ends.size:
            return int(_NEVER)
        step = ends[stage - 1]
