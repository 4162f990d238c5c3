"""Renders of a chat's parts: prompts, prefixes and probes, and the text that templates write between messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.masks.authored_text import Author
from megatron_packed_sft.encode.masks.traced_renderer import TracedText
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.support.drop_reasons import DropReason

Range = tuple[int, int]
Messages = Sequence[dict[str, Any]]

# What a message is called belongs to its header, not to what it says.
_HEADER_KEYS = frozenset({"role", "name", "tool_call_id"})
_TAG = r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]"


class Render(Protocol):
    """Renders a part of the chat; RecordRefusedError if the template cannot."""

    def __call__(self, messages: Messages, *, add_generation_prompt: bool = False, probe: bool = False) -> TracedText:
        """`probe`: some messages are ours."""


class Scaffold(NamedTuple):
    """What a prompt ends with: the template's text after the last text that somebody wrote.

    Args:
        text: all of it.
        num_bare: how much of it stands there without a generation prompt, too.
        after: who wrote the last text before it.
    """

    text: str
    num_bare: int
    after: Author | None

    @property
    def is_asked_for(self) -> bool:
        """Whether the template heeds `add_generation_prompt`."""
        return len(self.text) > self.num_bare


class ChatParts:
    """A chat and renders of its parts.

    Args:
        messages: of the chat.
        render: renders parts of it.
    """

    def __init__(self, messages: Messages, render: Render) -> None:
        self.messages = messages
        self.chat = render(messages)
        self._render = render

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = False, probe: bool = False
    ) -> TracedText | None:
        """Render some messages; None if the template cannot."""
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, probe=probe)
        except RecordRefusedError:
            return None

    def prompts(self, i: int) -> tuple[TracedText | None, TracedText | None]:
        """Return what comes before message i, with and without a generation prompt."""
        prompt = self.render(self.messages[:i], add_generation_prompt=True) if i else None
        return prompt, self.render(self.messages[:i]) if prompt is not None else None

    def prefix(self, i: int) -> TracedText | None:
        """Return the chat up to message i."""
        return self.render(self.messages[: i + 1]) if i + 1 < len(self.messages) else self.chat

    def probe(self, i: int, message: dict[str, Any]) -> TracedText | None:
        """Return the chat up to message i, with another message of the assistant in its place."""
        return self.render([*self.messages[:i], {"role": "assistant", **message}], probe=True)


class Tokens:
    """Control tokens and tags, which are whole or not there at all.

    Args:
        control: the tokenizer's control tokens.
    """

    def __init__(self, control: re.Pattern[str]) -> None:
        self.pattern = re.compile(f"{control.pattern}|{_TAG}")

    def outside(self, text: str, position: int) -> int:
        """Move a position in front of the token, tag or word that it stands in."""
        if not 0 < position < len(text):
            return position
        low = max(0, position - 80)
        for match in self.pattern.finditer(text, low, min(len(text), position + 80)):
            if match.start() < position < match.end():
                return match.start()
            if position in match.span():
                return position
        if _is_word(text[position - 1]) and _is_word(text[position]):
            while position and _is_word(text[position - 1]):
                position -= 1
        return position

    def before_forced_block(self, prompt: str, parting: int, num_bare: int) -> int:
        """Return where a prompt parts: a block that it opens and closes is given whole or not at all."""
        rest = prompt[parting:]
        if not rest.strip():
            return parting
        opened = list(self.pattern.finditer(prompt, num_bare, parting))
        name = block_name(opened[-1][0]) if len(opened) > 1 else ""
        is_closed = name and any(block_name(match[0]) == name for match in self.pattern.finditer(rest))
        return opened[-1].start() if is_closed else parting

    def num_essential(self, header: str, *, with_role: bool = False) -> int:
        """Return how much of a header must be there: the words before its first control token, or that token.

        Args:
            header: what a prompt adds.
            with_role: the word right behind the token, as in `<|im_start|>assistant`, must be there, too.
        """
        token = self.pattern.search(header)
        if token is None:
            return len(header.rstrip())
        words = len(header[: token.start()].rstrip())
        if words or not with_role:
            return words or token.end()
        end = token.end()
        while end < len(header) and _is_word(header[end]):
            end += 1
        return end

    def has_header(self, got: str, header: str) -> bool:
        """Whether enough of a header is there."""
        if not header.strip():
            return True
        has_token = self.pattern.search(header) is not None
        return bool(got.strip()) and len(got) >= (self.num_essential(header) if has_token else 1)


def is_own(author: Author, i: int) -> bool:
    """Whether an author is what message i says."""
    return author.message == i and not (author.path and author.path[0] in _HEADER_KEYS)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, leave out empty ones, and join those that touch or overlap.

    Example:
        >>> joined([(5, 6), (0, 2), (2, 4), (8, 8)])
        [(0, 4), (5, 6)]
    """
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif start < end:
            result.append((start, end))
    return result


def untraceable(detail: str) -> RecordRefusedError:
    """Return a refusal: the renders give no consistent answer."""
    return RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, detail)


def role_of(message: dict[str, Any]) -> Any:
    """Return who speaks."""
    return message.get("role")


def last_foreign(render: TracedText, position: int, i: int) -> tuple[int, Author | None]:
    """Return the end and the author of the last text before a position that message i did not write."""
    end, author = 0, None
    for span in render.spans:
        if span.start >= position:
            break
        if span.end <= position and not is_own(span.author, i):
            end, author = span.end, span.author
    return end, author


def iterations_of(render: TracedText) -> Iterator[tuple[int, int, int]]:
    """Yield message, start and end of each iteration over messages."""
    entered: dict[int, tuple[int, int]] = {}  # loop -> message, position
    for position, mark in render.marks:
        if mark.kind in ("enter", "leave", "after") and mark.loop in entered:
            message, start = entered.pop(mark.loop)
            yield message, start, position
        if mark.kind == "enter":
            entered[mark.loop] = mark.message, position


def next_iteration(render: TracedText, i: int, position: int) -> int:
    """Return where the template first writes for another message than i after a position."""
    starts = (s for message, s, end in iterations_of(render) if message != i and s >= position and end > s)
    return next(starts, len(render.text))


def left_iteration(render: TracedText, i: int, last: int) -> int | None:
    """Return where the template leaves its iteration for message i, after that message's last text."""
    loop = None
    for position, mark in render.marks:
        if mark.kind == "enter" and mark.message == i:
            loop = mark.loop
        elif position >= last and (
            (mark.kind == "leave" and mark.message == i)
            or mark.kind == "enter"
            or (mark.kind == "after" and mark.loop == loop)
        ):
            return position
    return None


def scaffold_of(prompt: TracedText, bare: TracedText | None) -> Scaffold:
    """Return what a prompt ends with; `bare` is the same render without a generation prompt."""
    last = prompt.spans[-1] if prompt.spans else None
    end, after = (last.end, last.author) if last else (0, None)
    text = prompt.text[end:]
    num_bare = 0
    if bare is not None:
        bare_last = bare.spans[-1] if bare.spans else None
        if (bare_last.author if bare_last else None) == after:
            num_bare = num_shared(text, bare.text[bare_last.end if bare_last else 0 :])
    return Scaffold(text, num_bare, after)


def num_shared(one: str, two: str) -> int:
    """Return the length of the beginning that two texts share."""
    low, high = 0, min(len(one), len(two))
    if one[:high] == two[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == two[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def block_name(token: str) -> str:
    """`<think>` and `</think>`, `<|START_TEXT|>` and `<|END_TEXT|>` have one name."""
    return re.sub(r"START|END|begin|end|[^A-Za-z]", "", token)
