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
from typing import Any, NamedTuple

from jinja2 import nodes

from megatron_packed_sft.encode.environment import Renderer, RowRefusedError

ECHO = -1
"""The message of a span that nobody's turn is to be found by: a repeated string, or one of a tool's description."""

# DELETE, since marked text that is ASCII stays so and renders faster; then Unicode's noncharacters. JSON escapes none.
_MARK_CHARACTERS = ["\x7f", *(chr(code) for code in range(0xFDD0, 0xFDF0))]
# Templates compare these or count their letters, so marks in them would change the chat.
_NEVER_MARKED = frozenset({"role", "type", "id", "tool_call_id", "index"})
_METHODS = frozenset({"split", "rsplit", "startswith", "endswith", "replace", "find", "rfind", "index", "count"})


class Span(NamedTuple):
    """Characters [start, end) that came from a message; `before` and `after` are the unmarked ends of their string."""

    start: int
    end: int
    message: int
    before: str = ""
    after: str = ""


class Trace(NamedTuple):
    """A rendered text and its spans, in the order of the text. `unmarked` are strings of the row that bear no marks."""

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
            marked_tools = marking.mark(tools, (ECHO,)) if mark_tools else tools
            try:
                spans = marking.spans_of(self.renderer.render(marked, marked_tools), plain)
            except RowRefusedError:
                continue  # the marks made the template refuse what it accepts without them
            if spans is not None:
                return Trace(plain, spans, marking.unmarked)
        raise RowRefusedError(
            "untraceable_template",
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
    raise RowRefusedError("untraceable_template", "the row holds U+007F and all of U+FDD0..U+FDEF; clean its text")


class _Marking:
    """The marks of one render: string n of the messages stands as ¤n¤text¤¤.

    An owner is the list of messages a string belongs to: one, or several that are equal. It is written once for each.
    """

    def __init__(self, free: str, skipped: frozenset[str], looked_for: re.Pattern[str] | None) -> None:
        self._mark = free
        self._skipped = skipped
        self._looked_for = looked_for
        self._strings: list[tuple[Sequence[int], str, str]] = []
        self.unmarked: list[str] = []

    def mark_messages(self, messages: Sequence[dict[str, Any]], equal_alike: bool) -> list[dict[str, Any]]:
        if not equal_alike:
            return [self._mark_mapping(message, (number,)) for number, message in enumerate(messages)]
        owners: dict[str, list[int]] = {}
        for number, message in enumerate(messages):
            owners.setdefault(repr(message), []).append(number)
        marked = {key: self._mark_mapping(messages[owner[0]], owner) for key, owner in owners.items()}
        return [marked[repr(message)] for message in messages]

    def mark(self, value: Any, owner: Sequence[int]) -> Any:
        """Mark all strings inside a value."""
        if isinstance(value, str):
            return self._mark_string(value, owner)
        if isinstance(value, dict):
            self.unmarked.extend(value)
            return self._mark_mapping(value, owner)
        if isinstance(value, list | tuple):
            return [self.mark(item, owner) for item in value]
        return value

    def spans_of(self, marked: str, plain: str) -> list[Span] | None:
        """Return where the marked strings lie in the plain text; None if the two texts are not the same."""
        parts = marked.split(self._mark)
        scaffold, numbers, inside, closes = parts[::4], parts[1::4], parts[2::4], parts[3::4]
        if any(closes) or len(scaffold) != len(closes) + 1 or not all(map(str.isdecimal, numbers)):
            return None  # the template cut a string apart between its marks
        spans = []
        position = 0
        num_seen = [0] * len(self._strings)
        for between, digits, text in zip(scaffold, numbers, inside, strict=False):
            number = int(digits)
            owner, before, after = self._strings[number]
            nth = num_seen[number]
            num_seen[number] += 1
            position += len(between)
            end = position + len(text)
            spans.append(Span(position, end, owner[nth] if nth < len(owner) else ECHO, before, after))
            position = end
        parts[1::4] = [""] * len(numbers)
        return spans if "".join(parts) == plain else None

    def _mark_mapping(self, value: dict[str, Any], owner: Sequence[int]) -> dict[str, Any]:
        marked = {}
        for key, item in value.items():
            if key in self._skipped:
                self.unmarked.extend(strings_in(item))
                marked[key] = item
            else:
                marked[key] = self.mark(item, owner)
        return marked

    def _mark_string(self, text: str, owner: Sequence[int]) -> str:
        if self._looked_for is None or not self._looked_for.search(text):
            return self._mark_piece(text, owner)
        # The odd pieces are what the template looks for. They stay whole and bare, with the whitespace around them.
        pieces = self._looked_for.split(text)
        self.unmarked.extend(pieces[1::2])
        marked = [piece if number % 2 else self._mark_piece(piece, owner) for number, piece in enumerate(pieces)]
        return "".join(marked)

    def _mark_piece(self, text: str, owner: Sequence[int]) -> str:
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core) if len(core) < len(text) else ("", "", "")
        self._strings.append((owner, before, after))
        return f"{before}{self._mark}{len(self._strings) - 1}{self._mark}{core}{self._mark}{self._mark}{after}"


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string inside a value, keys of inner objects too.

    Example:
        >>> list(strings_in({"name": "add", "arguments": {"a": 1, "b": "two"}}))
        ['name', 'add', 'arguments', 'a', 'b', 'two']
    """
    waiting = [value]
    while waiting:  # a stack, in the order of the text, because this runs for every row and nested generators are slow
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
