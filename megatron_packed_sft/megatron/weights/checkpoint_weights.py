"""The weights of a model in a torch_dist checkpoint: found by name, checked against the model's shape.

Megatron-Core stacks the layers of a model in one tensor (`decoder.layers.mlp.linear_fc2.weight`, sizes [layers, ...]),
or numbers them (`decoder.layers.7.mlp.linear_fc2.weight`) when they may differ; both are read. The global tensors of a
checkpoint do not depend on the parallel layout that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from megatron_packed_sft.errors import ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.families import shape_family
from megatron_packed_sft.megatron.weights.layout import EMBEDDING, LAYERS, OUTPUT, Weight
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint

_PARTS: Final = ("decoder.", "embedding.", "output_layer.")


class CheckpointWeights:
    """The weights of a model in a checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        shape: of the model that it should hold; a checkpoint of another one is refused.
    """

    def __init__(self, checkpoint: TorchDistCheckpoint, shape: ModelShape) -> None:
        self._checkpoint = checkpoint
        self.shape = shape
        self._prefix = _prefix(checkpoint)
        known = set()
        for weight in self.weights():
            name, _ = self._place(weight)
            self._check(name, weight)
            known.add(name)
        if shape.tie_embeddings:
            known.add(f"{self._prefix}{OUTPUT}")
        self._refuse_unexpected(known)
        self.dtype = checkpoint.tensors[f"{self._prefix}{EMBEDDING}"].dtype

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of the model, from input to output."""
        return shape_family(self.shape).weights(self.shape)

    def read(self, weight: Weight) -> torch.Tensor:
        """Return a whole weight, without the padding of the vocabulary."""
        tensor = self._checkpoint.read(*self._place(weight))
        return tensor.narrow(weight.axis, 0, weight.length)

    def _place(self, weight: Weight) -> tuple[str, int | None]:
        """Return the name of the tensor that holds a weight, and its index in a stack of layers."""
        if weight.layer is None:
            return f"{self._prefix}{weight.name}", None
        numbered = f"{self._prefix}{LAYERS}{weight.layer}.{weight.name}"
        if numbered in self._checkpoint.tensors:
            return numbered, None
        return f"{self._prefix}{LAYERS}{weight.name}", weight.layer

    def _check(self, name: str, weight: Weight) -> None:
        if name not in self._checkpoint.tensors:
            raise ShardFileError(
                f"{self._checkpoint.path} has no tensor {name}, which a {self.shape.family} model of this shape has; "
                "give the checkpoint of that model"
            )
        found = self._checkpoint.tensors[name].sizes
        wanted = weight.sizes
        if name != f"{self._prefix}{weight.name}" and len(found) > len(wanted):
            wanted = (self.shape.num_layers, *wanted)
        if weight.is_padded and found[0] > wanted[0]:
            wanted = (found[0], *wanted[1:])
        if found != wanted:
            raise ShardFileError(
                f"{self._checkpoint.path}: {name} has the sizes {list(found)}, and the model has {list(wanted)}; give "
                "the checkpoint of that model"
            )

    def _refuse_unexpected(self, known: set[str]) -> None:
        for name in self._checkpoint.tensors:
            inner = name.removeprefix(self._prefix)
            is_of_model = name.startswith(self._prefix) and inner.startswith(_PARTS) and "_extra_state" not in inner
            if is_of_model and name not in known:
                raise UnsupportedFormatError(
                    f"{self._checkpoint.path} has the tensor {name}, which a {self.shape.family} model has not; it "
                    "cannot be exported as one"
                )


def _prefix(checkpoint: TorchDistCheckpoint) -> str:
    """Return what stands before the names of the model's tensors: nothing, or for some writers `model.`."""
    found = [name for name in checkpoint.tensors if name.endswith(EMBEDDING) and "optimizer" not in name]
    if len(found) != 1:
        raise UnsupportedFormatError(
            f"{checkpoint.path} has {len(found)} tensors that end in {EMBEDDING}; give the checkpoint of one GPT model"
        )
    return found[0].removesuffix(EMBEDDING)
