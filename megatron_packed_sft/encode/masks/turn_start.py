"""Where a turn starts: where the chat stops following the generation prompt."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.traced_renderer import TracedText
from megatron_packed_sft.encode.masks.turn_parts import (
    ChatParts,
    Scaffold,
    Tokens,
    is_own,
    last_foreign,
    left_iteration,
    num_shared,
    role_of,
    scaffold_of,
    untraceable,
)
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError

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
        header: what the user says that turns begin with.
        recorder: gets a guard for every decision that a message's own text had a part in.
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
            return self._start_without_prompt(chat, i, first)  # nobody has asked yet

    def _surroundings(
        self, chat: TracedText, i: int, first: int | None, scaffold: Scaffold
    ) -> tuple[int, Author | None, int]:
        """Return where the last foreign text before the turn ends, who wrote it, and where scaffold ends after it."""
        if first is not None:
            anchor, author = last_foreign(chat, first, i)
            return anchor, author, first
        if scaffold.after is None:
            anchor = 0
        else:
            ends = [span.end for span in chat.spans if span.author == scaffold.after]
            if not ends:
                raise untraceable(f"message {i} has no text, and the text before it is not in the chat")
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
        """Return where what the prompt adds stands before the turn, wherever that is."""
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
                # After a tool's result or another answer the template writes no new header: the turn continues.
                start = self._tokens.outside(between, min(shared, scaffold.num_bare))
                return anchor + max(start, self._invariant(i, scaffold, between))
            if previous == "assistant" and scaffold.text[: scaffold.num_bare].strip() not in between:
                # The previous answer is not even ended: both are one turn.
                start = min(self._tokens.outside(between, shared), self._tokens.outside(scaffold.text, shared))
                return anchor + self._after_header(i, scaffold, between, start)
        raise untraceable(f"the generation prompt {added!r} is not before message {i}: {between[-80:]!r}")

    def _find_beginning(self, between: str, added: str) -> tuple[int, bool] | None:
        """Find a prompt, or as much of its beginning as there is, but at least its first control token and its role."""
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
            raise untraceable(f"the header {header!r} is not before message {i}: {chat.text[anchor:limit][-80:]!r}")
        return at + len(header)

    def _start_without_prompt(self, chat: TracedText, i: int, first: int | None) -> int:
        """No prompt before this message renders: that of a user's question stands in."""
        if first is None:
            raise untraceable(f"message {i} has no text, and no prompt renders before it")
        prompt = self._parts.render([_QUESTION], add_generation_prompt=True, probe=True)
        if prompt is None:
            raise untraceable(f"no prompt renders before message {i}")
        scaffold = scaffold_of(prompt, self._parts.render([_QUESTION], probe=True))
        added = scaffold.text[scaffold.num_bare :]
        anchor, _ = last_foreign(chat, first, i)
        between = chat.text[anchor:first]
        if not added.strip():
            return anchor + self._invariant_alone(i, between.removesuffix(self._blanks_after(scaffold)))
        # Nobody has asked, so what the prompt closes a question with need not be there.
        tokens = [match.start() for match in self._tokens.pattern.finditer(added)]
        for begin in (0, *tokens[1:2]):
            found = self._find_beginning(between, added[begin:].lstrip())
            if found is not None:
                return anchor + found[0]
        raise untraceable(f"the generation prompt {added!r} is not before message {i}: {between[-80:]!r}")

    def _blanks_after(self, scaffold: Scaffold) -> str:
        """Return the blanks that an answer to a question begins with, behind what a prompt gives."""
        render = self._parts.render([_QUESTION, {"role": "assistant", **_PROBES[0]}], probe=True)
        own = [span.start for span in render.spans if is_own(span.author, 1)] if render else []
        if not render or not own:
            return ""
        anchor, _ = last_foreign(render, own[0], 1)
        given, between = scaffold.text, render.text[anchor : own[0]]
        return between[len(given) :] if between.startswith(given) and not between[len(given) :].strip() else ""

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

    def _prompts_anyway(self, i: int, prompt: TracedText) -> bool:
        """Whether the template writes a generation prompt after every chat, asked or not."""
        answer = self._parts.probe(i, {"content": "zqanswer"})
        own = [span for span in answer.spans if is_own(span.author, i)] if answer else []
        if not answer or not own:
            return False
        left = left_iteration(answer, i, own[-1].end)
        after = "" if left is None else answer.text[left:].strip()
        return bool(after) and scaffold_of(prompt, None).text.rstrip().endswith(after)

    def _after_header(self, i: int, scaffold: Scaffold, between: str, start: int) -> int:
        """Return where a header that the prompt does not show ends; blanks alone are none."""
        end = self._invariant(i, scaffold, between)
        return end if between[start:end].strip() else start

    def _invariant(self, i: int, scaffold: Scaffold, between: str) -> int:
        """Return how much of the scaffold before message i does not depend on what the message says."""
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
    return position + num_shared(prompt[len(prompt.rstrip()) :], text[position:])
