r"""The turns of a rendered chat: what the template writes for each message, and where.

    <|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n
    ├─ before ──────┤    ├─ after ──┤├─ before ───────────┤     ├─ after ──┤
    ├──────────── turn 0 ────────────┤├──────────────── turn 1 ────────────┤

For people to look at. What is trained does not depend on it: that is decided by `TurnFinder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.masks.turn_parts import Range, is_own, iterations_of


class TurnOutline(NamedTuple):
    """One message as it is written.

    Args:
        message: its number.
        role: who speaks.
        start, end: the characters that the template writes for it; equal if it writes none.
        said: where its own texts are: content, reasoning, calls.
        is_inside: it stands inside the turn of another message, as a system prompt in the first question does.
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
        """Return what the template writes behind its last text."""
        return text[self.said[-1].end : self.end] if self.said else ""


def outline_of(messages: Sequence[dict[str, Any]], chat: TracedText, ends: Sequence[str]) -> list[TurnOutline]:
    """Return the turns of a chat, one for each message.

    Where the template's loop shows which message it is writing for, that decides. Elsewhere a turn goes from the end of
    the turn before it to its end of turn.

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
    """Return a message's own texts; where they stand in several places, those of the largest."""
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
