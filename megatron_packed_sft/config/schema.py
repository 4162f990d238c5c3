"""A configuration's dataclasses as its schema: which keys there are, what they mean, and a checked instance of them.

The meaning of a key is written once, under "Args:" in the docstring of its dataclass; `--help` shows it.

OmegaConf's structured configs are not used: they stop at the first mistake, read true as the text "True", refuse 8.0 as
an integer, and make frozen dataclasses (PackOptions, SplitRule) read-only before the user's values are merged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, Union

from megatron_packed_sft.errors import InvalidInputError

MISSING: Any = "???"  # marks a value that must be given, in YAML files as in defaults
# What other trainers call a key, and the keys here that it may stand for: the first that the schema has is suggested.
_LENGTH = ("packing.pack_size", "data.sequence_length")
OTHER_NAMES = {
    "seq_length": _LENGTH,
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "packing_length": _LENGTH,
    "global_max_length": _LENGTH,
    "packing": ("packing_mode",),
    "effective_batch_size": ("train.global_batch_size",),
    "per_device_train_batch_size": ("train.gradient_accumulation",),
    "max_steps": ("train.steps",),
    "num_train_epochs": ("train.epochs",),
    "lr": ("optimizer.learning_rate",),
    "dataset_path": ("data.path",),
    "tokenizer_path": ("data.tokenizer",),
    "template.path": ("template.name",),
    "tokenizer.name": ("tokenizer.path",),
}
_ENTRY = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): (.*)")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}

ConfigT = TypeVar("ConfigT")


class Key(NamedTuple):
    """One key of a configuration."""

    path: str
    kind: Any  # its type
    default: Any
    meaning: str


class WrongKeysError(InvalidInputError):
    """A configuration does not fit its schema; one sentence per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def keys(schema: Any, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass that hold values, those of nested dataclasses after the others.

    Example:
        >>> from dataclasses import make_dataclass
        >>> [key.path for key in keys(make_dataclass("Settings", [("pack_size", int, 4096)]))]
        ['pack_size']
    """
    groups = []
    for key in _fields(schema):
        path = f"{prefix}{key.path}"
        if dataclasses.is_dataclass(key.kind):
            groups.append((key.kind, path))
        else:
            yield key._replace(path=path)
    for kind, path in groups:
        yield from keys(kind, f"{path}.")


def plain(value: Any) -> Any:
    """Return dataclasses as dictionaries and tuples as lists, at every depth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.path: plain(getattr(value, field.path)) for field in _fields(type(value))}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def defaults(schema: type) -> dict[str, Any]:
    """Return the defaults of a dataclass and of the dataclasses in it, as plain values."""
    return {key.path: plain(key.default) for key in _fields(schema)}


def refuse_wrong_keys(schema: type, values: Mapping[str, Any]) -> None:
    """Refuse keys that the schema does not have, with a near match for each."""
    if problems := [f"{path} is not a key; {key_hint(schema, path)}" for path in _unknown(schema, values, "")]:
        raise WrongKeysError(problems)


def key_hint(schema: type, path: str) -> str:
    """Return what to do about a key that does not exist: the near match if there is one, else where to look."""
    group, _, last = path.rpartition(".")
    known = [key.path for key in keys(schema)]
    for right in OTHER_NAMES.get(path, OTHER_NAMES.get(last, ())):
        if right in known:
            return f"use {right}"
    siblings = [key.path for key in _fields_at(schema, group)]
    if near := difflib.get_close_matches(last, siblings, n=1, cutoff=0.7):
        return f"did you mean {group}.{near[0]}?" if group else f"did you mean {near[0]}?"
    # An entry that the user named, such as sources.NAME, has keys of its own; other groups give no hint there.
    is_named_entry = bool(group and siblings) and group not in {key.rpartition(".")[0] for key in known}
    by_last = {} if is_named_entry else {key.rpartition(".")[2]: key for key in reversed(known)}
    if near := difflib.get_close_matches(last, by_last, n=1, cutoff=0.85):
        return f"did you mean {by_last[near[0]]}?"
    return f"{group} has the keys {', '.join(siblings)}" if group and siblings else "--help lists them all"


def build(schema: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Return an instance of a dataclass from plain values, each checked against its type.

    Raises:
        WrongKeysError: a value is missing or of another type; all such keys are named.

    Example:
        >>> from dataclasses import make_dataclass
        >>> build(make_dataclass("Settings", [("pack_size", int)]), {"pack_size": "many"})
        Traceback (most recent call last):
        ...
        megatron_packed_sft.config.schema.WrongKeysError: pack_size is 'many'; it must be an integer
    """
    problems: list[str] = []
    result: ConfigT = _converted(values, schema, "", problems)
    if problems:
        raise WrongKeysError(problems)
    return result


def _fields(schema: Any) -> list[Key]:
    hints = typing.get_type_hints(schema)
    meanings = {name: text for base in reversed(schema.__mro__) for name, text in _meanings(base).items()}
    result = []
    for field in dataclasses.fields(schema):
        if not field.init:
            continue
        default = field.default if field.default is not dataclasses.MISSING else MISSING
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        result.append(Key(field.name, hints[field.name], default, meanings.get(field.name, "")))
    return result


def _meanings(schema: type) -> dict[str, str]:
    """Return what the docstring of a dataclass says about each field, under "Args:"."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(schema) or "").partition("Args:\n")[2].splitlines():
        if line.strip() and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == 4 else None
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _fields_at(schema: Any, path: str) -> list[Key]:
    """Return the fields of the dataclass at a path; none when there is no such dataclass."""
    for name in path.split(".") if path else []:
        if typing.get_origin(schema) is dict:
            schema = typing.get_args(schema)[1]
        elif dataclasses.is_dataclass(schema):
            schema = next((_without_none(key.kind) for key in _fields(schema) if key.path == name), None)
    return _fields(schema) if dataclasses.is_dataclass(schema) else []


def _unknown(schema: Any, values: Any, prefix: str) -> Iterator[str]:
    """Yield the paths of the keys that a schema does not have."""
    if not isinstance(values, Mapping):
        return
    if dataclasses.is_dataclass(schema):
        kinds = {key.path: key.kind for key in _fields(schema)}
    elif typing.get_origin(schema) is dict:
        kinds = dict.fromkeys(values, typing.get_args(schema)[1])
    else:
        return
    for name, inner in values.items():
        if name in kinds:
            yield from _unknown(_without_none(kinds[name]), inner, f"{prefix}{name}.")
        else:
            yield from _leaves(inner, f"{prefix}{name}")


def _leaves(values: Any, path: str) -> Iterator[str]:
    """Yield the paths below one that does not exist: a key in an unknown group, such as training.steps, has a hint."""
    if not isinstance(values, Mapping) or not values:
        yield path
        return
    for name, inner in values.items():
        yield from _leaves(inner, f"{path}.{name}")


def _converted(value: Any, kind: Any, path: str, problems: list[str]) -> Any:
    """Return a value as its type asks; a problem is noted, and the value returned as it is."""
    if value == MISSING and isinstance(value, str):
        problems.append(f"{path} has no value; add {path}=...")
        return value
    allows_none, kind = _without_none(kind) != kind or kind is Any, _without_none(kind)
    if (value is None and allows_none) or kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _instance(kind, value, path, problems)
    if typing.get_origin(kind) is dict and isinstance(value, Mapping):
        inner = typing.get_args(kind)[1]
        return {name: _converted(one, inner, f"{path}.{name}", problems) for name, one in value.items()}
    if typing.get_origin(kind) is list and isinstance(value, list | tuple):
        inner = typing.get_args(kind)[0]
        return [_converted(one, inner, f"{path}[{index}]", problems) for index, one in enumerate(value)]
    if kind in _KINDS:
        with contextlib.suppress(ValueError):
            return _scalar(value, kind)
    is_list = typing.get_origin(kind) is list
    expected = _KINDS.get(kind) or ("a list, such as [a, b]" if is_list else "a group of keys")
    problems.append(f"{path} is {value!r}; it must be {expected}{' or null' if allows_none else ''}")
    return value


def _instance(kind: Any, value: Mapping[str, Any], path: str, problems: list[str]) -> Any:
    num_problems = len(problems)
    prefix = f"{path}." if path else ""
    given = {
        key.path: _converted(value.get(key.path, key.default), key.kind, f"{prefix}{key.path}", problems)
        if key.path in value or key.default == MISSING
        else key.default
        for key in _fields(kind)
    }
    if len(problems) > num_problems:
        return None
    try:
        return kind(**given)
    except InvalidInputError as error:  # the dataclass checks its values itself, and knows its own names only
        problems.append(f"{prefix if str(error).split()[0] in given else ''}{error}")
        return None


def _scalar(value: Any, kind: type) -> Any:
    """Return a number, a text or a truth value from what YAML made of the user's words."""
    if isinstance(value, Mapping | list) or value is None:
        raise ValueError
    if kind is bool:
        word = str(value).lower()
        if word not in _TRUE + _FALSE:
            raise ValueError
        return word in _TRUE
    if kind is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return kind(value)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        others = [one for one in typing.get_args(kind) if one is not type(None)]
        if len(others) == 1:
            return others[0]
    return kind
