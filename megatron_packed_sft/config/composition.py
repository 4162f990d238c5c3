"""Composing a configuration from the YAML files of the package, the user's own and the command line, with Hydra."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from megatron_packed_sft.config.command_line import parse_override, quoted
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.plugins import installed_plugins

# Groups of settings that plugins extend: their registry, and the key that a choice sets, in which package.
_PLUGGABLE = {"storage": ("storages", "packed_storage", "_global_"), "packing": ("strategies", "strategy", "packing")}


def config_directory() -> Path:
    """Return the directory of prepare.yaml, train.yaml and their groups: in a wheel inside the package, else beside it.

    Example:
        >>> (config_directory() / "storage" / "memmap_v1.yaml").exists()
        True
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "storage").is_dir():
            return candidate
    raise MissingDependencyError(
        f"{package} has no configuration files; install megatron-packed-sft again, from a wheel or a checkout"
    )


class Files(NamedTuple):
    """The files that a configuration is composed from."""

    name: str  # of the main file, without .yaml
    directories: tuple[Path, ...]  # the one with the main file first

    @staticmethod
    def find(default_name: str, name: str | None, directory: str | None) -> Files:
        """Find the main file: the application's own, or one that the user names with --config-name."""
        ours = config_directory()
        name = (name or default_name).removesuffix(".yaml")
        directories = (ours,) if directory is None else (Path(os.path.abspath(directory)), ours)
        if not directories[0].is_dir():
            raise InvalidInputError(f"--config-dir {directory} is not a directory")
        for candidate in directories:
            if (candidate / f"{name}.yaml").is_file():
                others = (other for other in directories if other != candidate)
                return Files(name, (candidate, *others))
        places = " or ".join(map(str, directories))
        raise InvalidInputError(f"there is no {name}.yaml in {places}; name its directory with --config-dir")

    def choices(self, group: str) -> list[str]:
        """Return what can be chosen from a group, plugins included; nothing when there is no such group."""
        files = {file.stem for one in self.directories for file in (one / group).glob("*.yaml")}
        return [*sorted(files), *(name for name in _plugins(group) if name not in files)]

    def groups(self) -> dict[str, list[str]]:
        """Return the groups that the main file chooses from, each with its choices."""
        chosen = self._compose([]).hydra.runtime.choices
        return {group: self.choices(group) for group in sorted(chosen) if "/" not in group}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return what the files and the overrides say, without the application's defaults and checks."""
        composed = self._compose([self._as_hydra_writes(one) for one in overrides])
        with open_dict(composed):
            del composed["hydra"]
        return composed

    def _compose(self, overrides: list[str]) -> DictConfig:
        others = [quoted(f"file://{one}") for one in self.directories[1:]]
        if others:
            overrides = [*overrides, f"hydra.searchpath=[{','.join(others)}]"]
        for group, (_, key, package) in _PLUGGABLE.items():
            for plugin in _plugins(group):
                ConfigStore.instance().store(group=group, name=plugin, node={key: plugin}, package=package)
        files = f"{self.name}.yaml or a file that it names"
        try:
            if "hydra" in OmegaConf.load(self.directories[0] / f"{self.name}.yaml"):
                raise InvalidInputError(
                    f"{self.name}.yaml sets hydra: Hydra's own settings have no effect here; leave them out"
                )
            with initialize_config_dir(version_base="1.3", config_dir=str(self.directories[0])):
                return compose(config_name=self.name, overrides=overrides, return_hydra_config=True)
        except MissingConfigException as error:
            raise InvalidInputError(f"{files} includes {error.missing_cfg_file}, which does not exist") from error
        except HydraException as error:
            raise InvalidInputError(" ".join(str(error).split())) from error
        except InvalidInputError:
            raise
        except (yaml.YAMLError, RecursionError, ValueError) as error:  # also Python's tags, numbers of 5,000 digits
            reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
            raise InvalidInputError(f"{files} is not plain YAML ({reason}); correct it") from None

    def _as_hydra_writes(self, text: str) -> str:
        """Return an override as Hydra expects it: a key may be new to the files, a choice of a group must exist."""
        override = parse_override(text)
        key, value = override.key_or_group, override.value()
        if key.partition(".")[0].partition("/")[0] == "hydra":
            raise InvalidInputError(f"{key} is one of Hydra's own settings, which have no effect here; leave it out")
        choices = self.choices(key)
        if not choices or isinstance(value, dict):
            return text if override.is_delete() else f"++{text.lstrip('+')}"
        if not override.is_delete():
            for choice in value if isinstance(value, list) else [value]:
                if choice is not None and str(choice) not in choices:
                    raise InvalidInputError(f"{key} is {str(choice)!r}; choose one of {', '.join(choices)}")
        return text


def _plugins(group: str) -> list[str]:
    """Return the names that installed packages add to a group of settings."""
    return sorted(installed_plugins(_PLUGGABLE[group][0])) if group in _PLUGGABLE else []
