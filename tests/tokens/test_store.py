"""The token store: written in parts, read as one, and checked like everything else."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import (
    InvalidInputError,
    PackedSFTError,
    ShardError,
    TargetExistsError,
    WriterStateError,
)
from megatron_packed_sft.tokens.store import open_token_store, publish_store
from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path
from tests.packed_bins import files_of
from tests.tokens.stores import make_sequences, write_store

sequences_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 99_999), st.integers(0, 1)), min_size=1, max_size=12), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(sequences_strategy, min_size=1, max_size=4))
def test_sequences_of_all_parts_come_back(parts) -> None:
    split = [[([i for i, _ in seq], [t for _, t in seq]) for seq in part] for part in parts]
    flat = [seq for part in split for seq in part]
    with tempfile.TemporaryDirectory() as home:
        write_store(Path(home), split)
        store = open_token_store(home)
        assert len(store) == len(flat)
        assert store.lengths.tolist() == [len(ids) for ids, _ in flat]
        for index, (ids, train) in enumerate(flat):
            assert store[index][0].tolist() == ids
            assert store[index][1].tolist() == train
        assert validate_token_store(home).ok


def test_many_sequences_in_one_call_give_the_same_bytes_as_single_ones(tmp_path: Path) -> None:
    sequences = make_sequences(50)
    write_store(tmp_path / "single", [sequences], vocab_size=1000)
    with TokenPartWriter(part_path(tmp_path / "many", 0), vocab_size=1000) as writer:
        for some in (sequences[:20], sequences[20:]):
            writer.append_many(
                np.concatenate([ids for ids, _ in some]),
                np.concatenate([train for _, train in some]),
                [len(ids) for ids, _ in some],
            )
        writer.finalize()
    publish_store(tmp_path / "many")
    assert files_of(tmp_path / "single") == files_of(tmp_path / "many")


def _write_part(path: Path, number: int) -> None:
    with TokenPartWriter(part_path(path, number), vocab_size=1000) as writer:
        for ids, train in make_sequences(30, seed=number):
            writer.append(ids, train)
        writer.finalize()


def test_parts_written_by_many_processes_open_as_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(_write_part, [(tmp_path, number) for number in range(4)])
    store = publish_store(tmp_path)
    expected = [seq for number in range(4) for seq in make_sequences(30, seed=number)]
    assert [store[i][0].tolist() for i in range(len(store))] == [ids for ids, _ in expected]
    assert store.parts[0].manifest.dtype == "<u2"
    again = pickle.loads(pickle.dumps(store))
    assert [again[100][0].tolist(), again[3][0].tolist()] == [expected[100][0], expected[3][0]]


def test_lengths_touch_no_token(tmp_path: Path) -> None:
    write_store(tmp_path, [make_sequences(10), make_sequences(5, seed=1)])
    store = open_token_store(tmp_path)
    for name in ("ids.npy", "train.npy"):  # the bytes are nonsense now, the sizes are right
        for part in store.parts:
            size = (part.path / name).stat().st_size
            data = (part.path / name).read_bytes()[:128]
            (part.path / name).write_bytes(data + b"\xee" * (size - 128))
    assert store.lengths.tolist() == [len(ids) for ids, _ in make_sequences(10) + make_sequences(5, seed=1)]


def test_a_part_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    with TokenPartWriter(tmp_path / "part_000000") as writer:
        writer.append([1], [0])
    assert os.listdir(tmp_path) == []
    with TokenPartWriter(tmp_path / "part_000000") as writer:
        with pytest.raises(InvalidInputError, match="would hold no sequence"):
            writer.finalize()
        with pytest.raises(WriterStateError, match="is closed"):
            writer.append([1], [0])
    write_store(tmp_path, [make_sequences(3)])
    with pytest.raises(TargetExistsError):
        TokenPartWriter(tmp_path / "part_000000")


@pytest.mark.parametrize(
    ("ids", "train", "lengths", "sentence"),
    [
        ([1, 2], [0, 1], [1], "lengths add up to 1, but there are 2 input_ids and 2 train values"),
        ([1, 2], [0], [2], "lengths add up to 2, but there are 2 input_ids and 1 train values"),
        ([1, 2], [0, 1], [2, 0], "lengths is 0 at position 1; a sequence has at least one token"),
        ([1, 2], [0, 2], [2], r"train is 2 at position 1, not in 0\.\.1"),
        ([1, -2], [0, 1], [2], r"input_ids is -2 at position 1, not in 0\.\.99"),
        ([1, 100], [0, 1], [2], r"input_ids is 100 at position 1, not in 0\.\.99"),
        ([0.5], [0], [1], "it must be a 1-dimensional array of integers"),
    ],
)
def test_wrong_sequences_are_one_sentence(ids: Any, train: Any, lengths: Any, sentence: str, tmp_path: Path) -> None:
    with TokenPartWriter(tmp_path / "part", vocab_size=100) as writer:
        with pytest.raises(InvalidInputError, match=sentence):
            writer.append_many(ids, train, lengths)
        writer.append([1, 2], [0, 1])
        assert writer.finalize().num_tokens == 2


def test_parts_that_disagree_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path, [make_sequences(3)], tokenizer={"name": "a", "fingerprint": "1"})
    with TokenPartWriter(part_path(tmp_path, 1), tokenizer={"name": "b", "fingerprint": "2"}) as writer:
        writer.append([1], [0])
        writer.finalize()
    with pytest.raises(ShardError, match=r"its tokenizer is .* the parts of a store must agree"):
        publish_store(tmp_path)


def test_swapped_missing_and_replaced_parts_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [make_sequences(3, seed=n) for n in range(3)])
    store = tmp_path / "store"
    (store / "part_000000").rename(tmp_path / "aside")
    with pytest.raises(ShardError, match="part_000000 does not exist"):
        open_token_store(store)
    (store / "part_000001").rename(store / "part_000000")
    with pytest.raises(ShardError, match=r"part_000000 is not the part that .*store.json lists"):
        open_token_store(store)


def test_damage_is_found_and_the_file_is_named(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [make_sequences(4, longest=5)], vocab_size=1000)
    part = tmp_path / "store" / "part_000000"
    for name in sorted(os.listdir(part)):
        whole = (part / name).read_bytes()
        for position in range(len(whole)):
            bit = 1 << (position % 8)
            (part / name).write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
            report = validate_token_store(tmp_path / "store")
            assert not report.ok, (name, position)
            if name != "manifest.json":
                assert any(name in str(finding) for finding in report.findings), (name, position)
        for length in range(0, len(whole), 5):
            (part / name).write_bytes(whole[:length])
            with pytest.raises(PackedSFTError):
                open_token_store(tmp_path / "store")
        (part / name).write_bytes(whole)
    assert validate_token_store(tmp_path / "store").ok
    assert validate_token_store(tmp_path / "store", level="structure").ok


def test_damaged_offsets_are_an_error_and_never_a_wrong_read(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [make_sequences(5)])
    path = tmp_path / "store" / "part_000000" / "offsets.npy"
    offsets = np.load(path)
    for value in (0, 2**63, 10**12):
        broken = offsets.copy()
        broken[2] = value
        with open(path, "wb") as file:
            np.save(file, broken)
        store = open_token_store(tmp_path / "store")
        with pytest.raises(ShardError, match="damaged"):
            store[1]


def test_indices_outside_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path, [make_sequences(5)])
    store = open_token_store(tmp_path)
    for index in (-1, 5):
        with pytest.raises(IndexError):
            store[index]
        with pytest.raises(InvalidInputError, match=r"sequences must be in 0\.\.4"):
            store.by_part(np.array([index]))


def test_a_store_is_told_from_shards(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [make_sequences(5)])
    assert is_token_store(tmp_path / "store")
    assert is_token_store(tmp_path / "store" / "part_000000")
    assert not is_token_store(tmp_path)
    shutil.rmtree(tmp_path / "store")
