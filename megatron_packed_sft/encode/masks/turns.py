r"""Where the turns of a traced chat begin and end.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nFour.<|im_end|>\n
    ├─────── header ──────┤├──────────────── turn ─────────────────┤

An assistant's turn is all that the model writes: from the end of the generation prompt to the end of the end-of-turn
token. Headers and end-of-turn tokens are looked for in the scaffold only, never in what a message says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_packed_sft.encode.masks.trace import ECHO, Trace
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.support.drop_reasons import DropReason

Range = tuple[int, int]


class TurnMarks(NamedTuple):
    """What a template writes around an assistant's turn.

    Args:
        headers: texts after which the assistant begins to write, such as `<|im_start|>assistant` and a newline.
        ends: end-of-turn tokens, such as `<|im_end|>`.
        in_order: whether messages stand in the order of the chat.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]
    in_order: bool = True


def find_turns(
    trace: Trace, roles: Sequence[str], wanted: Sequence[bool], marks: TurnMarks, *, with_end: bool = True
) -> list[Range]:
    r"""Return the characters to train on: the turns of the wanted messages, ascending, none touching another.

    Args:
        trace: of the chat.
        roles: of its messages.
        wanted: which messages are trained.
        marks: of the template.
        with_end: whether the end-of-turn token belongs to the turn.

    Example:
        >>> from megatron_packed_sft.encode.masks.trace import Span
        >>> trace = Trace("Q: 2+2?\nA: 4;\n", [Span(3, 7, 0), Span(11, 12, 1)])
        >>> find_turns(trace, ["user", "assistant"], [False, True], TurnMarks(("A: ",), (";",)))
        [(11, 13)]
    """
    for text in trace.unmarked:
        if any(end in text for end in marks.ends):
            raise RecordRefusedError(
                DropReason.UNTRACEABLE_TEMPLATE,
                f"{text!r} is a name, an id or what the template looks for, and holds the end of a turn; change it",
            )
    finder = _Finder(trace, marks, with_end)
    turns: list[Range] = []
    for message, (role, is_wanted) in enumerate(zip(roles, wanted, strict=True)):
        if is_wanted and message in finder.own:
            turns.append(finder.turn(message) if role == "assistant" else finder.words(message))
    silent = [role == "assistant" and message not in finder.own for message, role in enumerate(roles)]
    if any(is_silent and is_wanted for is_silent, is_wanted in zip(silent, wanted, strict=True)):
        turns += finder.silent_turns(roles, silent, wanted)
    return joined(turns)


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


class _Finder:
    def __init__(self, trace: Trace, marks: TurnMarks, with_end: bool) -> None:
        self._text = trace.text
        self._spans = trace.spans
        self._marks = marks
        self._with_end = with_end
        self.own: dict[int, list[int]] = {}
        for number, span in enumerate(trace.spans):
            if span.message != ECHO:
                self.own.setdefault(span.message, []).append(number)

    def turn(self, message: int) -> Range:
        """Return the turn of an assistant's message that has text of its own."""
        first, last = self._first_and_last(message)
        return self._start(first), self._end(last)

    def words(self, message: int) -> Range:
        """Return what another role said: its text, and an end-of-turn token that follows at once."""
        first, last = self._first_and_last(message)
        end = self._end_of_words(last)
        if self._with_end:
            end += max((len(token) for token in self._marks.ends if self._text.startswith(token, end)), default=0)
        return self._start_of_words(first), end

    def silent_turns(self, roles: Sequence[str], silent: Sequence[bool], wanted: Sequence[bool]) -> Iterator[Range]:
        """Yield the wanted turns of assistants that have no text: a header, no text, an end of turn."""
        # A system prompt may be written anywhere, so it says nothing about where its neighbours are.
        anchors = sorted(message for message in self.own if roles[message] != "system")
        for before, after in zip([None, *anchors], [*anchors, None], strict=True):
            inside = range(0 if before is None else before + 1, len(roles) if after is None else after)
            group = [message for message in inside if silent[message]]
            if not any(wanted[message] for message in group):
                continue
            low = 0 if before is None else self._spans[self.own[before][-1]].end
            high = len(self._text) if after is None else self._spans[self.own[after][0]].start
            found = list(self._empty_turns(low, high))
            if self._marks.in_order and len(found) == len(group):
                yield from (turn for turn, message in zip(found, group, strict=True) if wanted[message])
            elif self._marks.in_order and len(found) < len(group) and all(wanted[message] for message in group):
                yield from found  # the template left some out; those that are there are wanted
            else:
                raise RecordRefusedError(
                    DropReason.UNTRACEABLE_TEMPLATE,
                    f"messages {group} are assistant turns without text, but the chat shows {len(found)} such turns, "
                    "or in another order; leave those messages out of the record",
                )

    def _first_and_last(self, message: int) -> Range:
        first, last = self.own[message][0], self.own[message][-1]
        if any(span.message not in (message, ECHO) for span in self._spans[first : last + 1]):
            raise RecordRefusedError(
                DropReason.UNTRACEABLE_TEMPLATE,
                f"the text of message {message} is mixed with that of others in the chat",
            )
        return first, last

    def _start(self, first: int) -> int:
        low = self._spans[first - 1].end if first else 0
        high = self._spans[first].start
        ends = [
            position + len(text)
            for text in (*self._marks.headers, *self._marks.ends)
            if (position := self._text.rfind(text, low, high)) >= 0
        ]
        return max(ends) if ends else self._start_of_words(first)

    def _end(self, last: int) -> int:
        for low, high in self._scaffold_after(last):
            found = [
                (position, position + len(text))
                for text in self._marks.ends
                if (position := self._text.find(text, low, high)) >= 0
            ]
            if found:
                start, end = min(found)
                return end if self._with_end else start
        return self._end_of_words(last)

    def _scaffold_after(self, number: int) -> Iterator[Range]:
        """Yield the scaffold between a span and the next message; repeated strings stand in between, if any."""
        for following in range(number + 1, len(self._spans)):
            yield self._spans[following - 1].end, self._spans[following].start
            if self._spans[following].message != ECHO:
                return
        yield self._spans[-1].end, len(self._text)

    def _start_of_words(self, number: int) -> int:
        span = self._spans[number]
        whitespace = span.before[len(span.before.rstrip()) :]
        return next(
            span.start - len(before)
            for before in (span.before, whitespace, "")
            if self._text.endswith(before, 0, span.start)
        )

    def _end_of_words(self, number: int) -> int:
        span = self._spans[number]
        whitespace = span.after[: len(span.after) - len(span.after.lstrip())]
        return next(
            span.end + len(after) for after in (span.after, whitespace, "") if self._text.startswith(after, span.end)
        )

    def _empty_turns(self, low: int, high: int) -> Iterator[Range]:
        inside = [span for span in self._spans if low <= span.start < high]
        starts = [low, *(span.end for span in inside)]
        ends = [*(span.start for span in inside), high]
        for position, limit in zip(starts, ends, strict=True):
            while (header_end := self._next(self._marks.headers, position, limit)[1]) >= 0:
                end_start, position = self._next(self._marks.ends, header_end, limit)
                if position < 0:
                    break
                next_header, _ = self._next(self._marks.headers, header_end, limit)
                if next_header < 0 or position <= next_header:
                    yield header_end, position if self._with_end else end_start
                else:
                    position = next_header

    def _next(self, texts: Sequence[str], low: int, high: int) -> Range:
        """Return where the first of some texts begins and ends, the longest if several do; (-1, -1) if none does."""
        found = [(at, -len(text)) for text in texts if (at := self._text.find(text, low, high)) >= 0]
        if not found:
            return -1, -1
        start, negative_length = min(found)
        return start, start - negative_length
