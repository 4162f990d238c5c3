"""Compiled mapping of trained characters to tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit


@njit(cache=True, nogil=True)
def mark_trained(
    token_starts: npt.NDArray[np.int64],
    token_ends: npt.NDArray[np.int64],
    range_begins: npt.NDArray[np.int64],
    range_ends: npt.NDArray[np.int64],
    train: npt.NDArray[np.uint8],
) -> int:
    """Set train[j] to 1 where token j overlaps a range; return how many of those reach beyond their range.

    Token starts and ranges ascend, and ranges do not overlap, so one walk over both is enough. A token of no width
    holds no character and stays 0.
    """
    num_straddling = 0
    k = 0
    for j in range(token_starts.size):
        start, end = token_starts[j], token_ends[j]
        while k < range_ends.size and range_ends[k] <= start:
            k += 1
        if k == range_ends.size:
            break
        if start < end and range_begins[k] < end:
            train[j] = 1
            if start < range_begins[k] or end > range_ends[k]:
                num_straddling += 1
    return num_straddling
