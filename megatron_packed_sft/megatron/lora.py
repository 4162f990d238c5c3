"""LoRA on the fused linear layers of Megatron-Core: trained beside frozen layers, exported merged or in PEFT's format.

    y = W x + scale * B (A x)
    linear_qkv, linear_fc1     tensor-parallel ranks share W and B by rows; each has all of A
    linear_proj, linear_fc2    they share W and A by columns; each has all of B

The adapters are a module beside the layers, so a checkpoint has them under names of their own:
`adapters.layers.NAME.a` [layers, rank, in] and `adapters.layers.NAME.b.SECTION` [layers, out, rank].

The B of a fused layer, cut by rows as the layer itself is, becomes the Bs of q_proj, k_proj and v_proj (or of gate_proj
and up_proj) with the same A; so both exports are exact.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, rms_norm

from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.megatron.weights.layout import (
    ADAPTERS,
    BY_COLUMNS,
    LoraSettings,
    TensorShape,
    Weight,
    num_sections,
    target_layer,
)
from megatron_packed_sft.megatron.weights.safetensors_writer import SafetensorsWriter, WrittenWeights, num_bytes
from megatron_packed_sft.megatron.weights.torch_dist import CheckpointWeights, TorchDistCheckpoint
from megatron_packed_sft.support.atomic import write_file

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"


def add_lora(model: GPTModel, settings: LoraSettings) -> None:
    """Freeze a model and give its linear layers adapters; call it before the optimizer is built.

    Args:
        model: from `build_gpt_model`, with the weights that it starts from.
        settings: of the adapters.
    """
    if model.config.sequence_parallel:
        raise InvalidInputError("LoRA does not work with sequence_parallel yet; set it to False")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = Adapters(model.config.num_layers)
    for index, layer in enumerate(model.decoder.layers):
        for name in settings.target_modules:
            target = layer.get_submodule(target_layer(name))
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
        settings: of the adapters.
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
        """Return the term that is added to the layer's output."""
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
                f"{ADAPTERS}{self.name}.{key}",
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


class AdaptedWeights:
    """The weights of a checkpoint with their adapters merged in; read one at a time.

    Args:
        weights: of the frozen model.
        checkpoint: the checkpoint, which also holds the adapters.
        settings: of the adapters.
    """

    def __init__(self, weights: CheckpointWeights, checkpoint: TorchDistCheckpoint, settings: LoraSettings) -> None:
        self.shape, self.dtype, self.settings = weights.shape, weights.dtype, settings
        self._frozen = weights
        self._checkpoint = checkpoint
        self._names = {f"{target_layer(name)}.weight": name for name in settings.target_modules}
        for name in settings.target_modules:
            for key in ("a", "b.0"):
                if f"{ADAPTERS}{name}.{key}" not in checkpoint.tensors:
                    raise ShardFileError(f"{checkpoint.path} has no adapter for {name}; restore the checkpoint")

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of the model, from input to output."""
        return self._frozen.weights()

    def read(self, weight: Weight) -> torch.Tensor:
        """Return a whole weight, merged; the product is computed in float32 at least."""
        value = self._frozen.read(weight)
        if weight.name not in self._names:
            return value
        a, b = self.matrices(weight)
        precise = torch.promote_types(value.dtype, torch.float32)
        merged = value.to(precise) + self.settings.scale * (b.to(precise) @ a.to(precise))
        return merged.to(torch.promote_types(value.dtype, a.dtype))

    def adapted(self) -> Iterator[Weight]:
        """Yield the weights that have adapters."""
        return (weight for weight in self.weights() if weight.name in self._names)

    def matrices(self, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the A and the whole B of a weight."""
        name = self._names[weight.name]
        parts = [
            self._checkpoint.read(f"{ADAPTERS}{name}.b.{section}", weight.layer)
            for section in range(num_sections(name))
        ]
        return self._checkpoint.read(f"{ADAPTERS}{name}.a", weight.layer), torch.cat(parts)


def write_adapter(
    directory: Path,
    weights: AdaptedWeights,
    *,
    dtype: torch.dtype,
    base_model: str | None,
    on_bytes: Callable[[int], object] | None = None,
) -> WrittenWeights:
    """Write adapter_model.safetensors and adapter_config.json.

    Args:
        directory: an existing one.
        weights: the adapted model.
        dtype: of the file.
        base_model: the folder of the model that the adapter belongs to.
        on_bytes: called with the bytes of each tensor that was written.
    """
    settings = weights.settings
    tensors = [shape for weight in weights.adapted() for shape in _shapes(weight, settings.rank)]
    with SafetensorsWriter(directory / ADAPTER, tensors, dtype) as writer:
        for weight in weights.adapted():
            a, b = weights.matrices(weight)
            for tensor in weight.tensors:
                # Split by rows, B has the layout of the weight; by columns, the weight is one tensor and B is whole.
                spans = [span for span in weight.spans if span.tensor == tensor.name and weight.axis == 0]
                own = torch.cat([b[span.at : span.at + span.stop - span.start] for span in spans]) if spans else b
                for name, value in zip(_names(tensor), (a, own), strict=True):
                    writer.write(name, value)
                    if on_bytes is not None:
                        on_bytes(value.numel() * dtype.itemsize)
        writer.finalize()
    modules = sorted({tensor.name.split(".")[-2] for weight in weights.adapted() for tensor in weight.tensors})
    config = _config(settings, modules, base_model)
    write_file(directory / ADAPTER_CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    total = sum(num_bytes(tensor, dtype) for tensor in tensors)
    return WrittenWeights(total // dtype.itemsize, total, 1)


def _names(tensor: TensorShape) -> tuple[str, str]:
    """Return the names of A and B of a tensor, as PEFT has them."""
    module = f"base_model.model.{tensor.name.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _shapes(weight: Weight, rank: int) -> Iterator[TensorShape]:
    for tensor in weight.tensors:
        a, b = _names(tensor)
        yield TensorShape(a, (rank, tensor.sizes[1]))
        yield TensorShape(b, (tensor.sizes[0], rank))


def _config(settings: LoraSettings, modules: list[str], base_model: str | None) -> Mapping[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
