"""Batches of data with weights, and of `loss="per_conversation"`: the loss mask, its denominator, who takes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import PackedBin, PackedLoader, create_sft_dataset, pack, publish_store, weighted_loss, widen
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples
from megatron_packed_sft.data.options import BatchOptions
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path
from tests.packed_bins import make_bins, write_shard
from tests.storage.storage_checks import with_weights

EOS = 2
VOCAB_SIZE = 50
PLAIN = make_bins(12, 24, VOCAB_SIZE, seed=1)
WEIGHTED = [with_weights(one) for one in PLAIN]
LOSSES = ["per_token", "per_conversation"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards, the first without weights."""
    for number, bins in enumerate((PLAIN[:6], WEIGHTED[6:])):
        write_shard(tmp_path / "shards" / f"shard_{number}", bins, 24, pad_id=EOS, vocab_size=VOCAB_SIZE)
    return tmp_path / "shards"


MIXED = PLAIN[:6] + WEIGHTED[6:]


def sequences_of(one: PackedBin) -> list[slice]:
    return [
        slice(start, end)
        for start, end in zip(one.seq_start_id, [*one.seq_start_id[1:], len(one.input_ids)], strict=True)
    ]


def slow_mask(one: PackedBin, loss: str, *, shifted: bool) -> tuple[list[float], float]:
    """The mask of a bin, sequence by sequence in float64, and its denominator; `shifted` leaves the last ids out."""
    mask: list[float] = []
    denominator = 0.0
    for place in sequences_of(one):
        weights = one.loss_mask[place].astype(np.float64)
        total = float(weights.sum())
        if loss == "per_conversation":
            weights, total = weights / (total or 1), float(total > 0)
        mask += weights[:-1].tolist() if shifted else [0.0, *weights[:-1].tolist()]
        denominator += total
    return mask, denominator


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_mcore_batch_has_a_float_mask_and_its_denominator(shards: Path, loss: str, compact: bool) -> None:
    dataset = create_sft_dataset(shards, seq_length=32, contract=BatchOptions(loss=loss, compact=compact))
    plain = create_sft_dataset([shards / "shard_0"], seq_length=32)
    batch = dataset.fetch_batch(range(12))
    assert (batch["loss_mask"].dtype, batch["loss_denominator"].dtype) == (torch.float32, torch.float64)
    assert batch["tokens"].dtype == (torch.int32 if compact else torch.int64)
    assert widen(batch)["loss_mask"].dtype == torch.float32
    for index, one in enumerate(MIXED):
        mask, denominator = slow_mask(one, loss, shifted=True)
        found = batch["loss_mask"][index]
        assert torch.allclose(found[: len(mask)], torch.tensor(mask, dtype=torch.float32), rtol=1e-7)
        assert not found[len(mask) :].any()
        assert batch["loss_denominator"][index] == pytest.approx(denominator, rel=1e-15)
    for key, value in plain.fetch_batch(range(6)).items():  # all else is as it was
        if isinstance(value, torch.Tensor) and key not in ("loss_mask", "cu_seqlens_q", "cu_seqlens_kv"):
            width = value.shape[-1]
            assert torch.equal(widen(batch)[key][:6, ..., :width].to(value.dtype), value), key


def test_the_dtype_of_a_dataset_does_not_change_from_batch_to_batch(shards: Path) -> None:
    dataset = create_sft_dataset(shards, seq_length=32)
    for index in range(12):
        assert dataset.fetch_batch([index])["loss_mask"].dtype == torch.float32
        assert dataset[index]["loss_mask"].dtype == np.float32
    assert create_sft_dataset(shards / "shard_0").fetch_batch([0])["loss_mask"].dtype == torch.int64
    joined = create_sft_dataset([shards / "shard_0", shards / "shard_1"], weights=[0.5, 0.5], seq_length=32)
    assert {batch["loss_mask"].dtype for batch in PackedLoader(joined, micro_batch_size=1)} == {torch.float32}


@pytest.mark.parametrize("contract", ["mcore", "hf"])
@pytest.mark.parametrize("loss", LOSSES)
def test_samples_give_the_same_batch_as_the_kernel_that_reads_the_shards(
    shards: Path, contract: str, loss: str
) -> None:
    dataset = create_sft_dataset(shards, seq_length=32, contract=BatchOptions(contract, loss=loss))
    indices = [11, 0, -3, 7]
    direct, collated = dataset.fetch_batch(indices), dataset.collate_fn(dataset.__getitems__(indices))
    assert direct.keys() == collated.keys()
    for key, value in direct.items():
        same = torch.equal(value, collated[key]) if isinstance(value, torch.Tensor) else value == collated[key]
        assert same, key
    assert direct["loss_denominator"][2] == 0  # a padding sample


def test_a_plan_over_a_token_store_gives_the_weights_of_its_sequences(tmp_path: Path) -> None:
    with TokenPartWriter(part_path(tmp_path, 0), vocab_size=VOCAB_SIZE) as writer:
        writer.append([5, 6, 7], [0, 1, 1], [0, 0.5, 0.5])
        writer.append([8, 9], [0, 1])
        writer.finalize()
    store = publish_store(tmp_path)
    plan = pack(store.lengths, pack_size=8)
    batch = create_sft_dataset(tmp_path, EOS, plan=plan, contract=BatchOptions(pad_to_max_length=False)).fetch_batch(
        [0]
    )
    assert sorted(batch["loss_mask"][0].tolist(), reverse=True)[:4] == [1.0, 0.5, 0.5, 0.0]
    assert batch["loss_denominator"].tolist() == [2.0]


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1000, width=32), min_size=2, max_size=12),
    cut=st.integers(1, 11),
    contract=st.sampled_from(["mcore", "hf"]),
)
def test_every_conversation_counts_1_or_nothing(weights: list[float], cut: int, contract: str) -> None:
    cut = min(cut, len(weights) - 1)
    mask = np.array(weights, np.float32)
    mask[[cut - 1, -1]] = 0
    sample = {"input_ids": np.arange(3, 3 + len(mask)), "seq_boundaries": [0, cut, len(mask)], "loss_mask": mask}
    options = CollateOptions(contract=contract, eos_id=EOS, max_seq_length=16, weighted=True, loss="per_conversation")
    batch = collate([locate_in_samples([sample])], 1, options)
    num_trained = sum(bool(part.any()) for part in (mask[:cut], mask[cut:]))
    assert batch["loss_denominator"].tolist() == [num_trained]
    assert float(batch["loss_mask"].sum()) == pytest.approx(num_trained, rel=1e-5)


@pytest.mark.parametrize("contract", ["bridge_0_6", "bridge_main"])
def test_contracts_of_megatron_bridge_are_refused_when_the_dataset_is_opened(shards: Path, contract: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{contract}' contract cannot carry data with weights.*to an integer"):
        create_sft_dataset(shards, seq_length=32, contract=contract)
    with pytest.raises(InvalidInputError, match=r"cannot carry loss='per_conversation'.*or set loss='per_token'"):
        create_sft_dataset(shards / "shard_0", contract=BatchOptions(contract, loss="per_conversation"))
    create_sft_dataset(shards / "shard_0", contract=contract)


def test_what_would_lose_weights_or_means_nothing_is_refused(shards: Path) -> None:
    with pytest.raises(InvalidInputError, match="loss is 'per_turn'; choose from per_token, per_conversation"):
        create_sft_dataset(shards / "shard_0", contract=BatchOptions(loss="per_turn"))
    with pytest.raises(InvalidInputError, match="answer_only_loss=False counts every token"):
        create_sft_dataset(shards, contract=BatchOptions(answer_only_loss=False))
    sample = {"input_ids": [5, 6], "seq_boundaries": [0, 2], "loss_mask": [0.5, 0.0]}
    options = CollateOptions(contract="mcore", eos_id=EOS, max_seq_length=16)
    with pytest.raises(InvalidInputError, match=r"has weights of the loss, which this batch would lose; set weighted"):
        collate([locate_in_samples([sample])], 1, options)
    with pytest.raises(InvalidInputError, match=r"loss_mask of sample 0 of the batch is -0\.5 at position 0"):
        locate_in_samples([{**sample, "loss_mask": [-0.5, 0.0]}])


def test_megatron_lm_is_refused(shards: Path) -> None:
    megatron_lm = pytest.importorskip("megatron_packed_sft.megatron.megatron_lm")

    class Config:
        tokenizer = EOS
        sequence_length = 32

    build: Any = megatron_lm.PackedSFTMegatronDataset.build_low_level_dataset
    with pytest.raises(InvalidInputError, match="has weights of the loss, and Megatron-LM casts"):
        build(str(shards), Config())
    assert len(build(str(shards / "shard_0"), Config())) == 6


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=VOCAB_SIZE, **shape)
    ).double()


def by_definition(model: Any, bins: list[PackedBin], loss: str) -> tuple[torch.Tensor, float]:
    """Sum and denominator, conversation by conversation."""
    total, denominator = torch.zeros((), dtype=torch.float64), []
    for one in bins:
        for place in sequences_of(one):
            ids = torch.tensor(one.input_ids[place].astype(np.int64))[None]
            weights = torch.tensor(one.loss_mask[place].astype(np.float64))[:-1]
            if weights.sum() == 0:
                continue
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            scale = weights.sum() if loss == "per_conversation" else torch.ones(())
            total = total + torch.sum(losses * weights) / scale
            denominator.append(float(weights.sum() / scale))
    return total, math.fsum(denominator)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_an_hf_batch_is_that_of_the_conversations_one_by_one(shards: Path, llama: Any, loss: str) -> None:
    dataset = create_sft_dataset(shards, seq_length=32, contract=BatchOptions("hf", loss=loss))
    batch = dataset.fetch_batch(range(12))
    output = llama(**{**batch, "use_cache": False})
    assert output.loss is None  # the obvious way cannot ignore the weights in silence
    assert "labels" not in batch
    total, denominator = by_definition(llama, MIXED, loss)
    found = weighted_loss(output.logits, batch)
    assert found.item() == pytest.approx((total / denominator).item(), rel=1e-6)
    # Gradient accumulation: the sum over batches with the denominator of all of them.
    parts = [dataset.fetch_batch(range(first, first + 3)) for first in range(0, 12, 3)]
    whole = sum(float(part["loss_denominator"].sum()) for part in parts)
    summed = sum(weighted_loss(llama(**{**part, "use_cache": False}).logits, part, whole) for part in parts)
    assert summed.item() == pytest.approx(found.item(), rel=1e-6)


def test_the_loss_without_a_trained_token_is_0_and_of_a_batch_without_weights_refused(shards: Path, llama: Any) -> None:
    batch = create_sft_dataset(shards, seq_length=32, contract="hf").fetch_batch([-1])
    loss = weighted_loss(llama(**{**batch, "use_cache": False}).logits, batch)
    loss.backward()
    assert loss.item() == 0
    plain = create_sft_dataset(shards / "shard_0", contract="hf").fetch_batch([0])
    with pytest.raises(InvalidInputError, match="has no weighted_labels"):
        weighted_loss(torch.zeros(1, 4, VOCAB_SIZE), plain)
