"""A plan's form, its fingerprints, and its alignment to ranks (the scenarios of seed 003)."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.registry import known_strategies
from tests.packing import lengths as made

PACK = 2048


def bins_of(plan: PackPlan) -> list[list[int]]:
    return [plan.bin(number).tolist() for number in range(plan.num_bins)]


def test_static_packing_gives_a_fixed_number_of_bins_that_fit() -> None:
    lengths = made.chat(3000)
    plan = pack(lengths, pack_size=PACK)
    assert len(plan) == plan.num_bins == len(bins_of(plan))
    for members in bins_of(plan):
        assert lengths[members].sum() <= PACK


def test_a_sequence_longer_than_the_pack_gets_a_bin_of_its_own_or_is_dropped_deterministically() -> None:
    lengths = [10, 50, 20, 70]
    single = pack(lengths, pack_size=30, overflow="single")
    assert bins_of(single) == [[0, 2], [1], [3]]
    assert single.accounting.num_oversized == 2
    dropped = pack(lengths, pack_size=30, overflow="drop")
    assert bins_of(dropped) == [[0, 2]]
    assert dropped.accounting.dropped_sequences == {"longer_than_pack": 2}
    assert dropped.accounting.dropped_tokens == {"longer_than_pack": 120}


@pytest.mark.parametrize("strategy", known_strategies())
def test_identical_inputs_produce_identical_plans(strategy: str) -> None:
    lengths = made.two_kinds(4000)
    first, second = (pack(lengths, pack_size=PACK, strategy=strategy, seed=5) for _ in range(2))
    assert np.array_equal(first.indices, second.indices)
    assert np.array_equal(first.bin_offsets, second.bin_offsets)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("strategy", known_strategies())
def test_indices_ascend_inside_bins_and_bins_are_ordered_by_their_smallest_index(strategy: str) -> None:
    plan = pack(made.chat(5000), pack_size=PACK, strategy=strategy)
    bins = bins_of(plan)
    assert all(members == sorted(members) for members in bins)
    assert bins == sorted(bins)
    assert sorted(index for members in bins for index in members) == list(range(5000))


def test_without_drop_last_the_first_bins_are_repeated_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    plan = pack([4] * 10, pack_size=4)
    with caplog.at_level(logging.INFO):
        aligned = plan.aligned(world_size=4, drop_last=False)
    assert len(aligned) == 12  # ceil(10 / 4) * 4
    assert aligned.bins.tolist() == [*range(10), 0, 1]
    assert aligned.repeated_bins.tolist() == [0, 1]
    assert aligned.dropped_bins.size == 0
    logged = caplog.text
    assert "N_raw_packs=10 N_aligned_packs=12 world_size=4 drop_last=False" in logged
    assert plan.fingerprint in logged
    assert aligned.fingerprint in logged
    assert "pad_needed=2 repeated_packs=[0, 1]" in logged


def test_with_drop_last_the_last_bins_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    plan = pack([4] * 10, pack_size=4)
    with caplog.at_level(logging.INFO):
        aligned = plan.aligned(world_size=4, drop_last=True)
    assert aligned.bins.tolist() == list(range(8))  # floor(10 / 4) * 4
    assert aligned.dropped_bins.tolist() == [8, 9]
    assert "dropped_packs=[8, 9]" in caplog.text
    assert plan.aligned(world_size=4, drop_last=True).fingerprint == aligned.fingerprint


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 5, 10])
def test_a_plan_that_divides_evenly_is_its_own_alignment(world_size: int, drop_last: bool) -> None:
    plan = pack([4] * 10, pack_size=4)
    aligned = plan.aligned(world_size, drop_last)
    assert aligned.bins.tolist() == list(range(10))
    assert aligned.fingerprint == plan.fingerprint


def test_more_ranks_than_bins_repeat_the_plan_as_often_as_needed() -> None:
    plan = pack([4] * 3, pack_size=4)
    assert plan.aligned(world_size=8, drop_last=False).bins.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert plan.aligned(world_size=8, drop_last=True).num_bins == 0


def test_alignment_follows_the_reading_order_and_has_a_fingerprint_of_its_own() -> None:
    plan = pack([4] * 7, pack_size=4, shuffle_output=True, seed=3)
    aligned = plan.aligned(world_size=4, drop_last=False)
    assert plan.order is not None
    assert aligned.bins.tolist() == [*plan.order.tolist(), plan.order[0]]
    fingerprints = {aligned.fingerprint, plan.fingerprint, plan.order_fingerprint}
    fingerprints.add(plan.aligned(world_size=4, drop_last=True).fingerprint)
    assert len(fingerprints) == 4


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_world_size_that_is_no_count_is_refused(world_size: int) -> None:
    with pytest.raises(InvalidInputError, match="world_size must be a positive integer"):
        pack([4], pack_size=4).aligned(world_size, drop_last=True)


def test_fingerprints_tell_plans_apart() -> None:
    plan = pack([3, 1, 2, 2], pack_size=4)
    others = [
        pack([3, 1, 2, 2], pack_size=5),
        pack([2, 2, 3, 1], pack_size=4),
        pack([3, 1, 2, 1], pack_size=4),
        pack([3, 1, 2, 2], pack_size=4, max_seqs_per_bin=1),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_an_order_changes_its_own_fingerprint_and_not_what_is_in_the_bins() -> None:
    plain = pack(made.chat(2000), pack_size=PACK)
    mixed = pack(made.chat(2000), pack_size=PACK, shuffle_output=True, seed=1)
    assert plain.order is None
    assert plain.order_fingerprint == plain.fingerprint
    assert mixed.fingerprint == plain.fingerprint
    assert mixed.order_fingerprint != plain.fingerprint
    assert bins_of(mixed) == bins_of(plain)


def test_a_plan_cannot_be_changed() -> None:
    plan = pack([30, 4], pack_size=10, overflow="split", shuffle_output=True)
    assert plan.chunks is not None
    for array in (plan.indices, plan.bin_offsets, plan.item_lengths, plan.order, plan.chunks.start):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        plan.pack_size = 5  # type: ignore[misc]


def test_changing_the_lengths_afterwards_does_not_change_the_plan() -> None:
    lengths = np.array([3, 1], np.int32)
    plan = pack(lengths, pack_size=4)
    lengths[:] = 99
    assert plan.item_lengths.tolist() == [3, 1]


def test_a_bin_that_is_not_there_is_refused() -> None:
    plan = pack([4, 4], pack_size=4)
    for number in (2, -1):
        with pytest.raises(InvalidInputError, match=f"bin {number} is not in a plan of 2 bins"):
            plan.bin(number)


def test_an_order_must_hold_each_bin_once() -> None:
    plan = pack([4, 4], pack_size=4)
    for order in ([0, 0], [0], [1, 2]):
        with pytest.raises(InvalidInputError, match="each of the 2 bins once"):
            plan.reordered(np.array(order))


def test_stats_add_up() -> None:
    lengths = np.array([7, 3, 6, 2, 30])
    stats = pack(lengths, pack_size=10, overflow="drop").stats()
    assert (stats.num_bins, stats.num_items, stats.num_padding) == (2, 4, 2)
    assert stats.utilization == 18 / 20
    assert (stats.mean_items_per_bin, stats.max_items_per_bin, stats.longest_item) == (2.0, 2, 7)
    assert (stats.max_squared_lengths, stats.mean_squared_lengths) == (58, (58 + 40) / 2)
    assert (stats.lower_bound, stats.gap) == (2, 0.0)
    assert stats.as_dict()["accounting"]["dropped_tokens"] == {"longer_than_pack": 30}


def test_an_oversized_bin_counts_as_full_in_the_stats() -> None:
    stats = pack([15, 5], pack_size=10, overflow="single").stats()
    assert (stats.num_padding, stats.utilization) == (5, 20 / 25)
    assert stats.max_bin_tokens == 15
