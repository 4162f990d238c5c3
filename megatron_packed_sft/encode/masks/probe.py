"""What a template writes around turns, found by rendering small chats; and control tokens to escape in messages."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Recorder
from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedRenderer, TracedText
from megatron_packed_sft.encode.masks.turn_finder import TurnFinder
from megatron_packed_sft.encode.masks.turn_parts import Range, block_name, is_own, join_ranges
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, with_content_in_parts
from megatron_packed_sft.errors import InvalidInputError

_PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "probe"}},
    "required": ["key"],
}
_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "probe", "parameters": _PARAMETERS}}]
_USER: dict[str, Any] = {"role": "user", "content": "question"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "answer"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {"key": "argument"}}}
    ],
}


_PLAIN = ([_USER, _ANSWER, _USER, _ANSWER], [_USER, _ANSWER])


class Probe(NamedTuple):
    """What small renders show about a template.

    Args:
        ends: end-of-turn texts, such as `<|im_end|>`.
        answer_ends: those that end answers, not only tool calls.
        structure: the template's own text between an answer and the next question, and after a question.
        sought: constants that the template searches strings for, such as `</think>`.
        takes_parts: whether the template reads a message's content only as a list of parts.
    """

    ends: tuple[str, ...]
    structure: str
    sought: frozenset[str]
    takes_parts: bool
    answer_ends: tuple[str, ...]


def probe_template(
    renderer: TracedRenderer, control: re.Pattern[str], *, header: str | None, stops: Sequence[str]
) -> Probe:
    """Find what a template writes around turns; raise InvalidInputError if it cannot render a chat."""
    recorder = Recorder()
    chat = _Chats(renderer, recorder, control, header, stops)
    messages, tools, render = chat.plain()
    tokens = re.compile(f"{control.pattern}|<[^<>\\s]{{1,60}}>")
    ends: list[str] = []
    for number in range(1, len(messages), 2):
        ends += chat.end_of(messages, tools, number, tokens)
    answer_ends = tuple(dict.fromkeys((*ends, *stops)))
    for calls in ([_USER, _CALL], [_USER, {**_CALL, "content": None}]):
        if chat.takes_parts:
            calls = with_content_in_parts(calls)
        if ends:
            ends += [end for end in chat.end_of(calls, _TOOLS, 1, tokens) if end in stops or ends[0] not in end]
    structure = _structure(render, chat, messages[:1], tools)
    all_ends = tuple(dict.fromkeys((*ends, *stops)))
    return Probe(all_ends, structure, frozenset(recorder.sought), chat.takes_parts, answer_ends)


class _Chats:
    def __init__(
        self,
        renderer: TracedRenderer,
        recorder: Recorder,
        control: re.Pattern[str],
        header: str | None,
        stops: Sequence[str],
    ) -> None:
        self._renderer = renderer
        self._recorder = recorder
        self._settings: Mapping[str, Any] = {"control": control, "header": header, "stops": stops}
        self.takes_parts = False

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, *, prompt: bool = False) -> TracedText:
        chat = AuthoredChat(tools, self._recorder)
        return self._renderer.render(messages, chat, add_generation_prompt=prompt)

    def plain(self) -> tuple[Sequence[dict[str, Any]], Any, TracedText]:
        """Render a chat of a user and an assistant, with tools or with content in parts if the template needs them."""
        refusal = None
        for in_parts, messages, tools in product((False, True), _PLAIN, (None, _TOOLS)):
            if in_parts:
                messages = with_content_in_parts(messages)
            try:
                render = self.render(messages, tools)
            except RecordRefusedError as error:
                refusal = refusal or error
                continue
            own = [span for span in render.spans if is_own(span.author, len(messages) - 1)]
            # A list that is written with its brackets is not read as parts.
            if own and (not in_parts or any(len(span.author.path) > 1 for span in own)):
                self.takes_parts = in_parts
                return messages, tools, render
        if refusal is None:
            raise InvalidInputError(f"{self._renderer.name} omits the assistant's answer; choose another template")
        raise InvalidInputError(
            f"the template cannot render a chat of a user and an assistant ({refusal.detail}); choose another template"
        )

    def end_of(self, messages: Sequence[dict[str, Any]], tools: Any, number: int, tokens: re.Pattern[str]) -> list[str]:
        """Return what ends an assistant's turn: its last control token, or all text after the message's."""
        try:
            finder = TurnFinder(
                messages,
                lambda part, add_generation_prompt=False, probe=False: self.render(
                    part, tools, prompt=add_generation_prompt
                ),
                **self._settings,
            )
            own = finder.own_spans(number, None)
            start, end = finder.turn(number)
        except RecordRefusedError:
            return []
        turn = finder.chat.text[start:end]
        tail = finder.chat.text[own[-1].end : end].strip() if own else ""
        last = [match[0] for match in tokens.finditer(tail) if match.end() == len(tail)]
        if not last:
            return [tail] if tail else []
        name = block_name(last[-1])
        others = tokens.findall(turn.removesuffix(last[-1]))
        # A token that closes a block of the turn, such as </tool_call>, does not end the turn.
        is_closing = name and last[-1] not in self._settings["stops"] and name in map(block_name, others)
        return [] if is_closing else [last[-1]]


def _structure(render: TracedText, chat: _Chats, question: Sequence[dict[str, Any]], tools: Any) -> str:
    """Return the template's text around questions."""
    answers = [span.end for span in render.spans if is_own(span.author, 1)]
    questions = [span.start for span in render.spans if is_own(span.author, 2)]
    between = render.text[answers[-1] : questions[0]] if answers and questions else ""
    try:
        asked = chat.render(question, tools)
    except RecordRefusedError:
        return between
    ends = [span.end for span in asked.spans if is_own(span.author, 0)]
    return between + (asked.text[ends[-1] :] if ends else "")


# Control tokens in what people wrote: texts that must not become one.

# <think>, </tool_call>, <h1>: messages contain these on purpose, and mean the token.
_MARKUP = re.compile(r"</?[a-z][a-z0-9_]*>")


def tokens_to_escape(
    control_tokens: Collection[str], variables: Mapping[str, Any], structure: str, sought: Collection[str]
) -> list[str]:
    """Return the control tokens that the text of a message must not become.

    These are all except markup tags (`<think>`, `<tool_call>`, `<h1>`) and tokens that the template itself searches
    messages for. Tokens that the tokenizer names (`<s>`) or that separate turns (`<end_of_turn>`) are always included.

    Args:
        control_tokens: of the tokenizer.
        variables: the tokenizer's variables for templates: its special tokens as text, or lists of them.
        structure: what the template writes between turns.
        sought: what it searches messages for.

    Example:
        >>> tokens_to_escape(["<|im_end|>", "<think>", "</s>"], {"eos_token": "</s>"}, "", [])
        ['<|im_end|>', '</s>']
    """
    named = {value for value in variables.values() if isinstance(value, str)}
    meant = {text.strip() for text in sought}
    return [
        token
        for token in control_tokens
        if token.strip() and (token in named or token in structure or not (token in meant or _MARKUP.fullmatch(token)))
    ]


class ControlMarks:
    """Counts the places in a text where a control token may begin, to show without a search that strings contain none.

    A rendered text has at least as many of these places as its constants. If it has no more, no string contains the
    beginning of a control token, and none begins in a string and ends after it.

    Args:
        tokens: the tokens to escape.

    Example:
        >>> marks = ControlMarks(["<|im_start|>", "<|im_end|>"])
        >>> marks.count("<|im_end|>"), marks.count("a < b"), marks.count("<|im_end|> is a <|token|>")
        (1, 0, 2)
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # The first two characters, or one if the two could overlap.
        self._beginnings = sorted({token[: 2 if token[:1] != token[1:2] else 1] for token in tokens})

    def count(self, text: str) -> int:
        """Return how many there are."""
        return sum(map(text.count, self._beginnings))


def literal_ranges(text: str, spans: Sequence[Span], pattern: re.Pattern[str]) -> list[Range]:
    """Return the control tokens of a text that lie at least partly in the text of messages.

    Example:
        >>> from megatron_packed_sft.encode.masks.authored_text import Author
        >>> literal_ranges("<e>Hi<e><e>", [Span(3, 8, Author(0, ()))], re.compile("<e>"))
        [(5, 8)]
    """
    starts = [span.start for span in spans]
    found = []
    for match in pattern.finditer(text):
        number = bisect.bisect_left(starts, match.end()) - 1
        if number >= 0 and spans[number].end > match.start():
            found.append(match.span())
    return join_ranges(found)
