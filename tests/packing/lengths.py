"""Lengths for tests, from integer arithmetic only, so that they are the same with every NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def noise(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return 64 scrambled bits per entry (SplitMix64)."""
    with np.errstate(over="ignore"):
        value = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def between(low: int, high: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return even lengths from low to high, both included."""
    return low + (noise(count, seed) % np.uint64(high - low + 1)).astype(np.int64)


def bell(center: int, spread: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return lengths around `center`, the sum of four even ones: close to a normal distribution."""
    return center + sum(between(-spread, spread, count, seed * 10 + k) for k in range(4))


def chat(count: int) -> npt.NDArray[np.int64]:
    """Many short, few long, for a pack of 2,048."""
    squared = between(3, 32, count, 1) * between(3, 32, count, 2)
    return np.minimum(8 + squared, 2048)


def thirds(count: int) -> npt.NDArray[np.int64]:
    """Around a third of 2,048, where best fit wastes five percent."""
    return bell(682, 40, count, 3)


def two_kinds(count: int) -> npt.NDArray[np.int64]:
    """Short and long ones, for a pack of 2,048."""
    is_short = noise(count, 4) % np.uint64(2) == 0
    return np.where(is_short, bell(150, 15, count, 5), bell(900, 40, count, 6))


def above_a_third(count: int) -> npt.NDArray[np.int64]:
    """Just above a third of 2,048 on average: hard to pair."""
    return bell(696, 30, count, 7)
