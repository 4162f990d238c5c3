"""The numbers of a page, counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, convert, create_shard_writer, pack
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.inspect.report.charts import StepShape, length_histogram, slowest_over_mean
from megatron_packed_sft.inspect.report.dataset_page import dataset_page
from megatron_packed_sft.inspect.report.read_bins import bin_lengths
from tests.packed_bins import make_bins, write_shard

#           sequences of 3 and 1       one of 4                one of 2
BINS = [
    PackedBin(np.array([5, 6, 7, 8]), np.array([1, 1, 0, 0]), np.array([0, 3])),
    PackedBin(np.array([9, 9, 9, 9]), np.array([0, 0, 1, 0]), np.array([0])),
    PackedBin(np.array([5, 6]), np.array([1, 0]), np.array([0])),
]


@pytest.fixture(params=["memmap_v1", "legacy", "parquet", "directory"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same bins in every storage, and as two shards in a directory."""
    if request.param == "directory":
        write_shard(tmp_path / "shards" / "shard_000000", BINS[:2], 4)
        write_shard(tmp_path / "shards" / "shard_000001", BINS[2:], 4)
        return tmp_path / "shards"
    write_shard(tmp_path / "shard", BINS, 4)
    if request.param == "memmap_v1":
        return tmp_path / "shard"
    target = tmp_path / {"legacy": "bins.npy", "parquet": "bins.idx.parquet"}[request.param]
    convert(tmp_path / "shard", target, to=request.param)
    return target


def test_totals_and_charts_are_those_counted_by_hand(data: Path) -> None:
    page = dataset_page(open_data(data), global_batch=1, ranks=1)
    [split] = page["splits"].values()
    totals = split["totals"]
    assert (totals["num_bins"], totals["num_sequences"], totals["num_tokens"]) == (3, 4, 10)
    assert totals["pack_size"] == 4
    assert totals["num_trained"] == totals["num_trained_read"] == 4
    assert totals["fullness"] == pytest.approx(10 / 12)
    assert totals["num_padding"] == 2
    assert (totals["most_sequences"], totals["longest"], totals["shortest"], totals["median"]) == (2, 4, 1, 2.5)
    assert (totals["emptiest_bin"], totals["emptiest"]) == (2, 2)
    assert split["lengths"] == {"edges": [0, 1, 2, 3, 4], "counts": [1, 1, 1, 1]}
    assert split["fullness"]["line"]["mean"] == [1, 1, 0.5]
    assert sum(split["fullness"]["histogram"]["counts"]) == 3
    # Trained shares: 2 of 3, 0 of 1, 1 of 4, 1 of 2.
    assert split["trained"]["mean"] == pytest.approx((2 / 3 + 0 + 1 / 4 + 1 / 2) / 4)
    # Attention: 9 + 1, 16 and 4, of 16.
    assert split["attention"]["mean_share"] == pytest.approx((10 + 16 + 4) / 3 / 16)
    assert split["attention"]["costliest_bin"] == 1
    assert split["attention"]["step_costs"]["mean"] == [1.0, 1.6, 0.4], "steps of one bin, over their mean of 10"
    assert split["read"] == {"num_bins": 3, "num_sequences": 4, "num_tokens": 10}
    assert split["shown"] == {"num_bins": 3, "of": 3}


def test_lengths_are_those_of_the_bins_in_any_storage(data: Path) -> None:
    [reader] = open_data(data).splits.values()
    lengths = bin_lengths(reader)
    assert lengths.lengths.tolist() == [3, 1, 4, 2]
    assert lengths.offsets.tolist() == [0, 2, 3, 4]
    assert lengths.bin_tokens.tolist() == [4, 4, 2]
    assert lengths.attention_costs.tolist() == [10, 16, 4]


def test_lengths_of_many_random_bins_equal_those_counted_bin_by_bin(tmp_path: Path) -> None:
    bins = make_bins(200, 48, seed=5)
    write_shard(tmp_path / "shard", bins, 48)
    [reader] = open_data(tmp_path / "shard").splits.values()
    lengths = bin_lengths(reader)
    expected = [np.diff([*one.seq_start_id.tolist(), len(one.input_ids)]).tolist() for one in bins]
    assert lengths.lengths.tolist() == [length for some in expected for length in some]
    assert lengths.attention_costs.tolist() == [sum(length**2 for length in some) for some in expected]


def test_bins_go_to_the_ranks_in_turn() -> None:
    costs = np.array([4, 1, 2, 1, 10, 10, 1, 1])
    # Two steps of four bins: rank 0 has 4 + 2 and 10 + 1, rank 1 has 1 + 1 and 10 + 1.
    assert slowest_over_mean(costs, StepShape(4, 2)).tolist() == [6 / 4, 1.0]
    # Four ranks, one bin each.
    assert slowest_over_mean(costs, StepShape(4, 4)).tolist() == [4 / 2, 10 / 5.5]
    assert slowest_over_mean(costs[:3], StepShape(4, 2)).tolist() == [], "no whole step"


def test_the_last_bucket_of_lengths_ends_with_the_pack_size_or_the_longest() -> None:
    lengths = np.array([1, 64, 65, 4096])
    buckets = length_histogram(lengths, 4096)
    assert buckets["edges"][:3] == [0, 64, 128]
    assert buckets["edges"][-1] == 4096
    assert buckets["counts"][:2] == [2, 1], "1 and 64 are in the first bucket, 65 in the second"
    assert sum(buckets["counts"]) == 4
    assert length_histogram(np.array([3]), 100)["edges"][-1] == 100


def test_a_shape_of_steps_is_asked_for_recorded_or_usual() -> None:
    assert StepShape.choose(10_000, None, 256, 16) == (256, 16)
    assert StepShape.choose(10_000, 48, None, None) == (48, 8)
    assert StepShape.choose(10_000, None, None, 12) == (60, 12)
    assert StepShape.choose(3, None, None, None) == (1, 1)
    with pytest.raises(InvalidInputError, match="choose --global-batch-size 8 or 12"):
        StepShape.choose(100, None, 10, 4)
    with pytest.raises(InvalidInputError, match="--ranks is 0"):
        StepShape.choose(100, None, None, 0)


def test_every_strategy_packs_the_same_lengths(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 90, 500)
    plan = pack(lengths, pack_size=100)
    with create_shard_writer("memmap_v1", tmp_path / "shard", num_bins=plan.num_bins, pack_size=100) as writer:
        for number in range(plan.num_bins):
            sizes = lengths[plan.bin(number)]
            total = int(sizes.sum())
            writer.write_bin(number, np.ones(total, int), np.zeros(total, int), np.cumsum([0, *sizes[:-1]]))
        writer.finalize()
    page = dataset_page(open_data(tmp_path / "shard"))
    compared = {one["strategy"]: one for one in page["splits"]["train"]["strategies"]["rows"]}
    assert {"optimal", "best_fit", "first_fit", "first_fit_shuffle", "greedy", "window"} <= compared.keys()
    assert compared["optimal"]["num_bins"] == plan.num_bins
    assert compared["optimal"]["fullness"] == pytest.approx(lengths.sum() / (plan.num_bins * 100))
    assert compared["greedy"]["num_bins"] > plan.num_bins, "it takes sequences as they come"


def test_a_page_of_large_data_says_what_it_sampled(tmp_path: Path) -> None:
    bins = make_bins(300, 64, seed=2)
    write_shard(tmp_path / "shard", bins, 64)
    page = dataset_page(open_data(tmp_path / "shard"), bins=[123], tokens_in_page=1_000)
    shown = [one["number"] for one in page["bins"]["splits"]["train"]]
    assert 123 in shown
    assert shown == sorted(set(shown))
    assert page["splits"]["train"]["shown"] == {"num_bins": len(shown), "of": 300}
    assert sum(len(bins[number].input_ids) for number in shown) <= 1_000 + 64
    with pytest.raises(InvalidInputError, match="bin 300 is not in split 'train', which has 300 bins"):
        dataset_page(open_data(tmp_path / "shard"), bins=[300])
