"""Lower bounds for the number of bins, from the histogram of sizes; a few sums over it, so NumPy is fast enough."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

# Finer rounding than this hardly differs from the plain sum.
_MOST_PARTS = 32


def lower_bound(histogram: Int64, capacity: int, max_per_bin: int) -> int:
    """Return the best lower bound known for the number of bins.

    Example:
        >>> lower_bound(np.array([0, 0, 0, 5, 0, 0, 0]), 6, 1 << 40)  # five of 3, two of which share a bin of 6
        3
    """
    num_items = int(histogram[1 : capacity + 1].sum())
    bound = max(martello_toth_bound(histogram, capacity), -(-num_items // max_per_bin))
    return max(bound, _rounding_bound(histogram, capacity))


def martello_toth_bound(histogram: Int64, capacity: int) -> int:
    """Return max(ceil(sum / capacity), L2 of Martello and Toth): no packing has fewer bins.

    For a threshold t, sizes above capacity - t share a bin with nothing >= t; sizes above half of it share with each
    other never. What of the sizes in [t, capacity / 2] does not fit beside the latter needs further bins.
    """
    half = capacity // 2
    num_up_to = np.cumsum(histogram[: capacity + 1])
    sum_up_to = np.cumsum(np.arange(capacity + 1) * histogram[: capacity + 1])
    best = -(-int(sum_up_to[capacity]) // capacity)
    if half == 0:
        return best
    # One value for each threshold 1..half.
    sum_small = sum_up_to[half] - sum_up_to[:half]
    below_alone = slice(capacity - half, capacity)
    num_large = num_up_to[below_alone][::-1] - num_up_to[half]
    room = num_large * capacity - (sum_up_to[below_alone][::-1] - sum_up_to[half])
    overflow = max(0, int((sum_small - room).max()))
    return max(best, int(num_up_to[capacity] - num_up_to[half]) + -(-overflow // capacity))


def _rounding_bound(histogram: Int64, capacity: int) -> int:
    """Return the best bound by the rounding of Fekete and Schepers (a dual feasible function), k = 2, 3, ...

    Rounding a size x to floor((k + 1) x / capacity) parts of capacity / k never makes a bin impossible (where the
    division has no rest, x itself is kept): at most k sizes above capacity / (k + 1) share a bin. It sees what sums
    cannot, such as lengths just above a third.
    """
    num_at_least = np.cumsum(histogram[capacity:0:-1])[::-1]  # of size 1, 2, ...
    sizes, kept, first_steps, parts = _roundings(capacity)
    weights = np.add.reduceat(num_at_least[sizes - 1] * capacity - histogram[sizes] * kept, first_steps)
    return int((-(-weights // (parts * capacity))).max())


@lru_cache(maxsize=8)
def _roundings(capacity: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the smallest size of each step of each rounding, that size where it is kept and else 0, where the steps of
    each rounding begin, and its number of parts.
    """
    parts = np.arange(2, _MOST_PARTS + 1)
    first_steps = np.cumsum(parts + 1) - (parts + 1)
    parts_of = np.repeat(parts, parts + 1)
    steps = capacity * (np.arange(parts_of.size) - np.repeat(first_steps, parts + 1) + 1)
    sizes = (steps + parts_of) // (parts_of + 1)
    return sizes, np.where(sizes * (parts_of + 1) == steps, sizes, 0), first_steps, parts
