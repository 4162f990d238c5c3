"""Records in our form, whatever their file looks like: a conversation, a text, or token ids; and `RecordError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import xxhash

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.wording import without_url_secrets

MAX_RECORD_BYTES = 16_000_000
DEEPEST = 100  # levels of lists and objects; templates and their traces recurse, and Python stops at 1,000 calls


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in OpenAI's form.

    Args:
        messages: each a dict with `role` and, as given, `content`, `tool_calls` (arguments as objects), `tool_call_id`,
            `name`, `reasoning_content`; keys with null values are removed.
        tools: the tools' JSON schemas, as chat templates take them.
        train: the weight of each message, if the record gives any: 0 (or False) leaves it untrained, 1 (or True) trains
            it, 0.5 trains it half as much; None decides by its role.
        weight: of the whole record; every message's weight is multiplied by it.
        parts: for messages whose content came in parts with weights of their own: (characters, weight) of each part, in
            order, None for the weight of the message.
        variables: template variables that the record sets, its `chat_template_kwargs`.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    train: Sequence[float | None] | None = None
    weight: float = 1.0
    parts: Mapping[int, Sequence[tuple[int, float | None]]] | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text in parts, each with its weight: prompt (0) and completion (1), or one plain text that is all trained.

    The parts are joined as they are and tokenized as one text, so ids do not depend on where the parts meet.
    """

    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """Ids and weights of the same length: `train[k]` is 0 unless the model should learn to produce token k."""

    input_ids: Sequence[int]
    train: Sequence[float]


Record = Conversation | TextRecord | TokenizedRecord


class Location(NamedTuple):
    """Where a record came from; numbers start at 1.

    Example:
        >>> str(Location("chats.jsonl", 12, "line"))
        'chats.jsonl, line 12'
    """

    path: str
    number: int
    noun: str = "record"

    def __str__(self) -> str:
        return f"{without_url_secrets(self.path)}, {self.noun} {self.number}"


class RecordError(InvalidInputError):
    """One record cannot be used, but the records after it can. The only error that `max_errors` allows.

    Args:
        field: the path inside the record, such as `messages[3].content`; empty for the record as a whole.
        problem: what is wrong and what to do, as a sentence that begins with the field.
        where: file and line, if known.

    Example:
        >>> error = RecordError("messages[3].content", "is a number; give a string")
        >>> str(error.at(Location("chats.jsonl", 12, "line")))
        'chats.jsonl, line 12: messages[3].content is a number; give a string'
    """

    def __init__(self, field: str, problem: str, where: Location | None = None) -> None:
        super().__init__(field, problem, where)  # all arguments, so that the error can be pickled
        self.field = field
        self.problem = problem
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.field or 'the record'} {self.problem}"

    def at(self, where: Location) -> RecordError:
        """Return the same error with its location."""
        return RecordError(self.field, self.problem, where)


class NotTakenError(RecordError):
    """A record that is sound, but on the side of its preference data that is not taken; counted, never an error."""

    def at(self, where: Location) -> NotTakenError:
        """Return the same error with its location."""
        return NotTakenError(self.field, self.problem, where)


def too_many_bytes(limit: int) -> RecordError:
    """Return the error for a record that is too long to be parsed.

    Example:
        >>> print(too_many_bytes(16_000_000))
        the record has more than max_record_bytes=16,000,000 bytes; split it, remove it, or raise max_record_bytes
    """
    return RecordError(
        "", f"has more than max_record_bytes={limit:,} bytes; split it, remove it, or raise max_record_bytes"
    )


def too_deep(field: str = "") -> RecordError:
    """Return the error for a record that is nested too deeply.

    Example:
        >>> print(too_deep("tools"))
        tools is nested more than 100 levels deep; flatten it, or remove the record
    """
    return RecordError(field, f"is nested more than {DEEPEST} levels deep; flatten it, or remove the record")


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested too deeply; never by recursion.

    Example:
        >>> is_too_deep([[{"a": []}]])
        False
    """
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return False
    return True


def kind_of(value: Any) -> str:
    """Return what kind of JSON value this is, for error messages.

    Example:
        >>> kind_of(None), kind_of(2.5), kind_of({})
        ('null', 'a number', 'an object')
    """
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"of the type {type(value).__name__}")


def content_hash(record: Record) -> bytes:
    """Return a hash of the content of a record, for splits and exact duplicates.

    It depends on the messages, tools, weights and variables, but not on the file, the schema or the order of keys.

    Example:
        >>> from megatron_packed_sft.records.schemas.registry import adapter
        >>> chat = adapter()({"messages": [{"role": "user", "content": "Hi"}]})
        >>> same = adapter()({"conversations": [{"value": "Hi", "from": "human"}]})
        >>> content_hash(chat) == content_hash(same)
        True
    """
    content: tuple[Any, ...]
    if isinstance(record, Conversation):
        content = ("conversation", record.messages, record.tools or None, _flags_of(record))
        if record.weight != 1 or record.parts or record.variables:
            parts = sorted((record.parts or {}).items())
            content = (*content, float(record.weight), parts, dict(record.variables or {}))
    elif isinstance(record, TextRecord):
        content = ("text", [(text, _flag(weight)) for text, weight in record.parts])
    else:
        content = ("tokenized", record.input_ids, [*map(_number, record.train)])
    try:
        text = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # Parquet columns may hold what JSON cannot, and JSON files integers beyond 64 bits
        if is_too_deep(content):
            raise too_deep() from None
        raise RecordError(
            "", f"cannot be written as JSON ({error}); write such values as strings, or remove them"
        ) from error
    if text.count(b"{") + text.count(b"[") > DEEPEST and is_too_deep(content):
        raise too_deep()
    return xxhash.xxh3_128_digest(text)


def _flags_of(record: Conversation) -> list[Any] | None:
    flags = None if record.train is None else [*map(_flag, record.train)]
    return flags if flags and any(flag is not None for flag in flags) else None


def _flag(weight: float | None) -> float | None:
    """Write weights 0 and 1 as flags, so that a hash does not depend on which of them the record had."""
    return bool(weight) if weight in (0, 1) else weight


def _number(weight: float) -> float:
    return int(weight) if weight in (0, 1) else weight
