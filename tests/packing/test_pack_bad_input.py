"""Wrong input: one sentence that says what is wrong and what to do, never a stack trace from NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.registry import known_strategies


@pytest.mark.parametrize("bad", [0, -1, -(2**40), 2**31])
@pytest.mark.parametrize("dtype", [np.int64, object])
def test_a_length_that_is_no_length_is_named_with_its_place(bad: int, dtype: Any) -> None:
    lengths = np.array([5, 6, bad, 7], dtype)
    match = f"sequence 2 has length {bad}" if dtype is np.int64 else "integers, not object"
    with pytest.raises(InvalidInputError, match=match):
        pack(lengths, pack_size=10)


def test_a_huge_unsigned_length_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="sequence 1 has length"):
        pack(np.array([5, 2**63 + 5], np.uint64), pack_size=10)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty"),
        ([[1, 2], [3, 4]], "one dimension"),
        ([[1], [2, 3]], "one number per sequence"),
        ([1.5, 2.0], "integers, not float64"),
        (["a"], "integers"),
        ([True, False], "integers, not bool"),
        (7, "one dimension"),
        (None, "one dimension"),
    ],
    ids=str,
)
def test_what_is_no_list_of_lengths_is_refused(lengths: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        pack(lengths, pack_size=10)


def test_a_pack_below_the_shortest_sequence_says_so() -> None:
    with pytest.raises(
        InvalidInputError, match="no sequence fits: a bin holds sequences of at most 4 tokens, and the shortest has 5"
    ):
        pack([7, 5, 9], pack_size=4)


def test_a_plan_with_nothing_left_says_why() -> None:
    with pytest.raises(InvalidInputError, match=r"all 3 were dropped \(longer_than_pack: 3\)"):
        pack([7, 5, 9], pack_size=4, overflow="drop")
    with pytest.raises(InvalidInputError, match=r"all 2 were dropped \(below_min_len: 2\)"):
        pack([2, 3], PackOptions(pack_size=9, min_len=8))


def test_an_unknown_strategy_suggests_the_nearest_or_lists_all() -> None:
    with pytest.raises(InvalidInputError, match="strategy 'best' is unknown; did you mean 'best_fit'"):
        pack([1], pack_size=4, strategy="best")
    with pytest.raises(InvalidInputError, match="strategy 'xyz' is unknown; use one of") as caught:
        pack([1], pack_size=4, strategy="xyz")
    assert all(name in str(caught.value) for name in known_strategies())
    assert len(known_strategies()) >= 6


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("overflow", "crop", "overflow 'crop' is unknown; choose from error, drop, truncate, split, single"),
        ("measure", "bytes", "measure 'bytes' is unknown; choose from tokens, inputs"),
        ("pack_size", 0, "pack_size must be a positive integer"),
        ("pack_size", 10.0, "pack_size must be a positive integer"),
        ("pack_size", True, "pack_size must be a positive integer"),
        ("pack_size", 2**30, "pack_size is at most 4,194,304"),
        ("min_len", 0, "min_len must be a positive integer"),
        ("max_len", 0, "max_len must be a positive integer"),
        ("stride", -1, "stride must be an integer that is not negative"),
        ("seed", -1, "seed must be an integer that is not negative"),
        ("seed", 2**64, r"seed is at most 2\*\*64 - 1"),
        ("max_seqs_per_bin", 0, "max_seqs_per_bin must be a positive integer"),
        ("pad_seq_to_mult", 0, "pad_seq_to_mult must be a positive integer"),
        ("order_window", 0, "order_window must be a positive integer"),
        ("steps", {"balance": "none"}, "steps needs global_batch"),
        ("steps", {"global_batch": 4, "size": 1}, "may have balance and whole_batches; it has global_batch, size"),
        ("steps", {"global_batch": 0}, "steps.global_batch must be a positive integer"),
        ("steps", {"global_batch": 4, "balance": "cost"}, "steps.balance 'cost' is unknown"),
        ("steps", 4, "steps must be a mapping"),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: Any, message: str) -> None:
    steps = {"steps": value} if option == "steps" else {}
    options = PackOptions(**{"pack_size": 10, **({} if steps else {option: value})})
    with pytest.raises(InvalidInputError, match=message):
        pack([5, 6], options, **steps)


@pytest.mark.parametrize("trained", [[1], [1, -1], [0.5, 0.5], [[1, 1]]])
def test_trained_tokens_must_be_one_count_per_sequence(trained: Any) -> None:
    with pytest.raises(InvalidInputError, match="one count >= 0 for each of the 2 sequences"):
        pack([5, 6], pack_size=10, steps={"global_batch": 1, "balance": "trained_tokens"}, trained_tokens=trained)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_is_taken(dtype: Any) -> None:
    plan = pack(np.array([3, 1, 2, 2], dtype), pack_size=4)
    assert plan.fingerprint == pack([3, 1, 2, 2], pack_size=4).fingerprint


def test_options_may_be_numpy_integers(tmp_path: Path) -> None:
    plan = pack(
        [6, 6, 2],
        pack_size=np.int64(18),
        pad_seq_to_mult=np.int32(4),
        seed=np.uint64(2**64 - 1),
        max_seqs_per_bin=np.int64(2),
        shuffle_output=True,
        steps={"global_batch": np.int64(1), "balance": "attention"},
    )
    plan.save(tmp_path / "plan.npz")
    assert PackPlan.load(tmp_path / "plan.npz").order_fingerprint == plan.order_fingerprint
    plain = pack([6, 6, 2], pack_size=18, pad_seq_to_mult=4, max_seqs_per_bin=2)
    assert plan.fingerprint == plain.fingerprint


def test_lengths_may_be_a_strided_or_read_only_view() -> None:
    lengths = np.array([3, 9, 1, 9, 2, 9, 2, 9])[::2]
    lengths.flags.writeable = False
    assert pack(lengths, pack_size=4).fingerprint == pack([3, 1, 2, 2], pack_size=4).fingerprint
