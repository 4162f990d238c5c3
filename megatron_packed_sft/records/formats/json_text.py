"""JSON text to values, without a silent change: orjson turns integers beyond 64 bits into floats, this does not."""

from __future__ import annotations

import json
from typing import Any

import orjson

from megatron_packed_sft.records.record_error import RecordError

_ALL_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_RUN = b"0" * 20  # what an integer beyond 64 bits has at least


def has_long_number(text: bytes) -> bool:
    """Whether a number beyond 64 bits may stand in it; far quicker than to look for one exactly.

    Example:
        >>> has_long_number(b'{"id": 12345678901234567890}'), has_long_number(b'{"id": 1234567890}')
        (True, False)
    """
    return _LONG_RUN in text.translate(_ALL_DIGITS_ALIKE)


def parse(text: bytes, field: str = "") -> Any:
    """The value of a JSON text; integers are exact, whatever their size.

    Args:
        text: one JSON value.
        field: for the error, where it stands in its row.

    Example:
        >>> parse(b"[36893488147419103232]")
        [36893488147419103232]
    """
    value = orjson.loads(text)  # comes first: stricter than the other, and it refuses what even a float cannot hold
    if not has_long_number(text):
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise RecordError(
            field, "is nested too deeply for its long numbers to be read; write them as strings"
        ) from None
