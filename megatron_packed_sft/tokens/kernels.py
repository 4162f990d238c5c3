"""Compiled gathering of many sequences into one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit


@njit(cache=True, nogil=True)
def copy_sequences(
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    out_ids: npt.NDArray[Any],
    out_train: npt.NDArray[np.uint8],
) -> None:
    """Copy sequences [starts[k], starts[k] + lengths[k]) of one part to targets[k] in the flat output."""
    for k in range(starts.size):
        start, target = starts[k], targets[k]
        for j in range(lengths[k]):
            out_ids[target + j] = ids[start + j]
            out_train[target + j] = train[start + j]
