"""Building GPT models: what this rank gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.attention import PackedAttention
from megatron_packed_sft.megatron.model import padded_vocab_size
from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import build

pytestmark = [pytest.mark.usefixtures("one_rank"), *map(pytest.mark.filterwarnings, tiny_gpt.WARNINGS)]


def test_it_is_megatrons_gpt_with_our_attention() -> None:
    from megatron.core.models.gpt import GPTModel

    model = build()
    assert type(model) is GPTModel
    attentions = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert [type(attention) for attention in attentions] == [PackedAttention] * 2
    assert model.config.calculate_per_token_loss
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_vocabulary_is_padded() -> None:
    model = build(vocab_size=300)
    assert model.embedding.word_embeddings.weight.shape == (384, 64)
    assert build(vocab_size=300, make_vocab_size_divisible_by=4).vocab_size == 300
    assert padded_vocab_size(300, 64, tensor_parallel=8) == 512


def test_the_same_seed_gives_the_same_weights() -> None:
    models = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        models.append(build())
    first, same, other = ([weight.detach() for weight in model.parameters()] for model in models)
    assert all(torch.equal(one, two) for one, two in zip(first, same, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_tied_embeddings_are_one_weight() -> None:
    assert "output_layer.weight" not in dict(build(tie_embeddings=True).named_parameters())
    assert "output_layer.weight" in dict(build(tie_embeddings=False).named_parameters())


def test_further_fields_of_the_configuration_are_passed_on() -> None:
    assert build(init_method_std=0.5, layernorm_epsilon=1e-6).config.layernorm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.bfloat16}, "torch.bfloat16 on CPU; use torch.float32"),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, "sequence_parallel needs Transformer Engine"),
        ({"num_query_groups": 3}, "num_attention_heads 4 is not a multiple of num_query_groups 3"),
        ({"bf16": True, "fp16": True}, "Megatron-Core refuses this model"),
        ({"no_such_field": 1}, "Megatron-Core refuses this model.*no_such_field"),
        ({"vocab_size": 0}, "vocab_size 0.*must be at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(**arguments)
