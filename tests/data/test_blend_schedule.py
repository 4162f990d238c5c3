"""Weights that change over the run: every prefix within one sample of what is due, exact access and resume."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.data.order import order_kernels
from megatron_packed_sft.data.order.blend import Blend, BlendedSources
from megatron_packed_sft.data.order.blend_weights import AnnealedWeights, BlendSchedule
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.errors import InvalidInputError
from tests.packed_bins import make_bins, write_shard

EOS = 2


def proportions(num_sources: int) -> st.SearchStrategy[tuple[int, ...]]:
    weights = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 10**3, 10**6, 10**9, 10**17]))
    return st.lists(weights, min_size=num_sources, max_size=num_sources).filter(any).map(tuple)


@st.composite
def annealings(draw: st.DrawFn) -> AnnealedWeights:
    num_sources = draw(st.integers(1, 8))
    first = draw(st.integers(0, 200))
    last = first + draw(st.one_of(st.just(0), st.integers(0, 200)))
    return AnnealedWeights(draw(proportions(num_sources)), draw(proportions(num_sources)), first, last)


def make(annealing: AnnealedWeights) -> Blend:
    return Blend(annealing, [100] * len(annealing.start))


def due(annealing: AnnealedWeights, position: int) -> list[Fraction]:
    """What the document says: the sum over samples of the weights in the middle of each."""
    totals = sum(annealing.start), sum(annealing.end)
    found = [Fraction(0)] * len(annealing.start)
    for sample in range(position):
        middle, length = Fraction(2 * sample + 1, 2) - annealing.first, annealing.last - annealing.first
        moved = (
            Fraction(0) if sample < annealing.first else Fraction(1) if sample >= annealing.last else middle / length
        )
        for source, (before, after) in enumerate(zip(annealing.start, annealing.end, strict=True)):
            found[source] += Fraction(before, totals[0]) * (1 - moved) + Fraction(after, totals[1]) * moved
    return found


@given(annealings(), st.integers(0, 450))
@settings(deadline=None)
@example(AnnealedWeights((1, 0), (0, 1), 0, 0), 10)
@example(AnnealedWeights((1, 0, 0), (0, 0, 1), 3, 4), 10)
@example(AnnealedWeights((0, 1), (1, 0), 100, 300), 400)
@example(AnnealedWeights((10**17, 1, 1), (1, 10**17, 1), 10, 20), 40)
def test_every_prefix_is_less_than_one_sample_from_what_is_due(annealing: AnnealedWeights, position: int) -> None:
    tolerance = Fraction(1, 10**9)  # proportions without a common measure are rounded far below a sample
    counts = make(annealing).counts(position)
    assert sum(counts) == position
    for count, share in zip(counts, due(annealing, position), strict=True):
        assert abs(count - share) < 1 + tolerance


@given(annealings())
@settings(deadline=None, max_examples=50)
def test_the_bound_holds_in_exact_integers_at_every_single_sample(annealing: AnnealedWeights) -> None:
    blend = make(annealing)
    counts = [0] * len(annealing.start)
    for position, source in enumerate(blend.choose(0, 450).sources.tolist(), start=1):
        counts[source] += 1
        for count, share in zip(counts, blend.stages.due(position), strict=True):
            assert abs(count * blend.stages.total - share) < blend.stages.total
    for weights in blend.stages.weights:
        assert sum(weights) == blend.stages.total


@given(annealings(), st.integers(0, 450), st.integers(0, 50))
@settings(deadline=None)
def test_any_access_gives_the_same_as_one_pass(annealing: AnnealedWeights, first: int, count: int) -> None:
    whole = make(annealing).choose(0, 500)
    blend = make(annealing)
    for _ in range(2):
        some = blend.choose(first, count)
        assert some.sources.tolist() == whole.sources[first : first + count].tolist()
        assert some.positions.tolist() == whole.positions[first : first + count].tolist()
    assert blend.choose(first // 2, 10).sources.tolist() == whole.sources[first // 2 : first // 2 + 10].tolist()


@given(annealings(), st.integers(0, 450), st.integers(0, 450))
@settings(deadline=None)
def test_resume_goes_on_exactly_also_after_a_change_of_the_schedule(
    annealing: AnnealedWeights, stop: int, again: int
) -> None:
    before = make(annealing)
    after = make(annealing)
    after.load_state(stop, before.state(stop))
    assert after.choose(stop, 60).positions.tolist() == before.choose(stop, 60).positions.tolist()
    other = AnnealedWeights(annealing.end, annealing.start, annealing.first + 7, annealing.last + 30)
    changed = make(other)
    changed.load_state(stop, before.state(stop))
    resumed = make(other)
    resumed.load_state(stop + again, changed.state(stop + again))
    assert resumed.choose(stop + again, 60).positions.tolist() == changed.choose(stop + again, 60).positions.tolist()
    for source, count in enumerate(before.counts(stop)):  # nothing is skipped, nothing comes twice
        sources, positions = changed.choose(stop, 60)
        assert positions[sources == source].tolist() == [count + n for n in range(int((sources == source).sum()))]


@given(st.integers(1, 5).flatmap(proportions), st.integers(0, 100), st.integers(0, 100))
@settings(deadline=None)
def test_annealing_to_the_same_weights_is_a_constant_blend(weights: tuple[int, ...], first: int, length: int) -> None:
    annealed = make(AnnealedWeights(weights, weights, first, first + length)).choose(0, 300)
    if max(weights) < 10**12:  # larger ones are rounded
        assert annealed.sources.tolist() == Blend(weights, [100] * len(weights)).choose(0, 300).sources.tolist()


def test_a_long_line_is_a_thousand_equal_stages() -> None:
    blend = make(AnnealedWeights((1, 0), (0, 1), 10**9, 3 * 10**9))
    stages = blend.stages
    assert len(stages.starts) == 1002
    assert set(np.diff(stages.starts[1:]).tolist()) == {2 * 10**6}
    shares = [weights[1] / stages.total for weights in stages.weights]
    assert shares[:3] == [0.0, 0.0005, 0.0015]
    assert shares[-2:] == [0.9995, 1.0]
    assert stages.due(3 * 10**9)[1] == 10**9 * stages.total  # half of the line, exactly


def test_a_resume_in_the_middle_of_a_long_line_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    annealing = AnnealedWeights((3, 1), (1, 1), 10**9, 3 * 10**9)
    far = 2 * 10**9
    shares = [share // make(annealing).stages.total for share in make(annealing).stages.due(far)]
    state = make(annealing).state(0)
    counts = (shares[0], far - shares[0])
    blend = make(annealing)
    skipped = []
    schedule = order_kernels.schedule

    def counting(*arguments: Any) -> None:
        skipped.append(arguments[4])
        schedule(*arguments)

    monkeypatch.setattr(order_kernels, "schedule", counting)
    blend.load_state(far, type(state)(weights=state.weights, counts=counts, origin_counts=(0, 0), annealing=annealing))
    blend.choose(far, 100)
    blend.choose(far + 100, 100)
    assert make(annealing).choose(10**9 - 4, 4).sources.tolist() == make(annealing).choose(0, 4).sources.tolist()
    assert skipped == [0, 0, 0, 0]  # before the line, the pattern of the start weights gives the counts


def test_progress_tells_the_weight_of_the_moment_and_the_mixture_so_far() -> None:
    blend = Blend(AnnealedWeights((1, 0), (0, 1), 10, 20), [5, 5])
    assert [(source.weight, source.num_samples) for source in blend.progress(10)] == [(0.95, 10), (0.05, 0)]
    first, second = blend.progress(20)
    assert (first.weight, first.share, first.num_samples, first.epochs) == (0.0, 0.75, 15, 3.0)
    assert (second.weight, second.share, second.num_samples, second.epochs) == (1.0, 0.25, 5, 1.0)


def test_a_source_whose_last_share_is_never_complete_still_stays_within_a_sample() -> None:
    blend = make(AnnealedWeights((1, 2), (0, 1), 1, 1))  # a third of a sample is due to the first, forever
    counts = np.cumsum(blend.choose(0, 50).sources == 0)
    assert counts.max() <= 1
    assert blend.choose(40, 10).sources.tolist() == [1] * 10


@pytest.mark.parametrize(
    ("begin", "finish", "edges"), [(0.8, 1.0, (80, 100)), (0, 1, (0, 100)), (0.255, 0.509, (25, 50))]
)
def test_shares_of_the_run_become_samples_rounded_down(begin: float, finish: float, edges: tuple[int, int]) -> None:
    document = {"start": [1, 0], "end": [1, 1], "from": begin, "to": finish}
    annealing = BlendSchedule.parse(document, [], num_sources=2).over(100)
    assert (annealing.first, annealing.last) == edges


def test_shares_are_taken_as_written_however_long_the_run_is() -> None:
    document = {"start": [1, 0], "end": [1, 1], "from": 0.1, "to": 0.7}
    annealing = BlendSchedule.parse(document, [], num_sources=2).over(10**18)
    assert (annealing.first, annealing.last) == (10**17, 7 * 10**17)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("shards")
    for number, (name, num_bins) in enumerate((("chats", 6), ("web", 4))):
        write_shard(home / name, make_bins(num_bins, 24, seed=number), 24)
    return {"chats": home / "chats", "web": home / "web"}


SCHEDULE: dict[str, Any] = {"start": {"web": 0, "chats": 1}, "end": {"web": 1, "chats": 1}, "from": 0.5}


def test_a_dataset_of_named_sources_anneals_over_its_own_length(shards: dict[str, Path]) -> None:
    dataset = create_sft_dataset(shards, EOS, weights=SCHEDULE, max_num_samples=80)
    assert len(dataset) == 80
    order = dataset.sampling_order
    assert order is not None
    assert {name: source.num_samples for name, source in order.progress(80).items()} == {"chats": 70, "web": 10}
    other = create_sft_dataset(shards, EOS, weights=SCHEDULE, max_num_samples=160)
    assert other.fingerprint != dataset.fingerprint


def test_a_loader_of_a_blend_runs_over_the_whole_run_and_resumes_in_it_on_any_number_of_ranks(
    shards: dict[str, Path],
) -> None:
    def loader(rank: int = 0, size: int = 1) -> PackedLoader:
        dataset = create_sft_dataset(shards, EOS, weights=SCHEDULE, max_num_samples=80)
        return PackedLoader(dataset, data_parallel_rank=rank, data_parallel_size=size)

    whole = [batch["tokens"].tolist() for batch in loader()]
    assert len(whole) == 80
    stopped = loader()
    for _ in itertools.islice(stopped, 50):
        pass
    state = stopped.state_dict()
    assert state["blend"]["annealing"] == {"start": [1, 0], "end": [1, 1], "first": 40, "last": 80}
    ranks = [loader(rank, 2) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(state)
    halves = [[batch["tokens"].tolist() for batch in one] for one in ranks]
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == whole[50:]
    with pytest.raises(
        InvalidInputError, match=r"schedule was 'to 1:1 over samples 40 to 80' and is '.* 80 to 160' now"
    ):
        PackedLoader(create_sft_dataset(shards, EOS, weights=SCHEDULE, max_num_samples=160)).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": SCHEDULE}, "needs the run's length; set max_num_samples to the samples of the whole run"),
        ({"weights": {"chats": 1, "wbe": 1}}, "weights names wbe, which is not a source; choose from chats, web"),
        ({"weights": {"chats": 1}}, "weights has no weight for web; give every source one"),
        (
            {"weights": {**SCHEDULE, "from": 0.9, "to": 0.2}},
            "weights.from is 0.9 and weights.to is 0.2; from must not be above",
        ),
        ({"weights": {**SCHEDULE, "from": math.nan}}, "weights.from is nan; it is a share of the run, from 0 to 1"),
        ({"weights": {**SCHEDULE, "from": True}}, "weights.from is True; it is a share of the run"),
        ({"weights": {**SCHEDULE, "end": [1, 2, 3]}}, "3 weights were given for 2 paths in weights.end; give one each"),
        (
            {"weights": {**SCHEDULE, "end": {"chats": 0, "web": -1}}},
            "weights.end.web is -1; give a number of at least 0",
        ),
        ({"weights": {**SCHEDULE, "end": {"chats": 0, "web": 0}}}, "weights.end is all zero; give at least one source"),
    ],
)
def test_a_wrong_blend_is_refused_in_a_sentence(
    shards: dict[str, Path], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        create_sft_dataset(shards, EOS, **arguments)


def test_weights_by_name_need_names(shards: dict[str, Path]) -> None:
    with pytest.raises(InvalidInputError, match="weights goes by names, but the paths have none; name them as in"):
        create_sft_dataset(list(shards.values()), EOS, weights={"chats": 1, "web": 1})


def test_a_name_may_stand_for_many_shards(shards: dict[str, Path]) -> None:
    pattern = {"all": str(shards["chats"].parent / "*"), "web": shards["web"]}
    dataset = create_sft_dataset(pattern, EOS, weights={"all": 1, "web": 1})
    order = dataset.sampling_order
    assert order is not None
    assert (order.blend.sizes, order.names) == ((10, 4), ("all", "web"))


def test_paths_without_names_are_reported_by_path_also_when_one_comes_twice(shards: dict[str, Path]) -> None:
    paths = [shards["chats"], shards["web"], shards["web"]]
    order = create_sft_dataset(paths, EOS, weights=[1, 1, 1]).sampling_order
    assert order is not None
    assert order.names == (str(paths[0]), f"{paths[1]} (2)", f"{paths[2]} (3)")


def test_weights_that_do_not_change_need_no_length() -> None:
    sources = BlendedSources((SampleOrder(5),) * 2, (3, 1), ("chats", "web"))
    assert sources.order(None).blend.counts(8) == (6, 2)
