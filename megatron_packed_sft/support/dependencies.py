"""Packages that only some inputs need, loaded when the first such input is met."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_packed_sft.errors import MissingDependencyError


def load(module: str, extra: str, purpose: str) -> Any:
    """Import a module that an extra of ours installs.

    Example:
        >>> load("json", "json", "reading JSON").loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {module.partition('.')[0]}; install it with "
            f"pip install 'megatron-packed-sft[{extra}]'"
        ) from error
