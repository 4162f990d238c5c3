"""Masks: sequences of a bin see themselves and nothing else, in every form the mask comes in."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples
from megatron_packed_sft.data.batch.model_helpers import doc_ids_from_boundaries, document_mask_mod, visible_mask
from megatron_packed_sft.data.options import BatchOptions
from megatron_packed_sft.errors import InvalidInputError
from tests.packed_bins import make_bins, write_shard

SAMPLES = [
    {"input_ids": list(range(5, 15)), "seq_boundaries": [0, 4, 5, 10], "loss_mask": [1] * 10},
    {"input_ids": list(range(5, 10)), "seq_boundaries": [0, 5], "loss_mask": [1] * 5},
]


def make_batch(contract: str, **arguments: Any) -> dict[str, Any]:
    options = CollateOptions(contract=contract, eos_id=3, max_seq_length=16, **arguments)
    return collate([locate_in_samples(SAMPLES)], len(SAMPLES), options)


@pytest.mark.parametrize("contract", ["bridge_0_6", "bridge_main", "mcore"])
def test_doc_ids_of_a_batch_are_those_of_its_boundaries(contract: str) -> None:
    batch = make_batch(contract, return_doc_ids=True)
    boundaries = batch["cu_seqlens_q"]
    assert batch["doc_ids"].tolist() == [[0, 0, 0, 2, 2, 2, 2, *[3] * 9], [0, 0, 0, 0, *[1] * 12]]
    found = doc_ids_from_boundaries(boundaries, 16)
    assert found.dtype == batch["doc_ids"].dtype == torch.int32
    assert torch.equal(found, batch["doc_ids"])


def test_doc_ids_of_a_flattened_batch_are_those_of_its_boundaries() -> None:
    batch = make_batch("hf", return_doc_ids=True)
    assert torch.equal(doc_ids_from_boundaries(batch["cu_seq_lens_q"], 15), batch["doc_ids"][0])


def test_a_position_sees_itself_and_those_before_it_in_its_sequence() -> None:
    doc_ids = make_batch("mcore", return_doc_ids=True)["doc_ids"]
    visible = visible_mask(doc_ids)
    assert visible.shape == (2, 1, 16, 16)
    for index in range(2):
        for query in range(16):
            for key in range(16):
                expected = key <= query and bool(doc_ids[index, query] == doc_ids[index, key])
                assert bool(visible[index, 0, query, key]) == expected


def test_the_mask_mod_of_flex_attention_is_the_dense_mask() -> None:
    doc_ids = make_batch("mcore", return_doc_ids=True)["doc_ids"]
    made = create_mask(document_mask_mod(doc_ids), 2, 1, 16, 16, device="cpu")
    assert torch.equal(made, visible_mask(doc_ids))


def test_the_dense_mask_of_mcore_hides_other_sequences_and_that_of_bridge_does_not() -> None:
    hidden = make_batch("mcore", return_cu_seqlen=False)
    doc_ids = make_batch("mcore", return_doc_ids=True)["doc_ids"]
    assert "cu_seqlens_q" not in hidden
    assert torch.equal(hidden["attention_mask"], ~visible_mask(doc_ids))
    causal = make_batch("bridge_0_6", return_cu_seqlen=False)["attention_mask"]
    assert torch.equal(causal, torch.ones(2, 1, 16, 16, dtype=torch.bool).triu(1))


def test_attention_with_the_mask_is_attention_over_each_sequence_alone() -> None:
    torch.manual_seed(0)
    batch = make_batch("mcore")
    doc_ids = doc_ids_from_boundaries(batch["cu_seqlens_q"], 16)
    query, key, value = torch.randn(3, 2, 2, 16, 8, dtype=torch.float64).unbind()
    packed = scaled_dot_product_attention(query, key, value, attn_mask=visible_mask(doc_ids))
    for index, boundaries in enumerate(batch["cu_seqlens_q"].tolist()):
        for start, end in itertools.pairwise(boundaries):
            if start < end:
                parts = (tensor[index : index + 1, :, start:end] for tensor in (query, key, value))
                alone = scaled_dot_product_attention(*parts, is_causal=True)
                torch.testing.assert_close(packed[index : index + 1, :, start:end], alone)


def test_a_batch_of_mcore_is_not_used_without_its_boundaries() -> None:
    batch = make_batch("mcore")
    assert "attention_mask" not in batch
    assert batch.get("attention_mask") is None  # for those who do pass the boundaries
    with pytest.raises(InvalidInputError, match=r"boundaries instead of an attention_mask.*packed_seq_params\(batch\)"):
        batch["attention_mask"]
    with pytest.raises(KeyError, match="nonsense"):
        batch["nonsense"]
    assert type(pickle.loads(pickle.dumps(batch))) is type(batch)


def test_boundaries_without_the_padding_that_aligns_sequences_are_no_places() -> None:
    sample = {"input_ids": [5, 6, 2, 2, 2, 7, 8, 2, 2, 2], "seq_boundaries": [0, 5, 10], "loss_mask": [1] + [0] * 9}
    options = CollateOptions(contract="mcore", eos_id=2, max_seq_length=8, pad_seq_to_mult=4, return_doc_ids=True)
    batch = collate([locate_in_samples([sample])], 1, options)
    with pytest.raises(InvalidInputError, match=r"end at 4, not at the bin's 8 positions.*pass cu_seqlens_q_padded"):
        doc_ids_from_boundaries(batch["cu_seqlens_q"], 8)
    assert torch.equal(doc_ids_from_boundaries(batch["cu_seqlens_q_padded"], 8), batch["doc_ids"])


@pytest.mark.parametrize("contract", ["bridge_0_6", "bridge_main", "mcore"])
def test_a_mask_that_lets_sequences_see_each_other_is_announced(
    contract: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shard(tmp_path / "shard", make_bins(2, 16), 16)
    dataset = create_sft_dataset(tmp_path / "shard", 2, contract=BatchOptions(contract, return_cu_seqlen=False))
    dataset.fetch_batch([0])
    dataset.fetch_batch([1])
    announced = [message for message in caplog.messages if "lets the sequences of a bin see each other" in message]
    assert len(announced) == (contract != "mcore")
