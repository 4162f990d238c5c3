"""What each strategy promises, how full it packs, and how users add their own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.strategies import registry as strategies
from megatron_packed_sft.packing.strategies.fit import pack_best_fit
from megatron_packed_sft.packing.strategies.optimal import pack_optimal
from megatron_packed_sft.packing.strategies.packing_problem import PackingProblem, histogram_of
from megatron_packed_sft.packing.strategies.registry import known_strategies, register_strategy
from tests.packing import lengths as made

PACK = 2048


def best_fit_one_by_one(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    """Best fit decreasing as in the textbook; returns the number of bins."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return len(rooms)


def first_fit_one_by_one(lengths: Iterable[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        number = next((number for number, room in enumerate(rooms) if room >= length), len(rooms))
        if number == len(rooms):
            rooms.append(capacity)
        rooms[number] -= length
    return len(rooms)


def test_greedy_keeps_the_order() -> None:
    plan = pack([3, 2, 2, 4, 1, 3], pack_size=4, strategy="greedy")
    assert plan.indices.tolist() == list(range(6))
    assert plan.bin_offsets.tolist() == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("shape", [made.chat, made.thirds, made.two_kinds])
def test_best_fit_over_the_histogram_needs_as_many_bins_as_one_by_one(shape: Any) -> None:
    for count in (1, 2, 50, 700):
        lengths = shape(count)
        assert pack(lengths, pack_size=PACK, strategy="best_fit").num_bins == best_fit_one_by_one(lengths, PACK)


def test_first_fit_is_the_textbook_one() -> None:
    for lengths in (made.chat(600), made.thirds(600), made.between(1, 64, 3000, 9)):
        plan = pack(lengths, pack_size=PACK, strategy="first_fit")
        assert plan.num_bins == first_fit_one_by_one(sorted(lengths.tolist(), reverse=True), PACK)


def test_first_fit_grows_beyond_its_first_tree() -> None:
    plan = pack(np.full(5000, 3), pack_size=4, strategy="first_fit")
    assert plan.num_bins == 5000


def test_first_fit_shuffle_depends_on_the_seed_only() -> None:
    lengths = made.chat(2000)
    plans = [pack(lengths, pack_size=PACK, strategy="first_fit_shuffle", seed=seed) for seed in (1, 1, 2)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint


@pytest.mark.parametrize("shape", [made.chat, made.thirds, made.two_kinds, made.above_a_third])
@pytest.mark.parametrize("count", [300, 20_000])
def test_optimal_is_never_less_full_than_best_fit(shape: Any, count: int) -> None:
    lengths = shape(count)
    assert (
        pack(lengths, pack_size=PACK, strategy="optimal").num_bins
        <= pack(lengths, pack_size=PACK, strategy="best_fit").num_bins
    )


@pytest.mark.parametrize(
    ("shape", "method", "gap"),
    [(made.chat, "exact fill", 0), (made.thirds, "mixed fill", 0.0001), (made.two_kinds, "mixed fill", 0.001)],
)
def test_optimal_comes_close_to_the_lower_bound(shape: Any, method: str, gap: float) -> None:
    plan = pack(shape(100_000), pack_size=PACK)
    assert plan.method == method
    assert plan.stats().gap <= gap


def test_a_search_without_any_work_still_packs_well() -> None:
    sizes = made.thirds(20_000).astype(np.int32)
    problem = PackingProblem(sizes=sizes, histogram=histogram_of(sizes, PACK), capacity=PACK, work_limit=0)
    assert len(pack_optimal(problem).bin_offsets) <= len(pack_best_fit(problem).bin_offsets)


def test_window_keeps_neighbours_together() -> None:
    lengths = made.chat(50_000)
    plan = pack(lengths, pack_size=PACK, strategy="window")
    assert plan.method == "in order"
    assert plan.stats().gap < 0.001
    spans = plan.indices[plan.bin_offsets[1:] - 1] - plan.indices[plan.bin_offsets[:-1]]
    assert np.median(spans) < 500
    # The canonical order of the bins is then the order of the data, but for the last few.
    firsts = plan.indices[plan.bin_offsets[:-1]]
    assert (np.diff(firsts) > 0).all()


def test_window_fills_bins_that_hold_more_than_wait_at_a_time() -> None:
    lengths = made.between(1, 5, 40_000, 12)
    plan = pack(lengths, pack_size=10_000, strategy="window")
    assert plan.method == "in order"
    assert plan.num_bins == plan.lower_bound
    assert np.diff(plan.bin_offsets).max() > 3000


def test_window_composes_bins_nearly_at_random() -> None:
    lengths = made.chat(50_000)

    def share_between_bins(strategy: str) -> float:
        plan = pack(lengths, pack_size=PACK, strategy=strategy)
        counts = np.diff(plan.bin_offsets)
        means = plan.bin_tokens / counts
        return float((counts * (means - lengths.mean()) ** 2).sum() / ((lengths - lengths.mean()) ** 2).sum())

    assert share_between_bins("window") < 0.35
    assert share_between_bins("best_fit") > 0.7


def test_window_falls_back_on_sorted_lengths_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.sort(made.between(1, PACK, 20_000, 8))[::-1]
    with caplog.at_level(logging.WARNING):
        plan = pack(lengths, pack_size=PACK, strategy="window")
    assert plan.method.startswith("optimal: ")
    assert plan.num_bins == pack(lengths, pack_size=PACK, strategy="optimal").num_bins
    assert "using 'optimal'" in caplog.text


@pytest.fixture
def own_strategies() -> Iterator[None]:
    """Forget what a test registers."""
    before = dict(strategies.STRATEGIES._values)
    yield
    strategies.STRATEGIES._values.clear()
    strategies.STRATEGIES._values.update(before)


@pytest.mark.usefixtures("own_strategies")
class TestOwnStrategies:
    def test_lists_of_indices_become_a_canonical_plan(self) -> None:
        register_strategy("pairs", lambda lengths, capacity: [[3, 2], [1, 0]])
        plan = pack([1, 2, 3, 4], pack_size=8, strategy="pairs")
        assert [plan.bin(b).tolist() for b in range(2)] == [[0, 1], [2, 3]]
        assert plan.strategy == "pairs"
        assert "pairs" in known_strategies()

    def test_an_array_of_bin_numbers_may_have_gaps(self) -> None:
        register_strategy("numbers", lambda lengths, capacity: np.array([9, 2, 9, 2]))
        plan = pack([1, 2, 3, 4], pack_size=8, strategy="numbers")
        assert [plan.bin(b).tolist() for b in range(2)] == [[0, 2], [1, 3]]

    def test_it_gets_what_each_sequence_takes(self) -> None:
        seen: list[Any] = []

        def alone(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
            seen.append((lengths.tolist(), capacity))
            return [[index] for index in range(lengths.size)]

        register_strategy("alone", alone)
        pack([6, 99, 2], pack_size=18, strategy="alone", overflow="drop", pad_seq_to_mult=4)
        assert seen == [([9, 5], 18)]

    def test_names_are_not_taken_twice_by_accident(self) -> None:
        register_strategy("mine", lambda lengths, capacity: [])
        with pytest.raises(InvalidInputError, match="registered already"):
            register_strategy("mine", lambda lengths, capacity: [])
        register_strategy("mine", lambda lengths, capacity: [[0]], replace=True)
        assert pack([1], pack_size=2, strategy="mine").num_bins == 1
        with pytest.raises(InvalidInputError, match="built in"):
            register_strategy("optimal", lambda lengths, capacity: [], replace=True)
        with pytest.raises(InvalidInputError, match="must be a function"):
            register_strategy("none", None)  # type: ignore[arg-type]
