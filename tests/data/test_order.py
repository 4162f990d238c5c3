"""The keyed permutation: whole, well mixed, the same everywhere, and free of cost to open."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.errors import InvalidInputError


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    return order.samples(epoch * order.num_samples, order.num_samples)


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.text(max_size=8))
@settings(deadline=None)
def test_every_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int, fingerprint: str) -> None:
    order = SampleOrder(num_samples, seed, fingerprint)
    assert sorted(epoch_of(order, epoch).tolist()) == list(range(num_samples))


@given(
    st.integers(1, 200),
    st.lists(st.integers(0, 5000), max_size=40),
    st.booleans(),
)
@settings(deadline=None)
def test_access_is_the_same_one_by_one_in_blocks_and_out_of_order(
    num_samples: int, positions: list[int], shuffle: bool
) -> None:
    order = SampleOrder(num_samples, 7, "data", shuffle)
    stream = order.samples(0, 5001)
    assert order.at(positions).tolist() == stream[positions].tolist()
    assert [order[position] for position in positions] == stream[positions].tolist()
    square = np.array(positions[: len(positions) // 2 * 2], np.int64).reshape(-1, 2)
    assert order.at(square).tolist() == stream[square].tolist()


def test_the_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    # Written down when the format was made. A change here changes the order of runs that are under way.
    assert SampleOrder(10, 1234, "abc").samples(0, 20).tolist() == GOLDEN_SMALL
    assert SampleOrder(10**9, 1234, "abc").samples(3 * 10**9 - 4, 8).tolist() == GOLDEN_LARGE
    assert SampleOrder(2**62, -1, "").samples(2**62 - 2, 2).tolist() == GOLDEN_LARGEST


def in_plain_python(order: SampleOrder, position: int) -> int:
    """The definition, in Python's unbounded integers."""
    epoch, value = divmod(position, order.num_samples)
    text = f"packed_sft order 1|{order.seed}|{epoch}|{order.fingerprint}"
    words = [int.from_bytes(word, "little") for word in batched(hashlib.shake_128(text.encode()).digest(1024), 8)]
    for pair_sum, key in zip(words[:64], words[64:], strict=True):
        partner = (pair_sum - value) % order.num_samples
        coin = max(value, partner) ^ key
        for _ in range(2):
            coin = (coin ^ (coin >> 32)) * 0xD6E8FEB86659FD93 % 2**64
        value = partner if coin >> 63 else value
    return value


def batched(data: bytes, size: int) -> list[bytes]:
    return [data[first : first + size] for first in range(0, len(data), size)]


@given(st.integers(2, 2**62), st.integers(0, 2**62))
@settings(deadline=None)
def test_the_compiled_order_is_the_one_that_is_defined(num_samples: int, position: int) -> None:
    order = SampleOrder(num_samples, 42, "data")
    assert order[position] == in_plain_python(order, position)


def test_seed_epoch_and_fingerprint_each_give_another_order() -> None:
    orders = [SampleOrder(1000, seed, data) for seed in (0, 1, 2**63) for data in ("a", "b")]
    epochs = [epoch_of(order, epoch) for order in orders for epoch in (0, 1, 2)]
    for one, other in itertools.combinations(epochs, 2):
        assert np.count_nonzero(one == other) < 12  # chance gives 1; 12 has a probability of 10^-9
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.2


def test_all_permutations_of_few_samples_are_equally_likely() -> None:
    for num_samples, num_permutations in ((2, 2), (3, 6), (4, 24), (5, 120)):
        drawn = 200 * num_permutations
        epochs = SampleOrder(num_samples, 5).samples(0, drawn * num_samples).reshape(drawn, num_samples)
        counts = Counter(map(tuple, epochs.tolist()))
        assert len(counts) == num_permutations
        chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
        freedom = num_permutations - 1
        assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("num_samples", [1000, 1024, 65_537, 100_000])
def test_an_epoch_has_the_statistics_of_a_random_permutation(num_samples: int) -> None:
    fixed_points, neighbours, runs_up = [], [], []
    where = np.arange(num_samples)
    for epoch in range(20):
        samples = epoch_of(SampleOrder(num_samples, 99, "data"), epoch)
        # A random permutation has correlations of 1 / sqrt(n) with its positions and with its neighbours.
        assert abs(np.corrcoef(where, samples)[0, 1]) < 5 / np.sqrt(num_samples)
        assert abs(np.corrcoef(samples[1:], samples[:-1])[0, 1]) < 5 / np.sqrt(num_samples)
        assert abs(np.corrcoef(samples[7:], samples[:-7])[0, 1]) < 5 / np.sqrt(num_samples)
        # Each sixteenth of the positions gets a sixteenth of each sixteenth of the samples.
        table, _, _ = np.histogram2d(where, samples, 16)
        expected = num_samples / 256
        assert ((table - expected) ** 2 / expected).sum() < 225 + 6 * np.sqrt(2 * 225)
        # Neither are odd and even samples separated.
        assert abs(int((where & 1 == samples & 1).sum()) - num_samples / 2) < 4 * np.sqrt(num_samples)
        fixed_points.append(int((where == samples).sum()))
        neighbours.append(int((np.abs(np.diff(samples)) == 1).sum()))
        runs_up.append(float((np.diff(samples) > 0).mean()))
    assert 0.1 < np.mean(fixed_points) < 2.5  # one on average
    assert 0.8 < np.mean(neighbours) < 3.5  # two on average
    assert abs(np.mean(runs_up) - 0.5) < 0.02


def test_a_billion_samples_need_no_memory_and_are_well_spread() -> None:
    order = SampleOrder(10**9, 1, "data")
    assert len(pickle.dumps(order)) < 400
    some = order.samples(5 * 10**9 - 100_000, 200_000)  # across the edge of an epoch
    assert some.min() >= 0
    assert some.max() < 10**9
    for part in (some[:100_000], some[100_000:]):
        assert len(np.unique(part)) == 100_000
        assert abs(part.mean() - 5e8) < 5 * 1e9 / np.sqrt(12 * 100_000)
        counts = np.bincount(part // 10**7, minlength=100)
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 6 * np.sqrt(2 * 99)


def test_stored_order_repeats_without_a_seed() -> None:
    order = SampleOrder(3, shuffle=False)
    assert order.samples(1, 7).tolist() == [1, 2, 0, 1, 2, 0, 1]
    assert order == SampleOrder(3, seed=99, shuffle=False)


def test_no_global_random_state_is_read_or_changed() -> None:
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    first = SampleOrder(100, 1).samples(0, 100)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    np.random.seed(4)  # noqa: NPY002
    assert SampleOrder(100, 1).samples(0, 100).tolist() == first.tolist()


def test_an_order_survives_pickling() -> None:
    order = SampleOrder(50, 3, "x")
    assert pickle.loads(pickle.dumps(order)).samples(0, 50).tolist() == order.samples(0, 50).tolist()


def test_order_samplers_and_blending_import_neither_torch_nor_numba() -> None:
    script = (
        "import sys; from megatron_packed_sft.data.order import blend, sample_order, samplers, state; "
        "from megatron_packed_sft.data import loader; "
        "sample_order.SampleOrder(10**9); samplers.MicroBatchSampler(10**9, shuffle=True); "
        "blend.Blend([1, 2], [3, 4]); "
        "sys.exit(' '.join({'torch', 'numba'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "not 0; is the dataset empty"),
        ({"num_samples": -3}, "not -3"),
        ({"num_samples": 2**62 + 1}, r"1\.\.2\^62 samples"),
        ({"num_samples": 3, "seed": None}, "needs a seed; give an integer, or set shuffle=False"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SampleOrder(**arguments)


def test_positions_before_the_start_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="position -1 is before the start"):
        SampleOrder(3).at([0, -1])


GOLDEN_SMALL = [2, 5, 6, 3, 7, 8, 9, 0, 1, 4, 3, 2, 1, 8, 4, 6, 5, 7, 9, 0]
GOLDEN_LARGE = [690093523, 943094925, 528284233, 339469619, 555431267, 784425480, 173453193, 302251521]
GOLDEN_LARGEST = [2636641426055184659, 3319652491242659335]
