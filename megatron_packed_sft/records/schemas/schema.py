"""A schema: how to recognise a record by its keys, and how to turn it into one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_packed_sft.records.record import Record

Adapter = Callable[[dict[str, Any]], Record]


class Schema(NamedTuple):
    """One shape that records come in.

    Args:
        recognise: return whether a parsed record has this schema, for `schema: auto`; it should look at keys only.
        adapt: turn a parsed record into a `Record`, or raise `RecordError` with the field that is wrong.
    """

    recognise: Callable[[dict[str, Any]], bool]
    adapt: Adapter


def has_keys(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return a test for records that have all of some keys; a key whose value is null does not count.

    Example:
        >>> has_keys("prompt", "completion")({"prompt": "2 + 2 = ", "completion": None})
        False
    """
    return lambda record: all(record.get(name) is not None for name in names)
