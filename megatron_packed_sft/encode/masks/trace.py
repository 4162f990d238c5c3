r"""Who wrote which character of a rendered chat.

Every string of a message is put between marks that name it. The chat is rendered once with the marks and once without;
only if both texts are equal but for the marks does the trace hold. Text between no marks is scaffold: the template's.

    messages   {"role": "assistant", "content": "Four."}
    marked     <|im_start|>assistant\n¤0¤Four.¤¤<|im_end|>\n        ¤ stands for a character that is not in the text
    trace      text "<|im_start|>assistant\nFour.<|im_end|>\n", spans [(22, 27, message 0)]

The marks stand inside a string's leading and trailing whitespace, so that templates may trim, and beside what the
template itself looks for in strings, so that `'</think>' in content` finds what it found before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import nodes

from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.support.drop_reasons import DropReason

ECHO = -1
"""The message of a span that nobody's turn is to be found by: a repeated string, a speaker's name, a tool's words."""

# DELETE, since marked text that is ASCII stays so and renders faster; then Unicode's noncharacters. JSON escapes none.
_MARK_CHARACTERS = ["\x7f", *(chr(code) for code in range(0xFDD0, 0xFDF0))]
# Templates compare these or count their letters, so marks in them would change the chat.
_NEVER_MARKED = frozenset({"role", "type", "id", "tool_call_id", "index"})
_METHODS = frozenset({"split", "rsplit", "startswith", "endswith", "replace", "find", "rfind", "index", "count"})


class Span(NamedTuple):
    """Characters [start, end) that came from a message; `before` and `after` are its unmarked neighbours there."""

    start: int
    end: int
    message: int
    before: str = ""
    after: str = ""


class Trace(NamedTuple):
    """A rendered text and its spans, in the order of the text; `unmarked` holds the record's strings without marks."""

    text: str
    spans: Sequence[Span]
    unmarked: Sequence[str] = ()


class Placement(NamedTuple):
    """What is marked: all but the values of some keys; equal messages with equal marks, or each with its own."""

    skipped: frozenset[str]
    equal_messages_alike: bool


# In the order they are tried. Some templates ask whether a message equals another one, or look a function's name up.
_PLACEMENTS = (
    Placement(_NEVER_MARKED, False),
    Placement(_NEVER_MARKED, True),
    Placement(_NEVER_MARKED | {"name"}, True),
    Placement(_NEVER_MARKED | {"name", "tool_calls"}, True),
)


class Tracer:
    """Traces the chats that one template renders.

    Example:
        >>> tracer = Tracer(Renderer("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"))
        >>> text, spans, _ = tracer.trace([{"role": "user", "content": " Hi "}])
        >>> text, text[spans[0].start : spans[0].end], spans[0].message
        ('<user>Hi', 'Hi', 0)
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        looked_for = sorted(_strings_looked_for(renderer.tree), key=len, reverse=True)
        self._looked_for = re.compile(f"({'|'.join(map(re.escape, looked_for))})") if looked_for else None

    def trace(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        *,
        mark_tools: bool = False,
        plain: str | None = None,
    ) -> Trace:
        """Trace a chat, or refuse it: a trace is never a guess.

        Args:
            messages: the chat.
            tools: the tools' schemas.
            mark_tools: mark the strings of `tools` too.
            plain: the chat as rendered already.
        """
        if plain is None:
            plain = self.renderer.render(messages, tools)
        free = free_character(plain)
        for placement in _PLACEMENTS:
            marking = _Marking(free, placement.skipped, self._looked_for)
            marked = marking.mark_messages(messages, placement.equal_messages_alike)
            marked_tools = marking.mark_tools(tools) if mark_tools else tools
            try:
                spans = marking.spans_of(self.renderer.render(marked, marked_tools), plain)
            except RecordRefusedError:
                continue  # the marks made the template refuse what it accepts without them
            if spans is not None:
                return Trace(plain, spans, marking.unmarked)
        raise RecordRefusedError(
            DropReason.UNTRACEABLE_TEMPLATE,
            f"{self.renderer.name} changes the messages' text in a way that cannot be followed; "
            "put generation marks into the template, or choose another",
        )


def free_character(text: str) -> str:
    r"""Return a character to make marks of: one that a text does not hold.

    Example:
        >>> free_character("a\x7fb") == "\ufdd0"
        True
    """
    for character in _MARK_CHARACTERS:
        if character not in text:
            return character
    raise RecordRefusedError(
        DropReason.UNTRACEABLE_TEMPLATE, "the record holds U+007F and all of U+FDD0..U+FDEF; clean its text"
    )


class _Marking:
    """The marks of one render: string n of the messages stands as ¤n¤text¤¤.

    An owner is the list of messages a string belongs to: one, or several that are equal. It is written once for each.
    """

    def __init__(self, free: str, skipped: frozenset[str], looked_for: re.Pattern[str] | None) -> None:
        self._free = free
        self._skipped = skipped
        self._looked_for = looked_for
        self._strings: dict[str, tuple[Sequence[int], str, str]] = {}
        self.unmarked: list[str] = []

    def mark_messages(self, messages: Sequence[dict[str, Any]], equal_alike: bool) -> list[dict[str, Any]]:
        if not equal_alike:
            return [self._mark_message(message, (number,)) for number, message in enumerate(messages)]
        owners: dict[str, list[int]] = {}
        for number, message in enumerate(messages):
            owners.setdefault(repr(message), []).append(number)
        marked = {key: self._mark_message(messages[owner[0]], owner) for key, owner in owners.items()}
        return [marked[repr(message)] for message in messages]

    def mark_tools(self, tools: Any) -> Any:
        return self._mark(tools, (ECHO,), self._skipped)

    def spans_of(self, marked: str, plain: str) -> list[Span] | None:
        """Return where the marked strings lie in the plain text; None if the two texts are not the same."""
        parts = marked.split(self._free)
        scaffold, numbers, inside, closes = parts[::4], parts[1::4], parts[2::4], parts[3::4]
        if len(parts) % 4 != 1 or any(closes) or not self._strings.keys() >= set(numbers):
            return None  # the template cut a string apart between its marks
        parts[1::4] = closes
        if "".join(parts) != plain:
            return None
        spans = []
        position = 0
        num_seen = dict.fromkeys(numbers, 0)
        for between, number, text in zip(scaffold, numbers, inside, strict=False):
            owner, before, after = self._strings[number]
            nth = num_seen[number]
            num_seen[number] += 1
            position += len(between)
            end = position + len(text)
            spans.append(Span(position, end, owner[nth] if nth < len(owner) else ECHO, before, after))
            position = end
        return spans

    def _mark_message(self, message: dict[str, Any], owner: Sequence[int]) -> dict[str, Any]:
        return {
            # A speaker's name belongs to the header, not to what is said.
            key: self._mark_item(key, item, (ECHO,) if key == "name" else owner, self._skipped)
            for key, item in message.items()
        }

    def _mark_item(self, key: str, item: Any, owner: Sequence[int], skipped: frozenset[str]) -> Any:
        if key in skipped and not isinstance(item, dict):  # a schema may describe an argument of such a name
            self.unmarked.extend(strings_in(item))
            return item
        # The names of arguments are the user's own, and mean nothing to a template.
        return self._mark(item, owner, frozenset() if key == "arguments" else skipped)

    def _mark(self, value: Any, owner: Sequence[int], skipped: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._mark_string(value, owner)
        if isinstance(value, dict):
            self.unmarked.extend(value)
            return {key: self._mark_item(key, item, owner, skipped) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, owner, skipped) for item in value]
        return value

    def _mark_string(self, text: str, owner: Sequence[int]) -> str:
        marked = []
        done = 0
        for (start, end), (stop, _) in pairwise([*self._cores(text), (len(text), len(text))]):
            before, number, after = text[done:start], str(len(self._strings)), text[end:stop]
            self._strings[number] = owner, before, after
            marked.append(f"{before}{self._free}{number}{self._free}{text[start:end]}{self._free}{self._free}")
            done = end
        marked.append(text[done:])
        return "".join(marked)

    def _cores(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield what is to stand between marks: all but what the template looks for, and the whitespace around it."""
        pieces = [text] if self._looked_for is None else self._looked_for.split(text)
        self.unmarked.extend(pieces[1::2])
        position = 0
        for number, piece in enumerate(pieces):
            core = piece.strip()
            if core and number % 2 == 0:
                start = position + len(piece) - len(piece.lstrip())
                yield start, start + len(core)
            position += len(piece)


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string inside a value, keys of inner objects too.

    Example:
        >>> list(strings_in({"name": "add", "arguments": {"a": 1, "b": "two"}}))
        ['name', 'add', 'arguments', 'a', 'b', 'two']
    """
    waiting = [value]
    while (
        waiting
    ):  # a stack, in the order of the text, because this runs for every record and nested generators are slow
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for key, inner in reversed(item.items()):
                waiting += (inner, key)
        elif isinstance(item, list | tuple):
            waiting += reversed(item)


def _strings_looked_for(tree: nodes.Template) -> set[str]:
    """Return the constants that a template looks for in strings. Names are left out: they are keys of messages."""
    found: list[nodes.Node] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS:
            found += call.args
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name == "replace":
            found += filtered.args
    for comparison in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in comparison.ops):
            found.append(comparison.expr)
    constants = {node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str)}
    return {text for text in constants if text.strip() and not text.strip().isidentifier()}
