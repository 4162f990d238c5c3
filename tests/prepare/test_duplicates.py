"""Exact duplicates: the first in the order of the input wins."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.prepare.encode_stage import find_duplicates


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8), max_size=5))
def test_a_row_is_a_duplicate_exactly_when_an_equal_one_came_before(units: list[list[tuple[int, int]]]) -> None:
    found = find_duplicates({number: np.array(rows, np.uint64).reshape(-1, 2) for number, rows in enumerate(units)})
    seen: set[tuple[int, int]] = set()
    for number, rows in enumerate(units):
        expected = set()
        for position, row in enumerate(rows):
            if row in seen:
                expected.add(position)
            seen.add(row)
        assert found[number] == expected
