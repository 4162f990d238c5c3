"""Registries that other packages extend: storages, strategies, schemas and model families by name.

A name comes from one of three places, asked in this order:

    built in        one line in the room's own table, imported when it is first used
    registered      `register(...)` at run time
    entry points    `megatron_packed_sft.storages`, `.strategies`, `.schemas` and `.families` of installed packages

An installed package therefore extends the command line, the recipes and the factory without an import by the user:

    [project.entry-points."megatron_packed_sft.strategies"]
    my_packer = "my_package.packing:my_packer"
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Generic, TypeVar, cast

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError

GROUPS = ("storages", "strategies", "schemas", "families")

Value = TypeVar("Value")


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package; `rivals` are other packages that offer the same name."""

    group: str
    name: str
    target: str
    package: str
    version: str
    rivals: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import what the entry point names; a plugin that cannot be imported is an error that names its package."""
        if self.rivals:
            raise MissingDependencyError(
                f"{' and '.join([self.package, *self.rivals])} all offer {self.name!r} in "
                f"megatron_packed_sft.{self.group}; uninstall all of them except one"
            )
        try:
            return _import(self.target)
        except Exception as error:
            raise MissingDependencyError(
                f"plugin {self.name!r} of {self.package} {self.version} cannot be loaded ({self.target}: "
                f"{type(error).__name__}: {error}); fix or uninstall that package"
            ) from error


@functools.cache
def installed_plugins(group: str) -> Mapping[str, Plugin]:
    """Return the plugins of a group by name. Nothing is imported, so a broken plugin fails only when it is used."""
    found: dict[str, Plugin] = {}
    for point in sorted(metadata.entry_points(group=f"megatron_packed_sft.{group}"), key=lambda point: point.name):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("an unknown package", "")
        plugin = Plugin(group, point.name, point.value, package, version)
        first = found.setdefault(point.name, plugin)
        if first.target != plugin.target and package not in first.rivals:
            found[point.name] = replace(first, rivals=(*first.rivals, package))
    return found


class Registry(Generic[Value]):
    """Things by name: built in, registered at run time, or offered by an installed package.

    Args:
        group: the entry point group, such as `storages`.
        noun: what one of them is called in messages.
        built_in: name -> `module:attribute`, imported when the name is first used.

    Example:
        >>> registry = Registry("strategies", "strategy", {"length": "builtins:len"})
        >>> registry["length"]("abc"), registry.names()
        (3, ('length',))
    """

    def __init__(self, group: str, noun: str, built_in: Mapping[str, str]) -> None:
        self.group = group
        self.noun = noun
        self._targets = dict(built_in)
        self._values: dict[str, Value] = {}

    def register(self, name: str, value: Value, *, replace: bool = False) -> None:
        """Add a value under a new name, or replace one when asked to."""
        if not replace and name in self:
            raise InvalidInputError(
                f"{self.noun} {name!r} is registered already; choose another name, or pass replace=True"
            )
        self._values[name] = value

    def names(self) -> tuple[str, ...]:
        """Return all names: built-in ones first, then registered ones, then plugins. Nothing is imported."""
        return tuple(dict.fromkeys([*self._targets, *self._values, *installed_plugins(self.group)]))

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._targets or name in installed_plugins(self.group)

    def __getitem__(self, name: str) -> Value:
        if name not in self._values:
            if name in self._targets:
                self._values[name] = cast("Value", _import(self._targets[name]))
            elif name in installed_plugins(self.group):
                self._values[name] = cast("Value", installed_plugins(self.group)[name].load())
            else:
                raise InvalidInputError(self.unknown(name))
        return self._values[name]

    def usable(self) -> Iterator[Value]:
        """Yield every value in the order of `names`, without the plugins that cannot be loaded (see `broken`)."""
        for name in self.names():
            try:
                value = self[name]
            except MissingDependencyError:
                continue
            yield value

    def broken(self) -> dict[str, str]:
        """Return the plugins that cannot be used, each with one sentence that says why."""
        found = {}
        for name, plugin in installed_plugins(self.group).items():
            if name in self._targets:
                found[name] = f"plugin {name!r} of {plugin.package} {plugin.version} is ignored: the name is built in"
                continue
            try:
                self[name]
            except MissingDependencyError as error:
                found[name] = str(error)
        return found

    def origin(self, name: str) -> str:
        """Return where a name comes from: `built in`, `registered`, or the package and version that offer it."""
        if name in self._targets:
            return "built in"
        if (plugin := installed_plugins(self.group).get(name)) is not None:
            return f"{plugin.package} {plugin.version}"
        return "registered"

    def unknown(self, name: str) -> str:
        """Return one sentence about a name that does not exist, with the nearest one or all of them."""
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(self.names())}"
        return f"{self.noun} {name!r} is unknown; {hint}"


def _import(target: str) -> Any:
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else []:
        value = getattr(value, part)
    return value
