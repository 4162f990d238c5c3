"""The executor that a configuration names."""

from __future__ import annotations

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import ExecutorConfig
from megatron_packed_sft.prepare.ray_executor import RayExecutor
from megatron_packed_sft.support.processes import Executor, LocalExecutor

# The keys that only one kind has.
_KEYS: dict[str, tuple[str, ...]] = {"local": (), "array": ("index", "count"), "ray": ("address", "num_cpus")}


def create_executor(config: ExecutorConfig) -> Executor:
    """Return the executor of a configuration.

    Example:
        >>> create_executor(ExecutorConfig(num_workers=2)).num_workers
        2
    """
    if config.kind not in _KEYS:
        raise InvalidInputError(f"executor.kind is {config.kind!r}; choose {', '.join(_KEYS)}")
    for kind, keys in _KEYS.items():
        for key in keys:
            if kind != config.kind and getattr(config, key) is not None:
                raise InvalidInputError(f"executor.{key} is for executor={kind}; add that, or leave the key out")
    if config.kind == "ray":
        return RayExecutor(config.address, config.num_workers, config.num_cpus)
    return LocalExecutor(config.num_workers)  # a call of an array works on its share with processes, too
