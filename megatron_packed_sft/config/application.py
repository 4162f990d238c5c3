"""One way to run a Hydra application: a typed configuration in, an exit code out, one sentence for every wrong key."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_packed_sft.config.arguments import for_hydra, is_multirun
from megatron_packed_sft.config.location import config_directory
from megatron_packed_sft.config.problems import explain
from megatron_packed_sft.config.targets import checked_compositions, refuse_foreign_targets
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError

ConfigT = TypeVar("ConfigT")
_FULL_ERROR = "HYDRA_FULL_ERROR"


def run_application(
    task: Callable[[ConfigT], int | None],
    *,
    name: str,
    schema: type[ConfigT],
    description: str,
    examples: str,
    flags: Mapping[str, str] | None = None,
    look_alikes: Mapping[str, str] | None = None,
    named_by_user: Sequence[str] = (),
    argv: Sequence[str] | None = None,
) -> int:
    """Compose conf/NAME.yaml with the command line's overrides, check it against the schema, and run the task.

    Hydra's own options (`--cfg job`, `--multirun`, `--config-dir`, ...) work as everywhere.

    Args:
        task: gets an instance of `schema`; its return value is the exit code (None: 0).
        name: of the configuration file; the schema is stored as `NAME_schema`, for its defaults list.
        schema: a dataclass; keys it does not have and values of another type are errors.
        description: what the application does, for `--help`.
        examples: lines for `--help`.
        flags: options without a value and the override each stands for, such as {"--quiet": "quiet=true"}.
        look_alikes: keys that people try and the right one for each, such as {"packing_length": "packing.pack_size"}.
        named_by_user: keys below which the user makes up names, such as "sources"; they need no plus.
        argv: arguments after the program's name; sys.argv's by default.

    Example:
        >>> run_application(train, name="train", schema=TrainConfig, description="", examples="")  # doctest: +SKIP
        0
    """
    arguments = for_hydra(sys.argv[1:] if argv is None else argv, flags or {}, named_by_user)
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    codes: list[int] = []
    failures: list[Exception] = []

    def run(config: DictConfig) -> None:
        try:
            codes.append(task(_checked(config, schema)) or 0)
        except PackedSFTError as error:
            codes.append(_refused(name, error))
        except Exception as error:  # raised here, Hydra would print a line of its own first
            failures.append(error)

    try:
        if "--help" in arguments or "-h" in arguments:
            print(_help(name, description, examples, flags or {}))
            return 0
        with _hydra_surroundings(name, arguments), checked_compositions():
            hydra_main(version_base="1.3", config_path=str(config_directory()), config_name=name)(run)()
        if failures:
            raise failures[0]
    except (HydraException, OmegaConfBaseException) as error:
        _complain(name, explain(error, _default(name), look_alikes or {}))
        return 2
    except PackedSFTError as error:
        return _refused(name, error)
    except BrokenPipeError:  # the reader of a pipe, such as head, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush would complain
        return 1
    except KeyboardInterrupt:
        _say(f"packed-sft {name}: interrupted; run the same command again to go on")
        return 130
    return max(codes, default=0)


def _refused(name: str, error: PackedSFTError) -> int:
    """Say what is wrong; the exit code for it."""
    _complain(name, str(error))
    return 2 if isinstance(error, InvalidInputError) else 1


def _checked(config: DictConfig, schema: type[ConfigT]) -> ConfigT:
    refuse_foreign_targets(config)
    # Once more against the schema: an override with a plus adds any key it likes.
    whole = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(config))
    checked: ConfigT = OmegaConf.to_object(whole)  # type: ignore[assignment]  # the schema's own class
    return checked


def _complain(name: str, problem: str) -> None:
    _say(f"packed-sft {name}: error: {problem}")


def _say(text: str) -> None:
    """Say it once: under torchrun every rank finds the same mistake, and the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def _help(name: str, description: str, examples: str, flags: Mapping[str, str]) -> str:
    shorthands = "".join(f"  {flag:<14}the same as {override}\n" for flag, override in flags.items())
    groups = "".join(f"  {group:<14}{', '.join(choices)}\n" for group, choices in _groups(name).items())
    return (
        f"usage: packed-sft {name} [KEY=VALUE ...] [--cfg job] [--multirun]\n\n{description.strip()}\n\n"
        f"examples:\n{examples.rstrip()}\n\noptions:\n{shorthands}"
        "  --cfg job     print the configuration that would be used, and stop\n"
        "  --multirun    one run for each combination of values, written as KEY=FIRST,SECOND\n"
        "  --hydra-help  Hydra's own options\n\n"
        f"groups of settings, chosen by GROUP=NAME:\n{groups}\n"
        f"keys and their defaults (??? must be given):\n\n{OmegaConf.to_yaml(_default(name))}"
    )


def _default(name: str, *, with_hydra: bool = False) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(config_directory())):
        return compose(config_name=name, return_hydra_config=with_hydra)


def _groups(name: str) -> dict[str, list[str]]:
    """The groups of one application and what can be chosen from each."""
    chosen = _default(name, with_hydra=True).hydra.runtime.choices
    own = sorted(group for group in chosen if "/" not in group)
    return {group: sorted(file.stem for file in (config_directory() / group).glob("*.yaml")) for group in own}


@contextmanager
def _hydra_surroundings(name: str, arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv only; and without the variable it prints errors in its own words and leaves the process."""
    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    with ExitStack() as leftovers:
        sys.argv = [f"packed-sft {name}", *arguments]
        if is_multirun(arguments):  # which notes its configuration, by default below the working directory
            sweeps = leftovers.enter_context(tempfile.TemporaryDirectory(prefix="packed-sft-"))
            sys.argv.insert(1, f"hydra.sweep.dir={sweeps}")
        try:
            yield
        finally:
            sys.argv = argv
            if full_error is None:
                del os.environ[_FULL_ERROR]
            GlobalHydra.instance().clear()


def as_yaml(config: Any) -> str:
    r"""A configuration dataclass as the YAML that would give it again.

    Example:
        >>> from dataclasses import make_dataclass
        >>> as_yaml(make_dataclass("Settings", [("pack_size", int)])(4096))
        'pack_size: 4096\n'
    """
    return str(OmegaConf.to_yaml(OmegaConf.structured(config)))
