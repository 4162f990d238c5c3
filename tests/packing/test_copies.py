"""Copies of a sequence do not share a bin unless nothing else fits, and bins stay as full as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from tests.packing import lengths as made
from tests.packing.test_pack_properties import STRATEGIES, check_everything

PACK = 2048


def num_together(plan: PackPlan, copies_of: Any) -> int:
    """Sequences that share a bin with another copy, counted in plain NumPy."""
    bin_of = np.repeat(np.arange(plan.num_bins), np.diff(plan.bin_offsets))
    sequence_of = plan.indices if plan.chunks is None else plan.chunks.sequence[plan.indices]
    placed = np.unique(np.stack([bin_of, sequence_of], axis=1), axis=0)
    groups = np.stack([placed[:, 0], np.asarray(copies_of)[placed[:, 1]]], axis=1)
    return len(groups) - len(np.unique(groups, axis=0))


@pytest.mark.parametrize("shape", [made.chat, made.thirds, made.two_kinds])
@pytest.mark.parametrize("strategy", ["optimal", "window", "best_fit"])
@pytest.mark.parametrize("weight", [2, 3])
def test_copies_do_not_share_a_bin(shape: Any, strategy: str, weight: int) -> None:
    lengths = np.repeat(shape(10_000), weight)
    copies_of = np.repeat(np.arange(10_000), weight)
    plain = pack(lengths, pack_size=PACK, strategy=strategy)
    apart = pack(lengths, pack_size=PACK, strategy=strategy, copies_of=copies_of)
    assert num_together(plain, copies_of) > 10
    # Where every bin is full to the last token, an item or two may find nothing to be exchanged for.
    assert num_together(apart, copies_of) == apart.accounting.num_copies_together <= 2
    assert apart.num_bins == plain.num_bins
    check_everything(apart, lengths.tolist())


def test_copies_that_nothing_can_part_are_counted_and_stored_with_the_plan(tmp_path: Any) -> None:
    plan = pack([4, 4, 4, 4], pack_size=8, copies_of=[0, 0, 0, 0])
    assert plan.num_bins == 2
    assert plan.accounting.num_copies_together == 2
    assert plan.stats().accounting.num_copies_together == 2
    plan.save(tmp_path / "plan.npz")
    assert PackPlan.load(tmp_path / "plan.npz").accounting == plan.accounting
    assert pack([4, 4, 4, 4], pack_size=8, copies_of=[0, 0, 1, 1]).accounting.num_copies_together == 0


def test_two_items_go_for_one_when_no_single_exchange_fits() -> None:
    plan = pack([6, 6, 5, 1, 5, 1], pack_size=12, strategy="best_fit", copies_of=[0, 0, 1, 2, 3, 4])
    assert plan.num_bins == 2
    assert plan.accounting.num_copies_together == num_together(plan, [0, 0, 1, 2, 3, 4]) == 0


def test_greedy_keeps_the_order_and_only_counts() -> None:
    plan = pack([3, 3, 2, 2], pack_size=6, strategy="greedy", copies_of=[7, 7, 8, 8])
    assert plan.indices.tolist() == [0, 1, 2, 3]
    assert plan.accounting.num_copies_together == 2


def test_a_plan_without_copies_is_the_same_with_and_without_the_argument() -> None:
    lengths = made.chat(5000)
    plain = pack(lengths, pack_size=PACK)
    assert pack(lengths, pack_size=PACK, copies_of=np.arange(5000)).fingerprint == plain.fingerprint
    assert "num_copies_together" not in plain.accounting.as_dict()


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    weight=st.integers(1, 4),
    strategy=st.sampled_from(STRATEGIES),
    overflow=st.sampled_from(["drop", "split", "truncate", "single"]),
    most=st.none() | st.integers(1, 6),
    window=st.none() | st.integers(5, 40),
)
def test_the_plan_stays_sound_and_the_count_is_exact(
    lengths: list[int], weight: int, strategy: str, overflow: str, most: int | None, window: int | None
) -> None:
    repeated = np.repeat([*lengths, 5], weight)
    copies_of = np.repeat(np.arange(len(lengths) + 1) * 1_000_003 - 7, weight)
    options: dict[str, Any] = {"pack_size": 30, "strategy": strategy, "overflow": overflow}
    options |= {"max_seqs_per_bin": most, "order_window": window}
    plain = pack(repeated, **options)
    plan = pack(repeated, copies_of=copies_of, **options)
    check_everything(plan, repeated.tolist())
    assert plan.num_bins == plain.num_bins
    assert most is None or int(np.diff(plan.bin_offsets).max()) <= most
    assert plan.accounting.num_copies_together == num_together(plan, copies_of) <= num_together(plain, copies_of)
    assert pack(repeated, copies_of=copies_of, **options).fingerprint == plan.fingerprint


@pytest.mark.parametrize("wrong", [[1, 2], [0.5, 0.5, 0.5], [[1], [2], [3]]])
def test_copies_of_must_be_one_integer_per_sequence(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="copies_of must hold one integer for each of the 3 sequences"):
        pack([1, 2, 3], pack_size=4, copies_of=wrong)
