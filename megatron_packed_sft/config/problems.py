"""Hydra's and OmegaConf's errors in one sentence: which key, what is wrong, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

_FULL_KEY = re.compile(r"full_key: (\S+)")
_SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(.*?)'\n", re.DOTALL)
_DETAILS = re.compile(r"\n\s*full_key|\n\s*Config search path")


def explain(error: Exception, default: DictConfig, look_alikes: Mapping[str, str]) -> str:
    """One sentence for an error that came out of composing a configuration.

    Args:
        error: as Hydra or OmegaConf raised it.
        default: the configuration without overrides, to find the key that was meant.
        look_alikes: wrong names that are common, and the right one for each.
    """
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    causes = list(_causes(error))
    innermost = causes[-1]
    key = next((found for cause in causes if (found := _full_key(cause))), "")
    if isinstance(innermost, MissingMandatoryValue):
        return f"{key or innermost} has no value; give it on the command line, {key}=..."
    if key and isinstance(innermost, ConfigKeyError | ConfigAttributeError):
        return f"{key} is not a key; {_meant(key, default, look_alikes)}"
    if several := _SEVERAL_VALUES.match(str(innermost)):
        key, _, value = several.group(1).partition("=")
        return (
            f"{key}={value} is several values; for plain text write \"{key}='{value}'\", for a list {key}=[{value}], "
            "or add --multirun to run once for each"
        )
    text = " ".join(_DETAILS.split(str(innermost))[0].split())
    return f"{key}: {text}" if key and key not in text else text


def _unreadable(error: OverrideParseException) -> str:
    key, equals, value = error.override.partition("=")
    if not equals or not key:
        return f"{error.override!r} is no setting; write KEY=VALUE"
    # The shell takes the outer quotes away, Hydra the inner ones.
    quoted = value.strip("'\"").replace("'", "\\'")
    return (
        f"{error.override} cannot be read, since brackets, quotes and such mean something in a value; "
        f"for plain text write \"{key}='{quoted}'\""
    )


def _meant(key: str, default: DictConfig, look_alikes: Mapping[str, str]) -> str:
    right = look_alikes.get(key) or look_alikes.get(key.rsplit(".", 1)[-1])
    if right:
        return f"use {right}"
    known = list(_keys(default))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    named_alike = [other for other in known if other.rsplit(".", 1)[-1] == last]
    if named_alike or close:
        return f"did you mean {(named_alike or close)[0]}?"
    return "--help lists them all"


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        path = f"{prefix}{key!s}"
        yield path
        value = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none():
            yield from _keys(value, f"{path}.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _full_key(error: BaseException) -> str:
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return str(error.full_key)
    found = _FULL_KEY.search(str(error))
    return found.group(1) if found else ""
