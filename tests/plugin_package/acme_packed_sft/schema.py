"""A schema: records with `q` and `a`."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft import Conversation, Schema
from megatron_packed_sft.records.record import RecordError


def recognise(record: dict[str, Any]) -> bool:
    """Return whether a record has our keys."""
    return "q" in record and "a" in record


def adapt(record: dict[str, Any]) -> Conversation:
    """Return a conversation of one question and one answer."""
    for key in ("q", "a"):
        if not isinstance(record.get(key), str):
            raise RecordError(key, "is not text")
    return Conversation([{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}])


SCHEMA = Schema(recognise, adapt)
