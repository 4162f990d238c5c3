"""Explain a chat template: what it writes around each kind of turn, and what it loses, changes or refuses.

The source of the template is not analysed. Small chats (the probes) are rendered by the engine of `prepare`, which
knows who wrote each character, and the result is described.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.authored_text import TOOLS
from megatron_packed_sft.encode.masks.lost_text import ALL_TOOLS, CONTENT, MESSAGE, REASONING, TOOL_CALL, Loss
from megatron_packed_sft.encode.masks.rendering_marker import ChatOutline
from megatron_packed_sft.encode.masks.trained_kinds import TurnKind
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.record_marker import RenderedSequence
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation

_ID = "abcdefghi"  # Mistral's templates require nine characters
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """Return an assistant message."""
    message = {"role": "assistant", "content": text}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def calling(*cities: str, text: str = "", reasoning: str | None = None) -> dict[str, Any]:
    """Return an assistant message with one tool call for each city."""
    calls = [
        {"id": _ID, "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for city in cities or ("Oslo",)
    ]
    return {**answer(text, reasoning), "tool_calls": calls}


def result(text: str) -> dict[str, Any]:
    """Return a tool message."""
    return {"role": "tool", "tool_call_id": _ID, "name": "get_weather", "content": text}


def chat(*messages: dict[str, Any], tools: bool = False) -> Conversation:
    """Return a conversation."""
    return Conversation(list(messages), [_WEATHER] if tools else None)


class Probe(NamedTuple):
    """A chat that tests one behaviour of a template.

    Args:
        name: what is special about the chat.
        conversation: the chat.
        message: the number of the message under test.
        changed: the finding if the template writes its content differently.
        inside: the finding if it is written inside another turn.
        by_turns: test whether each turn looks as it did when it was the last one.
        about_start: test whether the template begins with words of its own.
    """

    name: str
    conversation: Conversation
    message: int = 1
    changed: str = "is not written as it is"
    inside: str = ""
    by_turns: bool = False
    about_start: bool = False

    def counts(self, loss: Loss) -> bool:
        """Whether a loss is about the message under test."""
        return loss.message == self.message


_SYSTEM = {"role": "system", "content": "zqsystem"}
_ONE, _TWO, _THREE, _FOUR = user("zqone"), answer("zqtwo"), user("zqthree"), answer("zqfour")
_CALLED = (_ONE, calling(), result("zqresult"), _TWO)
PROBES = (
    Probe("a system prompt", chat(_SYSTEM, _ONE, _TWO), 0, inside="is written inside the first question"),
    Probe("a developer message", chat({**_SYSTEM, "role": "developer"}, _ONE, _TWO), 0),
    Probe("a system prompt in the middle", chat(_ONE, _TWO, _SYSTEM, _THREE, _FOUR), 2,
          inside="is written inside another turn"),
    Probe("a chat without a system prompt", chat(_ONE, _TWO, _THREE, _FOUR), 0, about_start=True),
    Probe("several turns", chat(_ONE, _TWO, _THREE, _FOUR), by_turns=True,
          changed="earlier answers look different once a later question comes; encode.render=auto trains each as it "
          "was written"),
    Probe("two questions in a row", chat(_ONE, _THREE, _TWO), 1, inside="is written inside the first one"),
    Probe("two answers in a row", chat(_ONE, _TWO, _FOUR), 2),
    Probe("an answer first", chat(_TWO, _ONE, _FOUR), 0),
    Probe("an empty answer", chat(_ONE, answer(""), _THREE, _FOUR)),
    Probe("blanks around a question", chat(user("  zqone \n"), _TWO), 0, "loses blanks {}"),
    Probe("blanks around an answer", chat(_ONE, answer("  zqtwo \n"), _THREE, _FOUR), 1, "loses blanks {}"),
    Probe("reasoning", chat(_ONE, answer("zqtwo", "zqreason"))),
    Probe("reasoning in an earlier turn", chat(_ONE, answer("zqtwo", "zqreason"), _THREE, answer("zqfour", "zqwhy"))),
    Probe("<think> in an earlier answer", chat(_ONE, answer("<think>\nzqreason\n</think>\n\nzqtwo"), _THREE, _FOUR),
          changed="the reasoning between its tags is left out, or written differently"),
    Probe("tools", chat(_ONE, _TWO, tools=True), TOOLS),
    Probe("a tool call", chat(*_CALLED, tools=True)),
    Probe("a tool call that ends the chat", chat(_ONE, calling(), tools=True)),
    Probe("words beside a call", chat(_ONE, calling(text="zqwords"), result("zqresult"), _TWO, tools=True)),
    Probe("reasoning beside a call", chat(_ONE, calling(reasoning="zqreason"), result("zqresult"), _TWO, tools=True)),
    Probe("two calls at once",
          chat(_ONE, calling("Oslo", "Rome"), result("zqrain"), result("zqsun"), _TWO, tools=True)),
    Probe("a tool's result", chat(*_CALLED, tools=True), 2),
)  # fmt: skip

_BRIEF = {"role": "system", "content": "You are a helpful assistant. Be brief."}
_QUESTION, _SUM = user("Do I need an umbrella in Oslo?"), user("Thanks! And 2 + 2?")
# From the richest chat to one that every template accepts.
EXAMPLES = {
    "system prompt, reasoning, a tool call, its result, two answers": chat(
        _BRIEF,
        _QUESTION,
        calling(reasoning="I should look at the weather."),
        result('{"weather": "rain"}'),
        answer("Yes, it rains.", "Rain means umbrella."),
        tools=True,
    ),
    "system prompt, a tool call, its result, two answers": chat(
        _BRIEF,
        _QUESTION,
        calling(),
        result('{"weather": "rain"}'),
        answer("Yes, it rains."),
        _SUM,
        answer("4."),
        tools=True,
    ),
    "a tool call, its result, an answer": chat(
        _QUESTION, calling(), result('{"weather": "rain"}'), answer("Yes, it rains."), tools=True
    ),
    "system prompt, reasoning, an answer": chat(_BRIEF, user("2 + 2?"), answer("4.", "Two and two is four.")),
    "system prompt, two answers": chat(_BRIEF, user("2 + 2?"), answer("4."), user("And 3 + 3?"), answer("6.")),
    "two answers": chat(user("2 + 2?"), answer("4."), user("And 3 + 3?"), answer("6.")),
    "an answer": chat(user("2 + 2?"), answer("4.")),
}


_ANY_DATE = "2026-01-31"
_PREFIX, _RAISED = "the tokenizer's template: ", "TemplateError: "
_LOSSES = {
    TOOL_CALL: "a call is left out",
    REASONING: "the reasoning is left out",
    CONTENT: "the words are left out",
    MESSAGE: "the message is left out",
    ALL_TOOLS: "the tools are left out",
}
_KEPT, _LOST, _REFUSED, _CHANGED = "kept", "lost", "refused", "changed"


class Around(NamedTuple):
    """What the template writes around one kind of text.

    Args:
        kind: of the text.
        before, after: what it writes before and after the text.
        trained_before, trained_after: the parts next to the text that the assistant writes and that are trained.
        example: the text itself where it is not plain text, such as a tool call.
    """

    kind: str
    before: str = ""
    trained_before: str = ""
    trained_after: str = ""
    after: str = ""
    example: str = ""


class Finding(NamedTuple):
    """How the template handles one kind of chat.

    Args:
        probe: the name of the chat.
        outcome: kept, changed, lost or refused.
        sentence: the details.
    """

    probe: str
    outcome: str
    sentence: str = ""


class ExampleText(NamedTuple):
    """A rendered chat with its title."""

    title: str
    conversation: Conversation
    rendered: RenderedSequence


@dataclass
class TemplateExplanation:
    """Renders probes and describes a template.

    Args:
        tokenizer: provides control tokens and variables.
        template: the template to explain.
        options: the user's settings for it.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    options: TemplateOptions = field(default_factory=TemplateOptions)
    needs_date: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        try:
            self._encoder = self._encoder_with()
            self._encoder.marker()
        except InvalidInputError:
            if self.options.date is not None:
                raise
            # Templates that write today's date need one; any date will do here.
            self.options = replace(self.options, date=_ANY_DATE)
            self._encoder = self._encoder_with()
            self._encoder.marker()
            self.needs_date = True

    @property
    def variables(self) -> list[str]:
        """The variables that the template reads."""
        return Renderer(self.template.source, name=self.template.name, date=_ANY_DATE).asked_variables()

    @property
    def ends(self) -> Sequence[str]:
        """Its end-of-turn texts."""
        return self._encoder.marker().ends

    @cached_property
    def around(self) -> list[Around]:
        """What it writes around each kind of text, without kinds that it does not support."""
        return list(self._arounds())

    @cached_property
    def findings(self) -> list[Finding]:
        """How it handles many kinds of chats."""
        found = [self._finding(probe) for probe in PROBES]
        if self.needs_date:
            found.insert(0, Finding("a chat", _CHANGED, "writes today's date, so template.date must be set"))
        return found

    @cached_property
    def example(self) -> ExampleText | None:
        """The richest chat that it renders without a loss, otherwise the richest that it renders."""
        first: ExampleText | None = None
        for title, conversation in EXAMPLES.items():
            try:
                [rendered] = self._encoder.render(conversation)
            except (RecordRefusedError, InvalidInputError):
                continue
            one = ExampleText(title, conversation, rendered)
            if not rendered.losses:
                return one
            first = first or one
        return first

    def _encoder_with(self, *, with_kinds: bool = True, **options: Any) -> RecordEncoder:
        given = EncodeOptions(on_lost="warn", **options)
        own: Any = _WithTemplate(self.tokenizer, self.template)
        return RecordEncoder(own, replace(self.options, name=None), given, with_kinds=with_kinds)

    @cached_property
    def _plain(self) -> RecordEncoder:
        return self._encoder_with(with_kinds=False)

    @cached_property
    def _by_turns(self) -> RecordEncoder:
        return self._encoder_with(with_kinds=False, render="auto")

    def _render(self, conversation: Conversation) -> tuple[RenderedSequence, ChatOutline] | None:
        try:
            [rendered] = self._encoder.render(conversation)
            return rendered, self._encoder.marker(conversation).outline(conversation)
        except (RecordRefusedError, InvalidInputError):
            return None

    def _arounds(self) -> Iterator[Around]:
        plain, start = self._plain_chat, ""
        if plain is not None:
            start = plain[1].chat.text[: plain[1].turns[0].start]
            if start:
                yield Around("start", before=start)
        system = self._render(chat({"role": "system", "content": "zqsystem"}, user("zqone"), answer("zqtwo")))
        if system is not None:
            for one in self._of_message("system", system, 0):
                yield one._replace(before=one.before.removeprefix(start))
        if plain is not None:
            yield from self._of_message("user", plain, 0)
            yield from self._of_message("assistant", plain, 1)
            last = len(plain[1].turns) - 1
            if last > 1:
                again = list(self._of_message("last answer", plain, last))
                first = list(self._of_message("last answer", plain, 1))
                if again != first:
                    yield from again
        yield from self._of_kind(chat(user("zqone"), answer("zqtwo", "zqreason")), TurnKind.REASONING, "reasoning")
        call = chat(user("zqone"), calling(), result("zqresult"), answer("zqtwo"), tools=True)
        yield from self._of_kind(call, TurnKind.TOOL_CALL, "tool call")
        called = self._render(call)
        if called is not None:
            yield from self._of_message("tool result", called, 2)
            yield from self._of_tools(called)
        try:
            prompt = self._encoder.marker().generation_prompt(chat(user("zqone")))
        except (RecordRefusedError, InvalidInputError):
            prompt = ""
        yield Around("generation prompt", before=prompt)
        if plain is not None:
            end = plain[1].chat.text[max(turn.end for turn in plain[1].turns) :]
            if end:
                yield Around("end", after=end)

    def _of_message(self, kind: str, marked: tuple[RenderedSequence, ChatOutline], number: int) -> Iterator[Around]:
        rendered, outline = marked
        turn, text = outline.turns[number], outline.chat.text
        if not turn.said:
            return
        first, last = turn.said[0].start, turn.said[-1].end
        own = [one for one in rendered.marked.trained if one[0] <= first and last <= one[1]]
        start, end = own[0] if own else (first, last)
        start, end = max(start, turn.start), min(end, turn.end)
        before = text[turn.start : start]
        yield Around(kind, before, text[start:first], text[last:end], text[end : turn.end])

    def _of_kind(self, conversation: Conversation, kind: TurnKind, name: str) -> Iterator[Around]:
        """Yield what it writes around reasoning or a call, if it shows them."""
        marked = self._render(conversation)
        if marked is None:
            return
        rendered, outline = marked
        own = [one for one in rendered.marked.segments if one.kind == kind]
        spans = [span for span in outline.turns[1].said if own and own[0].start <= span.start < own[-1].end]
        if not spans:
            return
        text = outline.chat.text
        if kind is TurnKind.TOOL_CALL:
            yield Around(name, example=text[own[0].start : own[-1].end])
            return
        # A tag that the generation prompt opens is given: the part of the header that a plain answer's header lacks.
        given = text[outline.turns[1].start : own[0].start]
        header = self._header
        opened = given[len(header) :] if given.startswith(header) else ""
        yield Around(name, opened, text[own[0].start : spans[0].start], text[spans[-1].end : own[-1].end])

    @cached_property
    def _plain_chat(self) -> tuple[RenderedSequence, ChatOutline] | None:
        two_turns = chat(user("zqone"), answer("zqtwo"), user("zqthree"), answer("zqfour"))
        return self._render(two_turns) or self._render(chat(user("zqone"), answer("zqtwo")))

    @cached_property
    def _header(self) -> str:
        found = next(self._of_message("assistant", self._plain_chat, 1), None) if self._plain_chat else None
        return found.before if found else ""

    def _of_tools(self, marked: tuple[RenderedSequence, ChatOutline]) -> Iterator[Around]:
        _, outline = marked
        spans = [span for span in outline.chat.spans if span.author.message == TOOLS]
        if not spans:
            return
        start, end = spans[0].start, spans[-1].end
        inside = [turn for turn in outline.turns if turn.start <= start < turn.end]
        before = outline.chat.text[inside[0].start if inside else 0 : start]
        behind = [turn.start for turn in outline.turns if turn.start >= end]
        limit = inside[0].end if inside else min(behind, default=end)
        said = [span.start for turn in inside for span in turn.said if span.start >= end]
        after = outline.chat.text[end : min([limit, *said])]
        yield Around("tools", example=before + outline.chat.text[start:end] + after)

    def _finding(self, probe: Probe) -> Finding:
        try:
            if probe.by_turns:
                is_same = len(self._by_turns.render(probe.conversation)) == 1
                return Finding(probe.name, _KEPT) if is_same else Finding(probe.name, _CHANGED, probe.changed)
            [rendered] = self._plain.render(probe.conversation)
            outline = self._plain.marker(probe.conversation).outline(probe.conversation)
        except RecordRefusedError as refusal:
            detail = refusal.detail.removeprefix(_PREFIX).removeprefix(_RAISED)
            return Finding(probe.name, _REFUSED, detail)
        except InvalidInputError as error:
            return Finding(probe.name, _REFUSED, str(error))
        losses = [loss for loss in rendered.losses if probe.counts(loss)]
        if losses:
            return Finding(probe.name, _LOST, " and ".join(dict.fromkeys(_LOSSES[loss.kind] for loss in losses)))
        sentence = _change(probe, outline)
        return Finding(probe.name, _CHANGED, sentence) if sentence else Finding(probe.name, _KEPT)


class _WithTemplate:
    """A tokenizer whose chat template is the explained one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template.source
        self.tool_template = template.tool_source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _change(probe: Probe, outline: ChatOutline) -> str:
    """Return how a message is changed, or an empty text if it is written unchanged."""
    if probe.message < 0:
        return ""
    turn = outline.turns[probe.message]
    if turn.is_inside and probe.inside:
        return probe.inside
    if probe.about_start:
        return _own_beginning(outline)
    content = probe.conversation.messages[probe.message].get("content")
    shown = "".join(outline.chat.text[one.start : one.end] for one in turn.said if one.author.path[:1] == ("content",))
    if not isinstance(content, str) or shown == content or not content.strip():
        return ""
    if shown == json.dumps(content):
        return "is written as JSON"
    if shown.strip() != content.strip():
        return probe.changed
    is_left, is_right = shown.startswith(content[0]), shown.endswith(content[-1])
    where = "after it" if is_left else "before it" if is_right else "on both sides"
    return probe.changed.format(where)


def _own_beginning(outline: ChatOutline) -> str:
    """Return the finding about a template that begins every chat with words of its own."""
    first, third = outline.turns[0], outline.turns[2]
    text = outline.chat.text
    if not first.said or not third.said:
        return ""
    before, header = text[: first.said[0].start], third.before(text)
    own = before.removesuffix(header) if before.endswith(header) else before
    words = re.sub(r"<[^<>]*>|\[/?[A-Z_]+\]", " ", own)
    return f"begins with the template's own words: {own.strip()}" if len(words.split()) > 1 else ""
