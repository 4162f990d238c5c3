"""Rows whose content an earlier row had already. Found before encoding, so that the first wins for any worker count."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


def find_duplicates(hashes: Mapping[int, npt.NDArray[np.uint64]]) -> dict[int, frozenset[int]]:
    """The positions of repeated rows in each unit.

    Args:
        hashes: unit number -> content hashes [rows, 2]. Costs 16 bytes of memory per row, and as much again to sort.

    Example:
        >>> one, two = np.array([[1, 1], [2, 2]], np.uint64), np.array([[3, 3], [1, 1]], np.uint64)
        >>> find_duplicates({0: one, 1: two})
        {0: frozenset(), 1: frozenset({1})}
    """
    numbers = sorted(hashes)
    rows = np.concatenate([hashes[number] for number in numbers]) if numbers else np.empty((0, 2), np.uint64)
    order = np.lexsort((rows[:, 1], rows[:, 0]))  # stable: equal rows stay in their order
    repeated = np.zeros(len(rows), bool)
    repeated[order[1:]] = np.all(rows[order[1:]] == rows[order[:-1]], axis=1)
    ends = np.cumsum([len(hashes[number]) for number in numbers])
    pieces = np.split(repeated, ends[:-1]) if numbers else []
    return {number: frozenset(np.flatnonzero(piece).tolist()) for number, piece in zip(numbers, pieces, strict=True)}
