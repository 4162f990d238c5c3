"""Renders of parts of a chat: prompts, prefixes and probes, and the text that templates write between messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.masks.authored_text import Author
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.support.drop_reasons import DropReason

Range = tuple[int, int]
Messages = Sequence[dict[str, Any]]

# These keys of a message belong to its header, not to its text.
_HEADER_KEYS = frozenset({"role", "name", "tool_call_id"})
_TAG = r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]"


class Render(Protocol):
    """Renders a part of the chat; RecordRefusedError if the template cannot."""

    def __call__(self, messages: Messages, *, add_generation_prompt: bool = False, probe: bool = False) -> TracedText:
        """Render messages; in a probe, some of them are not the record's."""


class Scaffold(NamedTuple):
    """The end of a prompt: the template's text after the last text of a message.

    Args:
        text: all of it.
        num_bare: how many of its characters are also written without a generation prompt.
        after: the author of the last text before it.
    """

    text: str
    num_bare: int
    after: Author | None

    @property
    def is_asked_for(self) -> bool:
        """Whether the template obeys `add_generation_prompt`."""
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
        """Render some messages; return None if the template cannot."""
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, probe=probe)
        except RecordRefusedError:
            return None

    def prompts(self, i: int) -> tuple[TracedText | None, TracedText | None]:
        """Return the chat before message i, with and without a generation prompt."""
        prompt = self.render(self.messages[:i], add_generation_prompt=True) if i else None
        return prompt, self.render(self.messages[:i]) if prompt is not None else None

    def prefix(self, i: int) -> TracedText | None:
        """Return the chat up to message i."""
        return self.render(self.messages[: i + 1]) if i + 1 < len(self.messages) else self.chat

    def probe(self, i: int, message: dict[str, Any]) -> TracedText | None:
        """Return the chat up to message i, with another assistant message in its place."""
        return self.render([*self.messages[:i], {"role": "assistant", **message}], probe=True)


class Tokens:
    """Control tokens and tags, inside which no turn may start or end.

    Args:
        control: the tokenizer's control tokens.
    """

    def __init__(self, control: re.Pattern[str]) -> None:
        self.pattern = re.compile(f"{control.pattern}|{_TAG}")

    def outside(self, text: str, position: int) -> int:
        """Return a position moved to the start of the token, tag or word that contains it."""
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
        """Return where a prompt and a chat part, moved before a block that the prompt opens and closes."""
        rest = prompt[parting:]
        if not rest.strip():
            return parting
        opened = list(self.pattern.finditer(prompt, num_bare, parting))
        name = block_name(opened[-1][0]) if len(opened) > 1 else ""
        is_closed = name and any(block_name(match[0]) == name for match in self.pattern.finditer(rest))
        return opened[-1].start() if is_closed else parting

    def num_essential(self, header: str, *, with_role: bool = False) -> int:
        """Return how much of a header is essential: the words before its first control token, or that token.

        Args:
            header: what a prompt adds.
            with_role: whether the word after the token is essential too, as in `<|im_start|>assistant`.
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
        """Return whether a text contains enough of a header."""
        if not header.strip():
            return True
        has_token = self.pattern.search(header) is not None
        return bool(got.strip()) and len(got) >= (self.num_essential(header) if has_token else 1)


def is_own(author: Author, i: int) -> bool:
    """Return whether an author is a text of message i."""
    return author.message == i and not (author.path and author.path[0] in _HEADER_KEYS)


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, leave out empty ones, and join those that touch or overlap.

    Example:
        >>> join_ranges([(5, 6), (0, 2), (2, 4), (8, 8)])
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
    """Return a refusal of a record whose renders give no consistent answer."""
    return RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, detail)


def role_of(message: dict[str, Any]) -> Any:
    """Return the role of a message."""
    return message.get("role")


def last_foreign(render: TracedText, position: int, i: int) -> tuple[int, Author | None]:
    """Return the end and the author of the last text before a position that is not from message i."""
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
    """Return where the template first writes for a message other than i after a position."""
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
    """Return the end of a prompt; `bare` is the same render without a generation prompt."""
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
    """Return the length of the common prefix of two texts."""
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
    """Return what an opening and a closing tag share, such as `<|START_TEXT|>` and `<|END_TEXT|>`."""
    return re.sub(r"START|END|begin|end|[^A-Za-z]", "", token)


# The blocks that a template marks with `{% generation %}`, and the messages that they belong to.


class Block(NamedTuple):
    """A generation block.

    Args:
        range: its characters.
        owner: the message that it belongs to, or None if that is unclear.
    """

    range: Range
    owner: int | None


def generation_blocks(chat: TracedText, roles: Sequence[str]) -> list[Block]:
    """Return the generation blocks of a render; a turn may have several, some without text of a message."""
    found: list[tuple[Range, int | None]] = []
    entered: dict[int, int] = {}  # loop -> message
    begun: list[tuple[int, int | None]] = []
    for position, event in chat.marks:
        if event.kind == "begin":
            begun.append((position, next(reversed(entered.values()), None)))
        elif event.kind == "end":
            start, message = begun.pop()
            found.append(((start, position), message))
        else:
            entered.pop(event.loop, None)
            if event.kind == "enter":
                entered[event.loop] = event.message
    assistants = [number for number, role in enumerate(roles) if role == "assistant"]
    by_number = assistants if len(assistants) == len(found) else [None] * len(found)
    return [
        Block(block, _owner(chat, block, message, number))
        for (block, message), number in zip(found, by_number, strict=True)
    ]


def _owner(chat: TracedText, block: Range, in_loop: int | None, by_number: int | None) -> int | None:
    """Return the message that a block belongs to: by its text, by the loop that writes it, or by its place."""
    start, end = block
    said = {span.author.message for span in chat.spans if start <= span.start < end and _is_message(span.author)}
    if said:
        return said.pop() if len(said) == 1 else None
    if in_loop is not None or by_number is not None:
        return in_loop if in_loop is not None else by_number
    # A block after all messages belongs to the last one.
    before = [span.author.message for span in chat.spans if span.end <= start and _is_message(span.author)]
    return before[-1] if before else None


def _is_message(author: Author) -> bool:
    return author.message >= 0 and is_own(author, author.message)


# The turns of a rendered chat, to be shown to people: what the template writes for each message, and where.
#
#     <|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n
#     ├─ before ──────┤    ├─ after ──┤├─ before ───────────┤     ├─ after ──┤
#     ├──────────── turn 0 ────────────┤├──────────────── turn 1 ────────────┤
#
# What is trained does not depend on it; `TurnFinder` decides that.


class TurnOutline(NamedTuple):
    """What the template writes for one message.

    Args:
        message: its number.
        role: its role.
        start, end: the characters that the template writes for it; equal if there are none.
        said: the spans of its own texts: content, reasoning, calls.
        is_inside: whether it is inside the turn of another message, like a system prompt in the first question.
    """

    message: int
    role: str
    start: int
    end: int
    said: Sequence[Span] = ()
    is_inside: bool = False

    def before(self, text: str) -> str:
        """Return what the template writes before its first text."""
        return text[self.start : self.said[0].start] if self.said else text[self.start : self.end]

    def after(self, text: str) -> str:
        """Return what the template writes after its last text."""
        return text[self.said[-1].end : self.end] if self.said else ""


def outline_of(messages: Sequence[dict[str, Any]], chat: TracedText, ends: Sequence[str]) -> list[TurnOutline]:
    """Return the turns of a chat, one for each message.

    If the template's loop shows which message it is writing for, that decides. Otherwise, a turn extends from the end
    of the turn before it to its end of turn.

    Args:
        messages: in the form that was rendered.
        chat: their traced render.
        ends: end-of-turn texts of the template.
    """
    said = [_longest_run(chat, number) for number in range(len(messages))]
    found: list[TurnOutline] = []
    for number, message in enumerate(messages):
        own = said[number]
        whole = _iteration(chat, number, own)
        if whole is None and own:
            whole = _between_neighbours(chat, said, number, found[-1].end if found else 0, ends)
        start, end = whole or (found[-1].end, found[-1].end) if found or whole else (0, 0)
        found.append(TurnOutline(number, str(message.get("role", "")), start, end, own))
    return [one._replace(is_inside=_is_inside(one, found)) for one in found]


def _longest_run(chat: TracedText, number: int) -> list[Span]:
    """Return the spans of a message's own texts; if they are in several places, those of the longest."""
    runs: list[list[Span]] = [[]]
    for span in chat.spans:
        if is_own(span.author, number):
            runs[-1].append(span)
        elif runs[-1] and span.author.message != number:
            runs.append([])
    return max(runs, key=lambda run: sum(span.end - span.start for span in run))


def _iteration(chat: TracedText, number: int, said: Sequence[Span]) -> Range | None:
    """Return the iteration of the template's loop that writes a message, if one does."""
    own = [(start, end) for message, start, end in iterations_of(chat) if message == number and end > start]
    if said:
        own = [(start, end) for start, end in own if start <= said[0].start and said[-1].end <= end]
    return max(own, key=lambda both: both[1] - both[0], default=None)


def _between_neighbours(
    chat: TracedText, said: Sequence[Sequence[Span]], number: int, previous_end: int, ends: Sequence[str]
) -> Range:
    own = said[number]
    iterations = [one for one in iterations_of(chat) if one[0] != number]
    if any(at <= own[0].start and own[-1].end <= end for _, at, end in iterations):
        return own[0].start, own[-1].end  # inside the turn of another message
    start = previous_end if previous_end <= own[0].start else own[0].start
    limit = min(
        (other[0].start for other in said if other and other[0].start >= own[-1].end),
        default=len(chat.text),
    )
    entered = [at for _, at, end in iterations if end > at >= own[-1].end]
    limit = min([limit, *entered])
    behind = chat.text[own[-1].end : limit]
    found = [(behind.find(token), token) for token in ends if token and token in behind]
    if not found:
        return start, own[-1].end if limit < len(chat.text) else len(chat.text)
    at, token = min(found)
    stop = at + len(token)
    stop += len(behind[stop:]) - len(behind[stop:].lstrip())
    return start, own[-1].end + stop


def _is_inside(one: TurnOutline, others: Sequence[TurnOutline]) -> bool:
    return bool(one.said) and any(
        other.message != one.message and other.start <= one.said[0].start and one.said[-1].end <= other.end
        for other in others
        if other.said and other.end - other.start > one.end - one.start
    )
