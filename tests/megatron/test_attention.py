"""Attention over packed rows, compared with the formula."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.attention import PackedAttention
from tests.megatron import tiny_gpt

pytestmark = [pytest.mark.usefixtures("one_rank"), *map(pytest.mark.filterwarnings, tiny_gpt.WARNINGS)]

NUM_HEADS, NUM_GROUPS, SIZE = 4, 2, 8
LOGICAL = [0, 5, 5, 6, 13]  # sequences of 5, 0, 1 and 7 tokens
PHYSICAL = [0, 8, 8, 12, 20]
LENGTH = 24


def make_attention(*, softmax_scale: float | None = None, attention_type: str = "self", **fields: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {"attention_dropout": 0.0, "cuda_graph_scope": [], **fields}
    config = TransformerConfig(num_layers=1, hidden_size=NUM_HEADS * SIZE, num_attention_heads=NUM_HEADS, **fields)
    return PackedAttention(config, 1, AttnMaskType.causal, attention_type, softmax_scale=softmax_scale)


def make_boundaries(logical: list[int], physical: list[int] | None = None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(logical, dtype=torch.int32)
    padded = None if physical is None else torch.tensor(physical, dtype=torch.int32)
    return PackedSeqParams("thd", ends, ends, padded, padded)


def make_inputs(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, heads, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    ]


def formula(query: Tensor, key: Tensor, value: Tensor, scale: float = 1 / math.sqrt(SIZE)) -> Tensor:
    """softmax(Q K^T / sqrt(size)) V with a causal mask, head by head: [s, heads, size] -> [s, heads * size]."""
    heads = []
    for head in range(NUM_HEADS):
        group = head // (NUM_HEADS // NUM_GROUPS)
        scores = query[:, head] @ key[:, group].T * scale
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append(torch.softmax(scores.masked_fill(future, -torch.inf), dim=1) @ value[:, group])
    return torch.cat(heads, dim=1)


def gradients(result: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
    return torch.autograd.grad(torch.sum(result * weights), inputs)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("physical", [None, PHYSICAL], ids=["no gaps", "gaps"])
def test_each_sequence_is_the_formula_alone_and_between_them_are_zeros(
    physical: list[int] | None, scale: float | None
) -> None:
    inputs = make_inputs(LENGTH)
    attention = make_attention(softmax_scale=scale)
    result = attention(*inputs, None, packed_seq_params=make_boundaries(LOGICAL, physical))
    expected = torch.zeros(LENGTH, NUM_HEADS * SIZE, dtype=torch.float64)
    for start, (first, last) in zip(physical or LOGICAL, pairwise(LOGICAL), strict=False):
        piece = slice(start, start + last - first)
        expected[piece] = formula(*(tensor[piece] for tensor in inputs), scale=scale or 1 / math.sqrt(SIZE))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    for found, wanted in zip(gradients(result, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)  # they go up to several hundred


def test_what_lies_between_sequences_gets_no_gradient_and_changes_nothing() -> None:
    inputs = make_inputs(LENGTH)
    attention, boundaries = make_attention(), make_boundaries(LOGICAL, PHYSICAL)
    result = attention(*inputs, None, packed_seq_params=boundaries)
    between = [*range(5, 8), *range(9, 12), *range(19, 24)]
    for gradient in gradients(result, inputs):
        assert not gradient[between].any()
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed:
        tensor[between] = 1e6
    assert torch.equal(attention(*changed, None, packed_seq_params=boundaries), result)


def test_a_batch_that_is_not_packed_is_causal() -> None:
    inputs = make_inputs(11, 2)
    result = make_attention()(*inputs, None)
    assert result.shape == (11, 2, NUM_HEADS * SIZE)
    for row in range(2):
        expected = formula(*(tensor[:, row] for tensor in inputs))
        torch.testing.assert_close(result[:, row], expected, rtol=0, atol=1e-14)


def test_a_dense_mask_hides_what_it_says() -> None:
    inputs = make_inputs(LENGTH)
    attention = make_attention()
    sequence_of = torch.tensor([0] * 5 + [1] + [2] * 7 + [3] * 11)
    visible = (sequence_of[:, None] == sequence_of[None]).tril()
    dense = attention(*(tensor.unsqueeze(1) for tensor in inputs), ~visible[None, None])
    packed = attention(*inputs, None, packed_seq_params=make_boundaries([0, 5, 6, 13, LENGTH]))
    torch.testing.assert_close(dense[:, 0], packed, rtol=0, atol=1e-14)


def test_dropout_is_there_in_training_only_and_leaves_other_random_numbers_alone() -> None:
    inputs = make_inputs(LENGTH)
    attention = make_attention(attention_dropout=0.5)
    state = torch.get_rng_state()
    first, second = (attention(*inputs, None, packed_seq_params=make_boundaries(LOGICAL)) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    attention.eval()
    expected = make_attention()(*inputs, None, packed_seq_params=make_boundaries(LOGICAL))
    assert torch.equal(attention(*inputs, None, packed_seq_params=make_boundaries(LOGICAL)), expected)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"window_size": (4, 0)}, "window_size"),
        ({"softmax_type": "learnable"}, "softmax_type 'learnable'"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
        ({"context_parallel_size": 2}, "context_parallel_size above 1"),
        ({"attention_type": "cross"}, "cross attention"),
    ],
    ids=str,
)
def test_what_needs_transformer_engine_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{named} needs Transformer Engine"):
        make_attention(**fields)


def test_cached_keys_a_bias_and_other_masks_are_refused() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    query, key, value = make_inputs(6, 1)
    attention = make_attention()
    for arguments in (
        {"query": query[-1:]},
        {"attention_bias": torch.zeros(1)},
        {"attn_mask_type": AttnMaskType.no_mask},
    ):
        with pytest.raises(InvalidInputError, match="causal self-attention for training"):
            attention(**{"query": query, "key": key, "value": value, "attention_mask": None, **arguments})
