"""A set of small integers with fast neighbours: one bit per value, and one bit per word of those.

    words    uint64, bit v of the set
    summary  uint64, bit w = "words[w] is not zero"

Every packer asks one of two questions thousands of times: the smallest member that is at least x (best fit), and the
largest that is at most x (largest sequence that still fits). Both look at two or three words here. Words and bits are
counted in unsigned numbers, because numba checks signed indices for being negative at every access.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import inner_kernel

# A whole number: int outside, int64 (or unsigned, where it is an index) in compiled code. Only numba sees which.
Scalar = Any
Bits = npt.NDArray[np.uint64]

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)
_SIX = np.uint64(6)
_LOW_SIX = np.uint64(63)
# Multiplying a power of two by this de Bruijn sequence brings a different 6-bit number to the top for each of the 64.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_NUMBER = np.zeros(64, dtype=np.uint64)
for _bit in range(64):
    _BIT_NUMBER[((0x03F79D71B4CB0A89 << _bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = _bit


def new_set(largest: Scalar) -> tuple[Bits, Bits]:
    """Make an empty set for values 0..largest; inside kernels it is `empty_set`."""
    num_words = (largest >> 6) + 1
    return np.zeros(num_words, np.uint64), np.zeros((num_words >> 6) + 1, np.uint64)


empty_set = inner_kernel(new_set)


@inner_kernel
def add(words: Bits, summary: Bits, value: Scalar) -> None:
    """Put `value` into the set."""
    bit = np.uint64(value)
    word = bit >> _SIX
    words[word] |= _ONE << (bit & _LOW_SIX)
    summary[word >> _SIX] |= _ONE << (word & _LOW_SIX)


@inner_kernel
def discard(words: Bits, summary: Bits, value: Scalar) -> None:
    """Take `value` out of the set."""
    bit = np.uint64(value)
    word = bit >> _SIX
    words[word] &= ~(_ONE << (bit & _LOW_SIX))
    if words[word] == 0:
        summary[word >> _SIX] &= ~(_ONE << (word & _LOW_SIX))


@inner_kernel
def _lowest_bit(word: Scalar) -> Scalar:
    return _BIT_NUMBER[((word & (~word + _ONE)) * _DE_BRUIJN) >> np.uint64(58)]


@inner_kernel
def _highest_bit(word: Scalar) -> Scalar:
    word |= word >> np.uint64(1)
    word |= word >> np.uint64(2)
    word |= word >> np.uint64(4)
    word |= word >> np.uint64(8)
    word |= word >> np.uint64(16)
    word |= word >> np.uint64(32)
    return _BIT_NUMBER[((word ^ (word >> np.uint64(1))) * _DE_BRUIJN) >> np.uint64(58)]


@inner_kernel
def lowest_at_least(words: Bits, summary: Bits, start: Scalar) -> Scalar:
    """Return the smallest member >= start, or -1. `start` is at most the set's largest possible value."""
    bit = np.uint64(start)
    word = bit >> _SIX
    bits = words[word] & (_ALL << (bit & _LOW_SIX))
    if bits != 0:
        return np.int64((word << _SIX) + _lowest_bit(bits))
    word += _ONE
    group = word >> _SIX
    num_groups = np.uint64(summary.size)
    if group >= num_groups:
        return np.int64(-1)
    bits = summary[group] & (_ALL << (word & _LOW_SIX))
    while bits == 0:
        group += _ONE
        if group >= num_groups:
            return np.int64(-1)
        bits = summary[group]
    word = (group << _SIX) + _lowest_bit(bits)
    return np.int64((word << _SIX) + _lowest_bit(words[word]))


@inner_kernel
def highest_at_most(words: Bits, summary: Bits, start: Scalar) -> Scalar:
    """Return the largest member <= start, or -1. A negative `start` is allowed."""
    if start < 0:
        return np.int64(-1)
    bit = np.uint64(start)
    word = bit >> _SIX
    bits = words[word] & (_ALL >> (_LOW_SIX - (bit & _LOW_SIX)))
    if bits != 0:
        return np.int64((word << _SIX) + _highest_bit(bits))
    if word == 0:
        return np.int64(-1)
    word -= _ONE
    group = word >> _SIX
    bits = summary[group] & (_ALL >> (_LOW_SIX - (word & _LOW_SIX)))
    while bits == 0:
        if group == 0:
            return np.int64(-1)
        group -= _ONE
        bits = summary[group]
    word = (group << _SIX) + _highest_bit(bits)
    return np.int64((word << _SIX) + _highest_bit(words[word]))
