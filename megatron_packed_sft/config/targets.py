"""`_target_` makes Hydra import and call whatever a configuration names; ours may name only our own package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_packed_sft.errors import InvalidInputError

ALLOWED_PREFIX = "megatron_packed_sft."


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


def _targets(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        inner_path = f"{path}.{key}" if path else str(key)
        if key == "_target_":
            yield inner_path, inner
        yield from _targets(inner, inner_path)
