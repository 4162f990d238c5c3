"""Samplers: the same global batches for any number of ranks, padding at the end, state that moves with the batches."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.data.loader import PackedLoader
from megatron_packed_sft.data.order.blend import Blend, BlendOrder
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.data.order.samplers import BatchSampler, GlobalBatchSampler, IndexSampler, MicroBatchSampler
from megatron_packed_sft.errors import InvalidInputError


def all_ranks(kind: type[BatchSampler], size: int, *arguments: Any, **options: Any) -> list[list[list[int]]]:
    """One list of batches per rank."""
    return [list(kind(*arguments, data_parallel_rank=rank, data_parallel_size=size, **options)) for rank in range(size)]


def global_stream(per_rank: list[list[list[int]]]) -> list[int]:
    """The samples in the order of the stream: step by step, rank by rank."""
    assert len({len(batches) for batches in per_rank}) == 1, "all ranks take the same number of steps"
    return [index for step in zip(*per_rank, strict=True) for batch in step for index in batch]


def test_sequential_micro_batches_are_those_of_megatron() -> None:
    # What Megatron's sampler gives for 10 samples, micro batch 2 and 2 ranks.
    assert all_ranks(MicroBatchSampler, 2, 10, 0, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all_ranks(MicroBatchSampler, 2, 10, 4, 2) == [[[4, 5]], [[6, 7]]]


def test_a_seed_that_would_be_ignored_is_refused() -> None:
    for create in (MicroBatchSampler, lambda count, seed: PackedLoader(range(count), collate_fn=list, seed=seed)):
        with pytest.raises(InvalidInputError, match="seed is 5, but nothing is shuffled; pass shuffle=True"):
            create(10, seed=5)
    blend = BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5)] * 2)
    with pytest.raises(InvalidInputError, match="seed is 5, but the order of the samples is given, such as that of a"):
        PackedLoader(range(10), collate_fn=list, order=blend, seed=5)
    assert list(MicroBatchSampler(4, seed=5, shuffle=False)) == [[0], [1], [2], [3]]


def test_shuffled_batches_follow_the_order_over_all_ranks() -> None:
    order = SampleOrder(24, 5, "data")
    for size in (1, 2, 3, 4, 6):
        batches = all_ranks(MicroBatchSampler, size, 24, 0, 2, shuffle=True, seed=5, fingerprint="data")
        assert global_stream(batches) == order.samples(0, 24).tolist()


@pytest.mark.parametrize("kind", [MicroBatchSampler, GlobalBatchSampler])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_global_batch_is_the_same_set_for_any_number_of_ranks(kind: type[BatchSampler], shuffle: bool) -> None:
    sets = set()
    for size, micro in ((1, 1), (1, 24), (2, 3), (2, 12), (3, 2), (4, 1), (8, 3), (12, 2), (24, 1)):
        per_rank = all_ranks(kind, size, 100, 0, micro, global_batch_size=24, shuffle=shuffle)
        indices = np.array([list(itertools.chain(*batches)) for batches in per_rank]).reshape(size, 4, -1)
        sets.add(tuple(frozenset(indices[:, k].reshape(-1).tolist()) for k in range(4)))
    [only] = sets
    assert [len(batch) for batch in only] == [24] * 4


def test_the_share_of_a_global_batch_is_the_ranks_micro_batches_in_turn() -> None:
    for size, micro in ((1, 2), (2, 2), (3, 4), (4, 3)):
        micro_batches = all_ranks(MicroBatchSampler, size, 50, 0, micro, global_batch_size=24, shuffle=True)
        shares = all_ranks(GlobalBatchSampler, size, 50, 0, micro, global_batch_size=24, shuffle=True)
        for rank in range(size):
            assert list(itertools.chain(*micro_batches[rank])) == list(itertools.chain(*shares[rank]))
            assert [len(share) for share in shares[rank]] == [24 // size] * 2


def test_single_indices_are_the_micro_batches_one_by_one() -> None:
    for options in ({}, {"drop_last": False}, {"drop_last": False, "pad_samples_to_global_batch_size": False}):
        batches = list(itertools.chain(*MicroBatchSampler(11, 0, 4, shuffle=True, **options)))
        sampler = IndexSampler(11, 0, 4, shuffle=True, **options)
        assert len(sampler) == len(batches)
        assert list(sampler) == batches


@given(
    num_samples=st.integers(1, 60),
    epochs=st.integers(1, 3),
    size=st.integers(1, 5),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    consumed=st.integers(0, 200),
    drop_last=st.booleans(),
    kind=st.sampled_from([MicroBatchSampler, GlobalBatchSampler]),
)
@settings(deadline=None)
def test_a_pass_gives_every_sample_left_in_it_once_and_then_drops_or_pads(
    num_samples: int,
    epochs: int,
    size: int,
    micro: int,
    accumulation: int,
    consumed: int,
    drop_last: bool,
    kind: type[BatchSampler],
) -> None:
    global_batch = size * micro * accumulation
    per_pass = num_samples * epochs
    if drop_last and per_pass < global_batch:
        return
    samplers = [
        kind(
            num_samples,
            consumed,
            micro,
            global_batch,
            rank,
            size,
            drop_last,
            num_epochs=epochs,
            shuffle=True,
            seed=3,
        )
        for rank in range(size)
    ]
    batches = [list(sampler) for sampler in samplers]
    left = per_pass - consumed % per_pass
    start = consumed
    if drop_last and left < global_batch:  # nothing whole is left: the next pass comes at once
        start, left = consumed + left, per_pass
    end = start + left
    stream = SampleOrder(num_samples, 3).samples(start, left).tolist()
    given_out = global_stream(batches) if kind is MicroBatchSampler else None
    everything = sorted(itertools.chain(*itertools.chain(*batches)))
    if drop_last:
        whole = left // global_batch * global_batch
        assert everything == sorted(stream[:whole])
        assert given_out in (None, stream[:whole])
    else:
        padding = -left % global_batch
        assert everything == [-1] * padding + sorted(stream)
        assert given_out in (None, stream + [-1] * padding)
    assert {sampler.consumed_samples for sampler in samplers} == {end}


def test_length_counts_the_batches_of_a_whole_pass() -> None:
    assert len(MicroBatchSampler(10, 0, 2, 4)) == 4
    assert len(MicroBatchSampler(10, 0, 2, 4, drop_last=False)) == 6
    assert len(GlobalBatchSampler(10, 0, 2, 4)) == 2
    assert len(GlobalBatchSampler(10, 0, 2, 4, drop_last=False)) == 3
    assert len(GlobalBatchSampler(10, 0, 2, 4, num_epochs=2)) == 5
    for kind, drop_last in itertools.product((MicroBatchSampler, GlobalBatchSampler), (True, False)):
        sampler = kind(10, 0, 2, 4, drop_last=drop_last)
        assert len(sampler) == len(list(sampler)) == len(list(sampler))


def test_a_sampler_without_an_end_has_no_length_and_goes_over_epochs_without_a_seam() -> None:
    sampler = MicroBatchSampler(5, 0, 2, num_epochs=None, shuffle=True)
    with pytest.raises(TypeError, match="never ends"):
        len(sampler)
    batches = list(itertools.islice(sampler, 2000))
    assert list(itertools.chain(*batches)) == SampleOrder(5).samples(0, 4000).tolist()


def test_the_next_pass_begins_where_the_last_one_ended() -> None:
    sampler = MicroBatchSampler(5, 0, 2, shuffle=True)
    order = SampleOrder(5)
    assert [index for batch in sampler for index in batch] == order.samples(0, 4).tolist()
    assert sampler.consumed_samples == 5  # the sample that was dropped belongs to that pass
    assert [index for batch in sampler for index in batch] == order.samples(5, 4).tolist()


def test_a_pass_that_was_left_early_goes_on() -> None:
    sampler = MicroBatchSampler(8, 0, 2)
    for indices in sampler:
        if indices == [2, 3]:
            break
    assert list(sampler) == [[4, 5], [6, 7]]


def test_without_padding_the_last_batch_is_short() -> None:
    options = {"drop_last": False, "pad_samples_to_global_batch_size": False}
    assert list(MicroBatchSampler(5, 0, 2, **options)) == [[0, 1], [2, 3], [4]]
    assert list(GlobalBatchSampler(5, 0, 2, 4, **options)) == [[0, 1, 2, 3], [4]]


def test_padding_fills_the_global_batch_of_every_rank() -> None:
    padded = all_ranks(GlobalBatchSampler, 2, 5, 0, 1, 4, drop_last=False)
    assert padded == [[[0, 2], [4, -1]], [[1, 3], [-1, -1]]]


@pytest.mark.parametrize("kind", [MicroBatchSampler, GlobalBatchSampler, IndexSampler])
@pytest.mark.parametrize("drop_last", [True, False])
def test_state_moves_with_the_batches_and_resumes(kind: Any, drop_last: bool) -> None:
    def make() -> Any:
        return kind(13, 0, 2, 4, drop_last=drop_last, shuffle=True, seed=8, fingerprint="data", num_epochs=3)

    def samples(batches: list[Any]) -> list[int]:
        flat = batches if kind is IndexSampler else itertools.chain(*batches)
        return [index for index in flat if index >= 0]

    whole = list(make())
    in_global_batch = {MicroBatchSampler: 2, GlobalBatchSampler: 1, IndexSampler: 4}[kind]
    for taken in range(0, len(whole), 2 if kind is IndexSampler else 1):
        sampler = make()
        iterator = iter(sampler)
        for _ in range(taken):
            next(iterator)
        resumed = make()
        resumed.load_state_dict(sampler.state_dict())
        rest, expected = list(resumed), whole[taken:]
        if taken % in_global_batch == 0:
            assert rest == expected
        else:  # inside a global batch: the same samples, then some of those that did not fill one before
            assert samples(rest)[: len(samples(expected))] == samples(expected)
            assert len(rest) - len(expected) in range(-in_global_batch, in_global_batch)


def test_the_state_of_a_blend_is_resumed_with_its_counts() -> None:
    def make(weights: tuple[float, ...] = (0.7, 0.3), **options: Any) -> MicroBatchSampler:
        orders = [SampleOrder(5, 1, "a"), SampleOrder(3, 1, "b")]
        return MicroBatchSampler(8, 0, 2, order=BlendOrder(Blend(weights, [5, 3]), orders), num_epochs=None, **options)

    whole = list(itertools.islice(make(), 50))
    sampler = make()
    assert list(itertools.islice(sampler, 20)) == whole[:20]
    state = sampler.state_dict()
    assert state["blend"]["counts"] == [28, 12]
    assert state["blend"]["shares"] == [0.7, 0.3]
    assert state["blend"]["epochs"] == [5.6, 4.0]
    resumed = make()
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed, 30)) == whole[20:]
    with pytest.raises(InvalidInputError, match=r"weights was \(7, 3\) and is \(1, 1\) now.*'weights'"):
        make((1, 1)).load_state_dict(state)
    changed = make((1, 1), allow_mismatch=("weights",))
    changed.load_state_dict(state)
    next_ten = list(itertools.chain(*itertools.islice(changed, 5)))
    assert sum(index < 5 for index in next_ten) == 5
    assert next_ten[:1] == SampleOrder(5, 1, "a").samples(28, 1).tolist()
    again = make((1, 1))
    again.load_state_dict(changed.state_dict())
    assert list(itertools.islice(again, 9)) == list(itertools.islice(changed, 9))


def test_integers_of_numpy_are_taken_and_the_state_stays_plain() -> None:
    sampler = MicroBatchSampler(np.int64(10), np.int64(4), 2)
    assert type(sampler.state_dict()["consumed_samples"]) is int
    assert list(sampler) == [[4, 5], [6, 7], [8, 9]]
    assert all(type(index) is int for batch in MicroBatchSampler(10, shuffle=True) for index in batch)


def test_a_sampler_survives_pickling() -> None:
    sampler = MicroBatchSampler(100, 10, 2, shuffle=True)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_samples": 0}, "total_samples is 0; it must be at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"global_batch_size": -4}, "global_batch_size is -4"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"consumed_samples": -1}, "consumed_samples is -1; it must be at least 0"),
        ({"data_parallel_rank": 2, "data_parallel_size": 2}, r"data_parallel_rank 2 is not in 0\.\.1; ranks count"),
        ({"data_parallel_rank": -1}, "data_parallel_rank -1 is not in"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        (
            {"micro_batch_size": 2, "global_batch_size": 5},
            "global_batch_size 5 is not a multiple of micro_batch_size 2",
        ),
        ({"drop_last": True, "pad_samples_to_global_batch_size": True}, "cannot both be on; choose one"),
        (
            {"data_parallel_size": 2, "drop_last": False, "pad_samples_to_global_batch_size": False},
            "leaves some ranks without a last batch",
        ),
        ({"micro_batch_size": 11}, "10 samples are fewer than one global batch of 11, so drop_last drops all"),
        ({"allow_mismatch": ("sed",)}, "must be a tuple of names from"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        MicroBatchSampler(**{"total_samples": 10, **arguments})
