r"""Finding where the assistant's turns of a chat begin and end.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nFour.<|im_end|>\n
    ├─────── given ───────┤├──────────────── turn ─────────────────┤

Four renders decide about message i: the whole chat (`chat`), the chat before the message with and without a generation
prompt (`prompt`, `bare`), and the chat up to the message (`prefix`). The turn starts where the chat stops following the
prompt, counted from the last text of another message; it ends at the last character that the template writes after the
message's last string. Both edges are in the template's own text, never in the text of a message. If the renders give no
consistent answer, the record is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.lost_text import says_something
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.masks.turn_parts import (
    ChatParts,
    Messages,
    Range,
    Render,
    Scaffold,
    Tokens,
    is_own,
    iterations_of,
    last_foreign,
    left_iteration,
    next_iteration,
    num_shared,
    role_of,
    scaffold_of,
    untraceable,
)
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError


class TurnFinder:
    """Finds the turns of one chat.

    Args:
        messages: of the chat.
        render: renders parts of it.
        control: the tokenizer's control tokens.
        stops: texts at which generation stops.
        header: the text that turns follow, if the user gives it.
        recorder: gets a guard for every decision that depends on a message's own text.
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
        """Return the turn of assistant message i; it is empty if the template writes nothing for it.

        Args:
            i: the message's number.
            is_loss_refused: whether the caller refuses a record of which the template omits a message.
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
        """Return the text of message i, with an end of turn right after it; None if the message is empty."""
        own = self.own_spans(i, None)
        if not own:
            return None
        end = own[-1].end
        return own[0].start, end + self.length_of_end(end, ends)

    def length_of_end(self, position: int, ends: Sequence[str]) -> int:
        """Return the length of the end of turn that the template writes at a position, or 0."""
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= position), len(text))
        return max((len(end) for end in ends if text.startswith(end, position, limit)), default=0)

    def own_spans(self, i: int, in_prefix: Sequence[Span] | None) -> list[Span]:
        """Return the run of message i's text that is its turn; what is repeated elsewhere is an echo.

        A run contains no text of other messages, and its texts have the same order as in the prefix.
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
                raise untraceable(f"the template mixes the text of message {i} with that of other messages")
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
                        break  # the prefix does not contain it again
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
        """Return the turn of an empty message: what the template writes for it after the prompt."""
        if prefix is None:
            raise untraceable(f"message {i} is empty, and the template cannot render the chat up to it")
        if bare is not None and prefix.text == bare.text:
            return 0, 0  # the template omits it
        start = self._starts.find(self.chat, i, None, prompt, bare)
        if not self._is_in_iteration(i, start):
            raise untraceable(f"message {i} is empty, and the template does not write messages in their order")
        written = prefix.text[self._starts.find(prefix, i, None, prompt, bare) :].rstrip()
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= start), len(text))
        left = left_iteration(self.chat, i, start)
        iteration = text[start:left].rstrip() if left is not None and left <= limit else None
        if i == len(self._parts.messages) - 1:
            end = start + self._ends.end_of_last(i, written, iteration, bare)
        elif text.startswith(written, start) and start + len(written) <= limit:
            end = start + max(len(written), len(iteration or ""))
        elif iteration is not None:
            end = start + len(iteration)
        else:
            raise untraceable(f"message {i} is empty, and the renders do not show where its turn ends")
        return start, self._ends.cut_at_stop(start, self._ends.with_stop(end, limit))

    def _is_in_iteration(self, i: int, position: int) -> bool:
        """Return whether the template writes a position while it iterates over message i, or does not show that."""
        iterations = list(iterations_of(self.chat))
        if not any(end > start for _, start, end in iterations):
            return True  # the text is assembled in the loop and written after it
        own = [(start, end) for message, start, end in iterations if message == i]
        return not own or any(start <= position <= end for start, end in own)


# Where a turn starts: where the chat stops following the generation prompt.

_PROBED_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "zqname", "arguments": {"zqkey": "zqvalue"}},
}
_PROBES: tuple[dict[str, Any], ...] = (
    {"content": "zqanswer"},
    {"content": "", "tool_calls": [_PROBED_CALL]},
    {"content": "zqanswer", "reasoning_content": "zqreason"},
    {"content": None, "tool_calls": [_PROBED_CALL]},
)
_QUESTION = {"role": "user", "content": "zqquestion"}


class TurnStarts:
    """Finds where turns start.

    Args:
        parts: the chat and renders of its parts.
        tokens: control tokens and tags.
        header: the text that turns follow, if the user gives it.
        recorder: gets a guard for every decision that depends on a message's own text.
    """

    def __init__(self, parts: ChatParts, tokens: Tokens, header: str | None, recorder: Recorder | None) -> None:
        self._parts = parts
        self._tokens = tokens
        self._header = header
        self._recorder = recorder

    def find(
        self, chat: TracedText, i: int, first: int | None, prompt: TracedText | None, bare: TracedText | None
    ) -> int:
        """Return where message i starts in a render of it; `first` is where its own text begins, if it has any."""
        if self._header is not None:
            return self._start_by_header(chat, i, first, self._header)
        if prompt is None:
            return self._start_without_prompt(chat, i, first)
        scaffold = scaffold_of(prompt, bare)
        anchor, author, limit = self._surroundings(chat, i, first, scaffold)
        if author == scaffold.after:
            start = self._follow(chat, i, first, anchor, limit, scaffold, prompt)
            if start is not None:
                return start
        try:
            return self._search(chat, i, first, anchor, limit, scaffold, follows=author == scaffold.after)
        except RecordRefusedError:
            if first is None or any(
                role_of(message) not in ("system", "developer") for message in self._parts.messages[:i]
            ):
                raise
            return self._start_without_prompt(chat, i, first)  # there is no question yet

    def _surroundings(
        self, chat: TracedText, i: int, first: int | None, scaffold: Scaffold
    ) -> tuple[int, Author | None, int]:
        """Return end and author of the last foreign text before the turn, and the end of the scaffold after it."""
        if first is not None:
            anchor, author = last_foreign(chat, first, i)
            return anchor, author, first
        if scaffold.after is None:
            anchor = 0
        else:
            ends = [span.end for span in chat.spans if span.author == scaffold.after]
            if not ends:
                raise untraceable(f"message {i} is empty, and the text before it is not in the rendered chat")
            anchor = ends[-1]
        limit = next((span.start for span in chat.spans if span.start >= anchor), len(chat.text))
        return anchor, scaffold.after, limit

    def _follow(
        self,
        chat: TracedText,
        i: int,
        first: int | None,
        anchor: int,
        limit: int,
        scaffold: Scaffold,
        prompt: TracedText,
    ) -> int | None:
        """Return where the chat stops following the prompt, or None if that is inconclusive."""
        text, between = scaffold.text, chat.text[anchor:limit]
        if len(text) > len(between) and text.startswith(between):
            self._guard_next_text(chat, limit, text[len(between) :])
        if chat.text.startswith(text, anchor):
            start = anchor + len(text)
            is_open = not scaffold.is_asked_for and first is not None and chat.text[start:limit].strip()
            if is_open and not self._prompts_anyway(i, prompt):
                start = anchor + self._after_header(i, scaffold, between, len(text))
            return start
        if text.strip():
            blanks = _follow_but_for_blanks(text, between)
            if blanks is not None:
                return anchor + blanks
        shared = min(num_shared(text, between), len(between))
        parting = min(self._tokens.outside(between, shared), self._tokens.outside(text, shared))
        if not scaffold.is_asked_for:
            start = self._tokens.before_forced_block(text, parting, 0)
            is_blank = not text[parting:].strip()
            prompts_anyway = self._prompts_anyway(i, prompt)
            if is_blank and (prompts_anyway or first is None or not between[start:].strip()):
                return anchor + start
            if is_blank or prompts_anyway:
                return anchor + self._after_header(i, scaffold, between, start)
            return None
        if shared < scaffold.num_bare or not self._tokens.has_header(
            text[scaffold.num_bare : parting], text[scaffold.num_bare :]
        ):
            return None
        start = self._tokens.before_forced_block(text, parting, scaffold.num_bare)
        if start == parting and between[start:].strip():
            start = max(start, self._invariant(i, scaffold, between))
        return anchor + start

    def _search(
        self, chat: TracedText, i: int, first: int | None, anchor: int, limit: int, scaffold: Scaffold, *, follows: bool
    ) -> int:
        """Return where the turn starts by searching for what the prompt adds."""
        between = chat.text[anchor:limit]
        added = scaffold.text[scaffold.num_bare :].lstrip()
        found = self._find_beginning(between, added)
        if found is not None:
            position, is_whole = found
            if not is_whole and follows and first is not None and between[position:].strip():
                position = max(position, self._invariant(i, scaffold, between))
            return anchor + position
        shared = num_shared(scaffold.text, between)
        previous = role_of(self._parts.messages[i - 1]) if i else "user"
        if follows and first is not None and previous not in ("user", "system", "developer"):
            if scaffold.is_asked_for and shared >= len(scaffold.text[: scaffold.num_bare].rstrip()):
                # After a tool's result or another answer, the template writes no new header: the turn continues.
                start = self._tokens.outside(between, min(shared, scaffold.num_bare))
                return anchor + max(start, self._invariant(i, scaffold, between))
            if previous == "assistant" and scaffold.text[: scaffold.num_bare].strip() not in between:
                # The previous answer has no end: both are one turn.
                start = min(self._tokens.outside(between, shared), self._tokens.outside(scaffold.text, shared))
                return anchor + self._after_header(i, scaffold, between, start)
        raise self._no_prompt(i, added, between)

    def _no_prompt(self, i: int, prompt: str, between: str) -> RecordRefusedError:
        if not prompt:
            return untraceable(f"the template has no generation prompt to show where message {i} starts")
        written = between[-80:]
        return untraceable(f"the template does not write its prompt {prompt!r} before message {i}, only {written!r}")

    def _find_beginning(self, between: str, added: str) -> tuple[int, bool] | None:
        """Find a prompt or the longest beginning of it, but at least its first control token and its role."""
        for length in range(len(added), max(self._tokens.num_essential(added, with_role=True), 1) - 1, -1):
            at = between.rfind(added[:length])
            if at >= 0:
                return self._tokens.outside(between, at + length), length == len(added)
        return None

    def _start_by_header(self, chat: TracedText, i: int, first: int | None, header: str) -> int:
        limit = first if first is not None else len(chat.text)
        anchor, _ = last_foreign(chat, limit, i)
        at = chat.text.rfind(header, anchor, limit)
        if at < 0:
            raise untraceable(
                f"template.header {header!r} is not in the text before message {i}: {chat.text[anchor:limit][-80:]!r}"
            )
        return at + len(header)

    def _start_without_prompt(self, chat: TracedText, i: int, first: int | None) -> int:
        """Return where a turn starts if no prompt renders before it, by the prompt after a user's question."""
        if first is None:
            raise untraceable(f"message {i} is empty, and the template cannot render a prompt before it")
        prompt = self._parts.render([_QUESTION], add_generation_prompt=True, probe=True)
        if prompt is None:
            raise untraceable(f"the template cannot render a prompt before message {i}")
        scaffold = scaffold_of(prompt, self._parts.render([_QUESTION], probe=True))
        added = scaffold.text[scaffold.num_bare :]
        anchor, _ = last_foreign(chat, first, i)
        between = chat.text[anchor:first]
        if not added.strip():
            return anchor + self._invariant_alone(i, between.removesuffix(self._blanks_after(scaffold)))
        # There is no question, so the text with which the prompt closes a question may be missing.
        tokens = [match.start() for match in self._tokens.pattern.finditer(added)]
        for begin in (0, *tokens[1:2]):
            found = self._find_beginning(between, added[begin:].lstrip())
            if found is not None:
                return anchor + found[0]
        raise self._no_prompt(i, added, between)

    def _blanks_after(self, scaffold: Scaffold) -> str:
        """Return the blanks that the template writes between a prompt and an answer."""
        render = self._parts.render([_QUESTION, {"role": "assistant", **_PROBES[0]}], probe=True)
        own = [span.start for span in render.spans if is_own(span.author, 1)] if render else []
        if not render or not own:
            return ""
        anchor, _ = last_foreign(render, own[0], 1)
        given, between = scaffold.text, render.text[anchor : own[0]]
        return between[len(given) :] if between.startswith(given) and not between[len(given) :].strip() else ""

    def _guard_next_text(self, chat: TracedText, first: int, rest: str) -> None:
        """Guard whether the next text continues the rest of the prompt, which the template itself does not write."""
        if self._recorder is None or first == len(chat.text):
            return
        position = 0
        for text, name in chat.whole.parts:
            if text and position == first:
                if name is None or (len(text) < len(rest) and rest.startswith(text)):
                    break
                self._recorder.guard(f"{name}.startswith({rest!a})", text.startswith(rest))
                self._recorder.guard(f"{rest!a}.startswith({name})", rest == text)
                self._recorder.edges_in_slots.add(first + len(rest))
                return
            position += len(text)
        self._recorder.give_up("the prompt ends inside a message")

    def _prompts_anyway(self, i: int, prompt: TracedText) -> bool:
        """Return whether the template writes a generation prompt after every chat, even if not asked for."""
        answer = self._parts.probe(i, {"content": "zqanswer"})
        own = [span for span in answer.spans if is_own(span.author, i)] if answer else []
        if not answer or not own:
            return False
        left = left_iteration(answer, i, own[-1].end)
        after = "" if left is None else answer.text[left:].strip()
        return bool(after) and scaffold_of(prompt, None).text.rstrip().endswith(after)

    def _after_header(self, i: int, scaffold: Scaffold, between: str, start: int) -> int:
        """Return the end of a header that the prompt does not show; blanks alone are not a header."""
        end = self._invariant(i, scaffold, between)
        return end if between[start:end].strip() else start

    def _invariant(self, i: int, scaffold: Scaffold, between: str) -> int:
        """Return how much of the scaffold before message i is the same for every message."""
        return self._shared_by_probes(i, between, scaffold.after, check_author=True)

    def _invariant_alone(self, i: int, between: str) -> int:
        return self._shared_by_probes(i, between, None, check_author=False)

    def _shared_by_probes(self, i: int, between: str, author: Author | None, *, check_author: bool) -> int:
        shared = len(between)
        for probe in _PROBES:
            render = self._parts.probe(i, probe)
            own = [span for span in render.spans if is_own(span.author, i)] if render else []
            if not render or not own:
                continue
            anchor, before = last_foreign(render, own[0].start, i)
            if not check_author or before == author:
                shared = min(shared, num_shared(between, render.text[anchor : own[0].start]))
        return self._tokens.before_forced_block(between, self._tokens.outside(between, shared), 0)


def _follow_but_for_blanks(prompt: str, text: str) -> int | None:
    """Return where a text continues after a whole prompt, if they are equal except for blanks."""
    position = 0
    for character in prompt:
        if character.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position >= len(text) or text[position] != character:
            return None
        position += 1
    return position + num_shared(prompt[len(prompt.rstrip()) :], text[position:])


# Where a turn ends: at the last character that the template writes after the message's last string.


class TurnEnds:
    """Finds where turns end.

    Args:
        parts: the chat and renders of its parts.
        tokens: control tokens and tags.
        stops: texts at which generation stops.
        recorder: gives up if the end depends on other messages.
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
            last: the end of its last text.
            prefix: the chat up to it.
            prefix_own: its own spans in the prefix.
            bare: the chat before it, without a generation prompt.
        """
        text = self._chat.text
        limit = next((span.start for span in self._chat.spans if span.start >= last), len(text))
        left = left_iteration(self._chat, i, last)
        iteration = text[last:left].rstrip() if left is not None and left <= limit else None
        if prefix is None or not prefix_own:
            if iteration is None:
                raise untraceable(f"the renders do not show where message {i} ends")
            return self.with_stop(last + len(iteration), limit)
        if self._recorder is not None and prefix.spans[-1].end > prefix_own[-1].end:
            self._recorder.give_up("text of others after a turn")
        tail = prefix.text[prefix_own[-1].end : next_iteration(prefix, i, prefix_own[-1].end)].rstrip()
        if i == len(self._parts.messages) - 1:
            return self.cut_at_stop(last, last + self.end_of_last(i, tail, iteration, bare))
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

    def end_of_last(self, i: int, tail: str, iteration: str | None, bare: TracedText | None) -> int:
        """Return how much of what follows the last message belongs to its turn.

        After its loop, a template may close the last turn with the text that closes other turns in front of the next
        message. It may also write text that belongs to no turn: an end of the chat, or a prompt not asked for.
        """
        if iteration is None or len(tail) <= len(iteration):
            return len(tail)
        if any(stop in iteration for stop in self._stops):
            return len(iteration)
        after = tail[len(iteration) :].strip()
        is_stop = after.startswith(self._stops) if self._stops else False
        follows_every_chat = bare is not None and scaffold_of(bare, None).text.rstrip().endswith(after)
        if not is_stop and follows_every_chat:
            return len(tail if self._closes_turns(i, after) else iteration)
        if any(stop in after for stop in self._stops) or not self._tokens.pattern.search(iteration):
            return len(tail)
        return len(tail if self._closes_turns(i, after) else iteration)

    def _closes_turns(self, i: int, text: str) -> bool:
        """Return whether the template also writes a text after message i if a question follows."""
        longer = self._parts.render([*self._parts.messages[: i + 1], _QUESTION], probe=True)
        if longer is None:
            return False
        own = [span.end for span in longer.spans if is_own(span.author, i)]
        entered = [at for at, mark in longer.marks if mark.kind == "enter" and mark.message == i]
        left = left_iteration(longer, i, (own or entered)[-1]) if own or entered else None
        if left is None:
            return False
        following = next((span for span in longer.spans if span.start >= left), None)
        is_next = following is not None and following.author.message == i + 1
        return is_next and longer.text[left:].lstrip().startswith(text)

    def cut_at_stop(self, last: int, end: int) -> int:
        """Return the end of the first stop token after the message's last text, or the given end."""
        text = self._chat.text
        return min((at + len(stop) for stop in self._stops if (at := text.find(stop, last, end)) >= 0), default=end)

    def with_stop(self, end: int, limit: int) -> int:
        """Return the end of a stop token that follows a turn without one, or the given end."""
        text = self._chat.text
        if text.endswith(self._stops, 0, end):
            return end
        at = end + len(text[end:limit]) - len(text[end:limit].lstrip())
        return max(
            (at + len(stop) for stop in self._stops if text.startswith(stop, at) and at + len(stop) <= limit),
            default=end,
        )
