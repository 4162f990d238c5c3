"""Records in our form, whatever their file looks like: a conversation, a text, or token ids; and `RecordError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import xxhash

from megatron_packed_sft.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in OpenAI's form.

    Args:
        messages: each a dict with `role` and, as given, `content`, `tool_calls` (arguments as objects), `tool_call_id`,
            `name`, `reasoning_content`; keys with null values are removed.
        tools: the tools' JSON schemas, as chat templates take them.
        train: for each message True or False if the record says so (`train`, or `weight` 0 or not), None for by role.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    train: Sequence[bool | None] | None = None


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text in parts, each trained or not: prompt and completion, or one plain text that is all trained.

    The parts are joined as they are and tokenized as one text, so ids do not depend on where the parts meet.
    """

    parts: Sequence[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """Ids and a mask of the same length: `train[k]` is 1 if the model should learn to produce token k."""

    input_ids: Sequence[int]
    train: Sequence[int]


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
        return f"{self.path}, {self.noun} {self.number}"


class RecordError(InvalidInputError):
    """One record cannot be used, but the records after it can. The only error that `on_error=skip` skips.

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

    It depends on the messages, tools and train flags, but not on the file, the schema or the order of keys.

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
    except TypeError as error:  # Parquet columns may hold what JSON cannot, and JSON files integers beyond 64 bits
        raise RecordError(
            "", f"cannot be written as JSON ({error}); write such values as strings, or remove them"
        ) from error
