"""reliability.md rows 16 and 17: stop anywhere, resume with other ranks and workers, refuse another run's state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_packed_sft.data.loader import PackedLoader
from megatron_packed_sft.data.order.blend import Blend, BlendOrder
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.order.samplers import GlobalBatchSampler, MicroBatchSampler
from megatron_packed_sft.errors import InvalidInputError

WORLD_SIZES = (1, 2, 3, 4, 8)
WORKERS = (0, 1, 4)
NUM_SAMPLES = 29  # prime, so that no batch ends with an epoch
GLOBAL_BATCH = 24  # every world size divides it
STOPS = range(2 * NUM_SAMPLES + 5)  # over two edges of epochs


class Numbers:
    """Sample i is the number i."""

    fingerprint = "numbers"
    tokenizer_fingerprint = "tokenizer"
    chat_template_fingerprint = "template"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list[int]) -> list[int]:
        return samples


def plain() -> Order:
    return SampleOrder(NUM_SAMPLES, 11, "numbers")


def blended() -> Order:
    orders = [SampleOrder(20, 11, "a"), SampleOrder(6, 11, "b"), SampleOrder(3, 11, "c")]
    return BlendOrder(Blend([0.6, 0.3, 0.1], [20, 6, 3]), orders)


def sampler(rank: int, size: int, consumed: int = 0, order: Order | None = None) -> MicroBatchSampler:
    micro_batch = max(1, GLOBAL_BATCH // size // 2)
    return MicroBatchSampler(
        NUM_SAMPLES, consumed, micro_batch, GLOBAL_BATCH, rank, size, num_epochs=None, order=order or plain()
    )


def in_stream_order(ranks: list[Any], num_steps: int) -> list[int]:
    """The samples of `num_steps` batches of every rank: step by step, rank by rank."""
    iterators = [iter(rank) for rank in ranks]
    return [sample for _ in range(num_steps) for iterator in iterators for sample in next(iterator)]


@pytest.mark.parametrize("order", [plain, blended])
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_after_every_sample_any_number_of_ranks_goes_on_with_the_same_stream(order: Any, size: int) -> None:
    stream = order().at(range(STOPS.stop + 2 * GLOBAL_BATCH + 12)).tolist()
    before = PackedLoader(Numbers(), MicroBatchSampler(NUM_SAMPLES, order=order(), num_epochs=None), prefetch=1)
    handed_out: Iterator[Any] = iter(before)
    for stop in STOPS:
        state = json.loads(json.dumps(before.state_dict()))
        assert state["consumed_samples"] == stop
        ranks = [PackedLoader(Numbers(), sampler(rank, size, order=order()), prefetch=0) for rank in range(size)]
        for rank in ranks:
            rank.load_state_dict(state)
        num_steps = 4 if size < 8 else 6  # two global batches, in micro batches
        rest = in_stream_order(ranks, num_steps)
        assert rest == stream[stop : stop + len(rest)]
        assert len(rest) == 2 * GLOBAL_BATCH
        assert next(handed_out) == stream[stop : stop + 1]


@pytest.mark.parametrize("before", WORLD_SIZES)
@pytest.mark.parametrize("after", WORLD_SIZES)
def test_a_run_may_change_its_ranks_at_every_step(before: int, after: int) -> None:
    stream = plain().at(range(300)).tolist()
    old = [PackedLoader(Numbers(), sampler(rank, before), prefetch=2) for rank in range(before)]
    running = [iter(loader) for loader in old]
    position = 0
    while position < 2 * NUM_SAMPLES:
        for iterator in running:
            next(iterator)
        states = [loader.state_dict() for loader in old]
        assert all(state == states[0] for state in states)  # every rank saves the same
        position = states[0]["consumed_samples"]
        new = [PackedLoader(Numbers(), sampler(rank, after), prefetch=0) for rank in range(after)]
        for loader in new:
            loader.load_state_dict(states[0])
        rest = in_stream_order(new, 3)
        assert rest == stream[position : position + len(rest)]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores, on purpose
def test_torch_workers_do_not_change_the_stream(size: int, workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    stops = (0, NUM_SAMPLES - 1, NUM_SAMPLES + 7) if workers == 0 else (NUM_SAMPLES - 5 - size,)
    for stop in stops:
        ranks = [
            data.DataLoader(
                Numbers(),
                batch_sampler=sampler(rank, size, consumed=stop),
                num_workers=workers,
                collate_fn=list,
                multiprocessing_context="fork" if workers else None,
            )
            for rank in range(size)
        ]
        # One rank after the other, so that no more than `workers` processes run at a time.
        batches = [list(itertools.islice(rank, 4)) for rank in ranks]
        rest = [sample for step in zip(*batches, strict=True) for batch in step for sample in batch]
        assert rest == plain().at(range(stop, stop + len(rest))).tolist()


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_whole_global_batches_are_the_same_sets_after_every_sample(size: int) -> None:
    stream = plain().at(range(200)).tolist()
    for stop in STOPS:
        ranks = [
            GlobalBatchSampler(NUM_SAMPLES, stop, 1, GLOBAL_BATCH, rank, size, num_epochs=None, order=plain())
            for rank in range(size)
        ]
        for step, shares in enumerate(itertools.islice(zip(*ranks, strict=True), 3)):
            first = stop + step * GLOBAL_BATCH
            assert sorted(itertools.chain(*shares)) == sorted(stream[first : first + GLOBAL_BATCH])


@pytest.mark.parametrize("stop", [0, 10, 24, 28, 29, 40, 57])
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_padded_passes_lose_no_sample_wherever_they_are_resumed(stop: int, size: int) -> None:
    ranks = [
        MicroBatchSampler(
            NUM_SAMPLES,
            stop,
            1,
            GLOBAL_BATCH,
            rank,
            size,
            drop_last=False,
            shuffle=True,
            seed=11,
            fingerprint="numbers",
        )
        for rank in range(size)
    ]
    num_left = NUM_SAMPLES - stop % NUM_SAMPLES
    given_out = [index for step in zip(*ranks, strict=True) for batch in step for index in batch]
    assert given_out[:num_left] == plain().at(range(stop, stop + num_left)).tolist()
    assert set(given_out[num_left:]) <= {-1}
    assert len(given_out) % GLOBAL_BATCH == 0
    assert {rank.consumed_samples for rank in ranks} == {stop + num_left}


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("fingerprint", "fingerprint"),
        ("tokenizer", "tokenizer_fingerprint"),
        ("chat_template", "chat_template_fingerprint"),
    ],
)
def test_a_state_of_other_data_tokenizer_or_template_is_refused(name: str, attribute: str) -> None:
    state = PackedLoader(Numbers(), shuffle=True).state_dict()
    dataset = Numbers()
    setattr(dataset, attribute, "something else")
    with pytest.raises(InvalidInputError) as caught:
        PackedLoader(dataset, shuffle=True).load_state_dict(state)
    assert f"{name} was {state[name]!r} and is 'something else' now" in str(caught.value)
    assert f"allow_mismatch=({name!r},)" in str(caught.value)
    allowed = PackedLoader(dataset, shuffle=True, allow_mismatch=(name,))
    allowed.load_state_dict({**state, "consumed_samples": 3})
    assert allowed.consumed_samples == 3


def test_a_state_of_another_seed_or_order_is_refused() -> None:
    state = PackedLoader(Numbers(), shuffle=True, seed=1).state_dict()
    with pytest.raises(InvalidInputError, match=r"seed was 1 and is 2 now.*allow_mismatch=\('seed',\)"):
        PackedLoader(Numbers(), shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(InvalidInputError, match=r"shuffle was True and is False now.*allow_mismatch=\('shuffle',\)"):
        PackedLoader(Numbers(), shuffle=False).load_state_dict(state)


def test_a_refused_state_changes_nothing() -> None:
    loader = PackedLoader(Numbers(), shuffle=True, seed=2)
    iterator = iter(loader)
    first = next(iterator)
    with pytest.raises(InvalidInputError):
        loader.load_state_dict(PackedLoader(Numbers(), shuffle=True, seed=1).state_dict())
    assert loader.consumed_samples == 1
    rest = [sample for batch in iterator for sample in batch]
    assert first + rest == SampleOrder(NUM_SAMPLES, 2, "numbers").samples(0, NUM_SAMPLES).tolist()
