"""The compiled kernels, compared with plain Python."""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.packing.search import histogram_kernel
from megatron_packed_sft.packing.search.histogram_kernel import Bits, best_fit_decreasing, exact_fill
from megatron_packed_sft.packing.search.sequence_kernel import shuffle_groups
from megatron_packed_sft.packing.strategies.optimal import mixed_fill
from megatron_packed_sft.packing.strategies.packing_problem import (
    Int64,
    Patterns,
    histogram_of,
    lower_bound,
    martello_toth_bound,
)
from tests.packing import lengths as made

UNLIMITED = 1 << 40


@numba.njit
def add(words: Bits, summary: Bits, value: int) -> None:
    histogram_kernel.add(words, summary, value)


@numba.njit
def discard(words: Bits, summary: Bits, value: int) -> None:
    histogram_kernel.discard(words, summary, value)


@numba.njit
def neighbours(words: Bits, summary: Bits, value: int) -> tuple[int, int]:
    at_most = histogram_kernel.highest_at_most(words, summary, value)
    return at_most, histogram_kernel.lowest_at_least(words, summary, max(value, 0))


@settings(max_examples=100, deadline=None)
@given(
    largest=st.sampled_from([1, 63, 64, 65, 4095, 4096, 9000]),
    members=st.sets(st.integers(0, 9000)),
    gone=st.sets(st.integers(0, 9000)),
    questions=st.lists(st.integers(0, 9000), min_size=1),
)
def test_a_bitset_answers_like_a_set(largest: int, members: set[int], gone: set[int], questions: list[int]) -> None:
    words, summary = histogram_kernel.new_set(largest)
    members = {member for member in members if member <= largest}
    for member in members:
        add(words, summary, member)
    for member in gone:
        if member <= largest:
            discard(words, summary, member)
    left = members - gone
    for question in questions:
        question = min(question, largest)
        lower = max((m for m in left if m <= question), default=-1)
        assert neighbours(words, summary, question) == (lower, min((m for m in left if m >= question), default=-1))
    assert neighbours(words, summary, -1)[0] == -1


def assert_holds(patterns: Patterns, histogram: Int64, capacity: int, max_per_bin: int = UNLIMITED) -> None:
    offsets, sizes, counts = patterns
    assert (counts > 0).all()
    assert (np.diff(offsets) > 0).all()
    assert np.diff(offsets).max() <= max_per_bin
    assert (np.add.reduceat(sizes.astype(np.int64), offsets[:-1]) <= capacity).all()
    held = np.zeros_like(histogram)
    np.add.at(held, sizes, np.repeat(counts, np.diff(offsets)))
    assert np.array_equal(held, histogram)


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 200),
    seed=st.integers(0, 1000),
    num_sizes=st.integers(1, 20),
    most=st.sampled_from([1, 2, 3, 7, UNLIMITED]),
)
def test_the_histogram_packers_hold_every_size_as_often_as_it_occurs(
    capacity: int, seed: int, num_sizes: int, most: int
) -> None:
    histogram = np.zeros(capacity + 1, np.int64)
    histogram[made.between(1, capacity, num_sizes, seed)] = made.between(1, 5000, num_sizes, seed + 1)
    bound = lower_bound(histogram, capacity, most)
    for fill in (best_fit_decreasing, exact_fill):
        patterns = fill(histogram, capacity, most)
        assert_holds(patterns, histogram, capacity, most)
        assert patterns[2].sum() >= bound


@pytest.mark.parametrize("most", [3, UNLIMITED])
@pytest.mark.parametrize("shape", [made.chat, made.thirds, made.two_kinds, made.above_a_third])
def test_mixed_fill_holds_every_size_as_often_as_it_occurs(shape: object, most: int) -> None:
    histogram = histogram_of(shape(20_000).astype(np.int32), 2048)  # type: ignore[operator]
    mixed = mixed_fill(histogram, 2048, most, UNLIMITED, fewest=UNLIMITED)
    assert mixed is not None
    assert_holds(mixed, histogram, 2048, most)


def test_mixed_fill_may_use_up_everything() -> None:
    histogram = np.zeros(4097, np.int64)
    histogram[1:9] = 100
    mixed = mixed_fill(histogram, 4096, UNLIMITED, UNLIMITED, fewest=UNLIMITED)
    assert mixed is not None
    assert_holds(mixed, histogram, 4096)


def test_mixed_fill_gives_up_when_it_cannot_win() -> None:
    histogram = histogram_of(made.between(1, 2048, 20_000, 5).astype(np.int32), 2048)
    bound = int(lower_bound(histogram, 2048, UNLIMITED))
    assert mixed_fill(histogram, 2048, UNLIMITED, UNLIMITED, fewest=bound) is None


def test_the_bound_sees_that_only_two_lengths_above_a_third_share_a_bin() -> None:
    histogram = np.zeros(31, np.int64)
    histogram[11] = 100
    assert martello_toth_bound(histogram, 30) == 37  # the sum: 1,100 / 30
    assert lower_bound(histogram, 30, UNLIMITED) == 50


def test_the_bound_sees_the_limit_per_bin() -> None:
    histogram = np.zeros(31, np.int64)
    histogram[1] = 100
    assert lower_bound(histogram, 30, 5) == 20


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 2**64 - 1))
def test_shuffling_groups_keeps_each_group_in_its_place(sizes: list[int], seed: int) -> None:
    offsets = np.cumsum([0, *sizes])
    values = np.arange(offsets[-1], dtype=np.int32)
    shuffle_groups(values, offsets, np.uint64(seed))
    for start, stop in itertools.pairwise(offsets.tolist()):
        assert sorted(values[start:stop].tolist()) == list(range(start, stop))
