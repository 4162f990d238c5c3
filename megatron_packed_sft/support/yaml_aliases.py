"""YAML may name a value once and repeat it by an alias: a few lines can stand for billions of values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from megatron_packed_sft.errors import InvalidInputError

_MOST_VALUES = 100_000


def refuse_alias_bomb(path: Path) -> None:
    """Refuse a file whose aliases stand for very many values; what is not YAML at all is left to its reader."""
    try:
        text = path.read_bytes()
        node = yaml.compose(text, yaml.SafeLoader) if b"&" in text and b"*" in text else None
        too_many = node is not None and _num_values(node, {}) > _MOST_VALUES
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return
    if too_many:
        raise InvalidInputError(f"{path} has aliases that stand for more than {_MOST_VALUES:,} values; write them out")


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Return how many values a node stands for; one that holds itself has no end."""
    if node.id == "scalar":
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        inside = [one for inner in node.value for one in (inner if isinstance(inner, tuple) else (inner,))]
        known[id(node)] = 1 + sum(_num_values(one, known) for one in inside)
    return known[id(node)]
