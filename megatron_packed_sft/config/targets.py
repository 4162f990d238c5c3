"""`_target_` makes Hydra import and call whatever a configuration names; ours may name only our own package.

What stands below Hydra's own key, `hydra`, is followed before any application runs: callbacks, loggers, launchers and
sweepers. So a configuration is checked as soon as it is composed. The first two are not for use here; the other two
Hydra takes from its installed plugins only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from megatron_packed_sft.errors import InvalidInputError

ALLOWED_PREFIX = "megatron_packed_sft."
_HYDRA = "hydra"
_HYDRA_PREFIXES = ("hydra._internal.core_plugins.", "hydra_plugins.")


def refuse_foreign_targets(config: DictConfig) -> None:
    """Refuse a configuration in which any `_target_` names something outside this package.

    Example:
        >>> refuse_foreign_targets(OmegaConf.create({"data": {"_target_": "os.x"}}))
        Traceback (most recent call last):
        ...
        megatron_packed_sft.errors.InvalidInputError: data._target_ is 'os.x'; it must begin with megatron_packed_sft.
    """
    for path, target in _targets(OmegaConf.to_container(config, resolve=True), ""):
        if not (isinstance(target, str) and target.startswith(ALLOWED_PREFIX)):
            raise InvalidInputError(f"{path} is {target!r}; it must begin with {ALLOWED_PREFIX}")


@contextmanager
def checked_compositions() -> Iterator[None]:
    """Inside the block, Hydra follows no foreign target of its own configuration.

    There is no hook between composing and following, so the loader that every composition goes through is wrapped.

    Example:
        >>> with checked_compositions():
        ...     hydra_main(config_path="conf", config_name="prepare")(run)()  # doctest: +SKIP
    """
    load = ConfigLoaderImpl.load_configuration

    def load_and_check(*arguments: Any, **options: Any) -> DictConfig:
        config = load(*arguments, **options)
        _refuse_what_hydra_would_call(OmegaConf.to_container(config[_HYDRA], resolve=False))
        return config

    ConfigLoaderImpl.load_configuration = load_and_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]


def _refuse_what_hydra_would_call(settings: Any) -> None:
    used = ["callbacks"] if settings["callbacks"] else []
    for name in ("job_logging", "hydra_logging"):
        if not isinstance(settings[name], dict) or settings[name].get("root") is not None:  # Hydra's sign to go on
            used.append(name)
    for name in used:
        raise InvalidInputError(f"{_HYDRA}.{name} would run whatever it names and is not used here; leave it out")
    for path, target in _targets(settings, _HYDRA):
        if not (isinstance(target, str) and target.startswith(_HYDRA_PREFIXES)):
            raise InvalidInputError(f"{path} is {target!r}; leave it out, or install it as a plugin of Hydra")


def _targets(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        inner_path = f"{path}.{key}" if path else str(key)
        if key == "_target_":
            yield inner_path, inner
        yield from _targets(inner, inner_path)
