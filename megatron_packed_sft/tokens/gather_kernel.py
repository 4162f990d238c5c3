"""The compiled loops of the token store: sequences into bins, and copies among neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel


@kernel
def fill_bins(
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    overlaps: npt.NDArray[np.int64],
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> None:
    """Copy items into bins and align their masks with the next token, in one pass.

    Item k is [starts[k], starts[k] + lengths[k]) of the part and goes to position positions[k] of bin bins[k]. Its
    first overlaps[k] tokens are trained in another chunk of the same sequence, so they are not trained here.
    """
    for k in range(starts.size):
        start, length, number, position = starts[k], lengths[k], bins[k], positions[k]
        # Slices first: indices from 0 need no check for negative ones, so the loops become vector copies.
        from_ids, to_ids = ids[start : start + length], out_ids[number, position : position + length]
        from_train, to_mask = train[start + 1 : start + length], out_mask[number, position : position + length]
        for j in range(length):
            to_ids[j] = from_ids[j]
        for j in range(length - 1):
            to_mask[j] = from_train[j]
        to_mask[length - 1] = 0
        for j in range(min(overlaps[k] - 1, length)):  # token j + 1 is the one that position j predicts
            to_mask[j] = 0


@kernel
def fill_weights(
    weights: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    mask: npt.NDArray[np.uint8],
    out_weights: npt.NDArray[np.float32],
) -> None:
    """Copy the weights of the items that `fill_bins` has placed, aligned with the next token as their mask is.

    They count where the mask does, so what was trained in another chunk is not weighted twice. `weights` is empty for
    a part whose trained tokens all count 1.
    """
    for k in range(starts.size):
        start, length, number, position = starts[k], lengths[k], bins[k], positions[k]
        item_mask, to_weights = mask[number, position : position + length], out_weights[number, position:]
        for j in range(length - 1):
            to_weights[j] = item_mask[j]
        if weights.size > 0:
            from_weights = weights[start + 1 : start + length]
            for j in range(length - 1):
                to_weights[j] *= from_weights[j]


@kernel
def fill_gaps(
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    pad_id: int,
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> None:
    """Write padding into [positions[k], ends[k]) of bin bins[k]."""
    for k in range(bins.size):
        for j in range(positions[k], ends[k]):
            out_ids[bins[k], j] = pad_id
            out_mask[bins[k], j] = 0


@kernel
def number_copies(
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    first: int,
    numbers: npt.NDArray[np.int64],
) -> bool:
    """Give each sequence of a part its number, counted from `first`, and a copy of the one before that one's number.

    `weights` is empty for a part without. Returns whether there is any copy.
    """
    found = False
    for k in range(offsets.size - 1):
        numbers[k] = first + k
        start, length = offsets[k], offsets[k + 1] - offsets[k]
        if k == 0 or start - offsets[k - 1] != length:
            continue
        before = offsets[k - 1]
        is_copy = True
        for j in range(length):
            if ids[start + j] != ids[before + j] or train[start + j] != train[before + j]:
                is_copy = False
                break
        if weights.size > 0:
            for j in range(length):
                is_copy &= weights[start + j] == weights[before + j]
        if is_copy:
            numbers[k] = numbers[k - 1]
            found = True
    return found
