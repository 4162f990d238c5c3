"""Compiled gathering of many sequences into one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel


@kernel
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
        start, target, length = starts[k], targets[k], lengths[k]
        from_ids, to_ids = ids[start : start + length], out_ids[target : target + length]
        from_train, to_train = train[start : start + length], out_train[target : target + length]
        for j in range(length):
            to_ids[j] = from_ids[j]
        for j in range(length):
            to_train[j] = from_train[j]


@kernel
def fill_rows(
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    overlaps: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> None:
    """Copy pieces of sequences into packed rows and align their masks with the next token, in one pass.

    Piece k is [starts[k], starts[k] + lengths[k]) of the part and goes to row rows[k] from columns[k] on. Its first
    overlaps[k] tokens were trained with another piece already and are not trained again.
    """
    for k in range(starts.size):
        start, length, row, column = starts[k], lengths[k], rows[k], columns[k]
        # Slices first: indices that start at 0 need no check for negative ones, and the loops become vector copies.
        from_ids, to_ids = ids[start : start + length], out_ids[row, column : column + length]
        from_train, to_mask = train[start + 1 : start + length], out_mask[row, column : column + length]
        for j in range(length):
            to_ids[j] = from_ids[j]
        for j in range(length - 1):
            to_mask[j] = from_train[j]
        to_mask[length - 1] = 0
        for j in range(min(overlaps[k] - 1, length)):  # token j + 1 is the one that position j predicts
            to_mask[j] = 0


@kernel
def fill_gaps(
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    pad_id: int,
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> None:
    """Write padding into [columns[k], ends[k]) of row rows[k]."""
    for k in range(rows.size):
        for j in range(columns[k], ends[k]):
            out_ids[rows[k], j] = pad_id
            out_mask[rows[k], j] = 0


@kernel
def number_copies(
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    first: int,
    numbers: npt.NDArray[np.int64],
) -> bool:
    """Give each sequence of a part its number, counted from `first`, and a copy of the one before that one's number.

    Returns whether there is any copy.
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
        if is_copy:
            numbers[k] = numbers[k - 1]
            found = True
    return found
