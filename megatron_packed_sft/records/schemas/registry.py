"""Which schema a record has, and the adapter that turns it into a `Record`."""

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


_HERE = "megatron_packed_sft.records.schemas"
# In the order in which `auto` asks them, surest keys first: chats often carry a rendered `text` or a `prompt` as well.
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
    """Return what the key `schema` of a source takes."""
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
    raise RecordError("", f"has {said}, which match no known schema; set schema, or give a mapping")


def adapter(schema: str = _AUTO, mapping: Mapping[str, Any] | None = None) -> Adapter:
    """Return a function that turns a parsed record into a `Record`, or raises `RecordError` with the field at fault.

    Args:
        schema: one of `schema_choices()`; `auto` recognises each record, or is `mapping` when one is given.
        mapping: see `MappedRecords`.

    Example:
        >>> adapter()({"messages": [{"role": "user", "content": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    if mapping is not None:
        if schema not in (_AUTO, _MAPPING):
            raise InvalidInputError(f"there is a mapping, but schema is {schema!r}; set schema to mapping")
        from megatron_packed_sft.records.schemas.field_mapping import MappedRecords  # imports the schemas

        return MappedRecords(mapping)
    if schema == _MAPPING:
        raise InvalidInputError("schema is mapping, but there is no mapping; give one, or use another schema")
    if schema == _AUTO:
        return _adapt_recognised
    if schema not in SCHEMAS:
        raise InvalidInputError(f"schema {schema!r} is unknown; use one of {', '.join(schema_choices())}")
    return SCHEMAS[schema].adapt


def _adapt_recognised(record: dict[str, Any]) -> Record:
    return SCHEMAS[recognise(record)].adapt(record)
