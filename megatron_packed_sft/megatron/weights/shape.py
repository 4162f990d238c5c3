"""What decides a model: its sizes and the few choices in which the families of dense models differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_FAMILY = "llama"  # what a run from scratch trains: RMSNorm, SwiGLU, rotary positions, no biases


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a dense GPT model.

    Args:
        family: the name under which its tensors are known, such as `llama` or `qwen3`.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_query_groups: key/value heads.
        head_dim: width of a head.
        ffn_hidden_size: inner width of the MLP.
        vocab_size: of the weights, without padding.
        tie_embeddings: share the input and output embeddings.
        rotary_base: base of the rotary positions.
        rotary_scaling_factor: Llama 3.1's scaling of the rotary positions, or None.
        layernorm_epsilon: of RMSNorm.
        qk_layernorm: normalize queries and keys.
        qkv_bias: queries, keys and values have biases.

    Example:
        >>> shape = ModelShape.of_sizes(num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96,
        ...                             vocab_size=256)
        >>> shape.head_dim, shape.num_query_groups
        (16, 4)
    """

    family: str = DEFAULT_FAMILY
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tie_embeddings: bool = False
    rotary_base: int = 10_000
    rotary_scaling_factor: float | None = None
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    qkv_bias: bool = False

    @classmethod
    def of_sizes(cls, **fields: Any) -> ModelShape:
        """Return a shape; heads for keys and the width of a head follow from the rest unless they are given."""
        num_heads = fields["num_attention_heads"]
        if fields.get("num_query_groups") is None:
            fields["num_query_groups"] = num_heads
        if fields.get("head_dim") is None:
            fields["head_dim"] = fields["hidden_size"] // num_heads
        return cls(**fields)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> ModelShape:
        """Return the shape that a checkpoint recorded; older ones recorded fewer fields."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls.of_sizes(**{name: value for name, value in saved.items() if name in names})

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of `build_gpt_model` that the shape decides."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.ffn_hidden_size,
            "vocab_size": self.vocab_size,
            "tie_embeddings": self.tie_embeddings,
            "rotary_base": self.rotary_base,
            "rotary_scaling_factor": self.rotary_scaling_factor,
            "layernorm_epsilon": self.layernorm_epsilon,
            "qk_layernorm": self.qk_layernorm,
            "add_qkv_bias": self.qkv_bias,
        }
