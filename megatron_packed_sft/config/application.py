"""One way to run an application: a typed configuration in, an exit code out, one sentence for every wrong key.

    command line ─▶ Hydra composes ─▶ keys and values checked ─▶ the task gets a dataclass
                    YAML files         against the dataclass

Hydra is used through its public functions, and only to compose: it never calls what a configuration names.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_packed_sft.config.command_line import OPTIONS, parse_command_line
from megatron_packed_sft.config.composition import Files
from megatron_packed_sft.config.schema import WrongKeysError, build, defaults, keys, plain, refuse_wrong_keys
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.plugins import GROUPS, installed_plugins
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.exits import refused, run_command
from megatron_packed_sft.support.paths import refuse_special_file
from megatron_packed_sft.support.terminal import never_fail_on_characters

ConfigT = TypeVar("ConfigT")
_WIDTH, _INDENT = 110, 32  # of --help


def run_application(
    task: Callable[[ConfigT], int | None],
    *,
    name: str,
    schema: type[ConfigT],
    description: str,
    examples: str,
    flags: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Compose conf/NAME.yaml with the command line's overrides, check it against the schema, and run the task.

    Args:
        task: gets an instance of `schema`; its return value is the exit code (None: 0).
        name: of the configuration file and of the verb.
        schema: a dataclass; keys it does not have and values of another type are errors. Its docstrings say what the
            keys mean.
        description: what the application does, for `--help`.
        examples: lines for `--help`.
        flags: options without a value and the override each stands for, such as {"--quiet": "quiet=true"}.
        argv: arguments after the program's name; sys.argv's by default.
    """
    never_fail_on_characters()
    arguments = sys.argv[1:] if argv is None else argv
    program, debug = f"packed-sft {name}", "--debug" in arguments

    def run() -> int:
        asked = parse_command_line(arguments, schema, flags or {})
        files = Files.find(name, asked.config_name, asked.config_dir)
        if asked.help:
            print(_help(name, schema, files, description, examples, flags or {}))
            return 0
        codes = []
        for overrides in asked.combinations():
            try:
                config = _compose(schema, files, overrides)
                if asked.cfg:
                    print(OmegaConf.to_yaml(config), end="")
                else:
                    codes.append(task(build(schema, _container(config))) or 0)
            except PackedSFTError as error:  # the other combinations of a multirun may still be right
                sentences = error.problems if isinstance(error, WrongKeysError) else ()
                codes.append(refused(program, error, debug=debug, sentences=sentences))
        return max(codes, default=0)

    return run_command(run, name=program, debug=debug, interrupted="interrupted; run the same command again to resume")


def read_settings(arguments: Sequence[str], *, name: str, schema: type[ConfigT]) -> ConfigT:
    """Return the configuration that an application would get from some arguments, for verbs that share its keys.

    Args:
        arguments: KEY=VALUE, --config-name and --config-dir.
        name: of the configuration file.
        schema: as in `run_application`.
    """
    asked = parse_command_line(arguments, schema, {})
    [overrides] = asked.combinations()
    files = Files.find(name, asked.config_name, asked.config_dir)
    return build(schema, _container(_compose(schema, files, overrides)))


def read_yaml(path: Path, settings: Sequence[str], *, schema: type[ConfigT]) -> ConfigT:
    """Return a YAML file as a checked configuration, without Hydra's groups and files.

    Args:
        path: the file.
        settings: KEY=VALUE, which replace the keys of the file.
        schema: as in `run_application`.
    """
    refuse_special_file(path)
    if wrong := [text for text in settings if "=" not in text]:
        raise InvalidInputError(f"{wrong[0]!r} is not a setting; write KEY=VALUE")
    try:
        with os_errors("read", path):
            given = OmegaConf.create(path.read_text())
        if not OmegaConf.is_dict(given):
            raise InvalidInputError("it is not a mapping of keys")
        values = _container(OmegaConf.merge(given, OmegaConf.from_dotlist(list(settings))))  # type: ignore[arg-type]
        refuse_wrong_keys(schema, values)
        return build(schema, values)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    except (YAMLError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInputError(f"{path} is not valid YAML ({' '.join(str(error).split())}); correct it") from None


def completions(
    words: Sequence[str], incomplete: str, *, name: str, schema: type, flags: Mapping[str, str]
) -> list[str]:
    """Return what the beginning of a word may become: options, keys, and the names of a group.

    Args:
        words: those before it. Some shells cut KEY=VALUE into three.
        incomplete: the beginning of a word.
        name: of the configuration file.
        schema: the keys.
        flags: options without a value.
    """
    kinds = {one.path: one.kind for one in keys(schema)}
    groups = Files.find(name, None, None).groups()
    words = [word for word in words if word != "="]
    is_cut = bool(words) and words[-1] in {*kinds, *groups}  # a shell that cuts at = completes what stands behind it
    if is_cut:
        incomplete = f"{words[-1]}={incomplete.removeprefix('=')}"
    if incomplete.startswith("-"):
        return [option for option in (*flags, *OPTIONS) if option.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{one}=" for one in sorted({*kinds, *groups}) if one.startswith(incomplete)]
    values = groups.get(key) or (["true", "false"] if kinds.get(key) is bool else [])
    return [value if is_cut else f"{key}={value}" for value in values if f"{key}={value}".startswith(incomplete)]


def as_yaml(config: Any) -> str:
    r"""Return a configuration dataclass as the YAML that would give it again.

    Example:
        >>> from dataclasses import make_dataclass
        >>> as_yaml(make_dataclass("Settings", [("pack_size", int)])(4096))
        'pack_size: 4096\n'
    """
    return str(OmegaConf.to_yaml(OmegaConf.create(plain(config))))


def _compose(schema: type, files: Files, overrides: Sequence[str]) -> DictConfig:
    """Return the schema's defaults with the files and overrides on top; keys that the schema lacks are refused."""
    given = files.compose(overrides)
    refuse_wrong_keys(schema, _container(given, resolve=False))
    merged = OmegaConf.merge(OmegaConf.create(defaults(schema)), given)
    assert isinstance(merged, DictConfig)
    return merged


def _container(config: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    try:
        container: dict[str, Any] = OmegaConf.to_container(config, resolve=resolve)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise InvalidInputError(f"{error.full_key}: {str(error.msg or error).splitlines()[0]}") from error
    return container


def _help(name: str, schema: type, files: Files, description: str, examples: str, flags: Mapping[str, str]) -> str:
    shorthands = "".join(f"  {flag:<20}same as {override}\n" for flag, override in flags.items())
    groups = "".join(f"  {group:<20}{', '.join(choices)}\n" for group, choices in files.groups().items())
    return (
        f"usage: packed-sft {name} [KEY=VALUE ...] [OPTION ...]\n\n{description.strip()}\n\n"
        f"examples:\n{examples.strip(chr(10)).rstrip()}\n\noptions:\n{shorthands}"
        "  --config-name NAME  take NAME.yaml as the configuration, a file of your own that includes this one\n"
        "  --config-dir DIR    where that file is\n"
        "  --cfg job           print the configuration that would be used, and stop\n"
        "  --multirun          run once for each combination of values, written as KEY=FIRST,SECOND\n"
        "  --debug             show the traceback of an error\n\n"
        f"groups of settings, chosen by GROUP=NAME:\n{groups}\n{_plugins()}"
        f"keys, their defaults and meaning (??? must be given):\n{_described(schema, files)}"
    )


def _plugins() -> str:
    """Return what installed packages add, or nothing."""
    lines = [
        f"  {group:<20}{', '.join(f'{plugin.name} ({plugin.package})' for plugin in found)}\n"
        for group in GROUPS
        if (found := installed_plugins(group).values())
    ]
    return f"added by installed packages:\n{''.join(lines)}\n" if lines else ""


def _described(schema: type, files: Files) -> str:
    """Return every key with its default and its meaning, a paragraph per group of keys."""
    values = OmegaConf.to_container(_compose(schema, files, []))
    lines: list[str] = []
    group = ""
    for key in keys(schema):
        if group != (group := key.path.rpartition(".")[0]):
            lines.append("")
        value: Any = values
        for part in key.path.split("."):
            value = value[part]
        setting = f"  {key.path}={_as_typed(value)}"
        meaning = textwrap.wrap(key.meaning, _WIDTH - _INDENT) or [""]
        if len(setting) < _INDENT:
            lines.append(f"{setting:<{_INDENT}}{meaning.pop(0)}".rstrip())
        else:
            lines.append(setting)
        lines += [" " * _INDENT + line for line in meaning]
    return "\n".join(lines)


def _as_typed(value: Any) -> str:
    """Return a value as one would type it."""
    if isinstance(value, list):
        return f"[{','.join(map(_as_typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {_as_typed(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
