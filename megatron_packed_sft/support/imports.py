"""Optional packages and functions that a configuration names: imported when needed, one sentence if missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError


def load(module: str, extra: str, purpose: str) -> Any:
    """Import a module that one of our extras installs.

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


def require_torch(what: str, extra: str = "torch") -> None:
    """Refuse a call that needs PyTorch if PyTorch is not installed; it is not imported.

    Args:
        what: needs it, such as the name of a function or a command.
        extra: our extra that installs it, with everything else that `what` needs.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        raise torch_is_missing(what, extra)


def torch_is_missing(what: str, extra: str = "torch") -> MissingDependencyError:
    """Return the error for something that needs PyTorch; see `require_torch`."""
    return MissingDependencyError(
        f"{what} needs PyTorch, which is not installed; install it with pip install 'megatron-packed-sft[{extra}]'"
    )


def function_named(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module.function` or `package.module:function`.

    An import runs code, so the caller has checked that the user allows it.

    Args:
        name: the dotted name.
        key: where the user wrote it, for messages.

    Example:
        >>> function_named("os.path.basename", "data.samples")("a/b")
        'b'
    """
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not module or not attribute:
        raise InvalidInputError(f"{key} {name!r} is not a dotted name; write my_package.my_function")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # whatever the user's module raises
        raise InvalidInputError(
            f"{key} {name!r} cannot be imported ({type(error).__name__}: {error}); check the name, install its "
            "package, or add its folder to PYTHONPATH"
        ) from error
    if not callable(function):
        raise InvalidInputError(f"{key} {name!r} is not a function, but {function!r}; check the name")
    named: Callable[..., Any] = function
    return named
