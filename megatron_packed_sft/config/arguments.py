"""The command line as people write it, made ready for Hydra's parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p")


def for_hydra(arguments: Sequence[str], flags: Mapping[str, str], named_by_user: Sequence[str]) -> list[str]:
    """Flags become overrides, all overrides stand together, and names that the user makes up need no plus.

    Plain text that Hydra's grammar has no place for, such as a path with brackets, `=` or letters of other scripts, is
    quoted for it.

    Args:
        arguments: as given.
        flags: options without a value and the override each stands for.
        named_by_user: keys below which any name may stand.

    Example:
        >>> for_hydra(["--multirun", "a=1", "--quiet", "sources.x.path=y"], {"--quiet": "quiet=true"}, ["sources"])
        ['a=1', 'quiet=true', '++sources={x: {}}', '++sources.x.path=y', '--multirun']
    """
    overrides: list[str] = []
    options: list[str] = []
    takes_value = False
    for argument in arguments:
        argument = flags.get(argument, argument)
        if takes_value or argument.startswith("-"):
            options.append(argument)
            takes_value = not takes_value and argument in _WITH_VALUE
        else:
            overrides.append(_quoted_if_needed(argument))
    return [*_with_new_names(overrides, named_by_user), *options]


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether Hydra will run once for each combination of values.

    Example:
        >>> is_multirun(["pack_size=2048,4096", "-m"])
        True
    """
    return "--multirun" in arguments or "-m" in arguments


def _quoted_if_needed(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key or value[:1] in ("[", "{", "'", '"'):  # a list or so with a mistake in it: said by Hydra
        return override
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        doubled = re.sub(r"\\+(?='|$)", lambda run: 2 * run.group(), value)  # elsewhere a backslash means itself
        escaped = doubled.replace("'", "\\'")
        return f"{key}='{escaped}'"
    return override


def _with_new_names(overrides: Sequence[str], named_by_user: Sequence[str]) -> list[str]:
    """OmegaConf makes a typed entry, such as a source, only from above: an empty one comes before its first value."""
    groups = "|".join(map(re.escape, named_by_user))
    below_group = re.compile(rf"\+{{0,2}}({groups})\.([^.=]+)(\.[^=]+)?=(.*)", re.DOTALL)
    result: list[str] = []
    for override in overrides:
        found = below_group.fullmatch(override) if named_by_user else None
        if found is None:
            result.append(override)
            continue
        group, name, inner, value = found.groups()
        empty = f"++{group}={{{name}: {{}}}}"
        if (inner or value.startswith("{")) and empty not in result:
            result.append(empty)
        result.append(f"++{group}.{name}{inner or ''}={value}")
    return result
