"""Blending: every prefix within one sample of the weights, any access the same, resume without a replay."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_packed_sft.data.order import order_kernels
from megatron_packed_sft.data.order.blend import Blend, BlendOrder
from megatron_packed_sft.data.order.blend_weights import whole_weights
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.errors import InvalidInputError

small = st.integers(0, 30)
wide = st.integers(0, 10**18)
decimals = st.floats(0, 1e9, allow_nan=False)
any_weights = st.one_of(
    st.lists(small, min_size=1, max_size=12),
    st.lists(wide, min_size=1, max_size=12),
    st.lists(decimals, min_size=1, max_size=12),
    st.lists(st.sampled_from([1, 1000, 10**6, 10**9, 0.001]), min_size=1, max_size=40),
).filter(any)


def make(weights: list[Any]) -> Blend:
    return Blend(weights, [100] * len(weights))


def exact_shares(weights: list[Any]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@given(any_weights)
@settings(deadline=None)
@example([0.48, 0.48, 0.02, 0.02])
@example([1] * 40)
@example([10**9, 1])
def test_every_prefix_is_less_than_one_sample_from_the_weights(weights: list[Any]) -> None:
    shares = exact_shares(weights)
    counts = [0] * len(weights)
    for position, source in enumerate(make(weights).choose(0, 300).sources.tolist(), start=1):
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * position) < 1


def test_small_weights_are_within_one_sample_over_whole_periods_too() -> None:
    for weights in itertools.product(range(5), repeat=4):
        if not any(weights):
            continue
        total = sum(weights)
        counts = np.cumsum(make(list(weights)).choose(0, 3 * total).sources[:, None] == np.arange(4), axis=0)
        lags = counts * total - np.arange(1, 3 * total + 1)[:, None] * np.array(weights)
        assert np.abs(lags).max() < total
        assert not lags[total - 1 :: total].any()  # level at the end of each period


def test_choosing_the_source_that_is_furthest_behind_would_not_do() -> None:
    """Why deadlines: the usual greedy rule is more than one sample off with many sources."""
    weights = np.array([1000, 1000, 1000, *[1] * 60])
    counts, worst = np.zeros(len(weights), np.int64), 0
    for position in range(1, weights.sum() + 1):
        chosen = int(np.argmax(weights * position - counts * weights.sum()))
        counts[chosen] += 1
        worst = max(worst, int(np.abs(weights * position - counts * weights.sum()).max()))
    assert worst > 1.5 * weights.sum()
    ours = np.cumsum(make(weights.tolist()).choose(0, weights.sum()).sources[:, None] == np.arange(63), axis=0)
    assert np.abs(ours * weights.sum() - np.arange(1, weights.sum() + 1)[:, None] * weights).max() < weights.sum()


@given(any_weights, st.integers(0, 400), st.integers(0, 50))
@settings(deadline=None)
def test_any_access_gives_the_same_as_one_pass(weights: list[Any], first: int, count: int) -> None:
    whole = make(weights).choose(0, 450)
    fresh = make(weights).choose(first, count)
    assert fresh.sources.tolist() == whole.sources[first : first + count].tolist()
    assert fresh.positions.tolist() == whole.positions[first : first + count].tolist()


def test_access_in_any_order_on_one_object_is_the_same_and_bounded() -> None:
    blend = make([0.123456789, 0.3, 1 / 3, 0.7])
    whole = blend.choose(0, 20_000)
    for first in np.random.default_rng(0).integers(0, 19_990, 600).tolist():
        some = blend.choose(first, 10)
        assert some.sources.tolist() == whole.sources[first : first + 10].tolist()
        assert some.positions.tolist() == whole.positions[first : first + 10].tolist()
    assert len(blend._points) <= 256


def test_positions_inside_each_source_count_up_without_a_gap() -> None:
    sources, positions = make([5, 3, 0, 1]).choose(0, 900)
    for source in range(4):
        assert positions[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert not (sources == 2).any()


@given(any_weights, st.integers(0, 300))
@settings(deadline=None)
def test_resume_goes_on_exactly(weights: list[Any], stop: int) -> None:
    before = make(weights)
    state = before.state(stop)
    after = make(weights)
    after.load_state(stop, state)
    rest, expected = after.choose(stop, 60), before.choose(stop, 60)
    assert rest.sources.tolist() == expected.sources.tolist()
    assert rest.positions.tolist() == expected.positions.tolist()
    assert after.choose(0, 20).sources.tolist() == before.choose(0, 20).sources.tolist()


def test_resume_does_not_replay_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [0.123456789, 0.3, 1 / 3]
    state = make(weights).state(100_000)
    skipped = []
    schedule = order_kernels.schedule

    def counting(*arguments: Any) -> None:
        skipped.append(arguments[4])
        schedule(*arguments)

    monkeypatch.setattr(order_kernels, "schedule", counting)
    blend = make(weights)
    blend.load_state(100_000, state)
    blend.choose(100_000, 10)
    blend.choose(100_010, 10)
    assert skipped == [0, 0]


def test_far_positions_of_simple_weights_cost_nothing() -> None:
    blend = make([0.3, 0.7])
    sources, positions = blend.choose(10**15, 10)
    assert sources.tolist() == blend.choose(0, 10).sources.tolist()
    assert positions[sources == 0].tolist() == [3 * 10**14 + k for k in range(3)]


def test_new_weights_take_over_where_the_old_ones_stopped() -> None:
    old = make([1, 1, 2])
    state = old.state(10)
    blend = make([1, 8, 1])
    blend.load_state(10, state)
    sources, positions = blend.choose(10, 100)
    assert np.bincount(sources).tolist() == [10, 80, 10]
    for source, count in enumerate(state.counts):
        assert positions[sources == source][0] == count  # nothing skipped, nothing twice
    with pytest.raises(InvalidInputError, match="sample 9 is before 10, where the blend's weights were changed"):
        blend.choose(9, 1)
    again = make([1, 8, 1])
    again.load_state(25, blend.state(25))
    assert again.choose(25, 50).positions.tolist() == blend.choose(25, 50).positions.tolist()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((5, 4), "are not 10 samples of 2 sources"),
        ((5, 4, 1), "are not 10 samples of 2 sources"),
        ((9, 1), r"weights \[1, 1\] do not give after 10 samples"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: tuple[int, ...], message: str) -> None:
    blend = make([1, 1])
    with pytest.raises(InvalidInputError, match=message):
        blend.load_state(10, replace(blend.state(10), counts=counts))


def test_an_origin_that_cannot_be_is_refused() -> None:
    blend = make([1, 1])
    for origin in ({"origin_counts": ()}, {"origin_position": 4}, {"origin_position": 20, "origin_counts": (10, 10)}):
        with pytest.raises(InvalidInputError, match="restore the checkpoint it came from"):
            blend.load_state(10, replace(blend.state(10), **origin))


def test_the_largest_weights_do_not_overflow() -> None:
    blend = make([2**61 - 3, 1, 2])
    assert blend.choose(0, 1000).sources.tolist() == [0] * 1000
    almost = replace(blend.state(0), counts=(2**61 - 12, 1, 1))  # ten samples before the end of the pattern
    blend.load_state(2**61 - 10, almost)
    assert sorted(blend.choose(2**61 - 10, 10).sources.tolist()) == [0] * 9 + [2]
    assert blend.counts(2**61) == blend.weights


def test_progress_reports_shares_counts_and_epochs() -> None:
    blend = Blend([0.25, 0.75], sizes=[10, 1000])
    light, heavy = blend.progress(80)
    assert (light.weight, light.share, light.num_samples, light.epochs) == (0.25, 0.25, 20, 2.0)
    assert (heavy.weight, heavy.share, heavy.num_samples, heavy.epochs) == (0.75, 0.75, 60, 0.06)
    assert [source.share for source in blend.progress(0)] == [0.0, 0.0]
    state = blend.state(80)
    assert (state.weights, state.counts, state.shares, state.epochs) == ((1, 3), (20, 60), (0.25, 0.75), (2.0, 0.06))


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([30, 70], (3, 7)),
        ([Fraction(1, 3), Fraction(1, 6)], (2, 1)),
        ([Decimal("0.05"), "0.95"], (1, 19)),
        ([np.float32(0.1), np.float64(0.9), np.int64(1)], (1, 9, 10)),
        ([1e-9, 1], (1, 10**9)),
        ([5], (1,)),
        ([0, 4], (0, 1)),
    ],
)
def test_weights_mean_what_is_written(weights: list[Any], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole


def test_weights_without_a_common_measure_are_rounded_far_below_a_sample() -> None:
    weights = [1.2345678901234567e-05, 3.3333333333333335, 0.7071067811865476]
    whole = whole_weights(weights)
    assert sum(whole) <= 2**61
    for exact, rounded in zip(exact_shares(weights), whole, strict=True):
        assert abs(exact - Fraction(rounded, sum(whole))) < Fraction(1, 2**58)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "weight 1 of the blend is -0.5; give a number of at least 0"),
        ([float("nan"), 1], "weight 0 of the blend is nan; give a number"),
        ([float("inf"), 1], "weight 0 of the blend is inf; give a number"),
        ([1, None], "weight 1 of the blend is None"),
        ([0, 0.0], "all zero; give at least one source a positive weight"),
        ([], "all zero"),
        (["a lot"], "weight 0 of the blend is 'a lot'"),
    ],
)
def test_bad_weights_are_refused_in_a_sentence(weights: list[Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        make(weights)
    assert caught.value.__cause__ is None


def test_sizes_and_weights_must_fit() -> None:
    with pytest.raises(InvalidInputError, match="2 weights for 1 sources; give each source one weight"):
        Blend([1, 1], [5])
    with pytest.raises(InvalidInputError, match="source 1 has 0 samples but a positive weight; give it data"):
        Blend([1, 1], [5, 0])
    assert Blend([1, 0], [5, 0]).counts(7) == (7, 0)


def two_sources(weights: tuple[int, int] = (2, 1), seed: int = 3) -> BlendOrder:
    orders = [SampleOrder(7, seed, "first"), SampleOrder(4, seed, "second")]
    return BlendOrder(Blend(weights, [7, 4]), orders)


def test_the_blended_order_walks_through_each_source_epoch_by_epoch() -> None:
    order = two_sources()
    sources, samples = order.locate(range(210))
    for source, alone in enumerate(order.orders):
        mine = samples[sources == source]
        assert mine.tolist() == alone.samples(0, len(mine)).tolist()
    assert order.at(range(210)).tolist() == (samples + np.array([0, 7])[sources]).tolist()
    assert order.num_samples == 11


@lru_cache
def whole_stream() -> np.ndarray:
    return two_sources().at(range(30_001))


@given(st.lists(st.integers(0, 30_000), max_size=30))
@settings(deadline=None)
def test_the_blended_order_is_the_same_for_scattered_positions(positions: list[int]) -> None:
    stream = whole_stream()
    assert two_sources().at(positions).tolist() == stream[positions].tolist()
    pairs = np.array(positions[: len(positions) // 2 * 2], np.int64).reshape(-1, 2)
    assert two_sources().at(pairs).tolist() == stream[pairs].tolist()


def test_a_blended_order_survives_pickling() -> None:
    order = two_sources()
    assert pickle.loads(pickle.dumps(order)).at(range(50)).tolist() == order.at(range(50)).tolist()


def test_the_fingerprint_of_a_blend_names_its_sources_in_order() -> None:
    one = SampleOrder(5, 1, "a"), SampleOrder(5, 1, "b")
    blend = Blend([1, 1], [5, 5])
    assert BlendOrder(blend, one).fingerprint != BlendOrder(blend, one[::-1]).fingerprint
    assert BlendOrder(blend, one).seed == 1


def test_orders_that_do_not_fit_the_blend_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"sizes \[5, 5\] but the orders \[5\]"):
        BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5)])
    with pytest.raises(InvalidInputError, match="different seeds"):
        BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5, 1), SampleOrder(5, 2)])


def test_no_weight_is_lost_when_it_is_tiny() -> None:
    assert whole_weights([1e-300, 1.0])[0] == 1
