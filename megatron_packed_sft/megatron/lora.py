"""LoRA on the fused linear layers of Megatron-Core: the base is frozen, each layer gets a product of two thin matrices.

    y = W x + scale * B (A x)
    linear_qkv, linear_fc1     tensor-parallel ranks share W and B by rows; each has all of A
    linear_proj, linear_fc2    they share W and A by columns; each has all of B

The adapters are a module of their own beside the layers, so that a checkpoint has them under names of their own:
`adapters.layers.NAME.a` [layers, rank, in] and `adapters.layers.NAME.b.SECTION` [layers, out, rank].
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, rms_norm

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.layout import BY_COLUMNS, PREFIX, LoraSettings, home_of, num_sections

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def add_lora(model: GPTModel, settings: LoraSettings) -> None:
    """Freeze a model and give its linear layers adapters; call it before the optimizer is made.

    Args:
        model: from `build_gpt_model`, with the weights that it starts from.
        settings: what the adapters are.
    """
    if model.config.sequence_parallel:
        raise InvalidInputError("LoRA does not work with sequence_parallel yet; set it to False")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = Adapters(model.config.num_layers)
    for index, layer in enumerate(model.decoder.layers):
        for name in settings.target_modules:
            target = layer.get_submodule(home_of(name))
            adapter = Adapter(name, layer.layer_number - 1, target.weight, settings)
            adapters.add_module(f"{index}_{name}", adapter)
            target.register_forward_hook(_adding(adapter))
    model.adapters = adapters


class Adapter(torch.nn.Module):
    """A and B of one layer on this rank.

    Args:
        name: of the layer, one of `TARGETS`.
        layer: number of the transformer layer in the whole model.
        weight: this rank's part of the weight that is adapted.
        settings: what the adapters are.
    """

    def __init__(self, name: str, layer: int, weight: Tensor, settings: LoraSettings) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        super().__init__()
        self.name, self.layer, self.settings = name, layer, settings
        self.is_by_columns = name in BY_COLUMNS
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        self.num_ranks = parallel_state.get_tensor_model_parallel_world_size()
        num_outputs, num_inputs = weight.shape
        self.a = torch.nn.Parameter(self._initial(num_inputs).to(weight.device, weight.dtype))
        sections = num_sections(name)
        rows = [weight.new_zeros(num_outputs // sections, settings.rank) for _ in range(sections)]
        self.b = torch.nn.ParameterList([torch.nn.Parameter(part) for part in rows])
        for parameter in [self.a] if self.is_by_columns else self.b:
            set_tensor_model_parallel_attributes(parameter, True, 1 if self.is_by_columns else 0, 1)

    def _initial(self, num_inputs: int) -> Tensor:
        """Return this rank's part of a random A that is the same in every parallel layout."""
        whole = num_inputs * (self.num_ranks if self.is_by_columns else 1)
        seed = zlib.crc32(f"{self.settings.seed} {self.layer} {self.name}".encode())
        drawn = torch.rand(
            self.settings.rank, whole, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        part = drawn[:, self.rank * num_inputs :][:, :num_inputs] if self.is_by_columns else drawn
        return (2 * part - 1) / math.sqrt(whole)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what is added to the layer's output."""
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        if self.settings.dropout and self.training:
            inputs = dropout(inputs, self.settings.dropout)
        # Where ranks share one of the two sums, they add it up: of the inputs forwards, of the gradients backwards.
        between = (
            reduce_from_tensor_model_parallel_region if self.is_by_columns else copy_to_tensor_model_parallel_region
        )
        b = self.b[0] if len(self.b) == 1 else torch.cat(list(self.b))
        return linear(between(linear(inputs, self.a)), b) * self.settings.scale

    def sharded(self, num_layers: int, prefix: str) -> dict[str, Any]:
        """Return the parameters with their places in a checkpoint."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing import ShardedTensor

        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)

        def place(key: str, parameter: Tensor, axis: int, is_shared: bool) -> Any:
            return ShardedTensor.from_rank_offsets(
                f"{PREFIX}{self.name}.{key}",
                parameter,
                (0, self.layer, num_layers),
                *([(axis + 1, self.rank, self.num_ranks)] if is_shared else []),
                replica_id=(0, 0 if is_shared else self.rank, copy),
                prepend_axis_num=1,
            )

        found = {f"{prefix}a": place("a", self.a, 1, self.is_by_columns)}
        for section, part in enumerate(self.b):
            key = f"b.{section}"
            found[f"{prefix}{key}"] = place(key, part, 0, not self.is_by_columns)
        return found


class Adapters(torch.nn.Module):
    """All adapters of this rank.

    Args:
        num_layers: of the whole model.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return all parameters with their places in a checkpoint, as Megatron-Core asks for them."""
        found: dict[str, Any] = {}
        for name, adapter in self.named_children():
            assert isinstance(adapter, Adapter)
            found |= adapter.sharded(self._num_layers, f"{prefix}{name}.")
        return found


def _adding(adapter: Adapter) -> Any:
    """Return the hook that adds an adapter's output to its layer's."""

    def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        hidden = inputs[0]
        if hasattr(module, "layer_norm_weight"):  # Transformer Engine normalizes inside the layer
            norm: Any = module.layer_norm_weight
            hidden = rms_norm(hidden, norm.shape, norm, module.eps)  # type: ignore[arg-type]
        return output[0] + adapter(hidden), output[1]

    return add
