"""Weights in the token store and on their way into shards: kept exactly, written only where they say something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import create_shard_writer, open_shard, validate
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.support import array_files
from megatron_packed_sft.tokens.materialize import materialize, materialize_shards
from megatron_packed_sft.tokens.store import open_token_store, publish_store
from megatron_packed_sft.tokens.validate import validate_token_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path
from tests.packed_bins import files_of
from tests.tokens.stores import make_sequences, make_weights, write_part, write_store


def stored(path: Path) -> list[list[float]]:
    """The weights of each sequence of a part, read with plain NumPy."""
    offsets = np.load(path / "offsets.npy")
    return [one.tolist() for one in np.split(np.load(path / "weights.npy"), offsets[1:-1].astype(np.int64))]


def test_weights_come_back_and_the_part_needs_a_reader_that_knows_them(tmp_path: Path) -> None:
    sequences = make_sequences(20)
    weights = make_weights(sequences)
    write_part(tmp_path / "part_000000", sequences, weights)
    assert stored(tmp_path / "part_000000") == [one.tolist() for one in weights]
    store = publish_store(tmp_path)
    assert store.has_weights
    assert store.manifest.to_json()["version"] == "1.2"
    assert validate_token_store(tmp_path).ok


def test_weights_that_begin_in_the_middle_of_a_part_are_filled_in_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = make_sequences(30)
    weights = make_weights(sequences)
    for index in range(17):
        weights[index] = np.array(sequences[index][1], np.float32)
    write_part(tmp_path / "from_the_start", sequences, weights)
    monkeypatch.setattr(array_files, "_READ_BACK", 64)  # many blocks
    write_part(tmp_path / "from_the_middle", sequences, weights, plain=17)
    assert files_of(tmp_path / "from_the_start") == files_of(tmp_path / "from_the_middle")


def test_weights_of_1_are_not_stored(tmp_path: Path) -> None:
    sequences = make_sequences(10)
    ones = [np.array(train, np.float32) for _, train in sequences]
    write_part(tmp_path / "with", sequences, ones)
    write_part(tmp_path / "without", sequences, ones, plain=10)
    assert files_of(tmp_path / "with") == files_of(tmp_path / "without")
    names = ["checksums.npy", "ids.npy", "manifest.json", "offsets.npy", "train.npy"]
    assert sorted(files_of(tmp_path / "with")) == names


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([0, 0.5], "there are 2 weights for 3 input_ids"),
        ([0.5, 0.5, 0.5], "weights is 0.5 at position 0, where train is 0"),
        ([0, 0.5, 0], "weights is 0.0 at position 2, where train is 1"),
        ([0, -1, 1], "weights is -1 at position 1; a weight is 0, or a positive number that a float32 holds"),
        ([0, float("nan"), 1], "weights is nan at position 1"),
        ([0, 1e39, 1], r"weights is 1e\+39 at position 1"),
        ([0, 1e-46, 1], "weights is 1e-46 at position 1"),
        ("abc", "weights is not an array of numbers"),
    ],
)
def test_unsound_weights_are_refused(tmp_path: Path, weights: object, problem: str) -> None:
    with TokenPartWriter(tmp_path / "part_000000", vocab_size=10) as writer:
        with pytest.raises(InvalidInputError, match=problem):
            writer.append([1, 2, 3], [0, 1, 1], weights)
        writer.append([1, 2, 3], [0, 1, 1], [0, 2, 1])
        assert writer.finalize().num_sequences == 1


def test_validate_finds_weights_that_do_not_fit_the_train_mask(tmp_path: Path) -> None:
    sequences = make_sequences(3)
    part = tmp_path / "part_000000"
    write_part(part, sequences, make_weights(sequences))
    data = bytearray((part / "weights.npy").read_bytes())
    place = int(np.argmin(np.concatenate([train for _, train in sequences])))
    data[128 + 4 * place : 132 + 4 * place] = np.float32(2).tobytes()
    (part / "weights.npy").write_bytes(data)
    findings = validate_token_store(part).findings
    assert {finding.field for finding in findings} == {"weights", "checksums", None}
    assert {finding.file for finding in findings} == {str(part / "weights.npy")}
    assert f"above 0 exactly where train is 1 at entry {place}" in findings[0].message


@pytest.mark.parametrize("overflow", ["split", "truncate"])
@pytest.mark.parametrize("mult", [1, 4])
def test_bins_have_the_weights_of_their_sequences_once(tmp_path: Path, overflow: str, mult: int) -> None:
    sequences = make_sequences(40, longest=60)
    weights = make_weights(sequences)
    # One part with weights, one without: their trained tokens count 1.
    write_part(part_path(tmp_path / "store", 0), sequences[:25], weights[:25])
    ones = [np.array(train, np.float32) for _, train in sequences[25:]]
    write_part(part_path(tmp_path / "store", 1), sequences[25:], ones)
    store = publish_store(tmp_path / "store")
    options = {"stride": 3} if overflow == "split" else {}
    plan = pack(store.lengths, pack_size=32, overflow=overflow, pad_seq_to_mult=mult, **options)
    with create_shard_writer("memmap_v1", tmp_path / "shard", num_bins=plan.num_bins, pack_size=32, pad_id=9) as writer:
        materialize(plan, store, writer, pad_id=9)
        writer.finalize()
    whole = [*weights[:25], *ones]
    for number, one in zip(plan.bin_order.tolist(), open_shard(tmp_path / "shard"), strict=True):
        assert one.loss_mask.dtype == np.float32
        ends = [*one.seq_start_id[1:].tolist(), len(one.input_ids)]
        for item, start, end in zip(plan.bin(number).tolist(), one.seq_start_id.tolist(), ends, strict=True):
            sequence, first, overlap = item, 0, 0
            if plan.chunks is not None:
                sequence, first = int(plan.chunks.sequence[item]), int(plan.chunks.start[item])
                overlap = int(plan.chunks.masked_prefix[item])
            expected = whole[sequence][first : first + int(plan.item_lengths[item])].copy()
            expected[:overlap] = 0
            found = one.loss_mask[start:end]
            assert found[: len(expected) - 1].tolist() == expected[1:].tolist()
            assert not found[len(expected) - 1 :].any()
    assert validate(tmp_path / "shard").ok
    if overflow == "split":  # every trained token but a sequence's first is weighted exactly once
        total = sum(float(one[1:].sum(dtype=np.float64)) for one in whole)
        assert open_shard(tmp_path / "shard").figures.sum_loss_weights == pytest.approx(total)  # type: ignore[attr-defined]


def test_shards_are_the_same_for_any_worker_count_and_say_for_themselves_whether_they_have_weights(
    tmp_path: Path,
) -> None:
    sequences = make_sequences(60, longest=20)
    weights = [np.array(train, np.float32) for _, train in sequences]
    weights[50:] = make_weights(sequences)[50:]
    write_part(part_path(tmp_path / "store", 0), sequences, weights)
    store = publish_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=32, strategy="greedy")
    for name, num_workers in (("one", 1), ("two", 2)):
        materialize_shards(plan, store, [tmp_path / name / f"{k}" for k in range(4)], num_workers=num_workers)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    found = {open_shard(tmp_path / "one" / f"{k}").manifest.has_weights for k in range(4)}  # type: ignore[attr-defined]
    assert found == {False, True}


@pytest.mark.parametrize("storage", ["legacy", "parquet"])
def test_storages_without_a_place_for_weights_refuse_them(tmp_path: Path, storage: str) -> None:
    sequences = make_sequences(5)
    write_part(part_path(tmp_path / "store", 0), sequences, make_weights(sequences))
    store = publish_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=64)
    with pytest.raises(InvalidInputError, match=f"{storage} keeps only 0 and 1; use memmap_v1, or prepare"):
        materialize_shards(plan, store, [tmp_path / "shard"], storage=storage)
    write_store(tmp_path / "plain", [sequences], vocab_size=1000)
    materialize_shards(plan, open_token_store(tmp_path / "plain"), [tmp_path / "shard"], storage=storage)


def test_a_sequence_comes_with_its_weights_or_with_ones(tmp_path: Path) -> None:
    sequences = make_sequences(12)
    weights = make_weights(sequences)
    write_part(tmp_path / "store" / "part_000000", sequences, weights)
    store = publish_store(tmp_path / "store")
    for number, ((ids, _), expected) in enumerate(zip(sequences, weights, strict=True)):
        found_ids, found = store.weighted(number)
        assert found_ids.tolist() == list(ids)
        assert found.tolist() == expected.tolist()
