"""Which schema a row has, and the adapter that turns it into one of our rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.plugins import Registry
from megatron_packed_sft.records.record import Record
from megatron_packed_sft.records.record_error import RecordError
from megatron_packed_sft.records.schemas.field_mapping import MappedRecords

Adapter = Callable[[dict[str, Any]], Record]

_HERE = "megatron_packed_sft.records.schemas"
# Schema -> the function that turns a parsed record into a `Record`. `mapping` is made anew for each mapping.
SCHEMAS: Registry[Adapter] = Registry(
    "schemas",
    "schema",
    {
        "messages": f"{_HERE}.messages:adapt_messages",
        "sharegpt": f"{_HERE}.sharegpt:adapt_sharegpt",
        "alpaca": f"{_HERE}.texts:adapt_alpaca",
        "prompt_completion": f"{_HERE}.texts:adapt_prompt_completion",
        "text": f"{_HERE}.texts:adapt_text",
        "tokenized": f"{_HERE}.texts:adapt_tokenized",
        "mapping": f"{_HERE}.field_mapping:MappedRecords",
    },
)


def recognise(row: dict[str, Any]) -> str:
    """The schema of a row, by its keys; a key whose value is null does not count.

    The surest keys come first: rows of chats often carry a rendered `text` or a `prompt` as well.

    Example:
        >>> recognise({"instruction": "Add 1 and 2.", "output": "3"})
        'alpaca'
    """
    get = row.get
    if get("messages") is not None:
        return "messages"
    if get("conversations") is not None:
        return "sharegpt"
    if get("input_ids") is not None:
        return "tokenized"
    if get("prompt") is not None and get("completion") is not None:
        return "prompt_completion"
    if get("instruction") is not None and get("output") is not None:
        return "alpaca"
    if get("text") is not None:
        return "text"
    keys = [key if value is not None else f"{key} (null)" for key, value in list(row.items())[:12]]
    said = f"the keys {', '.join(keys)}" if keys else "no keys"
    raise RecordError("", f"has {said}, which is no known schema; name the schema or give a mapping")


def adapter(schema: str = "auto", mapping: Mapping[str, Any] | None = None) -> Adapter:
    """A function that turns a parsed record into a `Record`, or raises `RecordError` with the field that is wrong.

    Args:
        schema: a name in `SCHEMAS`, or `auto`: recognised row by row, or `mapping` when one is given.
        mapping: see `MappedRecords`.

    Example:
        >>> adapter()({"messages": [{"role": "user", "content": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    if schema != "auto" and schema not in SCHEMAS:
        raise InvalidInputError(SCHEMAS.unknown(schema))
    if mapping is not None:
        if schema not in ("auto", "mapping"):
            raise InvalidInputError(f"a mapping was given, but the schema is {schema!r}; make it 'mapping'")
        return MappedRecords(mapping)
    if schema == "mapping":
        raise InvalidInputError("schema 'mapping' needs a mapping; give one, or another schema")
    return _adapt_recognised if schema == "auto" else SCHEMAS[schema]


def _adapt_recognised(row: dict[str, Any]) -> Record:
    return SCHEMAS[recognise(row)](row)
