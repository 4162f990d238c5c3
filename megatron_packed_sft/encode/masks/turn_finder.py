r"""Where the assistant's turns of a chat begin and end.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nFour.<|im_end|>\n
    ├─────── given ───────┤├──────────────── turn ─────────────────┤

For message i, four renders answer all questions: the whole chat (`chat`), the chat before the message with and without
a generation prompt (`prompt`, `bare`), and the chat up to the message (`prefix`). The turn starts where the chat stops
following the prompt, counted from the last text that somebody else wrote; it ends at the last character that the
template writes after the message's last string. Both are looked for in the template's own text only, never in what a
message says. Where the renders give no consistent answer, the record is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.lost_text import says_something
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.masks.turn_end import TurnEnds
from megatron_packed_sft.encode.masks.turn_parts import (
    ChatParts,
    Messages,
    Range,
    Render,
    Tokens,
    is_own,
    iterations_of,
    left_iteration,
    untraceable,
)
from megatron_packed_sft.encode.masks.turn_start import TurnStarts
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError


class TurnFinder:
    """Finds the turns of one chat.

    Args:
        messages: of the chat.
        render: renders parts of it.
        control: the tokenizer's control tokens.
        stops: texts at which generation stops.
        recorder: gets a guard for every decision that a message's own text had a part in.
    """

    def __init__(
        self,
        messages: Messages,
        render: Render,
        *,
        control: re.Pattern[str],
        stops: Sequence[str] = (),
        header: str | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.messages = messages
        self._parts = ChatParts(messages, render)
        self.chat = self._parts.chat
        tokens = Tokens(control)
        self._starts = TurnStarts(self._parts, tokens, header, recorder)
        self._ends = TurnEnds(self._parts, tokens, stops, recorder)

    def turn(self, i: int, *, is_loss_refused: bool = False) -> Range:
        """Return the turn of assistant message i, empty if the template writes nothing for it.

        Args:
            i: the message's number.
            is_loss_refused: if the template leaves the message out, the record is refused for that.
        """
        prefix = self._parts.prefix(i)
        prefix_own = [span for span in prefix.spans if is_own(span.author, i)] if prefix else None
        own = self.own_spans(i, prefix_own)
        prompt, bare = self._parts.prompts(i)
        if not own:
            try:
                return self._silent_turn(i, prefix, prompt, bare)
            except RecordRefusedError:
                if is_loss_refused and says_something(self._parts.messages[i]):
                    return 0, 0
                raise
        start = self._starts.find(self.chat, i, own[0].start, prompt, bare)
        end = self._ends.find(i, own[-1].end, prefix, prefix_own, bare)
        return start, max(start, end)

    def words(self, i: int, ends: Sequence[str]) -> Range | None:
        """Return what message i says itself, with an end of turn that follows at once; None if it says nothing."""
        own = self.own_spans(i, None)
        if not own:
            return None
        end = own[-1].end
        return own[0].start, end + self.length_of_end(end, ends)

    def length_of_end(self, position: int, ends: Sequence[str]) -> int:
        """Return how long the end of turn at a position is, if the template wrote one there."""
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= position), len(text))
        return max((len(end) for end in ends if text.startswith(end, position, limit)), default=0)

    def own_spans(self, i: int, in_prefix: Sequence[Span] | None) -> list[Span]:
        """Return the run of message i's text that is its turn; what is written again elsewhere is an echo.

        In the run nobody else's text stands between, and texts follow each other as in the prefix.
        """
        expected = None if in_prefix is None else [span.author for span in in_prefix]
        runs = self._runs(i, expected)
        if not runs:
            return []
        best = max(runs, key=len)
        if expected is not None:
            done = {span.author for span in best}
            elsewhere = {span.author for run in runs if run is not best for span in run} - done
            if elsewhere.intersection(expected):
                raise untraceable(f"the text of message {i} is mixed with that of others in the chat")
        return best

    def _runs(self, i: int, expected: Sequence[Author] | None) -> list[list[Span]]:
        spans = self.chat.spans
        known = frozenset(expected or ())
        runs: list[list[Span]] = []
        number = 0
        while number < len(spans):
            run: list[Span] = []
            position = 0
            while number < len(spans) and is_own(spans[number].author, i):
                author = spans[number].author
                if expected is not None and author in known:
                    try:
                        position = expected.index(author, position) + 1
                    except ValueError:
                        break  # the prefix has no more of it
                run.append(spans[number])
                number += 1
            if run:
                runs.append(run)
            else:
                number += 1
        return runs

    def _silent_turn(
        self, i: int, prefix: TracedText | None, prompt: TracedText | None, bare: TracedText | None
    ) -> Range:
        """Return the turn of a message that says nothing: what the template writes for it after the prompt."""
        if prefix is None:
            raise untraceable(f"message {i} has no text, and the chat up to it does not render")
        if bare is not None and prefix.text == bare.text:
            return 0, 0  # the template skips it
        start = self._starts.find(self.chat, i, None, prompt, bare)
        if not self._is_in_iteration(i, start):
            raise untraceable(f"message {i} has no text, and the chat is not in the order of its messages")
        written = prefix.text[self._starts.find(prefix, i, None, prompt, bare) :].rstrip()
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= start), len(text))
        left = left_iteration(self.chat, i, start)
        iteration = text[start:left].rstrip() if left is not None and left <= limit else None
        if i == len(self._parts.messages) - 1:
            end = start + self._ends.end_of_last(written, iteration, bare)
        elif iteration is not None:
            end = start + len(iteration)
        elif text.startswith(written, start) and start + len(written) <= limit:
            end = start + len(written)
        else:
            raise untraceable(f"message {i} has no text, and where its turn ends cannot be seen")
        return start, self._ends.cut_at_stop(start, self._ends.with_stop(end, limit))

    def _is_in_iteration(self, i: int, position: int) -> bool:
        """Whether a position lies where the template iterates over message i, if it shows that at all."""
        iterations = list(iterations_of(self.chat))
        if not any(end > start for _, start, end in iterations):
            return True  # the text is put together in the loop and written after it
        own = [(start, end) for message, start, end in iterations if message == i]
        return not own or any(start <= position <= end for start, end in own)
