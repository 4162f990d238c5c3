"""Messages and tools made of authored texts: dicts, lists, lengths, and the JSON that templates write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from megatron_packed_sft.encode.masks.authored_text import (
    MESSAGES_NAME,
    TOOLS,
    TOOLS_NAME,
    Author,
    AuthoredText,
    Part,
    Recorder,
    Run,
    authored,
    build_text,
    concatenate,
    plain_text,
    source_of,
)
from megatron_packed_sft.encode.templates.environment import JsonSettings, json_text


def signature(value: Any) -> Any:
    """Return what a template can see of a container without reading its strings: keys, types, numbers.

    Example:
        >>> signature({"a": "text", "b": 1, "c": []})
        (('a', 'str'), ('b', '1'), ('c', 'list'))
    """
    if isinstance(value, dict):
        return tuple((key, _kind(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(_kind(inner) for inner in value)
    return type(value).__name__


def _kind(value: Any) -> Any:
    # 1, 1.0 and True are equal, but not written alike.
    if isinstance(value, str | dict | list):
        return type(value).__name__
    return value if value is None else (type(value).__name__, value) if not isinstance(value, int) else repr(value)


class _Container:
    """A dict or list of a record; its structure becomes a guard as soon as a template looks at it."""

    raw: Any
    author: Author
    recorder: Recorder | None
    source: str | None
    is_guarded: bool
    json_texts: dict[JsonSettings, str]

    def touch(self) -> None:
        if not self.is_guarded:
            self.is_guarded = True
            if self.recorder is not None and self.source is not None:
                self.recorder.guard(f"signature({self.source})", signature(self.raw))

    def __bool__(self) -> bool:
        if self.recorder is not None and self.source is not None and not self.is_guarded:
            self.recorder.guard(f"bool({self.source})", bool(self.raw))
        return bool(self.raw)

    def __str__(self) -> str:
        text = str(self.raw)
        if self.recorder is None or self.source is None:
            return authored(text, self.author)
        return authored(text, self.author, self.recorder, f"str({self.source})")

    def __hash__(self) -> int:
        raise TypeError(f"unhashable type: {type(self.raw).__name__!r}")


class AuthoredDict(_Container, dict[Any, Any]):
    """A dict of a record."""

    __hash__ = _Container.__hash__  # type: ignore[assignment]


class AuthoredMessage(AuthoredDict):
    """A message; its keys and types are part of the shape's key and need no guard."""

    number: int


class AuthoredList(_Container, list[Any]):
    """A list of a record."""

    __hash__ = _Container.__hash__  # type: ignore[assignment]

    def __radd__(self, other: Any) -> Any:
        self.touch()
        return list(other) + list.copy(self)


def _touching(base: type, method: str) -> Callable[..., Any]:
    original = getattr(base, method)

    def touching(self: Any, *arguments: Any, **named: Any) -> Any:
        self.touch()
        return original(self, *arguments, **named)

    touching.__name__ = method
    return touching


for _method in (
    *("__getitem__", "get", "items", "keys", "values", "__iter__", "__len__", "__contains__"),
    *("__eq__", "__ne__", "copy", "__or__", "__reversed__"),
):
    setattr(AuthoredDict, _method, _touching(dict, _method))
for _method in (
    *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "copy", "__add__"),
    *("__reversed__", "index", "count", "__mul__"),
):
    setattr(AuthoredList, _method, _touching(list, _method))


class AuthoredLength(int):
    """The length of an authored text: comparisons become guards, not the length itself."""

    text: AuthoredText

    def __int__(self) -> int:
        return int.__add__(self, 0)

    def _compared(self, other: Any, operator: str, answer: Any) -> Any:
        if answer is not NotImplemented and self.text.recorder is not None:
            self.text.recorder.guard(f"len({source_of(self.text)}){operator}{int(other)!a}", answer)
        return answer

    def _fixed(self) -> int:
        len(self.text)
        return int.__add__(self, 0)

    def __bool__(self) -> bool:
        return bool(self.text)

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __index__(self) -> int:
        return self._fixed()

    def __str__(self) -> str:
        return str(self._fixed())

    __repr__ = __str__


def _comparing(method: str, operator: str) -> Callable[..., Any]:
    original = getattr(int, method)
    return lambda self, other: self._compared(other, operator, original(self, other))


def _fixing(method: str) -> Callable[..., Any]:
    original = getattr(int, method)
    return lambda self, other: original(self._fixed(), other)


for _method, _operator in (
    ("__eq__", "=="), ("__ne__", "!="), ("__lt__", "<"), ("__le__", "<="), ("__gt__", ">"), ("__ge__", ">="),
):  # fmt: skip
    setattr(AuthoredLength, _method, _comparing(_method, _operator))
for _method in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__floordiv__"):
    setattr(AuthoredLength, _method, _fixing(_method))


def length_of(value: Any) -> Any:
    """Return the length of a value; for an authored text, one that records comparisons."""
    if not isinstance(value, AuthoredText) or value.recorder is None:
        return len(value)
    length = AuthoredLength(str.__len__(value))
    length.text = value
    return length


class AuthoredChat:
    """A record whose strings know the message and the path that they come from; renders of its parts share it.

    Args:
        tools: of the chat.
        recorder: records what templates ask.
        parts: the lengths of the parts of messages whose content came in parts; every part is a separate author.
    """

    def __init__(
        self, tools: Any = None, recorder: Recorder | None = None, parts: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.recorder = recorder
        self._parts = parts or {}
        self.tools = None if tools is None else author_value(list(tools), Author(TOOLS, ()), recorder, TOOLS_NAME)
        self._messages: dict[int, AuthoredMessage] = {}

    def messages(self, messages: Sequence[dict[str, Any]], *, is_probe: bool = False) -> list[AuthoredMessage]:
        """Return the first messages of the chat, with plain roles; in a probe, some are not the record's."""
        result = []
        for number, message in enumerate(messages):
            known = self._messages.get(number)
            if is_probe and (known is None or known.raw is not message):
                known = _author_message(number, message, None)
            elif known is None:
                known = self._messages[number] = _author_message(number, message, self.recorder)
                if number in self._parts:
                    _author_parts(known, self._parts[number])
            result.append(known)
        return result


def _author_message(number: int, message: dict[str, Any], recorder: Recorder | None) -> AuthoredMessage:
    result = AuthoredMessage()
    result.number, result.raw, result.author, result.recorder = number, message, Author(number, ()), recorder
    result.source, result.is_guarded, result.json_texts = f"{MESSAGES_NAME}[{number}]", True, {}
    for key, value in message.items():
        source = f"{MESSAGES_NAME}[{number}][{key!a}]"
        if key == "role":
            inner = value
        else:
            inner = author_value(value, Author(number, (key,)), recorder, source)
            if recorder is not None and not isinstance(value, str | dict | list):
                recorder.guard(source, value)
        dict.__setitem__(result, key, inner)
    return result


def _author_parts(message: AuthoredMessage, lengths: Sequence[int]) -> None:
    """Make every part of a content a separate author: `("content", "part", 0)` and so on."""
    owner, key = message, "content"
    if isinstance(message.raw.get("content"), list):  # for a template that reads content in parts
        owner, key = list.__getitem__(dict.__getitem__(message, "content"), 0), "text"
    content = owner.raw.get(key)
    if isinstance(content, str):
        ends = list(accumulate(lengths))
        texts = [content[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        authors = (Author(message.number, ("content", "part", place)) for place in range(len(texts)))
        dict.__setitem__(owner, key, concatenate(map(authored, texts, authors)))


def author_value(value: Any, author: Author, recorder: Recorder | None, source: str) -> Any:
    """Return a value whose strings remember where they come from."""
    if isinstance(value, str):
        return authored(value, author, recorder, source)
    if not isinstance(value, dict | list | tuple):
        return value

    def inside(step: str | int) -> Author:
        # All tools are one author: which tool a text comes from does not matter, and there may be many.
        return author if author.message == TOOLS else Author(author.message, (*author.path, step))

    result: Any
    if isinstance(value, dict):
        result = AuthoredDict()
        for key, inner in value.items():
            place = inside(key)
            # A key is the same in every record of the shape, but it has an author too.
            name = authored(key, place) if isinstance(key, str) else key
            dict.__setitem__(result, name, author_value(inner, place, recorder, f"{source}[{key!a}]"))
    else:
        result = AuthoredList(
            author_value(inner, inside(number), recorder, f"{source}[{number}]") for number, inner in enumerate(value)
        )
    result.raw, result.author, result.recorder, result.source = value, author, recorder, source
    result.is_guarded, result.json_texts = False, {}
    return result


def without_authors(value: Any) -> Any:
    """Return the plain value of an authored one."""
    if isinstance(value, AuthoredText):
        return plain_text(value)
    if isinstance(value, _Container):
        return value.raw
    if isinstance(value, AuthoredLength):
        return int(value)
    if isinstance(value, dict):
        return {without_authors(key): without_authors(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_authors(inner) for inner in value)
    return value


def has_authors(value: Any, depth: int = 4) -> bool:
    """Return whether a value contains authored texts."""
    if isinstance(value, AuthoredText | _Container | AuthoredLength):
        return True
    if depth and isinstance(value, list | tuple):
        return any(has_authors(inner, depth - 1) for inner in value)
    if depth and isinstance(value, dict):
        return any(has_authors(inner, depth - 1) for pair in value.items() for inner in pair)
    return False


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as `tojson` does, with authors; brackets and numbers in a record's value belong to its author."""
    settings: JsonSettings = (ensure_ascii, indent, tuple(separators) if separators else None, sort_keys)
    if not isinstance(value, _Container):
        return _authored_json(value, settings)
    if settings not in value.json_texts:
        value.json_texts[settings] = _authored_json(value, settings)
    return value.json_texts[settings]


def _authored_json(value: Any, settings: JsonSettings) -> str:
    ensure_ascii, indent, separators, sort_keys = settings
    text = json.dumps(
        without_authors(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not has_authors(value):
        return text
    writer = _JsonWriter(settings)
    writer.write(value, None, 0)
    if (
        "".join(fragment for fragment, _, _ in writer.fragments) != text
    ):  # unusual keys: the text is right, its authors are not traced
        if writer.recorder is not None:
            writer.recorder.give_up("JSON of an unusual value")
        return build_text(text, [(len(text), writer.first_author)], [(text, None)], None)
    return writer.result(text)


class _JsonWriter:
    """Writes JSON as fragments: (text, author, the expression that gives it or None if it is constant)."""

    def __init__(self, settings: JsonSettings) -> None:
        self.fragments: list[tuple[str, Author | None, str | None]] = []
        self.recorder: Recorder | None = None
        self.first_author: Author | None = None
        self._settings = settings
        ensure_ascii, indent, separators, self._sort_keys = settings
        self._indent = indent if isinstance(indent, str) or indent is None else " " * indent
        pair: tuple[str, str] = separators or ((", " if indent is None else ","), ": ")
        self._comma, self._colon = pair
        self._ascii = ensure_ascii
        self._whole: tuple[int, str] | None = None  # where a value of the record began, and its source

    def write(self, value: Any, author: Author | None, level: int) -> None:
        if isinstance(value, _Container):
            self.recorder = self.recorder or value.recorder
            self.first_author = self.first_author or value.author
            author = value.author
            if self._whole is None and value.source is not None and value.recorder is not None and level == 0:
                self._whole = (len(self.fragments), value.source)
            elif value.source is not None and self._whole is None:
                self._write_inner(value, author, level)
                return
        if isinstance(value, AuthoredText):
            self._write_text(value, author)
        elif isinstance(value, dict):
            self._write_items(list(dict.items(value)), "{}", author, level)
        elif isinstance(value, list | tuple):
            items = list(list.__iter__(value)) if isinstance(value, list) else list(value)
            self._write_items(items, "[]", author, level)
        else:
            self._add(json.dumps(value, ensure_ascii=self._ascii), author)

    def _write_inner(self, value: Any, author: Author | None, level: int) -> None:
        """Write a record's value inside one of the template; on one line, its JSON does not depend on its place."""
        if self._indent is not None:
            value.touch()
            if isinstance(value, dict):
                self._write_items(list(dict.items(value)), "{}", author, level)
            else:
                self._write_items(list(list.__iter__(value)), "[]", author, level)
            return
        text = json_text(value.raw, self._settings)
        inner = _JsonWriter(self._settings)
        inner._whole = (0, "")
        inner.write(value, author, level)
        if "".join(fragment for fragment, _, _ in inner.fragments) != text or value.recorder is None:
            value.touch()
            self.fragments += inner.fragments
            return
        source = value.recorder.variable(f"json_text({value.source},{self._settings!a})")
        # Each fragment has its author, but all of them are one variable, which stands with the first.
        self.fragments += [
            (fragment, whose, source if number == 0 else "")
            for number, (fragment, whose, _) in enumerate(inner.fragments)
        ]

    def _write_items(self, items: list[Any], brackets: str, author: Author | None, level: int) -> None:
        if not items:
            self._add(brackets, author)
            return
        is_dict = brackets == "{}"
        if is_dict and self._sort_keys:
            items.sort(key=lambda item: plain_text(item[0]))
        new_line = "" if self._indent is None else "\n" + self._indent * (level + 1)
        self._add(brackets[0], author)
        for number, item in enumerate(items):
            self._add((self._comma if number else "") + new_line, author)
            if is_dict:
                key = item[0] if isinstance(item[0], str) else json.dumps(item[0])
                self.write(key if isinstance(key, AuthoredText) else str(key), author, level + 1)
                self._add(self._colon, author)
            self.write(item[1] if is_dict else item, author, level + 1)
        self._add(("" if self._indent is None else "\n" + self._indent * level) + brackets[1], author)

    def _write_text(self, value: AuthoredText, author_of_all: Author | None) -> None:
        self.recorder = self.recorder or value.recorder
        position, text = 0, plain_text(value)
        runs = [run for run in value.authors if run[0]]
        # The quotes of an empty text belong to the author of the value that contains it.
        whose = next((author for _, author in runs if isinstance(author, Author)), author_of_all)
        self.first_author = self.first_author or whose
        self._add('"', whose)
        # Empty texts are parts too: in another record they may not be empty.
        source = None
        if value.recorder is not None:
            source = value.recorder.variable(f"json_inside({source_of(value)},{self._ascii})")
        for number, (length, author) in enumerate(runs or [(0, None)]):
            inside = json.dumps(text[position : position + length], ensure_ascii=self._ascii)[1:-1]
            self.fragments.append((inside, author if isinstance(author, Author) else None, _of_first(source, number)))
            position += length
        self._add('"', whose)

    def _add(self, text: str, author: Author | None) -> None:
        self.fragments.append((text, author, None))

    def result(self, text: str) -> AuthoredText:
        runs: list[Run] = []
        for fragment, author, _ in self.fragments:
            if runs and runs[-1][1] == author:
                runs[-1] = (runs[-1][0] + len(fragment), author)
            elif fragment:
                runs.append((len(fragment), author))
        if self._whole is not None and self.recorder is not None:
            whole = self.recorder.variable(f"json_text({self._whole[1]},{self._settings!a})")
            return build_text(text, runs, [(text, whole)], self.recorder)
        parts: list[Part] = []
        for fragment, _, source in self.fragments:
            if source == "" or (source is None and parts and parts[-1][1] is None):
                parts[-1] = (parts[-1][0] + fragment, parts[-1][1])
            elif source is not None or fragment:
                parts.append((fragment, source))
        return build_text(text, runs, parts, self.recorder)


def _of_first(source: str | None, number: int) -> str | None:
    return source if number == 0 or source is None else ""
