"""Functions that a user names in a configuration, imported only on the user's word."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_packed_sft.errors import InvalidInputError


def function_named(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module.function`. The caller has asked whether that is wanted: an import runs code.

    Args:
        name: the dotted name.
        key: where the user wrote it, for messages.

    Example:
        >>> function_named("os.path.basename", "data.samples")("a/b")
        'b'
    """
    module, _, attribute = name.rpartition(".")
    if not module or not attribute:
        raise InvalidInputError(f"{key} is {name!r}; give a dotted name, such as my_package.my_function")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InvalidInputError(
            f"{key}={name} cannot be imported ({error}); install the package, or add its folder to PYTHONPATH"
        ) from error
    if not callable(function):
        raise InvalidInputError(f"{key}={name}: {module} has no function {attribute}; check the name")
    result: Callable[..., Any] = function
    return result
