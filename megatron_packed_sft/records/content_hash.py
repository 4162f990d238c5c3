"""A hash of what a record says, for splits and for finding exact duplicates."""

from __future__ import annotations

from typing import Any

import orjson
import xxhash

from megatron_packed_sft.records.record import Conversation, Record, RecordError, TextRecord


def content_hash(record: Record) -> bytes:
    """Sixteen bytes that depend on the record alone: not on its file, schema, or the order of keys.

    Flags that say which messages are trained on are part of it.

    Example:
        >>> from megatron_packed_sft.records.schemas.registry import adapter
        >>> chat = adapter()({"messages": [{"role": "user", "content": "Hi"}]})
        >>> same = adapter()({"conversations": [{"value": "Hi", "from": "human"}]})
        >>> content_hash(chat) == content_hash(same)
        True
    """
    content: tuple[Any, ...]
    if isinstance(record, Conversation):
        train = record.train if record.train and any(flag is not None for flag in record.train) else None
        content = ("conversation", record.messages, record.tools or None, train)
    elif isinstance(record, TextRecord):
        content = ("text", record.parts)
    else:
        content = ("tokenized", record.input_ids, record.train)
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
    except TypeError as error:  # columns of Parquet may hold what JSON cannot, and files integers beyond 64 bits
        raise RecordError(
            "", f"cannot be written as JSON ({error}); write such values as strings, or leave them out"
        ) from error
