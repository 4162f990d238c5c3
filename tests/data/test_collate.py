"""Collate, checked against the definition in semantics.md, written out slowly; tests/oracle compares with Bridge."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import PackedBin, open_shard
from megatron_packed_sft.data.batch.collate import collate, widen
from megatron_packed_sft.data.batch.contracts import CONTRACTS, CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples, locate_in_shard, locate_in_shards
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from tests.packed_bins import bins, make_bins, write_shard

EOS = 3
PADDED_CONTRACTS = [name for name, contract in CONTRACTS.items() if not contract.flattened]


def options(contract: str = "mcore", **arguments: Any) -> CollateOptions:
    return CollateOptions(**{"contract": contract, "eos_id": EOS, "max_seq_length": 64, **arguments})


def sample(packed: PackedBin, *, is_padding: bool = False) -> dict[str, Any]:
    return {
        "input_ids": packed.input_ids,
        "seq_boundaries": [*packed.seq_start_id.tolist(), len(packed.input_ids)],
        "loss_mask": packed.loss_mask,
        "is_padding": is_padding,
    }


def sequences(packed: PackedBin) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each sequence of a bin."""
    ends = [*packed.seq_start_id[1:].tolist(), len(packed.input_ids)]
    spans = zip(packed.seq_start_id.tolist(), ends, strict=True)
    return [(packed.input_ids[start:end].tolist(), packed.loss_mask[start:end].tolist()) for start, end in spans]


def padded_bin(packed: PackedBin, width: int) -> dict[str, list[int]]:
    """One bin of a batch of the `mcore` contract, as semantics.md says it."""
    tokens, labels, loss, positions, docs, ends = [], [], [], [], [], [0]
    for number, (ids, mask) in enumerate(sequences(packed)):
        tokens += ids[:-1]
        labels += ids[1:]
        loss += mask[:-1]
        positions += range(len(ids) - 1)
        docs += [number] * (len(ids) - 1)
        ends.append(len(tokens))
    gap = width - len(tokens)
    return {
        "tokens": tokens + [EOS] * gap,
        "labels": labels + [EOS] * gap,
        "loss_mask": loss + [0] * gap,
        "position_ids": positions + [0] * gap,
        "padding_mask": [False] * len(tokens) + [True] * gap,
        "doc_ids": docs + [len(packed.seq_start_id)] * gap,
        "cu_seqlens_q": ends + [width] * (gap > 0),
    }


@settings(max_examples=100, deadline=None)
@given(drawn=bins(vocab_size=8), pad_to_max_length=st.booleans(), multiple=st.sampled_from([1, 4, 16]))
def test_a_padded_batch_is_what_the_definition_says(
    drawn: tuple[int, list[PackedBin]], pad_to_max_length: bool, multiple: int
) -> None:
    _, packed_bins = drawn
    batch = collate(
        [locate_in_samples([sample(packed) for packed in packed_bins])],
        len(packed_bins),
        options(pad_to_max_length=pad_to_max_length, pad_seq_length_to_mult=multiple, return_doc_ids=True),
    )
    counts = [len(packed.input_ids) - len(packed.seq_start_id) for packed in packed_bins]
    # A model cannot run on no positions, so bins that predict nothing are padding.
    width = 64 if pad_to_max_length else -(-max(1, *counts) // multiple) * multiple
    assert batch["token_count"] == counts
    num_boundaries = max(len(padded_bin(packed, width)["cu_seqlens_q"]) for packed in packed_bins)
    for place, packed in enumerate(packed_bins):
        expected = padded_bin(packed, width)
        ends = expected["cu_seqlens_q"]
        assert batch["max_seqlen_q"][place].tolist() == [int(np.diff(ends).max())]
        expected["cu_seqlens_q"] = ends + ends[-1:] * (num_boundaries - len(ends))
        for key, value in expected.items():
            assert batch[key][place].tolist() == value, key


@settings(max_examples=100, deadline=None)
@given(drawn=bins(vocab_size=8), pad_to_max_length=st.booleans(), train_all=st.booleans())
def test_a_flattened_batch_is_what_hugging_face_models_take(
    drawn: tuple[int, list[PackedBin]], pad_to_max_length: bool, train_all: bool
) -> None:
    # As transformers' DataCollatorWithFlattening has it: labels are not shifted (the model does that), and the first
    # token of a sequence has none, because nothing predicts it.
    _, packed_bins = drawn
    input_ids, labels, positions, docs, ends = [], [], [], [], [0]
    for number, (ids, mask) in enumerate(itertools.chain.from_iterable(map(sequences, packed_bins))):
        input_ids += ids
        labels += [-100, *(one if train_all or kept else -100 for one, kept in zip(ids[1:], mask[:-1], strict=True))]
        positions += range(len(ids))
        docs += [number] * len(ids)
        ends.append(len(input_ids))
    gap = 64 * len(packed_bins) - len(input_ids) if pad_to_max_length else 0
    if gap:
        input_ids += [EOS] * gap
        labels += [-100] * gap
        positions += range(gap)
        docs += [len(ends) - 1] * gap
        ends.append(len(input_ids))
    batch = collate(
        [locate_in_samples([sample(packed) for packed in packed_bins])],
        len(packed_bins),
        options("hf", pad_to_max_length=pad_to_max_length, answer_only_loss=not train_all, return_doc_ids=True),
    )
    assert batch["input_ids"].tolist() == [input_ids]
    assert batch["labels"].tolist() == [labels]
    assert batch["position_ids"].tolist() == [positions]
    assert batch["doc_ids"].tolist() == [docs]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == ends
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == int(np.diff(ends).max())
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["position_ids"].dtype == torch.int64


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype
            assert torch.equal(actual[key], value), key
        else:
            assert actual[key] == value, key


def opened(path: Path, packed_bins: list[PackedBin], **arguments: Any) -> MemmapShard:
    write_shard(path, packed_bins, 64, **arguments)
    shard = open_shard(path)
    assert isinstance(shard, MemmapShard)
    return shard


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("compact", [False, True])
def test_every_way_into_a_batch_gives_the_same_batch(tmp_path: Path, contract: str, compact: bool) -> None:
    packed_bins = make_bins(12, 64, vocab_size=500, seed=1)
    small = opened(tmp_path / "u2", packed_bins, vocab_size=500)
    large = opened(tmp_path / "i4", packed_bins, vocab_size=100_000)
    assert small.arrays.input_ids.dtype == np.uint16
    assert large.arrays.input_ids.dtype == np.int32
    order = [7, 0, 11, 3]
    chosen = options(contract, compact=compact, return_doc_ids=True)
    expected = collate([locate_in_samples([sample(packed_bins[index]) for index in order])], 4, chosen)
    assert_equal(collate([locate_in_shard(small, order)], 4, chosen), expected)
    assert_equal(collate([locate_in_shard(large, np.array(order))], 4, chosen), expected)
    mixed = [locate_in_shard(large, [0, 3], [1, 3]), locate_in_shard(small, [11, 7], [2, 0])]
    assert_equal(collate(mixed, 4, chosen), expected)
    together = locate_in_shards([large, small], [1, 0, 1, 0], order)
    assert_equal(collate([together], 4, chosen), expected)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_compact_batch_holds_the_same_values_in_fewer_bytes(contract: str) -> None:
    located = [locate_in_samples([sample(packed) for packed in make_bins(5, 64, seed=2)])]
    compact = collate(located, 5, options(contract, compact=True))
    wide = collate(located, 5, options(contract))
    ids = "input_ids" if contract == "hf" else "tokens"
    assert compact[ids].dtype == compact["labels"].dtype == compact["position_ids"].dtype == torch.int32
    if contract != "hf":
        assert compact["loss_mask"].dtype == torch.uint8
    assert_equal(widen(compact), wide)


def test_a_batch_is_not_touched_by_the_next_one() -> None:
    located = [[locate_in_samples([sample(packed)])] for packed in make_bins(2, 64, seed=4)]
    chosen = options(pad_to_max_length=True)
    first = collate(located[0], 1, chosen)
    copies = {key: value.clone() for key, value in first.items() if isinstance(value, torch.Tensor)}
    collate(located[1], 1, chosen)
    assert all(torch.equal(first[key], copies[key]) for key in copies)


def test_threads_collate_at_the_same_time() -> None:
    located = [[locate_in_samples([sample(packed)])] for packed in make_bins(40, 64, seed=5)]
    alone = [collate(one, 1, options()) for one in located]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: collate(one, 1, options()), located))
    for actual, expected in zip(together, alone, strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("answer_only_loss", [True, False])
def test_a_padding_sample_has_no_loss_and_keeps_its_boundaries(contract: str, answer_only_loss: bool) -> None:
    [packed] = make_bins(1, 64, seed=6)
    chosen = options(contract, answer_only_loss=answer_only_loss)
    real = collate([locate_in_samples([sample(packed)])], 1, chosen)
    padding = collate([locate_in_samples([sample(packed, is_padding=True)])], 1, chosen)
    if contract == "hf":
        assert (real["labels"] != -100).any()
        assert (padding.pop("labels") == -100).all()
        del real["labels"]
    else:
        assert real.pop("loss_mask").any()
        assert not padding.pop("loss_mask").any()
    assert_equal(padding, real)


def test_padding_that_aligns_a_sequence_is_marked_and_a_trained_eos_is_not() -> None:
    # Two sequences padded to 4 tokens with EOS: a b | c EOS(trained) d. The last id of each is a label only.
    packed = {
        "input_ids": [5, 6, EOS, EOS, EOS, 7, EOS, EOS, EOS, EOS],
        "seq_boundaries": [0, 5, 10],
        "loss_mask": [1, 1, 0, 0, 0, 1, 1, 0, 0, 0],
    }
    batch = collate([locate_in_samples([packed])], 1, options(pad_seq_to_mult=4, pad_seq_length_to_mult=4))
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 8]]
    assert batch["cu_seqlens_q"].tolist() == [[0, 2, 4]]
    assert batch["padding_mask"].int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]
    everything = options(pad_seq_to_mult=4, pad_seq_length_to_mult=4, answer_only_loss=False)
    assert collate([locate_in_samples([packed])], 1, everything)["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]
    dropped = collate(
        [locate_in_samples([packed])], 1, options("bridge_0_6", pad_seq_to_mult=4, pad_seq_length_to_mult=4)
    )
    assert dropped["cu_seqlens_q"].tolist() == [[0, 2, 3]]
    assert dropped["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    flat = collate([locate_in_samples([packed])], 1, options("hf", pad_seq_to_mult=4, answer_only_loss=False))
    assert flat["labels"].tolist() == [[-100, 6, EOS, -100, -100, -100, EOS, EOS, -100, -100]]


@pytest.mark.parametrize("contract", PADDED_CONTRACTS)
def test_static_boundaries_have_the_same_shape_in_every_batch(contract: str) -> None:
    chosen = options(
        contract,
        pad_to_max_length=True,
        pad_cu_seqlens=True,
        dataset_max_seqlen=40,
        max_samples_per_bin=6,
        min_packed_seqlen=30,
    )
    shapes = set()
    for packed in make_bins(10, 64, seed=7):
        batch = collate([locate_in_samples([sample(packed)])], 1, chosen)
        boundaries = batch["cu_seqlens_q"]
        longest = batch["max_seqlen_q"]
        shapes.add(boundaries.shape)
        assert longest.tolist() == [40]
    assert len(shapes) == 1
