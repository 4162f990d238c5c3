"""Weights that records give: `train`, `weight` and `loss_weight` of a message or a part, and those of a whole record.

0 is not trained, 1 is trained, 0.5 half as much, 2 twice as much; no weight leaves it to the roles.
"""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.records.record import RecordError

Weights = list[float | None] | None
WEIGHT_KEYS = ("train", "weight", "loss_weight")
_NUMBERS = ("weight", "loss_weight")
_LEAST, _MOST = 1e-6, 1e6  # products of two still fit a float32


def train_weight(message: dict[str, Any], place: str) -> float | None:
    """Return the weight of a message or of a part of one, or None if it gives none.

    Example:
        >>> train_weight({"role": "assistant", "content": "Hello.", "loss_weight": 0.5}, "messages[1]")
        0.5
        >>> train_weight({"role": "assistant", "content": "Hello.", "train": False}, "messages[1]")
        False
    """
    train, weight = message.get("train"), _number(message, f"{place}.")
    if train is None:
        return weight
    if type(train) is not bool:
        raise RecordError(f"{place}.train", f"is {train!r:.40}; give true or false")
    if train and weight == 0:
        raise RecordError(f"{place}.train", "is true, but the weight is 0; keep one of them")
    return train if weight is None or not train else weight


def record_weight(record: dict[str, Any]) -> float:
    """Return the weight of a whole record, 1 if it gives none.

    Example:
        >>> record_weight({"text": "Once upon a time.", "weight": 0.25})
        0.25
    """
    weight = _number(record, "")
    return 1.0 if weight is None else weight


def _number(value: dict[str, Any], prefix: str) -> float | None:
    found = None
    for name in _NUMBERS:
        if (number := value.get(name)) is None:
            continue
        if not _is_weight(number):
            raise RecordError(
                f"{prefix}{name}",
                f"is {number!r:.40}; give 0 to leave it untrained, or a number from {_LEAST:g} to {_MOST:g}",
            )
        if found is not None and found != number:
            raise RecordError(f"{prefix}{name}", f"is {number}, but weight is {found:g}; keep one of them")
        found = float(number)
    return found


def _is_weight(number: Any) -> bool:
    return isinstance(number, int | float) and (number == 0 or _LEAST <= number <= _MOST)
