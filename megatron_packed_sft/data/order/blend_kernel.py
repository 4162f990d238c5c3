"""The compiled schedule of a blend: earliest deadline first, in whole numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

_NEVER = np.int64(2**63 - 1)  # later than any deadline: those are below 2^62 plus the steps of one run


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
    """Choose a source for each of num_skipped + sources.size samples; keep all but the skipped ones.

    lags[j] = weights[j] * samples so far - total * counts[j] is how far source j is behind its share, in units of
    1 / total samples; it stays inside (-total, total). Both lags and counts are brought to the end of the run.
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
    """Steps after which a source that gains `weight` per step has gained `amount`: it is a whole sample behind then."""
    return (amount + weight - 1) // weight
