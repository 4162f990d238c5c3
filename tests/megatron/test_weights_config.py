"""What config.json says: read as transformers reads it, or refused by name before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.errors import UnsupportedFormatError
from megatron_packed_sft.megatron.weights.families import FAMILIES, Family, family_of, register_family
from megatron_packed_sft.megatron.weights.layout import ModelShape, Span, Weight, dense_weights, local_name

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BUILT_IN = ("llama", "mistral", "qwen2", "qwen3")


def shape_of(name: str, **keys: Any) -> ModelShape:
    config = {"model_type": name, **SIZES, **({"sliding_window": None} if name == "mistral" else {}), **keys}
    return family_of(config, "config.json").shape(config, "config.json")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": 4, "head_dim": 8}, {"rope_theta": 5e5}])
def test_keys_that_are_left_out_mean_what_they_mean_in_transformers(name: str, keys: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(name, **SIZES, **keys)
    ours = shape_of(name, **keys)
    assert ours.num_query_groups == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.layernorm_epsilon == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rotary_base == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "changes", [{}, {"rotary_scaling_factor": 8.0, "rotary_base": 500_000}, {"tie_embeddings": True}]
)
def test_a_shape_survives_the_way_through_transformers(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    from dataclasses import replace

    from transformers import AutoConfig

    shape = replace(shape_of(name, num_key_value_heads=4, head_dim=8), **changes)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name].config(shape)))
    again = AutoConfig.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert family_of(config, "config.json").shape(config, "config.json") == shape


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True, and only False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"attention_dropout": 0.1}, "set it to 0 in a copy"),
        ("llama", {"quantization_config": {"bits": 4}}, "use the weights from before they were quantized"),
        ("llama", {"auto_map": {"AutoModel": "x.y"}}, "its own code is never run"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, "scaled by 'yarn', and only llama3"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "scaled by 'dynamic'"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "Megatron-Core has 4 built in"),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}}, "is 4096, and Megatron-Core"),
        ("llama", {"rope_theta": 10000.5}, "only whole numbers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number above 0"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
        ("llama", {"vocab_size": None}, "vocab_size is None"),
        ("llama", {"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads 5"),
        ("llama", {"head_dim": 7}, "head_dim is 7; rotary positions need an even width"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "use a causal language model"),
        ("mistral", {"sliding_window": 4096}, "if no sequence is longer than that, set it to null"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has full_attention, sliding"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {}, "model_type 'qwen3_moe' is not a known family; known are llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        shape_of(name, **keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistral_that_does_not_mention_its_window_has_one_in_transformers_and_is_refused() -> None:
    config = {"model_type": "mistral", **SIZES}
    with pytest.raises(UnsupportedFormatError, match="sliding_window is 4096"):
        family_of(config, "config.json").shape(config, "config.json")


def test_a_user_can_add_a_family() -> None:
    def renamed(shape: ModelShape) -> Any:
        return (weight for weight in dense_weights(shape) if weight.layer is None)

    register_family(Family(name="acme", architecture="AcmeForCausalLM", qkv_bias=True, weights=renamed), replace=True)
    shape = shape_of("acme")
    assert shape.family == "acme"
    assert shape.qkv_bias
    assert len(list(FAMILIES["acme"].weights(shape))) == 3


def test_names_of_both_layer_specs() -> None:
    """Transformer Engine does not run here; what its spec calls the weights is what a checkpoint calls them."""
    names = [weight.name for weight in dense_weights(shape_of("qwen3")) if weight.layer == 0]
    assert names == [
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    assert [local_name(name) for name in names if "layer_norm_" in name] == [
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
    ]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_share_every_weight_without_gap_or_overlap(name: str, num_ranks: int) -> None:
    for weight in dense_weights(shape_of(name, num_key_value_heads=4, head_dim=8)):
        length = -(-weight.length // 512) * 512 if weight.is_padded else weight.length
        covered = [span for rank in range(num_ranks) for span in weight.spans_of_rank(rank, num_ranks, length)]
        for tensor in weight.tensors:
            rows = sorted(row for span in covered if span.tensor == tensor.name for row in range(span.start, span.stop))
            times = 1 if weight.is_shared else num_ranks
            assert rows == sorted(list(range(tensor.sizes[weight.axis])) * times)
        assert all(
            span.at + span.stop - span.start <= length // (num_ranks if weight.is_shared else 1) for span in covered
        )


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    [fused] = [one for one in dense_weights(shape_of("llama", num_key_value_heads=16)) if "qkv.weight" in one.name][:1]
    assert isinstance(fused, Weight)
    names = {f"model.layers.0.self_attn.{which}_proj.weight": which for which in "qkv"}
    assert [(names[span.tensor], span.start, span.stop) for span in fused.spans[:6]] == [
        ("q", 0, 4),
        ("k", 0, 2),
        ("v", 0, 2),
        ("q", 4, 8),
        ("k", 2, 4),
        ("v", 2, 4),
    ]
    assert fused.spans[-1] == Span("model.layers.0.self_attn.v_proj.weight", 30, 32, 126)
