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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.support.drop_reasons import DropReason

Range = tuple[int, int]
Messages = Sequence[dict[str, Any]]

# What a message is called belongs to its header, not to what it says.
_HEADER_KEYS = frozenset({"role", "name", "tool_call_id"})
TAG = r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]"
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


class Render(Protocol):
    """Renders a part of the chat; RecordRefusedError if the template cannot."""

    def __call__(self, messages: Messages, *, add_generation_prompt: bool = False, probe: bool = False) -> TracedText:
        """`probe`: the last message is ours."""


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
        self.chat = render(messages)
        self._render = render
        self._tokens = re.compile(f"{control.pattern}|{TAG}")
        self._stops = tuple(stop for stop in stops if stop)
        self._header = header
        self._recorder = recorder

    def turn(self, i: int) -> Range:
        """Return the turn of assistant message i, empty if the template writes nothing for it."""
        prefix = self._try(self.messages[: i + 1]) if i + 1 < len(self.messages) else self.chat
        prefix_own = [span for span in prefix.spans if is_own(span.author, i)] if prefix else None
        own = self.own_spans(i, prefix_own)
        prompt, bare = self._prompts(i)
        if not own:
            return self._silent_turn(i, prefix, prompt, bare)
        start = self._start(self.chat, i, own[0].start, prompt, bare)
        end = self._end(i, own[-1].end, prefix, prefix_own, bare)
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
                raise _untraceable(f"the text of message {i} is mixed with that of others in the chat")
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

    # Start.

    def _prompts(self, i: int) -> tuple[TracedText | None, TracedText | None]:
        prompt = self._try(self.messages[:i], add_generation_prompt=True) if i else None
        return prompt, self._try(self.messages[:i]) if prompt is not None else None

    def _start(
        self, chat: TracedText, i: int, first: int | None, prompt: TracedText | None, bare: TracedText | None
    ) -> int:
        """Return where message i starts in a render of it; `first` is where its own text begins, if it has any."""
        if self._header is not None:
            return self._start_by_header(chat, i, first, self._header)
        if prompt is None:
            return self._start_without_prompt(chat, i, first)
        scaffold = _scaffold(prompt, bare)
        anchor, author, limit = self._surroundings(chat, i, first, scaffold)
        if author == scaffold.after:
            start = self._follow(chat, i, first, anchor, limit, scaffold, prompt)
            if start is not None:
                return start
        try:
            return self._search(chat, i, first, anchor, limit, scaffold, follows=author == scaffold.after)
        except RecordRefusedError:
            if first is None or any(_role(message) not in ("system", "developer") for message in self.messages[:i]):
                raise
            return self._start_without_prompt(chat, i, first)  # nobody has asked yet

    def _surroundings(
        self, chat: TracedText, i: int, first: int | None, scaffold: Scaffold
    ) -> tuple[int, Author | None, int]:
        """Return where the last foreign text before the turn ends, who wrote it, and where scaffold ends after it."""
        if first is not None:
            anchor, author = _last_foreign(chat, first, i)
            return anchor, author, first
        if scaffold.after is None:
            anchor = 0
        else:
            ends = [span.end for span in chat.spans if span.author == scaffold.after]
            if not ends:
                raise _untraceable(f"message {i} has no text, and the text before it is not in the chat")
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
        """Return where the chat stops following the prompt, or None if that says nothing."""
        text, between = scaffold.text, chat.text[anchor:limit]
        if len(text) > len(between) and text.startswith(between):
            self._guard_next_text(chat, limit, text[len(between) :])
        if chat.text.startswith(text, anchor):
            start = anchor + len(text)
            is_open = not scaffold.is_asked_for and first is not None and chat.text[start:limit].strip()
            if is_open and not self._prompts_anyway(i, prompt):
                start = max(start, anchor + self._invariant(i, scaffold, between))
            return start
        if text.strip():
            blanks = _follow_but_for_blanks(text, between)
            if blanks is not None:
                return anchor + blanks
        shared = min(_num_shared(text, between), len(between))
        parting = min(self._outside_tokens(between, shared), self._outside_tokens(text, shared))
        if not scaffold.is_asked_for:
            if not text[parting:].strip() or self._prompts_anyway(i, prompt):
                return anchor + self._before_forced_block(text, parting, 0)
            return None
        if shared < scaffold.num_bare or not self._has_header(
            text[scaffold.num_bare : parting], text[scaffold.num_bare :]
        ):
            return None
        start = self._before_forced_block(text, parting, scaffold.num_bare)
        if start == parting and between[start:].strip():
            start = max(start, self._invariant(i, scaffold, between))
        return anchor + start

    def _search(
        self, chat: TracedText, i: int, first: int | None, anchor: int, limit: int, scaffold: Scaffold, *, follows: bool
    ) -> int:
        """Return where what the prompt adds stands before the turn, wherever that is."""
        between = chat.text[anchor:limit]
        added = scaffold.text[scaffold.num_bare :].lstrip()
        found = self._find_beginning(between, added)
        if found is not None:
            position, is_whole = found
            if not is_whole and follows and first is not None and between[position:].strip():
                position = max(position, self._invariant(i, scaffold, between))
            return anchor + position
        shared = _num_shared(scaffold.text, between)
        goes_on = i > 0 and _role(self.messages[i - 1]) not in ("user", "system", "developer")
        if follows and scaffold.is_asked_for and first is not None and goes_on and shared >= scaffold.num_bare:
            # After a tool's result or another answer the template writes no new header: the turn continues.
            start = self._outside_tokens(between, scaffold.num_bare)
            return anchor + max(start, self._invariant(i, scaffold, between))
        raise _untraceable(f"the generation prompt {added!r} is not before message {i}: {between[-80:]!r}")

    def _find_beginning(self, between: str, added: str) -> tuple[int, bool] | None:
        """Find a prompt, or as much of its beginning as there is, but at least its first control token."""
        for length in range(len(added), max(self._num_essential(added), 1) - 1, -1):
            at = between.rfind(added[:length])
            if at >= 0:
                return self._outside_tokens(between, at + length), length == len(added)
        return None

    def _start_by_header(self, chat: TracedText, i: int, first: int | None, header: str) -> int:
        limit = first if first is not None else len(chat.text)
        anchor, _ = _last_foreign(chat, limit, i)
        at = chat.text.rfind(header, anchor, limit)
        if at < 0:
            raise _untraceable(f"the header {header!r} is not before message {i}: {chat.text[anchor:limit][-80:]!r}")
        return at + len(header)

    def _start_without_prompt(self, chat: TracedText, i: int, first: int | None) -> int:
        """No prompt before this message renders: that of a user's question stands in."""
        if first is None:
            raise _untraceable(f"message {i} has no text, and no prompt renders before it")
        prompt = self._try([_QUESTION], add_generation_prompt=True, probe=True)
        if prompt is None:
            raise _untraceable(f"no prompt renders before message {i}")
        scaffold = _scaffold(prompt, self._try([_QUESTION], probe=True))
        added = scaffold.text[scaffold.num_bare :]
        anchor, _ = _last_foreign(chat, first, i)
        between = chat.text[anchor:first]
        if not added.strip():
            return anchor + self._invariant_alone(i, between)
        found = self._find_beginning(between, added.lstrip())
        if found is None:
            raise _untraceable(f"the generation prompt {added!r} is not before message {i}: {between[-80:]!r}")
        return anchor + found[0]

    def _guard_next_text(self, chat: TracedText, first: int, rest: str) -> None:
        """The prompt says more than the template writes before the next text: does that go on with it?"""
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

    def _outside_tokens(self, text: str, position: int) -> int:
        """Move a position in front of the token, tag or word that it stands in."""
        if not 0 < position < len(text):
            return position
        low = max(0, position - 80)
        for match in self._tokens.finditer(text, low, min(len(text), position + 80)):
            if match.start() < position < match.end():
                return match.start()
            if position in match.span():
                return position
        if _is_word(text[position - 1]) and _is_word(text[position]):
            while position and _is_word(text[position - 1]):
                position -= 1
        return position

    def _before_forced_block(self, prompt: str, parting: int, num_bare: int) -> int:
        """Return where a prompt parts: a block that it opens and closes is given whole or not at all."""
        rest = prompt[parting:]
        if not rest.strip():
            return parting
        opened = list(self._tokens.finditer(prompt, num_bare, parting))
        name = _block_name(opened[-1][0]) if len(opened) > 1 else ""
        is_closed = name and any(_block_name(match[0]) == name for match in self._tokens.finditer(rest))
        return opened[-1].start() if is_closed else parting

    def _num_essential(self, header: str) -> int:
        """Return how much of a header must be there: the words before its first control token, or that token."""
        token = self._tokens.search(header)
        if token is None:
            return len(header.rstrip())
        return len(header[: token.start()].rstrip()) or token.end()

    def _has_header(self, got: str, header: str) -> bool:
        """Whether enough of a header is there."""
        if not header.strip():
            return True
        has_token = self._tokens.search(header) is not None
        return bool(got.strip()) and len(got) >= (self._num_essential(header) if has_token else 1)

    def _prompts_anyway(self, i: int, prompt: TracedText) -> bool:
        """Whether the template writes a generation prompt after every chat, asked or not."""
        answer = self._probe(i, {"content": "zqanswer"})
        own = [span for span in answer.spans if is_own(span.author, i)] if answer else []
        if not answer or not own:
            return False
        left = self._left(answer, i, own[-1].end)
        after = "" if left is None else answer.text[left:].strip()
        return bool(after) and _scaffold(prompt, None).text.rstrip().endswith(after)

    def _invariant(self, i: int, scaffold: Scaffold, between: str) -> int:
        """Return how much of the scaffold before message i does not depend on what the message says."""
        return self._shared_by_probes(i, between, scaffold.after, check_author=True)

    def _invariant_alone(self, i: int, between: str) -> int:
        return self._shared_by_probes(i, between, None, check_author=False)

    def _shared_by_probes(self, i: int, between: str, author: Author | None, *, check_author: bool) -> int:
        shared = len(between)
        for probe in _PROBES:
            render = self._probe(i, probe)
            own = [span for span in render.spans if is_own(span.author, i)] if render else []
            if not render or not own:
                continue
            anchor, before = _last_foreign(render, own[0].start, i)
            if not check_author or before == author:
                shared = min(shared, _num_shared(between, render.text[anchor : own[0].start]))
        return self._before_forced_block(between, self._outside_tokens(between, shared), 0)

    def _probe(self, i: int, message: dict[str, Any]) -> TracedText | None:
        return self._try([*self.messages[:i], {"role": "assistant", **message}], probe=True)

    # End.

    def _end(
        self,
        i: int,
        last: int,
        prefix: TracedText | None,
        prefix_own: Sequence[Span] | None,
        bare: TracedText | None,
    ) -> int:
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= last), len(text))
        left = self._left(self.chat, i, last)
        iteration = text[last:left].rstrip() if left is not None and left <= limit else None
        if prefix is None or not prefix_own:
            if iteration is None:
                raise _untraceable(f"where message {i} ends cannot be seen")
            return self._with_stop(last + len(iteration), limit)
        if self._recorder is not None and prefix.spans[-1].end > prefix_own[-1].end:
            self._recorder.give_up("text of others after a turn")
        tail = prefix.text[prefix_own[-1].end : _next_iteration(prefix, i, prefix_own[-1].end)].rstrip()
        if i == len(self.messages) - 1:
            return self._cut_at_stop(last, last + self._end_of_last(tail, iteration, bare))
        between = text[last:limit]
        if between.startswith(tail):
            end = len(tail)
            if iteration is not None and iteration.startswith(tail):
                end = len(iteration)
        elif iteration is not None:
            end = len(iteration)
        else:
            shared = _num_shared(between, tail)
            end = len(
                between[: min(self._outside_tokens(between, shared), self._outside_tokens(tail, shared))].rstrip()
            )
        return self._cut_at_stop(last, self._with_stop(last + end, limit))

    def _end_of_last(self, tail: str, iteration: str | None, bare: TracedText | None) -> int:
        """Return how much of what follows the chat's last message is its own: some templates go on after the loop."""
        if iteration is None or len(tail) <= len(iteration):
            return len(tail)
        if any(stop in iteration for stop in self._stops):
            return len(iteration)
        after = tail[len(iteration) :].strip()
        is_stop = after.startswith(self._stops) if self._stops else False
        if not is_stop and bare is not None and _scaffold(bare, None).text.rstrip().endswith(after):
            return len(iteration)  # written after every chat, whoever spoke last
        if any(stop in after for stop in self._stops):
            return len(tail)
        return len(iteration) if self._tokens.search(iteration) else len(tail)

    def _left(self, render: TracedText, i: int, last: int) -> int | None:
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

    def _is_in_iteration(self, i: int, position: int) -> bool:
        """Whether a position lies where the template iterates over message i, if it shows that at all."""
        iterations = list(_iterations(self.chat))
        if not any(end > start for _, start, end in iterations):
            return True  # the text is put together in the loop and written after it
        own = [(start, end) for message, start, end in iterations if message == i]
        return not own or any(start <= position <= end for start, end in own)

    def _cut_at_stop(self, last: int, end: int) -> int:
        """The first stop token after the message's last text ends the turn."""
        text = self.chat.text
        return min((at + len(stop) for stop in self._stops if (at := text.find(stop, last, end)) >= 0), default=end)

    def _with_stop(self, end: int, limit: int) -> int:
        """If no stop token ends the turn but one follows, it is the model's."""
        text = self.chat.text
        if text.endswith(self._stops, 0, end):
            return end
        at = end + len(text[end:limit]) - len(text[end:limit].lstrip())
        return max(
            (at + len(stop) for stop in self._stops if text.startswith(stop, at) and at + len(stop) <= limit),
            default=end,
        )

    # Turns without text.

    def _silent_turn(
        self, i: int, prefix: TracedText | None, prompt: TracedText | None, bare: TracedText | None
    ) -> Range:
        """Return the turn of a message that says nothing: what the template writes for it after the prompt."""
        if prefix is None:
            raise _untraceable(f"message {i} has no text, and the chat up to it does not render")
        if bare is not None and prefix.text == bare.text:
            return 0, 0  # the template skips it
        start = self._start(self.chat, i, None, prompt, bare)
        if not self._is_in_iteration(i, start):
            raise _untraceable(f"message {i} has no text, and the chat is not in the order of its messages")
        written = prefix.text[self._start(prefix, i, None, prompt, bare) :].rstrip()
        text = self.chat.text
        limit = next((span.start for span in self.chat.spans if span.start >= start), len(text))
        left = self._left(self.chat, i, start)
        iteration = text[start:left].rstrip() if left is not None and left <= limit else None
        if i == len(self.messages) - 1:
            end = start + self._end_of_last(written, iteration, bare)
        elif iteration is not None:
            end = start + len(iteration)
        elif text.startswith(written, start) and start + len(written) <= limit:
            end = start + len(written)
        else:
            raise _untraceable(f"message {i} has no text, and where its turn ends cannot be seen")
        return start, self._cut_at_stop(start, self._with_stop(end, limit))

    def _try(
        self, messages: Messages, *, add_generation_prompt: bool = False, probe: bool = False
    ) -> TracedText | None:
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, probe=probe)
        except RecordRefusedError:
            return None


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


def _untraceable(detail: str) -> RecordRefusedError:
    return RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, detail)


def _role(message: dict[str, Any]) -> Any:
    return message.get("role")


def _last_foreign(render: TracedText, position: int, i: int) -> tuple[int, Author | None]:
    """Return the end and the author of the last text before a position that message i did not write."""
    end, author = 0, None
    for span in render.spans:
        if span.start >= position:
            break
        if span.end <= position and not is_own(span.author, i):
            end, author = span.end, span.author
    return end, author


def _iterations(render: TracedText) -> Iterator[tuple[int, int, int]]:
    """Yield message, start and end of each iteration over messages."""
    entered: dict[int, tuple[int, int]] = {}  # loop -> message, position
    for position, mark in render.marks:
        if mark.kind in ("enter", "leave", "after") and mark.loop in entered:
            message, start = entered.pop(mark.loop)
            yield message, start, position
        if mark.kind == "enter":
            entered[mark.loop] = mark.message, position


def _next_iteration(render: TracedText, i: int, position: int) -> int:
    """Return where the template first writes for another message than i after a position."""
    starts = (s for message, s, end in _iterations(render) if message != i and s >= position and end > s)
    return next(starts, len(render.text))


def _scaffold(prompt: TracedText, bare: TracedText | None) -> Scaffold:
    last = prompt.spans[-1] if prompt.spans else None
    end, after = (last.end, last.author) if last else (0, None)
    text = prompt.text[end:]
    num_bare = 0
    if bare is not None:
        bare_last = bare.spans[-1] if bare.spans else None
        if (bare_last.author if bare_last else None) == after:
            num_bare = _num_shared(text, bare.text[bare_last.end if bare_last else 0 :])
    return Scaffold(text, num_bare, after)


def _num_shared(one: str, two: str) -> int:
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


def _follow_but_for_blanks(prompt: str, text: str) -> int | None:
    """Return where a text goes on after all of a prompt, if they are equal but for blanks."""
    position = 0
    for character in prompt:
        if character.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position >= len(text) or text[position] != character:
            return None
        position += 1
    return position + _num_shared(prompt[len(prompt.rstrip()) :], text[position:])


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _block_name(token: str) -> str:
    """`<think>` and `</think>`, `<|START_TEXT|>` and `<|END_TEXT|>` have one name."""
    return re.sub(r"START|END|begin|end|[^A-Za-z]", "", token)
