"""Page-locked memory, from which a GPU can copy while it computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from megatron_packed_sft.errors import InvalidInputError


def cuda_device_to_pin_for(pin_memory: bool | Literal["auto"]) -> int | None:
    """The CUDA device of this thread, or None when nothing is to be pinned.

    Example:
        >>> cuda_device_to_pin_for(False) is None
        True
    """
    if pin_memory not in (True, False, "auto"):
        raise InvalidInputError(f"pin_memory is {pin_memory!r}; use True, False or 'auto'")
    torch = sys.modules.get("torch")  # without torch there are no tensors to pin
    has_cuda = torch is not None and torch.cuda.is_available()
    if pin_memory is True and not has_cuda:
        raise InvalidInputError("pin_memory=True needs torch with CUDA, and there is none; use 'auto'")
    return torch.cuda.current_device() if torch is not None and has_cuda and pin_memory else None


def use_cuda_device(device: int) -> None:
    """Make pages that this thread locks known to the right device: a new thread begins with device 0."""
    sys.modules["torch"].cuda.set_device(device)


def pinned(value: Any) -> Any:
    """The same batch with everything that can be pinned in page-locked memory.

    Example:
        >>> pinned({"token_count": [3, 4]})
        {'token_count': [3, 4]}
    """
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pinned(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pinned, value))
    if isinstance(value, list | tuple):
        return type(value)(map(pinned, value))
    return value
