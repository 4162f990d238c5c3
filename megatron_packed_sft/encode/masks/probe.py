"""What a template writes around an assistant's turn, found by rendering a few small chats.

The header is the template's own generation prompt where it has one: what stands there is given at inference, all after
it is what the model writes. Templates without one (Mistral's) show where the assistant's text begins.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.trace import ECHO, Trace, Tracer
from megatron_packed_sft.encode.masks.turns import TurnMarks, find_turns
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.control_tokens import control_pattern
from megatron_packed_sft.errors import InvalidInputError

_CALL = {"name": "probe", "arguments": {"key": "argument"}}
_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "probe", "parameters": {}}}]
_USER = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": "answer"}
_TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
}
_RESULT = {"role": "tool", "name": "probe", "tool_call_id": "abcdefghi", "content": "result"}


class Probe(NamedTuple):
    """What was found: the marks of turns, and the control tokens that hold turns apart."""

    marks: TurnMarks
    structure: frozenset[str]


def probe_template(
    tracer: Tracer,
    control_tokens: Collection[str],
    *,
    header: str | None = None,
    end_of_turn: Sequence[str] | None = None,
) -> Probe:
    r"""Find a template's headers and end-of-turn tokens.

    Args:
        tracer: of the template.
        control_tokens: of the tokenizer.
        header: the user's word for it, instead of what the template shows.
        end_of_turn: likewise.

    Example:
        >>> from megatron_packed_sft.encode.templates.renderer import Renderer
        >>> source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}"
        >>> probe_template(Tracer(Renderer(source)), ["<end>", "[assistant]"]).marks
        TurnMarks(headers=('[assistant]',), ends=('<end>',), in_order=True)
    """
    chats = [_plain_chat(tracer)]
    with contextlib.suppress(RecordRefusedError):  # not every template knows tools
        chats.append(_look([_USER, _TOOL_CALL, _RESULT, _ANSWER, _USER, _ANSWER], _TOOLS, tracer))
    # Some tokenizers have thousands of control tokens; a template writes a few of them.
    written = "".join(text for chat in chats for text in (chat.trace.text, *chat.prompts.values()))
    control = control_pattern(token for token in control_tokens if token.strip() and token in written)
    headers = (header,) if header is not None else _headers(chats, control)
    ends = tuple(end_of_turn) if end_of_turn is not None else _ends(chats, control, headers)
    shown = [span.message for span in chats[0].trace.spans if span.message != ECHO]
    marks = TurnMarks(headers, ends, in_order=shown == sorted(shown))
    return Probe(marks, _structure(chats[0], marks, control))


class _Chat(NamedTuple):
    messages: list[dict[str, Any]]
    trace: Trace
    prompts: dict[str, str]

    def before(self, message: int) -> str:
        """Return the scaffold before a message's text."""
        number = next(n for n, span in enumerate(self.trace.spans) if span.message == message)
        low = self.trace.spans[number - 1].end if number else 0
        return self.trace.text[low : self.trace.spans[number].start]

    def after(self, message: int) -> str:
        """Return what stands between a message's text and the next message's; repeated words are part of it."""
        number = max(n for n, span in enumerate(self.trace.spans) if span.message == message)
        following = (span.start for span in self.trace.spans[number + 1 :] if span.message != ECHO)
        return self.trace.text[self.trace.spans[number].end : next(following, None)]

    def answers(self) -> list[int]:
        return [
            number
            for number, message in enumerate(self.messages)
            if message is _ANSWER and any(span.message == number for span in self.trace.spans)
        ]


def _plain_chat(tracer: Tracer) -> _Chat:
    try:
        try:
            chat = _look([_USER, _ANSWER, _USER, _ANSWER], None, tracer)
        except RecordRefusedError:
            chat = _look([_USER, _ANSWER], None, tracer)
    except RecordRefusedError as refusal:
        raise InvalidInputError(
            f"the template cannot render a chat of a user and an assistant ({refusal.detail}); choose another"
        ) from None
    if len(chat.messages) - 1 not in chat.answers():
        raise InvalidInputError(f"{tracer.renderer.name} leaves the assistant's answer out; choose another template")
    return chat


def _look(messages: list[dict[str, Any]], tools: Any, tracer: Tracer) -> _Chat:
    trace = tracer.trace(messages, tools)
    prompts = {
        message["role"]: _generation_prompt(tracer, messages[: number + 1], tools)
        for number, message in enumerate(messages)
        if message["role"] != "assistant"
    }
    return _Chat(messages, trace, prompts)


def _generation_prompt(tracer: Tracer, messages: list[dict[str, Any]], tools: Any) -> str:
    without = tracer.renderer.render(messages, tools)
    with_prompt = tracer.renderer.render(messages, tools, add_generation_prompt=True)
    return with_prompt[len(_common_start(without, with_prompt)) :]


def _common_start(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _headers(chats: Sequence[_Chat], control: re.Pattern[str]) -> tuple[str, ...]:
    found = {
        _header(chat.before(number), chat.prompts[chat.messages[number - 1]["role"]], control)
        for chat in chats
        for number in chat.answers()
    }
    return tuple(sorted(found - {""}))


def _header(before: str, prompt: str, control: re.Pattern[str]) -> str:
    """Return as much of the generation prompt as stands before an answer; without one, from the last control token on.

    Some templates end the prompt with more than a stored answer shows, such as `<think>`, so a part will do, if it
    holds the prompt's first control token, or all its words.
    """
    token = control.search(prompt)
    shortest = token.end() if token else len(prompt.rstrip())
    for length in range(len(prompt), max(shortest, 1) - 1, -1):
        if prompt[:length] in before:
            return prompt[:length]
    tokens = list(control.finditer(before))
    return before[tokens[-1].start() :] if tokens else before


def _ends(chats: Sequence[_Chat], control: re.Pattern[str], headers: Sequence[str]) -> tuple[str, ...]:
    *earlier, last = chats[0].answers()
    in_the_middle, at_the_end = chats[0].after(earlier[0] if earlier else last), chats[0].after(last)
    shared = _common_start(in_the_middle, at_the_end).rstrip()
    if not control.search(at_the_end) and (shared or not control.search(in_the_middle)):
        # The end of a turn is text that follows answers wherever they stand; a control token begins the next turn.
        text = shared or at_the_end.rstrip()
        return (text,) if text else ()
    found = set(control.findall(at_the_end)[:1])
    tokens = control.findall(in_the_middle)
    # A single token that does not end the chat is the header of the next turn.
    if len(tokens) > 1 or set(tokens) & found:
        found.add(tokens[0])
    for other in chats[1:]:
        called = any(span.message == 1 for span in other.trace.spans)
        tokens = control.findall(other.after(1)) if called else []
        if len(tokens) > 1 and not found & set(tokens) and not any(tokens[0] in header for header in headers):
            found.add(tokens[0])
    return tuple(sorted(found))


def _structure(chat: _Chat, marks: TurnMarks, control: re.Pattern[str]) -> frozenset[str]:
    roles = [message["role"] for message in chat.messages]
    turns = find_turns(chat.trace, roles, [role == "assistant" for role in roles], marks)
    outside = [0, *(position for turn in turns for position in turn), len(chat.trace.text)]
    texts = [chat.trace.text[low:high] for low, high in zip(outside[::2], outside[1::2], strict=True)]
    return frozenset(control.findall("\n".join([*texts, *marks.ends])))
