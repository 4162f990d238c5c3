"""A hash of what a row says, for splits and for finding exact duplicates."""

from __future__ import annotations

from typing import Any

import orjson
import xxhash

from megatron_packed_sft.records.record import Conversation, Record, TextRecord
from megatron_packed_sft.records.record_error import RecordError


def content_hash(row: Record) -> bytes:
    """Sixteen bytes that depend on the row alone: not on its file, schema, or the order of keys.

    Flags that say which messages are trained on are part of it.

    Example:
        >>> from megatron_packed_sft.records.schemas.registry import adapter
        >>> chat = adapter()({"messages": [{"role": "user", "content": "Hi"}]})
        >>> same = adapter()({"conversations": [{"value": "Hi", "from": "human"}]})
        >>> content_hash(chat) == content_hash(same)
        True
    """
    content: tuple[Any, ...]
    if isinstance(row, Conversation):
        train = row.train if row.train and any(flag is not None for flag in row.train) else None
        content = ("conversation", row.messages, row.tools or None, train)
    elif isinstance(row, TextRecord):
        content = ("text", row.parts)
    else:
        content = ("tokenized", row.input_ids, row.train)
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
    except TypeError as error:  # columns of Parquet may hold what JSON cannot, and files integers beyond 64 bits
        raise RecordError(
            "", f"cannot be written as JSON ({error}); write such values as strings, or leave them out"
        ) from error
