"""Adapters out: merged into the weights, or as a PEFT adapter that the `peft` library loads.

The B of a fused layer, cut by rows as the layer itself is, becomes the Bs of q_proj, k_proj and v_proj (or of gate_proj
and up_proj) with the same A; so both forms are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.megatron.weights.layout import PREFIX, LoraSettings, TensorShape, Weight, home_of, num_sections
from megatron_packed_sft.megatron.weights.safetensors_writer import SafetensorsWriter, WrittenWeights, num_bytes
from megatron_packed_sft.megatron.weights.torch_dist import CheckpointWeights, TorchDistCheckpoint
from megatron_packed_sft.support.atomic import write_file

ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"


class AdaptedWeights:
    """The weights of a checkpoint with their adapters merged in; read one at a time.

    Args:
        weights: of the frozen model.
        checkpoint: the checkpoint, which also holds the adapters.
        settings: what they are.
    """

    def __init__(self, weights: CheckpointWeights, checkpoint: TorchDistCheckpoint, settings: LoraSettings) -> None:
        self.shape, self.dtype, self.settings = weights.shape, weights.dtype, settings
        self._frozen = weights
        self._checkpoint = checkpoint
        self._names = {f"{home_of(name)}.weight": name for name in settings.target_modules}
        for name in settings.target_modules:
            for key in ("a", "b.0"):
                if f"{PREFIX}{name}.{key}" not in checkpoint.tensors:
                    raise ShardFileError(f"{checkpoint.path} has no adapter for {name}; restore the checkpoint")

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of the model, from input to output."""
        return self._frozen.weights()

    def read(self, weight: Weight) -> torch.Tensor:
        """Return a whole weight, merged; the product is made in float32 at least."""
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
            self._checkpoint.read(f"{PREFIX}{name}.b.{section}", weight.layer) for section in range(num_sections(name))
        ]
        return self._checkpoint.read(f"{PREFIX}{name}.a", weight.layer), torch.cat(parts)


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
                # By rows, B has the layout of the weight; by columns, a weight is one tensor and B is as it is.
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
