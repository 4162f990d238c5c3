r"""The parts of a turn: reasoning, answer, tool calls, end of turn; each with its weight.

    <think>\nHm.\n</think>\n\nFour.<|im_end|>
    ├────── reasoning ──────┤├ans┤├── end ──┤

One traced render shows the author of every character. The template's text belongs to what it opens or closes: the tag
before a message's reasoning and the first tag after it are reasoning, and the tags and the JSON around a call are the
call. The end-of-turn token has the weight of the part before it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Author
from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedRenderer, TracedText
from megatron_packed_sft.encode.masks.turn_parts import Range, is_own
from megatron_packed_sft.encode.sequences import Segment
from megatron_packed_sft.encode.templates.renderer import REASONING_KEYS, RecordRefusedError
from megatron_packed_sft.support.drop_reasons import DropReason


class TurnKind(enum.IntEnum):
    """What a trained character is part of; `OTHER` is for roles besides the assistant and for text records."""

    OTHER = 0
    ANSWER = 1
    REASONING = 2
    TOOL_CALL = 3
    END_OF_TURN = 4


# Tags around reasoning that is part of a message's content.
_COMMON_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))
_PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


class TurnSyntax(NamedTuple):
    """How a template writes turns.

    Args:
        ends: its end-of-turn texts.
        tokens: matches control tokens and tags.
        reasoning_tags: pairs of texts that open and close reasoning.
    """

    ends: Sequence[str]
    tokens: re.Pattern[str]
    reasoning_tags: Sequence[tuple[str, str]] = _COMMON_TAGS


class MessageWeights(NamedTuple):
    """The weights of a message.

    Args:
        message: the weight of the message, 0 if only parts of it are trained.
        parts: the weights of the parts of its content; None stands for the message's weight.
    """

    message: float
    parts: Sequence[float | None] = ()

    def of(self, author: Author | None) -> float:
        """Return the weight of an author's text; the template's text has the message's weight."""
        if author is None or author.path[:2] != ("content", "part"):
            return self.message
        weight = self.parts[int(author.path[2])]
        return self.message if weight is None else weight


class _Stretch(NamedTuple):
    start: int
    end: int
    kind: TurnKind
    author: Author | None  # None for the template's text


def probe_syntax(
    renderer: TracedRenderer, reasoning_key: str | None, tokens: re.Pattern[str], ends: Sequence[str]
) -> TurnSyntax:
    """Find the tags between which a template writes reasoning, by rendering a small chat."""
    tags = list(_COMMON_TAGS)
    if reasoning_key is not None:
        try:
            chat = renderer.render([_PROBE[0], {**_PROBE[1], reasoning_key: "reason"}], AuthoredChat())
        except RecordRefusedError:
            return TurnSyntax(ends, tokens, tags)
        for span in chat.spans:
            if span.author.path == (reasoning_key,):
                before = _token_before(chat.text, span.start, tokens)
                after = tokens.search(chat.text, span.end)
                if before and after and not chat.text[span.end : after.start()].strip():
                    tags.insert(0, (before, after[0]))
    return TurnSyntax(ends, tokens, tuple(dict.fromkeys(tags)))


def segments_of(
    chat: TracedText,
    ranges: Sequence[Range],
    roles: Sequence[str],
    weights: Mapping[int, MessageWeights],
    syntax: TurnSyntax,
    untrained: frozenset[TurnKind],
) -> list[Segment]:
    """Cut the trained ranges of a chat at every change of weight or kind, without what has weight 0.

    Args:
        chat: a traced render of the whole chat.
        ranges: its trained ranges.
        roles: of its messages.
        weights: of the trained messages, by number.
        syntax: of the template.
        untrained: kinds that are not trained.
    """
    segments: list[Segment] = []
    for found in ranges:
        for owner, turn in _by_owner(chat, found, weights):
            if roles[owner] == "assistant":
                stretches = _stretches(chat, turn, owner, syntax)
            else:
                stretches = _plain_stretches(chat, turn, owner)
            for segment in _weighted(stretches, weights[owner], untrained):
                last = segments[-1] if segments else None
                if last is not None and last[1:] == (segment.start, *segment[2:]):
                    segments[-1] = last._replace(end=segment.end)
                else:
                    segments.append(segment)
    return segments


def _weighted(
    stretches: Sequence[_Stretch], weights: MessageWeights, untrained: frozenset[TurnKind]
) -> Iterator[Segment]:
    before: float | None = None
    for start, end, kind, author in stretches:
        weight = 0.0 if kind in untrained else weights.of(author)
        if kind is TurnKind.END_OF_TURN and before is not None:
            weight = before  # it has the weight of the part before it
        if weight > 0 and start < end:
            yield Segment(start, end, weight, int(kind))
        if author is not None:
            before = weight


def _by_owner(chat: TracedText, found: Range, wanted: Mapping[int, MessageWeights]) -> Iterator[tuple[int, Range]]:
    """Yield the messages of a trained range with their parts of it, since turns that touch were joined."""
    spans = [span for span in _inside(chat, found) if span.author.message in wanted]
    owners = list(dict.fromkeys(span.author.message for span in spans))
    if len(owners) < 2:
        yield owners[0] if owners else _owner_by_iteration(chat, found, wanted), found
        return
    start = found[0]
    for (one, last), (two, first) in pairwise(_outer_spans(spans, owners)):
        entered = [at for at, mark in chat.marks if mark.kind == "enter" and mark.message == two]
        cut = max((at for at in entered if last.end <= at <= first.start), default=first.start)
        yield one, (start, cut)
        start = cut
    yield owners[-1], (start, found[1])


def _outer_spans(spans: Sequence[Span], owners: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield each owner with a span from its first text to its last."""
    for owner in owners:
        own = [span for span in spans if span.author.message == owner]
        yield owner, Span(own[0].start, own[-1].end, own[0].author)


def _owner_by_iteration(chat: TracedText, found: Range, wanted: Mapping[int, MessageWeights]) -> int:
    entered = [mark.message for at, mark in chat.marks if mark.kind == "enter" and at <= found[0]]
    if entered and entered[-1] in wanted:
        return entered[-1]
    if len(wanted) == 1:
        return next(iter(wanted))
    raise RecordRefusedError(
        DropReason.UNTRACEABLE_TEMPLATE,
        "an empty turn cannot be distinguished from others, so its weight cannot be applied",
    )


def _inside(chat: TracedText, turn: Range) -> list[Span]:
    """Return the spans of messages in a range, cut at its edges."""
    return [
        Span(max(span.start, turn[0]), min(span.end, turn[1]), span.author)
        for span in chat.spans
        if span.start < turn[1] and turn[0] < span.end and is_own(span.author, span.author.message)
    ]


def _plain_stretches(chat: TracedText, turn: Range, owner: int) -> list[_Stretch]:
    stretches, position = [], turn[0]
    for span in _inside(chat, turn):
        author = span.author if span.author.message == owner else None
        stretches += [
            _Stretch(position, span.start, TurnKind.OTHER, None),
            _Stretch(span.start, span.end, TurnKind.OTHER, author),
        ]
        position = span.end
    return [*stretches, _Stretch(position, turn[1], TurnKind.OTHER, stretches[-1].author if stretches else None)]


def _stretches(chat: TracedText, turn: Range, owner: int, syntax: TurnSyntax) -> list[_Stretch]:
    """Cut an assistant's turn into stretches of one author and one kind."""
    text, (start, end) = chat.text, turn
    spans = [span for span in _inside(chat, turn) if span.author.message == owner]
    body = end
    said = spans[-1].end if spans else start
    for token in syntax.ends:
        if text.endswith(token, said, end):
            body = end - len(token)
            break
    stretches: list[_Stretch] = []
    position, kind, opening = start, TurnKind.ANSWER, (start, start)
    for number, span in enumerate(spans):
        last, kind = kind, _kind_of(span.author)
        cut = position
        if number:
            cut = _end_of_closing(text, (position, span.start), last, opening, syntax) if kind != last else span.start
        stretches += [_Stretch(position, cut, last, None), _Stretch(cut, span.start, kind, None)]
        stretches.append(_Stretch(span.start, span.end, kind, span.author))
        if not number or kind != last:
            opening = (cut, span.start)
        position = span.end
    stretches.append(_Stretch(position, body, kind, None))
    stretches = _with_leading_reasoning(text, start, stretches, syntax)
    return [*stretches, _Stretch(body, end, TurnKind.END_OF_TURN, None)]


def _end_of_closing(text: str, between: Range, kind: TurnKind, opening: Range, syntax: TurnSyntax) -> int:
    """Return where the template's text stops closing the part before it and begins to open the next.

    A part that was opened by a tag ends with the next tag, and so does reasoning that the prompt opened.
    """
    start, limit = between
    if kind is TurnKind.TOOL_CALL:
        return limit  # the last bracket of a call cannot be identified
    closing = syntax.tokens.search(text, start, limit)
    opened = list(syntax.tokens.finditer(text, *opening))
    is_known = closing is not None and any(closing[0] == close for _, close in syntax.reasoning_tags)
    if closing is None or not (opened or (kind is TurnKind.REASONING and is_known)):
        return start
    end = closing.end()
    name = re.match(r"\w+", text[end:limit])
    following = syntax.tokens.match(text, end + name.end(), limit) if name else None
    if name and following and _is_named(text, opening, name[0], syntax):  # <|close|>think<|sep|>
        end = following.end()
    return limit - len(text[end:limit].lstrip())


def _is_named(text: str, opening: Range, name: str, syntax: TurnSyntax) -> bool:
    """Return whether the last two tags before a text enclose a name: <|open|>think<|sep|>."""
    tags = list(syntax.tokens.finditer(text, max(0, opening[1] - 120), opening[1]))[-2:]
    return len(tags) == 2 and text[tags[0].end() : tags[1].start()] == name


def _with_leading_reasoning(text: str, start: int, stretches: list[_Stretch], syntax: TurnSyntax) -> list[_Stretch]:
    """Mark what a turn begins with between tags as reasoning, no matter who wrote the tags."""
    stop = stretches[-1].end
    for opening, closing in syntax.reasoning_tags:
        begins = start + len(text[start:stop]) - len(text[start:stop].lstrip())
        is_given = text[:start].rstrip().endswith(opening) or text.startswith(closing, begins, stop)
        if not is_given and not text.startswith(opening, begins, stop):
            continue
        at = text.find(closing, start if is_given else begins + len(opening), stop)
        if at < 0:
            continue
        behind = at + len(closing)
        edge = stop - len(text[behind:stop].lstrip())
        cut = []
        for stretch in stretches:
            if stretch.end <= edge:
                cut.append(stretch._replace(kind=TurnKind.REASONING))
            elif stretch.start < edge:
                cut += [stretch._replace(end=edge, kind=TurnKind.REASONING), stretch._replace(start=edge)]
            else:
                cut.append(stretch)
        return cut
    return stretches


def _token_before(text: str, position: int, tokens: re.Pattern[str]) -> str | None:
    """Return the control token or tag right before a position, ignoring blanks, or None."""
    found = None
    for match in tokens.finditer(text, max(0, position - 120), position):
        found = match
    return found[0] if found is not None and not text[found.end() : position].strip() else None


def _kind_of(author: Author) -> TurnKind:
    key = author.path[0] if author.path else "content"
    if key in REASONING_KEYS:
        return TurnKind.REASONING
    return TurnKind.TOOL_CALL if key == "tool_calls" else TurnKind.ANSWER
