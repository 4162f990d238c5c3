"""Our batches are Megatron-Bridge's, bit for bit: its released classes and our collate run on the same bins.

Every key is compared: name, dtype, shape, `torch.equal`. What differs on purpose is at the end: the defects of the
released classes, and what ours does instead.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_packed_sft import open_shard
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CollateOptions
from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
    locate_in_arrays,
    locate_in_samples,
    locate_in_shard,
)
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.legacy.storage import LegacyShard
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from tests.oracle.bridge import CONTRACT_OF, VERSIONS, load, open_dataset
from tests.packed_bins import write_shard

EOS = 2
Bin = dict[str, list[int]]
METADATA_KEYS = ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")


class Case(NamedTuple):
    """Rows, the arguments both sides take, and what only the packing's metadata file says."""

    bins: list[Bin]
    indices: list[int]
    arguments: dict[str, Any]
    metadata: dict[str, int]


def make_bins(num_bins: int, max_length: int, seed: int, multiple: int = 1) -> list[Bin]:
    """Seeded bins with EOS tokens inside, subsequences of one token, and EOS up to the multiple at their ends."""
    rng = np.random.default_rng(seed)
    bins = []
    for _ in range(num_bins):
        packed: Bin = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
        for _ in range(int(rng.integers(1, 6))):
            length = int(rng.choice([1, 2, int(rng.integers(1, max_length // 8))]))
            ids = rng.choice([EOS, 5, 6, 7, 70_000], length).tolist()
            ids += [EOS] * (-(length - 1) % multiple)  # the last id is a label only
            packed["seq_start_id"].append(len(packed["input_ids"]))
            packed["input_ids"] += ids
            packed["loss_mask"] += [*rng.integers(0, 2, length - 1).tolist(), *[0] * (len(ids) - length + 1)]
        bins.append(packed)
    return bins


def metadata_of(bins: Sequence[Bin]) -> dict[str, int]:
    """The numbers Bridge's preparation writes beside the bins."""
    lengths = [np.diff([*packed["seq_start_id"], len(packed["input_ids"])]) for packed in bins]
    return {
        "dataset_max_seqlen": max(int(one.max()) for one in lengths),
        "max_samples_per_bin": max(len(one) for one in lengths),
        "min_packed_seqlen": min(len(packed["input_ids"]) for packed in bins),
    }


def theirs(case: Case, version: str, *, parquet: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        dataset = open_dataset(
            load(version),
            Path(directory),
            case.bins,
            EOS,
            parquet=parquet,
            metadata=case.metadata if case.arguments.get("pad_cu_seqlens") else None,
            **case.arguments,
        )
        return dict(dataset.collate_fn([dataset[index] for index in case.indices]))


def options_of(case: Case, contract: str, **more: Any) -> CollateOptions:
    return CollateOptions(contract=contract, eos_id=EOS, **case.arguments, **case.metadata, **more)


def as_sample(packed: Bin, index: int) -> dict[str, Any]:
    """A bin as our datasets hand it out."""
    return {
        "input_ids": packed["input_ids"],
        "loss_mask": packed["loss_mask"],
        "seq_boundaries": [*packed["seq_start_id"], len(packed["input_ids"])],
        "is_padding": index < 0,
    }


def from_samples(case: Case, directory: Path) -> list[LocatedBins]:
    return [locate_in_samples([as_sample(case.bins[index], index) for index in case.indices])]


def from_shards(case: Case, directory: Path) -> list[LocatedBins]:
    """Two shards whose bins alternate in the batch."""
    num_bins, width = len(case.bins), max(len(packed["input_ids"]) for packed in case.bins)
    shards = []
    for part in range(min(2, num_bins)):
        bins = [
            PackedBin(*(np.array(packed[name]) for name in ("input_ids", "loss_mask", "seq_start_id")))
            for packed in case.bins[part::2]
        ]
        write_shard(directory / f"shard_{part}", bins, width, pad_id=EOS)
        shard = open_shard(directory / f"shard_{part}")
        assert isinstance(shard, MemmapShard)
        shards.append(shard)
    found = []
    for part, shard in enumerate(shards):
        places = [place for place, index in enumerate(case.indices) if index % num_bins % 2 == part]
        bins = [case.indices[place] % num_bins // 2 for place in places]
        found.append(locate_in_shard(shard, bins, places, [case.indices[place] < 0 for place in places]))
    return [located for located in found if located.table.size]


def from_legacy(case: Case, directory: Path) -> list[LocatedBins]:
    np.save(directory / "bins.npy", np.array(case.bins, dtype=object), allow_pickle=True)
    flat = LegacyShard(directory / "bins.npy").flat
    bins = [index % len(case.bins) for index in case.indices]
    padding = [index < 0 for index in case.indices]
    arrays = (flat.input_ids, flat.loss_mask, flat.bin_offsets, flat.seq_starts, flat.seq_offsets)
    return [locate_in_arrays(*arrays, bins, is_padding=padding)]


ORIGINS = {"samples": from_samples, "memmap": from_shards, "legacy": from_legacy}


def ours(case: Case, contract: str, origin: str = "samples", **more: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        found = ORIGINS[origin](case, Path(directory))
        return collate(found, len(case.indices), options_of(case, contract, **more))


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(actual) == set(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype, key
            assert actual[key].shape == value.shape, key
            assert torch.equal(actual[key], value), key
        else:
            assert actual[key] == value, key
            assert type(actual[key]) is type(value), key


FLAGS = [
    (pad_to_max_length, pad_cu_seqlens, pad_seq_to_mult, answer_only_loss, return_cu_seqlen)
    for pad_to_max_length, pad_cu_seqlens, pad_seq_to_mult, answer_only_loss, return_cu_seqlen in itertools.product(
        (False, True), (False, True), (1, 4), (True, False), (True, False)
    )
    if pad_to_max_length or not pad_cu_seqlens
]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_combination_of_options_gives_the_released_batch(version: str, batch_size: int, origin: str) -> None:
    for pad_to_max_length, pad_cu_seqlens, pad_seq_to_mult, answer_only_loss, return_cu_seqlen in FLAGS:
        bins = make_bins(11, 96, seed=batch_size, multiple=pad_seq_to_mult)
        case = Case(
            bins,
            list(range(3, 3 + batch_size)),
            {
                "max_seq_length": 96,
                "pad_to_max_length": pad_to_max_length,
                "pad_cu_seqlens": pad_cu_seqlens,
                "pad_seq_to_mult": pad_seq_to_mult,
                "answer_only_loss": answer_only_loss,
                "return_cu_seqlen": return_cu_seqlen,
            },
            metadata_of(bins),
        )
        assert_same(ours(case, CONTRACT_OF[version], origin), theirs(case, version))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any bins, EOS anywhere in them, and any options the released classes take without crashing."""
    bins: list[Bin] = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.sampled_from([EOS, 5, 6, 70_000]), min_size=1, max_size=24))
        cuts = draw(st.sets(st.integers(1, len(ids) - 1), max_size=5)) if len(ids) > 1 else set()
        starts = sorted({0} | cuts)
        mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        for end in [*starts[1:], len(ids)]:
            mask[end - 1] = 0
        bins.append({"input_ids": ids, "loss_mask": mask, "seq_start_id": starts})
    answer_only_loss = draw(st.booleans())
    # A padding sample is trained there when every token is; see test_a_padding_sample_... below.
    first = -len(bins) if answer_only_loss else 0
    indices = draw(st.lists(st.integers(first, len(bins) - 1), min_size=1, max_size=8))
    longest = max(len(packed["input_ids"]) - len(packed["seq_start_id"]) for packed in bins)
    pad_to_max_length = draw(st.booleans())
    arguments = {
        "max_seq_length": max(1, longest + draw(st.integers(0, 20))),
        "pad_to_max_length": pad_to_max_length,
        "pad_seq_length_to_mult": draw(st.sampled_from([1, 4, 16])),
        # They take the logarithm of a batch without tokens.
        "ceil_to_power_2": all(len(bins[i]["input_ids"]) > len(bins[i]["seq_start_id"]) for i in indices)
        and draw(st.booleans()),
        "pad_cu_seqlens": pad_to_max_length and draw(st.booleans()),
        "pad_seq_to_mult": draw(st.sampled_from([1, 4])),
        "answer_only_loss": answer_only_loss,
        "return_cu_seqlen": draw(st.booleans()),
    }
    return Case(bins, indices, arguments, dict.fromkeys(METADATA_KEYS, 3) if draw(st.booleans()) else metadata_of(bins))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), origin=st.sampled_from(sorted(ORIGINS)), parquet_version=st.sampled_from(VERSIONS))
def test_any_bins_and_options_give_the_released_batch(case: Case, origin: str, parquet_version: str) -> None:
    for version in VERSIONS:
        assert_same(ours(case, CONTRACT_OF[version], origin), theirs(case, version))
    expected = theirs(case, parquet_version, parquet=True)
    assert_same(ours(case, CONTRACT_OF[parquet_version], origin), expected)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_bridge_main_is_the_released_batch_with_the_stored_loss_and_a_padding_mask(case: Case) -> None:
    # What follows 0.6 there: the stored mask counts at EOS tokens, too, and padding is marked for the router.
    expected = theirs(case, "0.6.2")
    actual = ours(case, "bridge_main")
    padding, loss = actual.pop("padding_mask"), actual.pop("loss_mask")
    del expected["loss_mask"]
    trained_eos = False
    for packed, index in enumerate(case.indices):
        stored = stored_loss(as_sample(case.bins[index], index), case.arguments["answer_only_loss"])
        assert loss[packed].tolist() == stored + [0] * (loss.shape[1] - len(stored))
        assert padding[packed, len(stored) :].all()
        # A padding sample has the boundaries of its bin, so its stored mask counts here.
        kept = torch.tensor(stored_loss(as_sample(case.bins[index], 0), case.arguments["answer_only_loss"]))
        trained_eos |= bool((actual["tokens"][packed, : len(kept)][kept == 1] == EOS).any())
    assert not (padding & (loss == 1)).any()
    if case.arguments["pad_seq_to_mult"] == 1:
        assert int((~padding).sum()) == sum(actual["token_count"])
    elif trained_eos:  # it is no padding, so the boundaries without padding may differ
        for key in ("cu_seqlens_q", "cu_seqlens_kv"):
            assert (actual.pop(key, torch.tensor(0)) >= expected.pop(key, torch.tensor(0))).all()
    assert_same(actual, expected)


def stored_loss(sample: dict[str, Any], answer_only_loss: bool) -> list[int]:
    result = []
    for start, end in itertools.pairwise(sample["seq_boundaries"]):
        for place in range(start, end - 1):
            if answer_only_loss:
                result.append(0 if sample["is_padding"] else sample["loss_mask"][place])
            else:
                result.append(int(sample["input_ids"][place] != EOS))
    return result


ONE_BIN: Bin = {"input_ids": [5, 6, EOS, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1, 0], "seq_start_id": [0, 4]}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dataset_of_one_bin_and_one_sample_is_a_batch_and_crashes_there(tmp_path: Path, version: str) -> None:
    with pytest.raises(IndexError):  # numpy.squeeze leaves an array without dimensions
        open_dataset(load(version), tmp_path, [ONE_BIN], EOS, max_seq_length=16, max_num_samples=1)
    batch = ours(Case([ONE_BIN], [0], {"max_seq_length": 16}, {}), CONTRACT_OF[version])
    assert batch["token_count"] == [4]


def test_a_padding_sample_of_a_shuffled_dataset_is_never_trained(tmp_path: Path) -> None:
    dataset = open_dataset(load("0.6.2"), tmp_path, [ONE_BIN, ONE_BIN], EOS, max_seq_length=16, max_num_samples=2)
    assert dataset.collate_fn([dataset[-1]])["loss_mask"].sum() == 0
    for origin in ORIGINS:
        case = Case([ONE_BIN, ONE_BIN], [-1, 0], {"max_seq_length": 16}, {})
        loss = ours(case, "bridge_0_6", origin)["loss_mask"]
        assert loss.sum(dim=1).tolist() == [0, 2]


@pytest.mark.parametrize("contract", ["bridge_0_6", "bridge_main", "mcore"])
def test_a_padding_sample_is_never_trained_even_when_every_token_is(contract: str) -> None:
    case = Case([ONE_BIN], [-1], {"max_seq_length": 16, "answer_only_loss": False}, {})
    for version in VERSIONS:  # the zero mask is not looked at there
        assert theirs(case, version)["loss_mask"].sum() > 0
    assert ours(case, contract)["loss_mask"].sum() == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bin_that_is_too_long_is_named_and_is_a_bare_assert_there(version: str) -> None:
    case = Case([ONE_BIN], [0], {"max_seq_length": 3}, {})
    with pytest.raises(AssertionError):
        theirs(case, version)
    with pytest.raises(InvalidInputError, match=r"bin 0 .* needs 4 positions, more than max_seq_length 3"):
        ours(case, CONTRACT_OF[version])


def test_the_trained_token_behind_an_eos_inside_a_bin_is_kept_and_is_lost_there() -> None:
    case = Case([ONE_BIN], [0], {"max_seq_length": 4}, {})
    assert theirs(case, "0.6.2")["loss_mask"].tolist() == [[0, 1, 0, 1]]
    assert ours(case, "bridge_0_6")["loss_mask"].tolist() == [[0, 1, 0, 1]]
    assert ours(case, "mcore")["loss_mask"].tolist() == [[0, 1, 1, 1]]


def test_a_batch_without_tokens_may_be_rounded_to_a_power_of_two_and_crashes_there() -> None:
    case = Case([{"input_ids": [5], "loss_mask": [0], "seq_start_id": [0]}], [0], {"max_seq_length": 16}, {})
    case.arguments["ceil_to_power_2"] = True
    with pytest.raises(ValueError, match="math domain error"):
        theirs(case, "0.6.2")
    assert ours(case, "bridge_0_6")["tokens"].shape == (1, 0)
