"""Write weights as the torch_dist checkpoint that Megatron-LM and Megatron-Bridge start from.

output/latest_checkpointed_iteration.txt    "release": no optimizer, no position in the data
output/release/.metadata, *.distcp          the weights, under the names that every parallel layout loads
output/release/common.pt                    what Megatron-LM reads first: its arguments, as far as they matter
output/release/run_config.yaml              the same for Megatron-Bridge
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.megatron.weights.layout import LAYERS, Weight
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.support.atomic import write_file

TRACKER: Final = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
RUN_CONFIG: Final = "run_config.yaml"
CHECKPOINT_VERSION: Final = 3.0
# Modules that ask for an entry of their own when they are loaded; all of them take None. The last one is Transformer
# Engine's.
_WITH_STATE: Final = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.core_attention",
)


def sharded_weights(
    weights: Iterable[Weight],
    read: Callable[[Weight], torch.Tensor],
    *,
    num_layers: int,
    dtype: torch.dtype,
    on_bytes: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Return all weights with their places in a checkpoint, as `dist_checkpointing.save` takes them.

    Args:
        weights: of the model.
        read: returns one of them, whole.
        num_layers: of the model; a checkpoint stacks them.
        dtype: of the checkpoint.
        on_bytes: called with the bytes of each weight.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found: dict[str, Any] = {}
    for weight in weights:
        value = read(weight).to(dtype).contiguous()
        if weight.layer is None:
            found[weight.name] = ShardedTensor.from_rank_offsets(weight.name, value)
        else:
            place = (0, weight.layer, num_layers)
            entry = ShardedTensor.from_rank_offsets(f"{LAYERS}{weight.name}", value, place, prepend_axis_num=1)
            found[f"{LAYERS}{weight.layer}.{weight.name}"] = entry
        if on_bytes is not None:
            on_bytes(value.nbytes)
    for layer in range(num_layers):
        for module in _WITH_STATE:
            name = f"{module}._extra_state"
            found[f"{LAYERS}{layer}.{name}"] = ShardedObject(f"{LAYERS}{name}", None, (num_layers,), (layer,))
    return found


def common_state(shape: ModelShape) -> dict[str, Any]:
    """Return what Megatron-LM expects beside the weights; it asks for the parallel sizes before it loads anything."""
    return {
        "args": argparse.Namespace(**dict(_arguments(shape))),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
    }


def write_descriptions(directory: Path, release: Path, shape: ModelShape) -> None:
    """Write Megatron's tracker file and Megatron-Bridge's run_config.yaml.

    Args:
        directory: the checkpoint's root.
        release: the folder with the weights in it.
        shape: of the model.
    """
    config = {
        "model": dict(_arguments(shape)),
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
    }
    write_file(release / RUN_CONFIG, (json.dumps(config, indent=2) + "\n").encode())  # JSON is YAML
    write_file(directory / TRACKER, f"{RELEASE}\n".encode())


def _arguments(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    """Yield the model's arguments under the names that Megatron-LM and Megatron-Bridge share."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        yield name, getattr(shape, name)
    yield "kv_channels", shape.head_dim
    yield "vocab_size", shape.vocab_size
    yield "rotary_base", shape.rotary_base
    yield "qk_layernorm", shape.qk_layernorm
    yield "add_qkv_bias", shape.qkv_bias
    yield "add_bias_linear", False
    yield "normalization", "RMSNorm"
    yield "layernorm_epsilon", shape.layernorm_epsilon
    yield "share_embeddings_and_output_weights", shape.tie_embeddings
    yield "untie_embeddings_and_output_weights", not shape.tie_embeddings
    yield "tensor_model_parallel_size", 1
    yield "pipeline_model_parallel_size", 1
    yield "no_save_optim", True
    yield "no_save_rng", True
    yield "ckpt_fully_parallel_save", False
