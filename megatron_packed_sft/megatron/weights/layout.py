"""A model's shape, its weights, and the Hugging Face tensors that each weight is made of, on any tensor-parallel rank.

    linear_qkv, two query groups:   q q k v | q q k v          by group: its query heads, then its key, then its value
    linear_fc1:                     gate ... | up ...          two sections, each of which the ranks share evenly
    word_embeddings:                embed_tokens ... zeros     padded at the end

Names are those of a torch_dist checkpoint, which are also those of the Transformer Engine layer spec; `local_name`
gives those of Megatron-Core's own spec. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from megatron_packed_sft.errors import InvalidInputError

DEFAULT_FAMILY = "llama"  # the family that a run from scratch trains: RMSNorm, SwiGLU, rotary positions, no biases
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYERS = "decoder.layers."
# Transformer Engine keeps a norm's weight with the linear layer behind it.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
ADAPTERS: Final = "adapters.layers."  # the prefix of adapters in a checkpoint
# The linear layers that may have adapters, and their names within a transformer layer.
_TARGET_LAYERS: Final = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}
TARGETS: Final = tuple(_TARGET_LAYERS)
BY_COLUMNS: Final = ("linear_proj", "linear_fc2")  # whose columns the tensor-parallel ranks share, instead of rows


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
        """Return a shape; `num_query_groups` and `head_dim` follow from the other sizes unless they are given."""
        num_heads = fields["num_attention_heads"]
        if fields.get("num_query_groups") is None:
            fields["num_query_groups"] = num_heads
        if fields.get("head_dim") is None:
            fields["head_dim"] = fields["hidden_size"] // num_heads
        return cls(**fields)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> ModelShape:
        """Return the shape that a checkpoint recorded."""
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls.of_sizes(**{name: value for name, value in saved.items() if name in names})
        except (KeyError, TypeError, ArithmeticError) as error:
            raise InvalidInputError(
                f"the checkpoint does not describe a model ({type(error).__name__}: {error}); restore it"
            ) from None

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of `build_gpt_model` that follow from the shape."""
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


class Span(NamedTuple):
    """A range of a Hugging Face tensor along the axis of its weight, and where it begins in the weight."""

    tensor: str
    start: int
    stop: int
    at: int


class TensorShape(NamedTuple):
    """A Hugging Face tensor: its name and sizes."""

    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A Megatron weight as a concatenation of ranges of Hugging Face tensors.

    Args:
        name: in the checkpoint, without the layer, such as `mlp.linear_fc1.weight`.
        tensors: the Hugging Face tensors that it is made of.
        spans: the ranges of their rows (columns, for axis 1), in the order of the weight.
        axis: along which the tensors are joined and the tensor-parallel ranks share the weight.
        is_shared: whether tensor-parallel ranks share it; otherwise each has all of it.
        num_sections: equal parts of the weight that are shared over the ranks one by one.
        layer: its number, or None outside the layers.
        is_padded: whether rows are added at the end until the ranks can share the vocabulary.
    """

    name: str
    tensors: tuple[TensorShape, ...]
    spans: tuple[Span, ...]
    axis: int = 0
    is_shared: bool = True
    num_sections: int = 1
    layer: int | None = None
    is_padded: bool = False

    @property
    def length(self) -> int:
        """Its size along the axis, without padding."""
        return sum(tensor.sizes[self.axis] for tensor in self.tensors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its sizes on one rank, without padding."""
        sizes = list(self.tensors[0].sizes)
        sizes[self.axis] = self.length
        return tuple(sizes)

    def spans_of_rank(self, rank: int, num_ranks: int, length: int | None = None) -> Iterator[Span]:
        """Yield the spans of a tensor-parallel rank, placed in that rank's part of the weight.

        Args:
            rank: its number among those that share the weight.
            num_ranks: how many these are.
            length: of the whole weight with its padding; by default there is none.

        Example:
            >>> gate, up = TensorShape("gate", (4, 8)), TensorShape("up", (4, 8))
            >>> fused = Weight("fc1", (gate, up), (Span("gate", 0, 4, 0), Span("up", 0, 4, 4)), num_sections=2)
            >>> list(fused.spans_of_rank(1, 2))
            [Span(tensor='gate', start=2, stop=4, at=0), Span(tensor='up', start=2, stop=4, at=2)]
        """
        if not self.is_shared:
            rank, num_ranks = 0, 1
        section = (self.length if length is None else length) // self.num_sections
        share = section // num_ranks
        for number in range(self.num_sections):
            begin = number * section + rank * share
            for span in self.spans:
                first = max(span.at, begin)
                last = min(span.at + span.stop - span.start, begin + share)
                if first < last:
                    start = span.start + first - span.at
                    yield Span(span.tensor, start, start + last - first, number * share + first - begin)


def local_name(name: str) -> str:
    """Return the name of a weight in Megatron-Core's own layer spec.

    Example:
        >>> local_name("mlp.linear_fc1.layer_norm_weight"), local_name("mlp.linear_fc2.weight")
        ('pre_mlp_layernorm.weight', 'mlp.linear_fc2.weight')
    """
    return _LOCAL_NAMES.get(name, name)


def dense_weights(shape: ModelShape) -> Iterator[Weight]:
    """Yield all weights of a dense model whose tensors have the names that Llama's have, from input to output."""
    hidden, vocab = shape.hidden_size, shape.vocab_size
    yield _one(EMBEDDING, "model.embed_tokens.weight", (vocab, hidden), is_padded=True)
    for layer in range(shape.num_layers):
        yield from _layer_weights(shape, layer)
    yield _one("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), is_shared=False)
    if not shape.tie_embeddings:
        yield _one(OUTPUT, "lm_head.weight", (vocab, hidden), is_padded=True)


def _layer_weights(shape: ModelShape, layer: int) -> Iterator[Weight]:
    hidden, inner, head = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    prefix = f"model.layers.{layer}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def norm(name: str, tensor: str, size: int) -> Weight:
        return _one(name, f"{prefix}{tensor}.weight", (size,), is_shared=False, layer=layer)

    yield norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm", hidden)
    yield _queries_keys_values(shape, attention, "weight", layer)
    if shape.qkv_bias:
        yield _queries_keys_values(shape, attention, "bias", layer)
    if shape.qk_layernorm:
        yield norm("self_attention.q_layernorm.weight", "self_attn.q_norm", head)
        yield norm("self_attention.k_layernorm.weight", "self_attn.k_norm", head)
    attended = shape.num_attention_heads * head
    name = "self_attention.linear_proj.weight"
    yield _one(name, f"{attention}o_proj.weight", (hidden, attended), axis=1, layer=layer)
    yield norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", hidden)
    gate, up = (TensorShape(f"{mlp}{which}_proj.weight", (inner, hidden)) for which in ("gate", "up"))
    yield Weight(
        "mlp.linear_fc1.weight",
        (gate, up),
        (Span(gate.name, 0, inner, 0), Span(up.name, 0, inner, inner)),
        num_sections=2,
        layer=layer,
    )
    yield _one("mlp.linear_fc2.weight", f"{mlp}down_proj.weight", (hidden, inner), axis=1, layer=layer)


def _one(
    name: str,
    tensor: str,
    sizes: tuple[int, ...],
    *,
    axis: int = 0,
    is_shared: bool = True,
    layer: int | None = None,
    is_padded: bool = False,
) -> Weight:
    """Return a weight that equals one tensor."""
    return Weight(
        name,
        (TensorShape(tensor, sizes),),
        (Span(tensor, 0, sizes[axis], 0),),
        axis=axis,
        is_shared=is_shared,
        layer=layer,
        is_padded=is_padded,
    )


def _queries_keys_values(shape: ModelShape, attention: str, kind: str, layer: int) -> Weight:
    """Return the fused weight or bias: for each query group its query heads, then its key head, then its value head."""
    num_groups, head = shape.num_query_groups, shape.head_dim
    sizes = {"q": shape.num_attention_heads // num_groups * head, "k": head, "v": head}
    tail = (shape.hidden_size,) if kind == "weight" else ()
    tensors = {
        which: TensorShape(f"{attention}{which}_proj.{kind}", (num_groups * size, *tail))
        for which, size in sizes.items()
    }
    spans, at = [], 0
    for group in range(num_groups):
        for which, size in sizes.items():
            spans.append(Span(tensors[which].name, group * size, (group + 1) * size, at))
            at += size
    return Weight(f"self_attention.linear_qkv.{kind}", tuple(tensors.values()), tuple(spans), layer=layer)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The settings of LoRA adapters.

    Args:
        rank: of the product.
        alpha: the product is multiplied by alpha / rank.
        dropout: share of the adapters' inputs that is dropped in training.
        target_modules: the layers that get adapters.
        seed: of their initial weights, which do not depend on the parallel layout.

    Example:
        >>> LoraSettings(rank=8, alpha=16).scale
        2.0
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS
    seed: int = 1234

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank


def num_sections(name: str) -> int:
    """Return the number of parts that the rows of a layer's B are divided into: gate and up are two.

    Example:
        >>> num_sections("linear_fc1"), num_sections("linear_qkv")
        (2, 1)
    """
    return 2 if name == "linear_fc1" else 1


def target_layer(name: str) -> str:
    """Return the name of a layer with adapters within its transformer layer.

    Example:
        >>> target_layer("linear_fc2")
        'mlp.linear_fc2'
    """
    return _TARGET_LAYERS[name]
