"""Schemas: how to recognise a record by its keys, and the adapter that turns it into a `Record`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.plugins import Registry
from megatron_packed_sft.records.record import Record, RecordError

Adapter = Callable[[dict[str, Any]], Record]


class Schema(NamedTuple):
    """One shape that records come in.

    Args:
        recognise: returns whether a parsed record has this schema, for `schema: auto`; it should look at keys only.
        adapt: turns a parsed record into a `Record`, or raises `RecordError` with the field that is wrong.
    """

    recognise: Callable[[dict[str, Any]], bool]
    adapt: Adapter


def has_keys(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether a record has all of some keys; null values do not count.

    Example:
        >>> has_keys("prompt", "completion")({"prompt": "2 + 2 = ", "completion": None})
        False
    """
    return lambda record: all(record.get(name) is not None for name in names)


_HERE = "megatron_packed_sft.records.schemas"
# In the order in which `auto` tries them, surest keys first: chats often have a rendered `text` or a `prompt` as well.
SCHEMAS: Registry[Schema] = Registry(
    "schemas",
    "schema",
    {
        "messages": f"{_HERE}.messages:MESSAGES",
        "sharegpt": f"{_HERE}.sharegpt:SHAREGPT",
        "tokenized": f"{_HERE}.texts:TOKENIZED",
        "prompt_completion": f"{_HERE}.texts:PROMPT_COMPLETION",
        "alpaca": f"{_HERE}.texts:ALPACA",
        "text": f"{_HERE}.texts:TEXT",
    },
)
_AUTO, _MAPPING = "auto", "mapping"


def register_schema(name: str, schema: Schema, *, replace: bool = False) -> None:
    """Add a schema for this process; an installed package does the same with an entry point.

    Example:
        >>> from megatron_packed_sft.records.record import TextRecord
        >>> story = Schema(lambda record: "story" in record, lambda record: TextRecord(((record["story"], True),)))
        >>> register_schema("story", story)
        >>> adapter()({"story": "Once upon a time."}).parts
        (('Once upon a time.', True),)
    """
    if name in (_AUTO, _MAPPING):
        raise InvalidInputError(f"schema {name!r} has a fixed meaning; choose another name")
    SCHEMAS.register(name, schema, replace=replace)


def schema_choices() -> tuple[str, ...]:
    """Return the values that the key `schema` of a source takes."""
    return (_AUTO, *SCHEMAS.names(), _MAPPING)


def recognise(record: dict[str, Any]) -> str:
    """Return the schema of a record, by its keys: built-in schemas first, then registered ones and plugins.

    Example:
        >>> recognise({"instruction": "Add 1 and 2.", "output": "3"})
        'alpaca'
    """
    for name in SCHEMAS.names():
        try:
            if SCHEMAS[name].recognise(record):
                return name
        except MissingDependencyError:  # a broken plugin recognises nothing
            continue
    keys = [key if value is not None else f"{key} (null)" for key, value in list(record.items())[:12]]
    said = f"the keys {', '.join(keys)}" if keys else "no keys"
    raise RecordError("", f"has {said}, which match no known schema; set schema or mapping for its source")


def adapter(schema: str = _AUTO, mapping: Mapping[str, Any] | None = None) -> Adapter:
    """Return a function that turns a parsed record into a `Record`, or raises `RecordError` with the field at fault.

    Args:
        schema: one of `schema_choices()`; `auto` recognises each record, or means `mapping` if one is given.
        mapping: see `MappedRecords`.

    Example:
        >>> adapter()({"messages": [{"role": "user", "content": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    if mapping is not None:
        if schema not in (_AUTO, _MAPPING):
            raise InvalidInputError(
                f"mapping is set, but schema is {schema!r}; set schema to mapping, or remove the mapping"
            )
        from megatron_packed_sft.records.schemas.field_mapping import MappedRecords  # imports the schemas

        return MappedRecords(mapping)
    if schema == _MAPPING:
        raise InvalidInputError("schema is mapping, but mapping is not set; set it, or use another schema")
    if schema == _AUTO:
        return _adapt_recognised
    if schema not in SCHEMAS:
        raise InvalidInputError(f"schema {schema!r} is unknown; use one of {', '.join(schema_choices())}")
    return SCHEMAS[schema].adapt


def _adapt_recognised(record: dict[str, Any]) -> Record:
    return SCHEMAS[recognise(record)].adapt(record)
