"""Megatron-Core without a GPU: the few places that require CUDA get the CPU instead.

Megatron-Core 0.16 uses "the current CUDA device" in some forty places, most of them through the names replaced here.
Something breaks without each of them (tests/megatron/test_cpu.py). Megatron-Core has no public switch for this, so an
upgrade must run those tests. With CUDA nothing is touched.
"""

from __future__ import annotations

import importlib
import logging
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

# Modules that create small tensors with device="cuda". They get a wrapped `torch`; all others keep the real one.
_MODULES_THAT_CREATE_ON_CUDA: Final = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)
_RNG_WARNING: Final = "CPU RNG state changed within GPU RNG context"


def adapt_to_cpu() -> None:
    """Let Megatron-Core run in this process without CUDA; does nothing with CUDA, or when called again.

    `start_distributed` calls it. Custom trainers call it before they build a model.
    """
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "is_cpu_adaptation", False):
        return
    for name in _MODULES_THAT_CREATE_ON_CUDA:
        importlib.import_module(name).torch = _TorchOnCpu()  # type: ignore[attr-defined]
    _adapt_gradient_clipping()
    _adapt_random_state()
    _adapt_torch()


def _adapt_torch() -> None:
    def current_device() -> torch.device:
        return torch.device("cpu")

    current_device.is_cpu_adaptation = True  # type: ignore[attr-defined]
    torch.cuda.current_device = current_device  # type: ignore[assignment]
    # Called after transfers between pipeline stages and before checkpoints; gloo has nothing to wait for.
    torch.cuda.synchronize = lambda device=None: None
    # Tied embeddings move their weight to the GPU before the first and last stage synchronise it.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _adapt_random_state() -> None:
    """Make the random-state tracker of model-parallel regions keep states of the CPU's generator."""
    from megatron.core.tensor_parallel import random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # A fork of the tracker warns when the CPU's generator has advanced, which here is the point.
    logging.getLogger(random.__name__).addFilter(lambda record: record.getMessage() != _RNG_WARNING)


class _TorchOnCpu(types.ModuleType):
    """The `torch` module, except that tensors requested on CUDA are created on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.tensor = _created_on_cpu(torch.tensor)
        self.zeros = _created_on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _created_on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return create(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return wrapper


def _adapt_gradient_clipping() -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    # The optimizer imported the function by name, so both names are replaced.
    clip_grads.clip_grad_by_total_norm_fp32 = _clip_gradients
    optimizer.clip_grad_by_total_norm_fp32 = _clip_gradients


def _clip_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Clip like Megatron-Core, without its assertion that gradients are CUDA tensors."""
    scale = max_norm / (total_norm + 1.0e-6)
    if scale < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
