"""The command line of an application: flags, options, and settings written KEY=VALUE."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from megatron_packed_sft.config.schema import OTHER_NAMES, key_hint, keys
from megatron_packed_sft.errors import InvalidInputError

_SWITCHES = {"--help": "help", "-h": "help", "--multirun": "multirun", "-m": "multirun", "--debug": "debug"}
_WITH_VALUE = {"--cfg": "cfg", "-c": "cfg", "--config-dir": "config_dir", "-cd": "config_dir",
               "--config-name": "config_name", "-cn": "config_name"}  # fmt: skip
OPTIONS = tuple(option for option in (*_SWITCHES, *_WITH_VALUE) if option.startswith("--"))


@dataclass
class CommandLine:
    """The arguments of one call, sorted."""

    overrides: list[str] = field(default_factory=list)
    help: bool = False
    multirun: bool = False
    debug: bool = False
    cfg: str | None = None
    config_dir: str | None = None
    config_name: str | None = None

    def combinations(self) -> Iterator[list[str]]:
        """Yield the overrides of each run: one, or with --multirun one for each combination of values."""
        choices: list[list[str]] = []
        for text in self.overrides:
            override = parse_override(text)
            if not override.is_sweep_override():
                choices.append([text])
            elif self.multirun:
                key = override.get_key_element()
                choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            else:
                key, _, value = text.partition("=")
                raise InvalidInputError(
                    f"{text} is several values; for plain text write \"{key}='{value}'\", for a list {key}=[{value}], "
                    "or add --multirun to run once for each"
                )
        return map(list, itertools.product(*choices))


def parse_command_line(arguments: Sequence[str], schema: type, flags: Mapping[str, str]) -> CommandLine:
    """Sort arguments into options and overrides.

    Plain text that Hydra's grammar cannot read, such as a path with brackets or `=`, is quoted for it.

    Args:
        arguments: those after the program's name.
        schema: the keys that a wrong option may have meant.
        flags: options without a value and the override each stands for.
    """
    result = CommandLine()
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        if argument in flags:
            result.overrides.append(flags[argument])
        elif argument in _SWITCHES:
            setattr(result, _SWITCHES[argument], True)
        elif name in _WITH_VALUE and (equals or waiting):
            setattr(result, _WITH_VALUE[name], value if equals else waiting.pop(0))
        elif argument.startswith("-"):
            raise _unknown_option(argument, waiting, schema, flags)
        else:
            result.overrides.append(_readable(argument))
    if result.cfg not in (None, "job"):
        raise InvalidInputError(f"--cfg is {result.cfg!r}; write --cfg job")
    return result


def parse_override(text: str) -> Override:
    """Return an override as Hydra understands it."""
    return OverridesParser.create().parse_override(text)


def quoted(text: str) -> str:
    r"""Return text in quotes that Hydra removes again.

    Example:
        >>> print(quoted("it's"))
        'it\'s'
    """
    doubled = re.sub(r"\\+(?='|$)", lambda run: 2 * run.group(), text)  # elsewhere a backslash means itself
    escaped = doubled.replace("'", "\\'")
    return f"'{escaped}'"


def _readable(override: str) -> str:
    """Return an override that Hydra's grammar can read, with its value quoted where that helps."""
    key, equals, value = override.partition("=")
    if not override.startswith("~") and (not equals or not key):
        raise InvalidInputError(f"{override!r} is not a setting; write KEY=VALUE")
    if _is_readable(override):
        return override
    if value[:1] in ("[", "{", "'", '"'):
        # The shell removes the outer quotes, Hydra the inner ones.
        raise InvalidInputError(
            f"{override} cannot be read, because brackets and quotes have a meaning in a value; "
            f'for plain text write "{key}={quoted(value.strip(chr(34) + chr(39)))}"'
        )
    if not _is_readable(f"{key}={quoted(value)}"):
        raise InvalidInputError(f"{key!r} is not a setting; a key has letters, digits, _ and dots")
    return f"{key}={quoted(value)}"


def _is_readable(override: str) -> bool:
    try:
        parse_override(override)
    except HydraException:
        return False
    return True


def _unknown_option(
    argument: str, following: Sequence[str], schema: type, flags: Mapping[str, str]
) -> InvalidInputError:
    """Return the error for an unknown option, with the setting that was probably meant."""
    option, equals, value = argument.partition("=")
    if option in _WITH_VALUE:
        return InvalidInputError(f"{option} needs a value")
    if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
        value = following[0]
    known = {key.path: key.kind for key in keys(schema)}
    groups = {path.partition(".")[0] for path in known if "." in path}
    name = option.lstrip("-").replace("-", "_")
    if name in known or name in groups:
        example = value or ("true" if known.get(name) is bool else "...")
        return InvalidInputError(f"{option} is not an option; settings have no dashes: write {name}={example}")
    if name in OTHER_NAMES:
        return InvalidInputError(f"{option} is not an option; {key_hint(schema, name)}, written KEY=VALUE")
    if near := difflib.get_close_matches(option, [*flags, *OPTIONS], n=1, cutoff=0.75):
        return InvalidInputError(f"{option} is not an option; did you mean {near[0]}?")
    return InvalidInputError(f"{option} is not an option; settings are written KEY=VALUE, and --help lists them")
