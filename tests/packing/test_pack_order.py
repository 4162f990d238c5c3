"""In which order bins are read: shuffling, steps of even cost, whole batches, and keeping the data's order."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import PackOptions, Steps
from megatron_packed_sft.packing.packer import pack
from tests.packing import lengths as made

PACK = 2048


def test_shuffling_is_a_permutation_that_depends_on_the_seed_only() -> None:
    lengths = made.chat(5000)
    orders = [pack(lengths, pack_size=PACK, shuffle_output=True, seed=seed).bin_order for seed in (1, 1, 2)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(np.sort(orders[0]), np.arange(orders[0].size))
    assert (orders[0] == np.arange(orders[0].size)).mean() < 0.05


def test_the_shuffle_is_even() -> None:
    """Each of four bins comes first about as often as the others."""
    firsts = [int(pack([4] * 4, pack_size=4, shuffle_output=True, seed=seed).bin_order[0]) for seed in range(2000)]
    assert (np.abs(np.bincount(firsts, minlength=4) - 500) < 100).all()


def rank_imbalance(costs: np.ndarray, order: np.ndarray, ranks: int) -> float:
    """The slowest rank of a step over the mean, averaged over steps."""
    steps = costs[order][: order.size // ranks * ranks].reshape(-1, ranks)
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())


def test_balancing_attention_makes_every_rank_of_a_step_cost_the_same() -> None:
    lengths = made.chat(40_000)
    shuffled = pack(lengths, pack_size=PACK, shuffle_output=True)
    even = pack(lengths, pack_size=PACK, steps={"global_batch": 8, "balance": "attention"})
    costs = even.bin_squared_lengths
    assert rank_imbalance(costs, shuffled.bin_order, 8) > 1.5
    assert rank_imbalance(costs, even.bin_order, 8) < 1.02
    assert even.stats().step_imbalance == pytest.approx(rank_imbalance(costs, even.bin_order, 8))
    assert even.fingerprint == shuffled.fingerprint


def test_steps_are_shuffled_so_that_cost_does_not_follow_time() -> None:
    plan = pack(made.chat(40_000), pack_size=PACK, steps=Steps(global_batch=8, balance="attention"), seed=4)
    whole = plan.num_bins // 8
    cost_of_step = plan.bin_squared_lengths[plan.bin_order][: whole * 8].reshape(whole, 8).sum(axis=1)
    assert abs(np.corrcoef(cost_of_step, np.arange(whole))[0, 1]) < 0.15


def test_balancing_trained_tokens_looks_at_these() -> None:
    lengths = made.chat(20_000)
    trained = made.between(0, 100, 20_000, 11) * lengths // 100
    steps = {"global_batch": 8, "balance": "trained_tokens"}
    plan = pack(lengths, pack_size=PACK, steps=steps, trained_tokens=trained)
    per_bin = np.add.reduceat(trained[plan.indices], plan.bin_offsets[:-1])
    assert rank_imbalance(per_bin, plan.bin_order, 8) < 1.02
    assert rank_imbalance(plan.bin_squared_lengths, plan.bin_order, 8) > 1.2


def test_pieces_of_a_sequence_share_its_trained_tokens() -> None:
    steps = {"global_batch": 1, "balance": "trained_tokens"}
    plan = pack([20, 10, 10], pack_size=10, overflow="split", steps=steps, trained_tokens=[20, 3, 9])
    # Bins: two pieces with ten trained tokens each, then 3 and 9; steps of one bin each, in some order.
    assert plan.num_bins == 4
    assert plan.order is not None


def test_a_short_step_comes_last() -> None:
    plan = pack([4, 3, 2, 1, 4], pack_size=4, max_seqs_per_bin=1, steps={"global_batch": 2, "balance": "attention"})
    assert plan.item_lengths[plan.bin(int(plan.bin_order[-1]))].tolist() == [1]


def test_steps_without_balance_leave_the_order_alone() -> None:
    plan = pack([4] * 6, pack_size=4, steps={"global_batch": 2})
    assert plan.order is None
    assert plan.global_batch == 2
    assert plan.stats().step_imbalance == 1.0


def test_whole_batches_hold_back_the_emptiest_bins_and_name_them() -> None:
    lengths = [4, 4, 1, 4, 2, 4]
    plan = pack(lengths, pack_size=4, max_seqs_per_bin=1, steps={"global_batch": 4, "whole_batches": True})
    assert plan.num_bins == 4
    assert plan.held_back is not None
    assert plan.held_back.tolist() == [2, 4]
    assert plan.accounting.dropped_sequences == {"held_back": 2}
    assert plan.accounting.dropped_tokens == {"held_back": 3}
    assert plan.stats().utilization == 1.0


def test_whole_batches_with_nothing_to_hold_back_change_nothing() -> None:
    plain = pack([4] * 4, pack_size=4)
    whole = pack([4] * 4, pack_size=4, steps={"global_batch": 2, "whole_batches": True})
    assert whole.fingerprint == plain.fingerprint
    assert whole.accounting.dropped_sequences == {}


def test_a_batch_larger_than_the_plan_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="back everything: 3 bins are fewer than a global batch of 4"):
        pack([4] * 3, pack_size=4, steps={"global_batch": 4, "whole_batches": True})


def test_a_held_back_piece_does_not_drop_its_sequence() -> None:
    plan = pack([15, 10], pack_size=10, overflow="split", steps={"global_batch": 2, "whole_batches": True})
    assert plan.accounting.dropped_tokens == {"held_back": 5}
    assert plan.accounting.dropped_sequences == {}
    assert plan.accounting.num_sequences_packed == 2


@pytest.mark.parametrize("shuffle_output", [False, True])
@pytest.mark.parametrize("whole_batches", [False, True])
def test_an_order_window_keeps_every_bin_inside_its_window(shuffle_output: bool, whole_batches: bool) -> None:
    window = 500
    plan = pack(
        made.chat(4321),
        PackOptions(pack_size=PACK, order_window=window, shuffle_output=shuffle_output),
        steps={"global_batch": 7, "whole_batches": whole_batches},
    )
    windows_of_bins = [np.unique(plan.bin(number) // window) for number in plan.bin_order.tolist()]
    assert all(window_of_bin.size == 1 for window_of_bin in windows_of_bins)
    in_order = np.array([window_of_bin[0] for window_of_bin in windows_of_bins])
    assert (np.diff(in_order) >= 0).all()
    if shuffle_output:
        assert plan.order is not None
        assert not np.array_equal(plan.order, np.arange(plan.num_bins))


def test_an_order_window_counts_only_what_is_packed() -> None:
    plan = pack([1, 9, 9, 1, 9, 9], PackOptions(pack_size=18, order_window=2, min_len=5))
    assert [plan.bin(b).tolist() for b in range(plan.num_bins)] == [[1, 2], [4, 5]]
