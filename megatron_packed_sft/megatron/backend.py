"""Choose what a run computes on, in this place only: NCCL and Transformer Engine with CUDA, gloo and torch without.

choose_backend() ─▶ Backend ─▶ start_distributed(backend, ...) ─▶ train ─▶ stop_distributed()
                      └─▶ layer_spec, device, default_dtype for `build_gpt_model`
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not exported explicitly
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.attention import PackedAttention
from megatron_packed_sft.megatron.cpu import adapt_to_cpu
from megatron_packed_sft.support.imports import load

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

# What torchrun sets. Any of the first three means that there are several processes.
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_starts: Final = itertools.count()  # per process; the same on all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The device of this process, and the libraries that go with it.

    Example:
        >>> Backend(device_type="cpu", distributed_backend="gloo", device=torch.device("cpu")).default_dtype
        torch.float32
    """

    device_type: Literal["cuda", "cpu"]
    distributed_backend: Literal["nccl", "gloo"]
    device: torch.device  # of this local rank
    uses_transformer_engine: bool = False

    @property
    def default_dtype(self) -> torch.dtype:
        """bfloat16 with CUDA; float32 on CPU, where Megatron's optimizer does not support bfloat16."""
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32

    def layer_spec(
        self, config: TransformerConfig, *, normalization: str = "RMSNorm", qk_layernorm: bool = False
    ) -> ModuleSpec:
        """Return the layer spec: Transformer Engine's, or Megatron-Core's own with `PackedAttention`."""
        from megatron.core.models.gpt import gpt_layer_specs

        if self.uses_transformer_engine:
            return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
        if config.sequence_parallel:
            raise InvalidInputError(
                "sequence_parallel needs Transformer Engine, which is not installed; set it to False"
            )
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=normalization, qk_layernorm=qk_layernorm)
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec


def choose_backend() -> Backend:
    """Return the CUDA backend when CUDA is available, else the CPU's.

    Example:
        >>> choose_backend().distributed_backend in ("nccl", "gloo")
        True
    """
    if not torch.cuda.is_available():
        return Backend(device_type="cpu", distributed_backend="gloo", device=torch.device("cpu"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise InvalidInputError(
            f"LOCAL_RANK is {local_rank}, but this machine has {torch.cuda.device_count()} CUDA devices; start one "
            "process per device (torchrun --nproc-per-node)"
        )
    return Backend(
        device_type="cuda",
        distributed_backend="nccl",
        device=torch.device("cuda", local_rank),
        uses_transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
    )


def start_distributed(
    backend: Backend,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    seed: int = 1234,
    timeout_minutes: float = 10.0,
) -> None:
    """Connect the processes of this run, create Megatron's groups and seed this process.

    Under torchrun the environment names the other processes. A plain `python` process is a run of one.

    Args:
        backend: from `choose_backend`.
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: ranks that share the layers.
        context_parallel: ranks that share each bin; needs Transformer Engine.
        seed: of the weights and of dropout.
        timeout_minutes: how long a rank waits for the others.
    """
    if torch.distributed.is_initialized():
        raise InvalidInputError("torch.distributed is already running; call stop_distributed() first")
    world_size = _world_size()
    _check_sizes(backend, world_size, tensor_parallel, pipeline_parallel, context_parallel)
    _import_megatron_core()
    adapt_to_cpu()
    from megatron.core import parallel_state

    if backend.device_type == "cuda":
        torch.cuda.set_device(backend.device)
    timeout = timedelta(minutes=timeout_minutes)
    store, rank = _meet(timeout)
    torch.distributed.init_process_group(
        backend.distributed_backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        context_parallel_size=context_parallel,
    )
    seed_random_numbers(seed)


def seed_random_numbers(seed: int) -> None:
    """Seed the random numbers of this rank for weights and dropout.

    Each stage draws its own numbers, as in Megatron-LM. Tensor-parallel ranks share a seed; their trackers differ.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)


def stop_distributed() -> None:
    """Disconnect from the run; does nothing when there is none."""
    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _import_megatron_core() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import time it warns about what else is not installed
        for module in ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"):
            load(module, "megatron", "training")
    load("psutil", "megatron", "writing a checkpoint")  # without it Megatron-Core's first checkpoint hangs


def _world_size() -> int:
    """Return the number of processes that torchrun started, or 1."""
    if not any(name in os.environ for name in _TORCHRUN[:3]):
        return 1
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise InvalidInputError(
            f"the environment has some of torchrun's variables but not {', '.join(missing)}; start with torchrun, or "
            f"unset {', '.join(name for name in _TORCHRUN if name not in missing)} to run alone"
        )
    return int(os.environ["WORLD_SIZE"])


def _meet(timeout: timedelta) -> tuple[Store, int]:
    """Return the store through which the processes find each other, and this one's rank."""
    if "RANK" not in os.environ:
        return HashStore(), 0
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    # torchrun's store outlives stop_distributed(), and leftovers of the first start would mislead the second.
    return PrefixStore(f"start_{next(_starts)}", store), rank


def _check_sizes(backend: Backend, world_size: int, tensor: int, pipeline: int, context: int) -> None:
    if min(tensor, pipeline, context) < 1:
        raise InvalidInputError(
            f"tensor_parallel {tensor}, pipeline_parallel {pipeline} and context_parallel {context} must be at least 1"
        )
    if context > 1 and not backend.uses_transformer_engine:
        raise InvalidInputError(
            f"context_parallel is {context}, which needs CUDA and Transformer Engine; set it to 1 on this machine"
        )
    if world_size % (tensor * pipeline * context):
        raise InvalidInputError(
            f"{world_size} processes cannot be split into groups of tensor_parallel {tensor} x pipeline_parallel "
            f"{pipeline} x context_parallel {context} = {tensor * pipeline * context}; start a multiple of that"
        )
