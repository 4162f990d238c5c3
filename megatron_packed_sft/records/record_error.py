"""What is wrong with one row, and where: the only error that `on_error: skip` may pass over."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError


class Location(NamedTuple):
    """Where a row came from; numbers start at 1.

    Example:
        >>> str(Location("chats.jsonl", 12, "line"))
        'chats.jsonl, line 12'
    """

    path: str
    number: int
    noun: str = "row"

    def __str__(self) -> str:
        return f"{self.path}, {self.noun} {self.number}"


class RecordError(InvalidInputError):
    """One row cannot be used; those after it can.

    Args:
        field: the path inside the row, such as `messages[3].content`; empty for the row as a whole.
        problem: what it is and what to do; the sentence goes on after the field.
        where: file and line, once known.

    Example:
        >>> error = RecordError("messages[3].content", "is a number; give a string")
        >>> str(error.at(Location("chats.jsonl", 12, "line")))
        'chats.jsonl, line 12: messages[3].content is a number; give a string'
    """

    def __init__(self, field: str, problem: str, where: Location | None = None) -> None:
        super().__init__(field, problem, where)  # all of them, so that it can be pickled
        self.field = field
        self.problem = problem
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.field or 'the row'} {self.problem}"

    def at(self, where: Location) -> RecordError:
        """The same error, with its place in front."""
        return RecordError(self.field, self.problem, where)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words.

    Example:
        >>> kind_of(None), kind_of(2.5), kind_of({})
        ('null', 'a number', 'an object')
    """
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"of the type {type(value).__name__}")
