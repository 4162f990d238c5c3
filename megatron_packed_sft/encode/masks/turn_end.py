"""Where a turn ends: at the last character that the template writes after the message's last string."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_packed_sft.encode.masks.authored_text import Recorder
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.masks.turn_parts import (
    ChatParts,
    Tokens,
    left_iteration,
    next_iteration,
    num_shared,
    scaffold_of,
    untraceable,
)


class TurnEnds:
    """Finds where turns end.

    Args:
        parts: the chat and renders of its parts.
        tokens: control tokens and tags.
        stops: texts at which generation stops.
        recorder: gives up where the end depends on what others say.
    """

    def __init__(self, parts: ChatParts, tokens: Tokens, stops: Sequence[str], recorder: Recorder | None) -> None:
        self._parts = parts
        self._chat = parts.chat
        self._tokens = tokens
        self._stops = tuple(stop for stop in stops if stop)
        self._recorder = recorder

    def find(
        self,
        i: int,
        last: int,
        prefix: TracedText | None,
        prefix_own: Sequence[Span] | None,
        bare: TracedText | None,
    ) -> int:
        """Return where the turn of message i ends.

        Args:
            i: the message's number.
            last: where its last text ends.
            prefix: the chat up to it.
            prefix_own: its own text there.
            bare: the chat before it, without a generation prompt.
        """
        text = self._chat.text
        limit = next((span.start for span in self._chat.spans if span.start >= last), len(text))
        left = left_iteration(self._chat, i, last)
        iteration = text[last:left].rstrip() if left is not None and left <= limit else None
        if prefix is None or not prefix_own:
            if iteration is None:
                raise untraceable(f"where message {i} ends cannot be seen")
            return self.with_stop(last + len(iteration), limit)
        if self._recorder is not None and prefix.spans[-1].end > prefix_own[-1].end:
            self._recorder.give_up("text of others after a turn")
        tail = prefix.text[prefix_own[-1].end : next_iteration(prefix, i, prefix_own[-1].end)].rstrip()
        if i == len(self._parts.messages) - 1:
            return self.cut_at_stop(last, last + self.end_of_last(tail, iteration, bare))
        between = text[last:limit]
        if between.startswith(tail):
            end = len(tail)
            if iteration is not None and iteration.startswith(tail):
                end = len(iteration)
        elif iteration is not None:
            end = len(iteration)
        else:
            shared = num_shared(between, tail)
            end = len(
                between[: min(self._tokens.outside(between, shared), self._tokens.outside(tail, shared))].rstrip()
            )
        return self.cut_at_stop(last, self.with_stop(last + end, limit))

    def end_of_last(self, tail: str, iteration: str | None, bare: TracedText | None) -> int:
        """Return how much of what follows the chat's last message is its own: some templates go on after the loop."""
        if iteration is None or len(tail) <= len(iteration):
            return len(tail)
        if any(stop in iteration for stop in self._stops):
            return len(iteration)
        after = tail[len(iteration) :].strip()
        is_stop = after.startswith(self._stops) if self._stops else False
        if not is_stop and bare is not None and scaffold_of(bare, None).text.rstrip().endswith(after):
            return len(iteration)  # written after every chat, whoever spoke last
        if any(stop in after for stop in self._stops):
            return len(tail)
        return len(iteration) if self._tokens.pattern.search(iteration) else len(tail)

    def cut_at_stop(self, last: int, end: int) -> int:
        """The first stop token after the message's last text ends the turn."""
        text = self._chat.text
        return min((at + len(stop) for stop in self._stops if (at := text.find(stop, last, end)) >= 0), default=end)

    def with_stop(self, end: int, limit: int) -> int:
        """If no stop token ends the turn but one follows, it is the model's."""
        text = self._chat.text
        if text.endswith(self._stops, 0, end):
            return end
        at = end + len(text[end:limit]) - len(text[end:limit].lstrip())
        return max(
            (at + len(stop) for stop in self._stops if text.startswith(stop, at) and at + len(stop) <= limit),
            default=end,
        )
