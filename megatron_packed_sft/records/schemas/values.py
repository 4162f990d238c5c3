"""Values of a parsed record: lists, objects and texts, or the error that says what they are instead."""

from __future__ import annotations

from typing import Any

import orjson

from megatron_packed_sft.records.formats import json_files
from megatron_packed_sft.records.record import RecordError, kind_of


def list_of(value: Any, field: str) -> list[Any]:
    """Return a non-empty list from a value that is one, or the JSON text of one.

    Example:
        >>> list_of('[{"role": "user", "content": "Hi"}]', "messages")
        [{'role': 'user', 'content': 'Hi'}]
    """
    if type(value) is str:
        value = parse_json(value, field)
    if type(value) is not list:
        raise RecordError(field, "is missing; give a list" if value is None else f"is {kind_of(value)}; give a list")
    if not value:
        raise RecordError(field, "is empty; give at least one element, or remove the record")
    return value


def object_of(value: Any, field: str, remedy: str) -> dict[str, Any]:
    """Return a value that is an object.

    Example:
        >>> object_of("Hi", "messages[1]", "give an object with role and content")
        Traceback (most recent call last):
        ...
        megatron_packed_sft.records.record.RecordError: messages[1] is a string; give an object with role and content
    """
    if type(value) is not dict:
        raise RecordError(field, f"is {kind_of(value)}; {remedy}")
    return value


def string_of(value: Any, field: str) -> str:
    """Return a value that is a string.

    Example:
        >>> string_of("Hi", "text")
        'Hi'
    """
    if type(value) is not str:
        raise RecordError(field, f"is {'missing' if value is None else kind_of(value)}; give a string")
    return value


def parse_json(text: str, field: str) -> Any:
    """Return the value of a field that holds JSON as text.

    Example:
        >>> parse_json('{"a": 1}', "arguments")
        {'a': 1}
    """
    try:
        return json_files.parse(text.encode(), field)
    except orjson.JSONDecodeError as error:
        raise RecordError(
            field, f"is not valid JSON ({error.msg} at character {error.pos + 1}); fix the text"
        ) from error


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at every depth; nulls in lists stay. Without nulls it is not copied.

    Example:
        >>> without_nulls({"a": None, "b": [{"c": None}, None]})
        {'b': [{}, None]}
    """
    try:
        if b":null" not in orjson.dumps(value):  # much faster than walking through it
            return value
    except TypeError:
        pass  # Parquet columns may hold what JSON cannot
    return _without_nulls_anywhere(value)


def _without_nulls_anywhere(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_nulls_anywhere(inner) for key, inner in value.items() if inner is not None}
    if type(value) is list:
        return [_without_nulls_anywhere(inner) for inner in value]
    return value
