"""Strings that remember who wrote each of their characters, and that record what a template asks about them.

An `AuthoredText` is a string, so a template's comparisons and lookups give the usual answers. Besides its characters,
it carries two things through every operation that templates use:

- `authors`: runs of characters with the message (or tool) that wrote them; None for the template's own text. Runs of
  length zero are events, such as the beginning of a loop's iteration.
- `parts`: how to build the same text for another record of the same shape: constants, and variables of a straight-line
  program that the `Recorder` keeps. Every answer that a template gets becomes a guard of that program.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

TOOLS = -1
# Names in recorded programs: of the record, and of variables (v0, v1, ...).
MESSAGES_NAME, TOOLS_NAME, VARIABLE = "messages", "tools", "v"
MESSAGE_NAME = "message"  # in programs about a single message
# Matches a quoted constant, which may hold anything, or a name (group 1).
_CONSTANT_OR_NAME = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\b(v\d+\b|messages\[\d+\]|message\b|tools\b)""")
_SUPPORTED_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]*")


class Author(NamedTuple):
    """Where a character comes from: a message (or `TOOLS`), and the path of the value inside it."""

    message: int
    path: tuple[str | int, ...]


class Event(NamedTuple):
    """An event between two characters: `enter`, `leave`, `after` (of a loop), `begin`, `end` (of a block)."""

    kind: str
    message: int = TOOLS
    loop: int = 0


Run = tuple[int, "Author | Event | None"]
Part = tuple[str, "str | None"]


class Recorder:
    """The straight-line program of one chat: assignments and guards, in the order of the render.

    Example:
        >>> recorder = Recorder()
        >>> content = authored("Hi ", Author(0, ("content",)), recorder, "messages[0]['content']")
        >>> bool(content.strip() == "Hi"), recorder.lines
        (True, [('v0', "messages[0]['content']"), ('v1', 'v0.strip()'), ("v1=='Hi'", True)])
    """

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []  # (name, source) assigns, (source, answer) guards
        self.is_assignment: list[bool] = []
        self.obstacle: str | None = None
        self.sought: set[str] = set()  # constants that the template searches strings for
        self.edges_in_slots: set[int] = set()  # edges of turns at known places inside strings
        self.names: dict[str, str] = {}  # expression -> variable
        self._guarded: set[tuple[str, str]] = set()

    def variable(self, source: str) -> str:
        """Return the name of the variable that holds an expression."""
        name = self.names.get(source)
        if name is None:
            name = self.names[source] = f"{VARIABLE}{len(self.names)}"
            self.lines.append((name, source))
            self.is_assignment.append(True)
        return name

    def guard(self, source: str, answer: Any) -> None:
        """Require that an expression gives the same answer again."""
        key = (source, repr(answer))
        if key not in self._guarded:
            self._guarded.add(key)
            self.lines.append((source, answer))
            self.is_assignment.append(False)

    def give_up(self, obstacle: str) -> None:
        """Note that the template did something that a program cannot repeat."""
        self.obstacle = self.obstacle or obstacle


def names_in(source: str) -> list[str]:
    """Return the names that a line of a program uses, in order.

    Example:
        >>> names_in("v1=='v2' or tools and v0 in messages[3]['content']")
        ['v1', 'tools', 'v0', 'messages[3]']
    """
    return [name for name in _CONSTANT_OR_NAME.findall(source) if name]


def replace_names(source: str, replace: Callable[[str], str]) -> str:
    """Replace the names that a line of a program uses, and nothing in its constants.

    Example:
        >>> replace_names("message['content']=='message'", lambda name: "messages[3]")
        "messages[3]['content']=='message'"
    """
    return _CONSTANT_OR_NAME.sub(lambda match: replace(match[1]) if match[1] else match[0], source)


def plain_text(text: str) -> str:
    """Return the bare string."""
    return str.__str__(text)


class AuthoredText(str):
    """A string with authors and parts; see the module. Create it with `authored` or `constant`."""

    __slots__ = ("authors", "parts", "recorder")
    authors: tuple[Run, ...]
    parts: tuple[Part, ...]
    recorder: Recorder | None

    # Questions about the text.

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        self._give_up("repr")
        return repr(plain_text(self))

    def __hash__(self) -> int:
        self._guard_value()
        return hash(plain_text(self))

    def __bool__(self) -> bool:
        answer = str.__len__(self) > 0
        if not any(text and name is None for text, name in self.parts):
            self._guard(f"bool({source_of(self)})", answer)
        return answer

    def __len__(self) -> int:
        length = str.__len__(self)
        self._guard(f"len({source_of(self)})", length)
        return length

    def __iter__(self) -> Iterator[str]:
        self._guard_value()
        return iter([self._constant_slice(at, at + 1) for at in range(str.__len__(self))])

    def __contains__(self, other: object) -> bool:
        if not isinstance(other, str):
            raise TypeError(f"'in <string>' requires string as left operand, not {type(other).__name__}")
        recorder = self.recorder or getattr(other, "recorder", None)
        answer = plain_text(other) in plain_text(self)
        if recorder is not None:
            if is_constant(other):
                recorder.sought.add(plain_text(other))
            recorder.guard(f"{source_of(other)} in {source_of(self)}", answer)
        return answer

    def __eq__(self, other: object) -> Any:
        return _compare(self, other, "==")

    def __ne__(self, other: object) -> Any:
        return _compare(self, other, "!=")

    def __lt__(self, other: str) -> Any:
        return _compare(self, other, "<")

    def __le__(self, other: str) -> Any:
        return _compare(self, other, "<=")

    def __gt__(self, other: str) -> Any:
        return _compare(self, other, ">")

    def __ge__(self, other: str) -> Any:
        return _compare(self, other, ">=")

    # Operations that make new texts.

    def __add__(self, other: str) -> Any:
        return _concatenated(self, other)

    def __radd__(self, other: str) -> Any:
        return _concatenated(other, self)

    def __mul__(self, times: Any) -> str:
        if isinstance(times, int) and 0 <= times <= 8:
            return concatenate([self] * times)
        self._give_up("repetition")
        return self._opaque(plain_text(self) * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return percent_format(self, values if isinstance(values, tuple) else (values,))

    def __format__(self, spec: str) -> str:
        if not spec:
            return self
        self._give_up("format specification")
        return format(plain_text(self), spec)

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(str.__len__(self))
            bounds = ":".join("" if bound is None else repr(int(bound)) for bound in (key.start, key.stop))
            if step == 1:
                return self._derived(start, max(start, stop), f"[{bounds}]")
            return self._opaque(plain_text(self)[key], f"[{bounds}:{step}]")
        position = int(key)
        plain_text(self)[position]  # raises as a string does
        at = position if position >= 0 else str.__len__(self) + position
        return self._derived(at, at + 1, f"[{position}]")

    def strip(self, characters: Any = None) -> str:
        """Strip both ends, as `str` does."""
        return self._strip("strip", characters)

    def lstrip(self, characters: Any = None) -> str:
        """Strip the left end."""
        return self._strip("lstrip", characters)

    def rstrip(self, characters: Any = None) -> str:
        """Strip the right end."""
        return self._strip("rstrip", characters)

    def split(self, separator: Any = None, maxsplit: Any = -1) -> list[str]:
        """Split, each fragment with its authors."""
        return self._split("split", separator, maxsplit)

    def rsplit(self, separator: Any = None, maxsplit: Any = -1) -> list[str]:
        """Split from the right."""
        return self._split("rsplit", separator, maxsplit)

    def splitlines(self, keepends: Any = False) -> list[str]:
        """Split into lines."""
        parts = plain_text(self).splitlines(True)
        ends = [part if keepends else part.splitlines()[0] for part in parts]
        position, spans = 0, []
        for part, kept in zip(parts, ends, strict=True):
            spans.append((position, position + len(kept)))
            position += len(part)
        return self._parts_at(f"splitlines({bool(keepends)})", spans)

    def partition(self, separator: str) -> tuple[str, str, str]:
        """Split at the first separator."""
        return self._partition("partition", separator)

    def rpartition(self, separator: str) -> tuple[str, str, str]:
        """Split at the last separator."""
        return self._partition("rpartition", separator)

    def removeprefix(self, prefix: str) -> str:
        """Remove a prefix, if there is one."""
        return self[str.__len__(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        """Remove a suffix, if there is one."""
        return self[: -str.__len__(suffix)] if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        """Replace texts; a constant replacement belongs to the author whose text it replaces."""
        text, sought = plain_text(self), plain_text(old)
        limit = -1 if count is None else int(count)
        self._seek(old)
        if sought not in text or limit == 0:
            self._guard(f"{source_of(old)} in {source_of(self)}", False)
            return self
        if not sought:
            self._give_up("replacing nothing")
            return self._opaque(text.replace(sought, plain_text(new), limit))
        runs: list[Run] = []
        position = num_done = 0
        while (at := text.find(sought, position)) >= 0 and num_done != limit:
            runs += _runs_between(self.authors, position, at)
            runs += _authors_of(new, first_author(_runs_between(self.authors, at, at + len(sought))))
            position, num_done = at + len(sought), num_done + 1
        runs += _runs_between(self.authors, position, len(text))
        result = text.replace(sought, plain_text(new), limit)
        if is_constant(self) and is_constant(old) and is_constant(new):
            return _make(result, tuple(runs), _constant_parts(result), None)
        recorder: Any = self.recorder or getattr(old, "recorder", None) or getattr(new, "recorder", None)
        source = f"{source_of(self)}.replace({source_of(old)},{source_of(new)},{limit})"
        return _make(result, tuple(runs), ((result, recorder.variable(source)),), recorder)

    def upper(self) -> str:
        """Return the text in upper case."""
        return self._cased("upper")

    def lower(self) -> str:
        """Return the text in lower case."""
        return self._cased("lower")

    def title(self) -> str:
        """Return the text in title case."""
        return self._cased("title")

    def capitalize(self) -> str:
        """Return the text with a capital letter."""
        return self._cased("capitalize")

    def join(self, texts: Iterable[Any]) -> str:
        """Join texts with this one between them."""
        found = list(texts)
        return concatenate([fragment for text in found for fragment in (self, text)][1:])

    def format(self, *values: Any, **named: Any) -> str:
        """Fill in plain fields; others are not supported."""
        fragments: list[Any] = []
        number = 0
        for literal, field, spec, conversion in string.Formatter().parse(plain_text(self)):
            fragments.append(literal)
            if field is None:
                continue
            if spec or conversion or not _SUPPORTED_FIELD.fullmatch(field):
                raise TypeError(f"format field {field!r} is not supported in chat templates")
            key = field or str(number)
            number += not field
            value = values[int(key)] if key.isdigit() else named[key]
            fragments.append(value if isinstance(value, str) else str(value))
        return concatenate(fragments)

    # Helpers.

    def _guard(self, source: str, answer: Any) -> None:
        if self.recorder is not None:
            self.recorder.guard(source, answer)

    def _guard_value(self) -> None:
        if self.recorder is not None:
            self.recorder.guard(f"{source_of(self)}=={plain_text(self)!a}", True)

    def _give_up(self, obstacle: str) -> None:
        if self.recorder is not None:
            self.recorder.give_up(obstacle)

    def _seek(self, text: Any) -> None:
        if self.recorder is not None and isinstance(text, str) and is_constant(text):
            self.recorder.sought.add(plain_text(text))

    def _opaque(self, text: str, operation: str = "") -> str:
        """Return a text whose authors are unknown by character; all of it belongs to the first author."""
        runs: tuple[Run, ...] = ((len(text), first_author(self.authors)),) if text else ()
        if self.recorder is None or not operation:
            return _make(text, runs, _constant_parts(text), None)
        return _make(text, runs, ((text, self.recorder.variable(source_of(self) + operation)),), self.recorder)

    def _constant_slice(self, start: int, end: int) -> AuthoredText:
        text = plain_text(self)[start:end]
        return _make(text, _runs_between(self.authors, start, end), _constant_parts(text), None)

    def _derived(self, start: int, end: int, operation: str) -> AuthoredText:
        """Return a slice of this text, which the source followed by `operation` computes."""
        if self.recorder is None:
            return self._constant_slice(start, end)
        text = plain_text(self)[start:end]
        variable = self.recorder.variable(source_of(self) + operation)
        return _make(text, _runs_between(self.authors, start, end), ((text, variable),), self.recorder)

    def _strip(self, method: str, characters: Any) -> AuthoredText:
        text = plain_text(self)
        chars = None if characters is None else plain_text(characters)
        start = 0 if method == "rstrip" else len(text) - len(text.lstrip(chars))
        end = max(start, len(text) if method == "lstrip" else len(text.rstrip(chars)))
        argument = "" if chars is None else ascii(chars)
        if len(self.parts) > 1 and self.recorder is not None:
            parts = self._stripped_parts(method, chars, argument)
            if parts is not None:
                return _make(text[start:end], _runs_between(self.authors, start, end), parts, self.recorder)
        return self._derived(start, end, f".{method}({argument})")

    def _stripped_parts(self, method: str, chars: str | None, argument: str) -> tuple[Part, ...] | None:
        """Strip only the outer parts; return None if one of them becomes empty."""
        assert self.recorder is not None
        parts = list(self.parts)
        for side, index in (("lstrip", 0), ("rstrip", -1)):
            if method not in (side, "strip"):
                continue
            text, name = parts[index]
            left = text.lstrip(chars) if side == "lstrip" else text.rstrip(chars)
            if not left:
                return None
            if name is not None:
                name = self.recorder.variable(f"{name}.{side}({argument})")
                self.recorder.guard(f"bool({name})", True)
            parts[index] = (left, name)
        return tuple(parts)

    def _split(self, method: str, separator: Any, maxsplit: Any) -> list[str]:
        text, limit = plain_text(self), int(maxsplit)
        sep = None if separator is None else plain_text(separator)
        self._seek(separator)
        found: list[str] = getattr(text, method)(sep, limit)
        spans, position = [], 0
        if sep is None:
            for fragment in found:
                position = text.index(fragment, position)
                spans.append((position, position + len(fragment)))
                position += len(fragment)
        else:
            for fragment in found:
                spans.append((position, position + len(fragment)))
                position += len(fragment) + len(sep)
        if separator is not None and not is_constant(separator):
            self._give_up("split by a variable")
        return self._parts_at(f"{method}({sep!a},{limit})", spans)

    def _partition(self, method: str, separator: str) -> tuple[str, str, str]:
        self._seek(separator)
        head, middle, tail = getattr(plain_text(self), method)(plain_text(separator))
        first, second = len(head), len(head) + len(middle)
        if not is_constant(separator):
            self._give_up("partition by a variable")
        operation = f"{method}({plain_text(separator)!a})"
        self._guard(f"{plain_text(separator)!a} in {source_of(self)}", bool(middle))
        one, two, three = self._parts_at(operation, [(0, first), (first, second), (second, second + len(tail))])
        return one, two, three

    def _parts_at(self, call: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        if self.recorder is None:
            return [self._constant_slice(start, end) for start, end in spans]
        whole = self.recorder.variable(f"{source_of(self)}.{call}")
        self.recorder.guard(f"len({whole})", len(spans))
        text, recorder = plain_text(self), self.recorder
        return [
            _make(
                text[start:end],
                _runs_between(self.authors, start, end),
                ((text[start:end], recorder.variable(f"{whole}[{number}]")),),
                recorder,
            )
            for number, (start, end) in enumerate(spans)
        ]

    def _cased(self, method: str) -> str:
        text = plain_text(self)
        result: str = getattr(text, method)()
        if len(result) != len(text):
            return self._opaque(result, f".{method}()")
        if self.recorder is None:
            return _make(result, self.authors, _constant_parts(result), None)
        name = self.recorder.variable(f"{source_of(self)}.{method}()")
        return _make(result, self.authors, ((result, name),), self.recorder)


def _asking(method: str) -> Callable[..., Any]:
    def ask(self: AuthoredText, *arguments: Any) -> Any:
        answer = getattr(plain_text(self), method)(*map(_plain_argument, arguments))
        if self.recorder is not None:
            for argument in arguments:
                self._seek(argument)
            self.recorder.guard(f"{source_of(self)}.{method}({','.join(map(source_of, arguments))})", answer)
        return answer

    ask.__name__ = method
    return ask


for _method in (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isdigit", "isalpha", "isalnum"),
    *("isspace", "islower", "isupper", "isnumeric", "isdecimal", "istitle", "isidentifier", "isascii"),
):
    setattr(AuthoredText, _method, _asking(_method))


def authored(text: str, author: Author, recorder: Recorder | None = None, source: str | None = None) -> AuthoredText:
    """Return a text by one author; with a `source`, another record may have another text in its place."""
    runs: tuple[Run, ...] = ((len(text), author),) if text else ()
    if recorder is None or source is None:
        return _make(text, runs, _constant_parts(text), None)
    return _make(text, runs, ((text, recorder.variable(source)),), recorder)


def constant(text: Any) -> AuthoredText:
    """Return a value as an authored text; without an author, it is the template's own."""
    if type(text) is AuthoredText:
        return text
    text = str(text)
    if type(text) is AuthoredText:
        return text
    return _make(text, ((len(text), None),) if text else (), _constant_parts(text), None)


def event(kind: str, message: int = TOOLS, loop: int = 0) -> AuthoredText:
    """Return an empty text that marks a place."""
    return _make("", ((0, Event(kind, message, loop)),), (), None)


def concatenate(texts: Iterable[Any]) -> AuthoredText:
    """Join texts, with their authors."""
    found = [text if type(text) is AuthoredText or type(text) is str else constant(text) for text in texts]
    if len(found) == 1:
        return constant(found[0])
    runs: list[Run] = []
    parts: list[Part] = []
    constants: list[str] = []  # since the last variable; there may be very many, so they are joined at once
    recorder = None
    for fragment in found:
        if type(fragment) is AuthoredText:
            runs += fragment.authors
            recorder = recorder or fragment.recorder
            new = fragment.parts
        elif fragment:
            runs.append((len(fragment), None))
            new = ((fragment, None),)
        else:
            continue
        for part in new:
            if part[1] is None:
                constants.append(part[0])
                continue
            if constants:
                parts.append(("".join(constants), None))
                constants.clear()
            parts.append(part)
    if constants:
        parts.append(("".join(constants), None))
    return _make("".join(map(plain_text, found)), tuple(runs), tuple(parts), recorder)


def build_text(text: str, authors: Iterable[Run], parts: Iterable[Part], recorder: Recorder | None) -> AuthoredText:
    """Return an authored text with these authors and parts."""
    return _make(text, tuple(authors), tuple(parts), recorder)


def percent_format(pattern: Any, values: Sequence[Any]) -> str:
    """Return `pattern % values` with the authors of values; only `%s` and `%%` are traced."""
    fragments = re.split(r"(%s|%%)", plain_text(pattern))
    if not is_constant(pattern) or any("%" in fragment for fragment in fragments[::2]):
        result = plain_text(pattern) % tuple(map(_plain_argument, values))
        first = next((value for value in (pattern, *values) if isinstance(value, AuthoredText)), None)
        if first is not None and first.recorder is not None:
            first.recorder.give_up("percent format")
        return constant(result) if first is None else first._opaque(result)
    waiting = iter(values)
    return concatenate(
        [
            fragment if n % 2 == 0 else "%" if fragment == "%%" else constant(next(waiting))
            for n, fragment in enumerate(fragments)
        ]
    )


def is_constant(value: Any) -> bool:
    """Return whether a text is the same for every record of the shape."""
    return not isinstance(value, AuthoredText) or value.recorder is None


def source_of(value: Any) -> str:
    """Return an expression that evaluates to a value."""
    if not isinstance(value, AuthoredText):
        return ascii(value)
    if value.recorder is None:
        return ascii(plain_text(value))
    if len(value.parts) == 1 and value.parts[0][1] is not None:
        return value.parts[0][1]
    return value.recorder.variable("+".join(name or ascii(text) for text, name in value.parts) or "''")


def first_author(runs: Iterable[Run]) -> Author | None:
    """Return the first author of some runs."""
    return next((author for length, author in runs if length and isinstance(author, Author)), None)


def _make(text: str, authors: tuple[Run, ...], parts: tuple[Part, ...], recorder: Recorder | None) -> AuthoredText:
    made = str.__new__(AuthoredText, text)
    made.authors, made.parts, made.recorder = authors, parts, recorder
    return made


def _constant_parts(text: str) -> tuple[Part, ...]:
    return ((text, None),) if text else ()


def _concatenated(left: Any, right: Any) -> Any:
    if not isinstance(left, str) or not isinstance(right, str):
        return NotImplemented
    return concatenate((left, right))


def _compare(text: AuthoredText, other: object, operator: str) -> Any:
    if not isinstance(other, str):
        return {"==": False, "!=": True}.get(operator, NotImplemented)
    one, two = plain_text(text), plain_text(other)
    answer = {
        "==": one == two, "!=": one != two, "<": one < two, "<=": one <= two, ">": one > two, ">=": one >= two,
    }[operator]  # fmt: skip
    recorder = text.recorder or getattr(other, "recorder", None)
    if recorder is not None and text is not other:
        if is_constant(other):
            recorder.sought.add(two)
        recorder.guard(f"{source_of(text)}{operator}{source_of(other)}", answer)
    return answer


def _runs_between(runs: Sequence[Run], start: int, end: int) -> tuple[Run, ...]:
    found: list[Run] = []
    position = 0
    for length, author in runs:
        if length == 0:
            if start <= position <= end:
                found.append((0, author))
        else:
            low, high = max(position, start), min(position + length, end)
            if low < high:
                found.append((high - low, author))
        position += length
    return tuple(found)


def _authors_of(text: str, default: Author | None) -> tuple[Run, ...]:
    """Return the authors of a replacement; a constant belongs to the author whose text it replaces."""
    if isinstance(text, AuthoredText) and first_author(text.authors):
        return text.authors
    return ((str.__len__(text), default),) if str.__len__(text) else ()


def _plain_argument(value: Any) -> Any:
    if isinstance(value, AuthoredText):
        return plain_text(value)
    if isinstance(value, tuple):
        return tuple(map(_plain_argument, value))
    return value


# Texts marked as safe: like Markup, they escape what is added to them, but keep authors.

# What markupsafe.escape replaces, in an order in which nothing is replaced twice.
_ESCAPES = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;"))


class AuthoredMarkup(AuthoredText):
    """An authored text that the filter `safe` has marked."""

    def __html__(self) -> str:
        return plain_text(self)

    def __str__(self) -> str:
        return build_text(plain_text(self), self.authors, self.parts, self.recorder)

    def __add__(self, other: Any) -> Any:
        return _added(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _added(other, self) if isinstance(other, str) else NotImplemented


def marked_as_safe(value: Any) -> AuthoredMarkup:
    """Return a value as a text that is not escaped.

    Example:
        >>> str("<b>" + marked_as_safe("<i>"))
        '&lt;b&gt;<i>'
    """
    text = constant(value)
    if text.recorder is not None:
        text.recorder.give_up("safe")
    marked = str.__new__(AuthoredMarkup, plain_text(text))
    marked.authors, marked.parts, marked.recorder = text.authors, text.parts, text.recorder
    return marked


def _added(left: Any, right: Any) -> AuthoredMarkup:
    return marked_as_safe(concatenate([_escaped(left), _escaped(right)]))


def _escaped(value: Any) -> AuthoredText:
    text = constant(value)
    if hasattr(value, "__html__"):
        return text
    for character, entity in _ESCAPES:
        if character in plain_text(text):
            text = constant(text.replace(character, entity))
    return text
