"""Schemas: how to recognise a record by its keys, and the adapter that turns it into a `Record`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.plugins import Registry
from megatron_packed_sft.records.record import Record, RecordError

Adapter = Callable[[dict[str, Any]], Record]

# How certain the keys of a schema are; records often have a rendered `text` or a `prompt` as well.
CHATS, PAIRS, COLUMNS, OTHERS = range(4)


class Schema(NamedTuple):
    """One shape that records come in.

    Args:
        recognise: returns whether a parsed record has this schema, for `schema: auto`; it should look at keys only.
        adapt: turns a parsed record into a `Record`, or raises `RecordError` with the field that is wrong.
        rank: the lower, the more certain; a record that two schemas of the same built-in rank recognise is refused.
    """

    recognise: Callable[[dict[str, Any]], bool]
    adapt: Adapter
    rank: int = OTHERS


def has_keys(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether a record has all of some keys; null values do not count.

    Example:
        >>> has_keys("prompt", "completion")({"prompt": "2 + 2 = ", "completion": None})
        False
    """
    return lambda record: all(record.get(name) is not None for name in names)


def has_list(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether any of some common keys holds a list of objects.

    Example:
        >>> has_list("contents")({"contents": "Once upon a time."})
        False
    """

    def recognise(record: dict[str, Any]) -> bool:
        return any(type(value := record.get(name)) is list and value and type(value[0]) is dict for name in names)

    return recognise


_HERE = "megatron_packed_sft.records.schemas"
SCHEMAS: Registry[Schema] = Registry(
    "schemas",
    "schema",
    {
        "messages": f"{_HERE}.messages:MESSAGES",
        "sharegpt": f"{_HERE}.sharegpt:SHAREGPT",
        "tokenized": f"{_HERE}.texts:TOKENIZED",
        "dialog": f"{_HERE}.sharegpt:DIALOG",
        "gemini": f"{_HERE}.gemini:GEMINI",
        "openai_batch": f"{_HERE}.messages:OPENAI_BATCH",
        "trajectory": f"{_HERE}.messages:TRAJECTORY",
        "prompt_completion": f"{_HERE}.texts:PROMPT_COMPLETION",
        "alpaca": f"{_HERE}.alpaca:ALPACA",
        "question_answer": f"{_HERE}.alpaca:QUESTION_ANSWER",
        "text": f"{_HERE}.texts:TEXT",
    },
)
_AUTO, _MAPPING = "auto", "mapping"
TAKES = ("chosen",)
# Built-in schemas that look at values, so that their keys alone decide nothing.
_ASK_VALUES = frozenset({"body", "contents", "traj", "conversation", "dialog", "dialogue"})
_ROLES = ("role", "from", "speaker", "author", "sender", "user")
_CONTENTS = ("content", "value", "text", "utterance", "message", "body")
_MAX_KNOWN = 1024
_known: dict[tuple[str, ...], str] = {}  # keys that are not null -> built-in schema


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
    _known.clear()


def schema_choices() -> tuple[str, ...]:
    """Return the values that the key `schema` of a source takes."""
    return (_AUTO, *SCHEMAS.names(), _MAPPING)


def recognise(record: dict[str, Any]) -> str:
    """Return the schema of a record, by its keys: the most certain built-in one, else a registered one or a plugin.

    Raises:
        RecordError: no schema fits, or two fit that are equally certain.

    Example:
        >>> recognise({"instruction": "Add 1 and 2.", "output": "3"})
        'alpaca'
    """
    names = tuple(record)
    if None in record.values():
        names = tuple(name for name in names if record[name] is not None)
    found = _known.get(names)
    if found is None:
        found = _recognise(record)
        if SCHEMAS.origin(found) == "built in" and _ASK_VALUES.isdisjoint(names):
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[names] = found
    return found


def _recognise(record: dict[str, Any]) -> str:
    fitting: list[tuple[int, str]] = []
    for name in SCHEMAS.names():
        try:
            schema = SCHEMAS[name]
            if schema.recognise(record):
                fitting.append((schema.rank, name))
        except MissingDependencyError:  # a broken plugin recognises nothing
            continue
    if not fitting:
        raise _unknown(record)
    surest = min(rank for rank, _ in fitting)
    best = [name for rank, name in fitting if rank == surest]
    if len(best) > 1 and surest != OTHERS:
        raise RecordError("", f"fits the schemas {' and '.join(best)}; set sources.NAME.schema to the right one")
    return best[0]


def _unknown(record: dict[str, Any]) -> RecordError:
    keys = [key if value is not None else f"{key} (null)" for key, value in list(record.items())[:12]]
    shown = f"the keys {', '.join(keys)}" if keys else "no keys"
    line = _mapping_line(record)
    such = f", such as mapping: {line}" if line else ""
    return RecordError("", f"has {shown}, which match no known schema; set schema or mapping for its source{such}")


def _mapping_line(record: dict[str, Any]) -> str | None:
    """Return the mapping that a record with a list of objects seems to need."""
    for name, value in record.items():
        if type(value) is list and value and type(value[0]) is dict:
            role, content = (next((key for key in keys if key in value[0]), None) for keys in (_ROLES, _CONTENTS))
            if role and content:
                return f"{{messages: {name}, role: {role}, content: {content}}}"
    return None


def adapter(schema: str = _AUTO, mapping: Mapping[str, Any] | None = None, take: str | None = None) -> Adapter:
    """Return a function that turns a parsed record into a `Record`, or raises `RecordError` with the field at fault.

    Args:
        schema: one of `schema_choices()`; `auto` recognises each record, or means `mapping` if one is given.
        mapping: see `MappedRecords`.
        take: `chosen` takes the chosen side of preference data, which is refused otherwise.

    Example:
        >>> adapter()({"messages": [{"role": "user", "content": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    if take is not None:
        return _taking(schema, mapping, take)
    if mapping is not None:
        if schema not in (_AUTO, _MAPPING):
            raise InvalidInputError(
                f"mapping is set, but schema is {schema!r}; set schema to mapping, or remove the mapping"
            )
        from megatron_packed_sft.records.schemas.field_mapping import MappedRecords  # imports the schemas

        return MappedRecords(mapping)
    if schema == _MAPPING:
        raise InvalidInputError("schema is mapping, but mapping is not set; set it, or use another schema")
    if schema != _AUTO and schema not in SCHEMAS:
        raise InvalidInputError(f"schema {schema!r} is unknown; use one of {', '.join(schema_choices())}")
    if schema != _AUTO and SCHEMAS.origin(schema) != "built in":
        return SCHEMAS[schema].adapt
    from megatron_packed_sft.records.schemas.preference import GuardedRecords  # imports the schemas

    return GuardedRecords(None if schema == _AUTO else schema)


def _taking(schema: str, mapping: Mapping[str, Any] | None, take: str) -> Adapter:
    if take not in TAKES:
        raise InvalidInputError(f"take is {take!r}; use chosen, or leave it out")
    if mapping is not None or schema != _AUTO:
        raise InvalidInputError(
            "take goes with schema auto; a schema or a mapping chooses the answer itself: keep one of them"
        )
    from megatron_packed_sft.records.schemas.preference import ChosenRecords  # imports the schemas

    return ChosenRecords()
