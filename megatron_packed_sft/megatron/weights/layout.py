"""Which rows of which Hugging Face tensor make up which Megatron weight, on any tensor-parallel rank.

    linear_qkv, two query groups:   q q k v | q q k v          by group: its query heads, then its key, then its value
    linear_fc1:                     gate ... | up ...          two sections, each of which the ranks share evenly
    word_embeddings:                embed_tokens ... zeros     padded at the end

Names are those of a torch_dist checkpoint, which are also those of the Transformer Engine layer spec; `local_name`
gives those of Megatron-Core's own spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_packed_sft.megatron.weights.shape import ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYERS = "decoder.layers."
# Transformer Engine keeps a norm's weight with the linear layer behind it.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
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
        tensors: the Hugging Face tensors that it is made of, each wholly.
        spans: which rows (columns, for axis 1) of which tensor follow each other.
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
    """Return a weight that is one tensor as it is."""
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
