"""Whatever the lengths and options: every sequence once or counted, no bin too full, tokens conserved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import lower_bound, martello_toth_bound

STRATEGIES = ["best_fit", "first_fit", "first_fit_shuffle", "greedy", "optimal", "window"]

lengths_and_pack = st.integers(1, 60).flatmap(
    lambda pack_size: st.tuples(st.lists(st.integers(1, pack_size), min_size=1, max_size=120), st.just(pack_size))
)


def check_everything(plan: PackPlan, lengths: list[int]) -> None:
    bins = [plan.bin(number).tolist() for number in range(plan.num_bins)]
    assert all(bins)
    assert all(members == sorted(members) for members in bins)
    assert bins == sorted(bins)
    packed = list(itertools.chain.from_iterable(bins))
    assert len(set(packed)) == len(packed)
    room = sizes_of(plan.item_lengths, plan.measure, plan.pad_seq_to_mult)
    for members in bins:
        assert room[members].sum() <= plan.pack_size or (len(members) == 1 and plan.accounting.num_oversized)
    accounting = plan.accounting
    assert accounting.num_sequences == len(lengths)
    assert accounting.num_tokens == sum(lengths)
    assert accounting.num_tokens_packed == int(plan.item_lengths[packed].sum())
    assert all(count > 0 for count in [*accounting.dropped_sequences.values(), *accounting.dropped_tokens.values()])
    rows = set(packed) if plan.chunks is None else set(plan.chunks.sequence[packed].tolist())
    assert len(rows) == accounting.num_sequences_packed
    num_held_back = 0 if plan.held_back is None else plan.held_back.size
    assert plan.lower_bound <= plan.num_bins + num_held_back
    if plan.order is not None:
        assert sorted(plan.order.tolist()) == list(range(plan.num_bins))


@settings(max_examples=150, deadline=None)
@given(problem=lengths_and_pack, strategy=st.sampled_from(STRATEGIES), most=st.none() | st.integers(1, 6))
def test_every_strategy_packs_every_sequence_once(
    problem: tuple[list[int], int], strategy: str, most: int | None
) -> None:
    lengths, pack_size = problem
    plan = pack(lengths, pack_size=pack_size, strategy=strategy, max_seqs_per_bin=most)
    check_everything(plan, lengths)
    assert plan.indices.size == len(lengths)
    assert most is None or int(np.diff(plan.bin_offsets).max()) <= most


some_options = st.fixed_dictionaries(
    {},
    optional={
        "overflow": st.sampled_from(["drop", "truncate", "split", "single"]),
        "stride": st.integers(0, 3),
        "min_len": st.integers(1, 4),
        "max_len": st.integers(8, 80),
        "max_seqs_per_bin": st.integers(1, 5),
        "pad_seq_to_mult": st.sampled_from([1, 2, 4]),
        "measure": st.sampled_from(["tokens", "inputs"]),
        "shuffle_output": st.booleans(),
        "order_window": st.integers(1, 30),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@settings(max_examples=250, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=80),
    pack_size=st.integers(8, 40),
    strategy=st.sampled_from(STRATEGIES),
    chosen=some_options,
    global_batch=st.none() | st.integers(1, 4),
    balance=st.sampled_from(["none", "attention"]),
)
def test_rows_and_tokens_are_conserved_under_all_options(
    lengths: list[int],
    pack_size: int,
    strategy: str,
    chosen: dict[str, Any],
    global_batch: int | None,
    balance: str,
) -> None:
    # A row of one token always fits, so something is packed whatever is dropped.
    lengths = [*lengths, *[max(4, chosen.get("min_len", 1))] * 4]
    if global_batch is not None:
        chosen["steps"] = {"global_batch": global_batch, "balance": "none" if "order_window" in chosen else balance}
    steps = chosen.pop("steps", None)
    options = PackOptions(pack_size=pack_size, strategy=strategy, **{"overflow": "drop", **chosen})
    plan = pack(lengths, options, steps=steps)
    check_everything(plan, lengths)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=30, max_size=60),
    global_batch=st.integers(1, 5),
    overflow=st.sampled_from(["drop", "split"]),
)
def test_whole_batches_hold_back_and_name_what_is_missing(lengths: list[int], global_batch: int, overflow: str) -> None:
    lengths = [*lengths, *[30] * 10]
    plan = pack(
        lengths,
        pack_size=30,
        overflow=overflow,
        steps={"global_batch": global_batch, "balance": "attention", "whole_batches": True},
    )
    check_everything(plan, lengths)
    assert plan.num_bins % global_batch == 0
    held_back = [] if plan.held_back is None else plan.held_back.tolist()
    assert not set(held_back) & set(plan.indices.tolist())
    assert plan.accounting.dropped_tokens.get("held_back", 0) == int(plan.item_lengths[held_back].sum())


def fewest_bins(sizes: list[int], capacity: int) -> int:
    """The true optimum, by trying every assignment of the next size to an open bin."""
    best = len(sizes)

    def place(position: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if position == len(sizes):
            best = len(rooms)
            return
        size = sizes[position]
        for room in set(rooms):
            if room >= size:
                left = list(rooms)
                left.remove(room)
                place(position + 1, (*left, room - size))
        place(position + 1, (*rooms, capacity - size))

    place(0, ())
    return best


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(3, 30).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=9))
    )
)
def test_no_lower_bound_is_above_the_true_optimum(capacity: tuple[int, list[int]]) -> None:
    size, sizes = capacity
    histogram = np.bincount(sizes, minlength=size + 1)
    optimum = fewest_bins(sorted(sizes, reverse=True), size)
    assert martello_toth_bound(histogram, size) <= lower_bound(histogram, size, 1 << 40) <= optimum
    assert optimum <= pack(sizes, pack_size=size).num_bins
