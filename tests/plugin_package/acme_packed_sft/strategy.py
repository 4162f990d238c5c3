"""A strategy: neighbours share a bin where two fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_pairs(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return the indices of each bin."""
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        if bins and len(bins[-1]) == 1 and lengths[bins[-1][0]] + length <= capacity:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins
