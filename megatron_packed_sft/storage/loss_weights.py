"""Weights of the loss: how much each prediction counts, where 0 and 1 do not say it all.

loss_mask      0  1    1    1  0     1 where the prediction counts
loss_weights   0  0.5  0.5  2  0     finite, above 0 exactly where the mask is 1; absent if all of them are 0 or 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock, IntArray, Violation, as_int_array

NO_WEIGHTS = np.empty(0, np.float32)  # for kernels, where every trained token counts 1
NO_WEIGHTS.flags.writeable = False  # as maps are; numba would compile again for an array that can be written


def mask_and_weights(values: Any, name: str, ndim: int = 1) -> tuple[IntArray, npt.NDArray[np.float32] | None]:
    """Split a loss mask into 0/1 and weights; weights are None if the mask is of integers, or all of them 0 or 1.

    Example:
        >>> mask, weights = mask_and_weights([0, 0.5, 1], "loss_mask")
        >>> mask.tolist(), weights.tolist()
        ([0, 1, 1], [0.0, 0.5, 1.0])
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        return as_int_array(values, name, ndim), None  # it says what is wrong
    if array.dtype.kind != "f" or array.size == 0:
        return as_int_array(array if array.size else values, name, ndim), None
    weights = as_weights(array, name, ndim)
    mask = (weights > 0).astype(np.uint8)
    return mask, None if np.array_equal(weights, mask) else weights


def as_weights(values: Any, name: str, ndim: int = 1) -> npt.NDArray[np.float32]:
    """Return `values` as a C-contiguous float32 array of `ndim` dimensions; they are finite and at least 0.

    Example:
        >>> as_weights([0, 0.5, 2], "weights").tolist()
        [0.0, 0.5, 2.0]
    """
    try:
        array = np.asarray(values)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
            weights = np.ascontiguousarray(array, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{name} is not an array of numbers ({error}); pass a list or a NumPy array") from None
    if weights.ndim != ndim:
        raise InvalidInputError(f"{name} has shape {weights.shape}; it must be a {ndim}-dimensional array of numbers")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)) | ((weights == 0) & (array != 0)))
    if bad.size:
        value = array.reshape(-1)[bad[0]]
        raise InvalidInputError(
            f"{name} is {value} at position {int(bad[0])}; a weight is 0, or a positive number that a float32 holds"
        )
    return weights


def find_weight_violations(block: BinBlock) -> tuple[list[Violation], npt.NDArray[np.float64]]:
    """Check the weights of bins that have no other violation; return at most one per bin, and each bin's sum."""
    from megatron_packed_sft.storage import bin_kernel

    assert block.loss_weights is not None
    positions = np.zeros(len(block), np.int64)
    sums = np.zeros(len(block), np.float64)
    violations = []
    if bin_kernel.check_weights(block.loss_mask, block.loss_weights, positions, sums):
        for index in np.flatnonzero(positions >= 0).tolist():
            place = int(positions[index])
            weight, mask = float(block.loss_weights[index, place]), int(block.loss_mask[index, place])
            message = f"is {weight:g} at position {place}, where loss_mask is {mask}; it is finite, and above 0 exactly"
            violations.append(Violation(index, "loss_weights", f"{message} where the mask is 1"))
    return violations, sums


def cannot_keep(what: str, storage: str) -> InvalidInputError:
    """Return the error for weights on their way into a storage that has no place for them."""
    return InvalidInputError(
        f"{what} has weights of the loss that are neither 0 nor 1, and {storage} keeps only 0 and 1; use memmap_v1, or "
        "prepare the data without weights"
    )


def masks_would_be_lost(what: str, num_untrained: int, num_predictions: int) -> InvalidInputError:
    """Return the error for loss masks on their way into a storage that keeps none."""
    return InvalidInputError(
        f"{what}: {num_untrained:,} of {num_predictions:,} predictions are not trained, and megatron_indexed keeps no "
        "loss masks, so they would be; add --drop-masks (drop_masks=True) if that is meant"
    )
