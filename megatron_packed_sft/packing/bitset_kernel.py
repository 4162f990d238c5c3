"""A set of small integers with fast neighbours: one bit per value, and one bit per word of those.

    words    uint64, bit v of the set
    summary  uint64, bit w = "words[w] is not zero"

Every packer asks one of two questions thousands of times: the smallest member that is at least x (best fit), and the
largest that is at most x (largest sequence that still fits). Both look at two or three words here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Bits = npt.NDArray[np.uint64]

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)
# Multiplying a power of two by this de Bruijn sequence brings a different 6-bit number to the top for each of the 64.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_NUMBER = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _BIT_NUMBER[((0x03F79D71B4CB0A89 << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


@njit(cache=True, nogil=True)
def empty_set(largest: int) -> tuple[Bits, Bits]:
    """Make an empty set for values 0..largest."""
    num_words = (largest >> 6) + 1
    return np.zeros(num_words, np.uint64), np.zeros((num_words >> 6) + 1, np.uint64)


@njit(cache=True, nogil=True)
def add(words: Bits, summary: Bits, value: int) -> None:
    """Put `value` into the set."""
    word = value >> 6
    words[word] |= _ONE << np.uint64(value & 63)
    summary[word >> 6] |= _ONE << np.uint64(word & 63)


@njit(cache=True, nogil=True)
def discard(words: Bits, summary: Bits, value: int) -> None:
    """Take `value` out of the set."""
    word = value >> 6
    words[word] &= ~(_ONE << np.uint64(value & 63))
    if words[word] == 0:
        summary[word >> 6] &= ~(_ONE << np.uint64(word & 63))


@njit(cache=True, nogil=True)
def _lowest_bit(word: np.uint64) -> int:
    return int(_BIT_NUMBER[((word & (~word + _ONE)) * _DE_BRUIJN) >> np.uint64(58)])


@njit(cache=True, nogil=True)
def _highest_bit(word: np.uint64) -> int:
    word |= word >> np.uint64(1)
    word |= word >> np.uint64(2)
    word |= word >> np.uint64(4)
    word |= word >> np.uint64(8)
    word |= word >> np.uint64(16)
    word |= word >> np.uint64(32)
    return int(_BIT_NUMBER[((word ^ (word >> np.uint64(1))) * _DE_BRUIJN) >> np.uint64(58)])


@njit(cache=True, nogil=True)
def lowest_at_least(words: Bits, summary: Bits, start: int) -> int:
    """Return the smallest member >= start, or -1. `start` is at most the set's largest possible value."""
    word = start >> 6
    bits = words[word] & (_ALL << np.uint64(start & 63))
    if bits != 0:
        return (word << 6) + _lowest_bit(bits)
    word += 1
    group = word >> 6
    if group >= summary.size:
        return -1
    bits = summary[group] & (_ALL << np.uint64(word & 63))
    while bits == 0:
        group += 1
        if group >= summary.size:
            return -1
        bits = summary[group]
    word = (group << 6) + _lowest_bit(bits)
    return (word << 6) + _lowest_bit(words[word])


@njit(cache=True, nogil=True)
def highest_at_most(words: Bits, summary: Bits, start: int) -> int:
    """Return the largest member <= start, or -1. A negative `start` is allowed."""
    if start < 0:
        return -1
    word = start >> 6
    bits = words[word] & (_ALL >> np.uint64(63 - (start & 63)))
    if bits != 0:
        return (word << 6) + _highest_bit(bits)
    word -= 1
    if word < 0:
        return -1
    group = word >> 6
    bits = summary[group] & (_ALL >> np.uint64(63 - (word & 63)))
    while bits == 0:
        group -= 1
        if group < 0:
            return -1
        bits = summary[group]
    word = (group << 6) + _highest_bit(bits)
    return (word << 6) + _highest_bit(words[word])
