"""A conversation to a marked text: which characters the model is to learn, and which only look like control tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import orjson

from megatron_packed_sft.encode.masks.escapes import literal_ranges, tokens_to_escape
from megatron_packed_sft.encode.masks.probe import probe_template
from megatron_packed_sft.encode.masks.trace import Trace, Tracer, free_character
from megatron_packed_sft.encode.masks.turns import Range, find_turns, joined
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.message_forms import forms_of
from megatron_packed_sft.encode.templates.renderer import GenerationMarks, RecordRefusedError, Renderer
from megatron_packed_sft.encode.tokenizers.control_tokens import control_pattern
from megatron_packed_sft.encode.tokenizers.interface import MarkedText, Tokenizer
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.drop_reasons import DropReason

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


class ChatMarker:
    """Renders conversations with one template, for one tokenizer.

    Args:
        tokenizer: gives the template's variables, and the control tokens.
        template: the chat template.
        options: what is trained and escaped.
        template_options: variables and date of the template, and what to use instead of what its probe finds.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, options: EncodeOptions, template_options: TemplateOptions
    ) -> None:
        self._options = options
        self._renderer = Renderer(
            template.source,
            name=template.name,
            variables={**tokenizer.template_variables, **template_options.variables},
            date=template_options.date,
        )
        self._tracer = Tracer(self._renderer)
        probe = probe_template(
            self._tracer,
            tokenizer.control_tokens,
            header=template_options.header,
            end_of_turn=template_options.end_of_turn,
        )
        self.turn_marks = probe.marks
        escaped: list[str] = []
        if options.special_tokens_in_content == "escape":
            escaped = tokens_to_escape(tokenizer.control_tokens, tokenizer.template_variables, probe.structure)
        self._escaped = control_pattern(escaped)
        # A record is searched as JSON, in one go. Of a token, the beginning may stand at the end of a string: another
        # string completes it, if the template writes them side by side.
        beginnings = {token[:length] for token in escaped for length in range(1, len(token))}
        to_trace = (*map(_in_json, (*escaped, *probe.marks.ends)), *(_in_json(text) + '"' for text in beginnings))
        self._to_trace = control_pattern(to_trace)
        self._to_mark_in_tools = control_pattern(map(_in_json, (*escaped, *probe.marks.headers, *probe.marks.ends)))
        self._warn_of_ordinary_ends(tokenizer)

    def mark(self, conversation: Conversation) -> MarkedText:
        """Render a conversation and say which characters are trained; RecordRefusedError if that cannot be said."""
        wanted = self.wanted(conversation)
        if not any(wanted):
            raise RecordRefusedError(
                DropReason.NOTHING_TO_TRAIN, "no message is to be trained, by its role or its flag"
            )
        tools = None if conversation.tools is None else list(conversation.tools)
        if self._renderer.has_generation_marks:
            return self._mark_by_generation(conversation, tools, wanted)
        messages, plain = self._first_form(conversation, tools, None)
        trace = self._trace(messages, tools, plain)
        literal = self._literal(trace)
        return MarkedText(plain, self._turns(trace, messages, wanted), literal)

    def wanted(self, conversation: Conversation) -> list[bool]:
        """Return which messages are to be trained."""
        roles = self._options.roles_to_train
        flags = conversation.train or [None] * len(conversation.messages)
        wanted = [
            message.get("role") in roles if flag is None else bool(flag)
            for message, flag in zip(conversation.messages, flags, strict=True)
        ]
        if self._options.last_turn_only and any(wanted):
            last = len(wanted) - 1 - wanted[::-1].index(True)
            wanted = [number == last for number in range(len(wanted))]
        return wanted

    def _first_form(
        self, conversation: Conversation, tools: Any, marks: GenerationMarks | None
    ) -> tuple[Messages, str]:
        refusal = RecordRefusedError(DropReason.EMPTY, "the conversation has no messages")
        for number, messages in enumerate(forms_of(conversation.messages)):
            try:
                return messages, self._renderer.render(messages, tools, marks=marks)
            except RecordRefusedError as other:
                if number == 0:
                    refusal = other
        raise refusal

    def _trace(self, messages: Messages, tools: Any, plain: str) -> Trace:
        return self._tracer.trace(messages, tools, mark_tools=self._tools_need_marks(tools), plain=plain)

    def _turns(self, trace: Trace, messages: Messages, wanted: Sequence[bool]) -> list[Range]:
        roles = [message.get("role", "") for message in messages]
        return find_turns(trace, roles, wanted, self.turn_marks, with_end=self._options.train_on_eot)

    def _literal(self, trace: Trace) -> list[Range]:
        for text in trace.unmarked:
            if self._escaped.search(text):
                raise RecordRefusedError(
                    DropReason.UNESCAPABLE,
                    f"{text!r} is a name, an id or what the template looks for, and holds the text of a control token; "
                    "change it, or set special_tokens_in_content='allow'",
                )
        return literal_ranges(trace.text, trace.spans, self._escaped)

    def _mark_by_generation(self, conversation: Conversation, tools: Any, wanted: Sequence[bool]) -> MarkedText:
        words = _as_json(conversation.messages)
        free = free_character(words + _as_json(tools) if tools else words)
        marks = GenerationMarks(f"{free}(", f"{free})")
        messages, marked = self._first_form(conversation, tools, marks)
        text, blocks = _take_out(marked, marks)
        if not self._renderer.marks_are_direct and self._renderer.render(messages, tools) != text:
            raise RecordRefusedError(
                DropReason.UNTRACEABLE_TEMPLATE,
                f"{self._renderer.name} changes what its generation blocks wrote; put the marks where it is written",
            )
        roles = [message.get("role", "") for message in messages]
        looks_like_control = self._to_trace.search(words) or self._tools_need_marks(tools)
        if wanted == [role == "assistant" for role in roles] and not looks_like_control:
            return MarkedText(text, joined(self._with_end(text, block, None) for block in blocks))
        others = [choice and role != "assistant" for role, choice in zip(roles, wanted, strict=True)]
        trace = self._trace(messages, tools, text)
        literal = self._literal(trace)
        owners = self._owners(blocks, trace, roles)
        trained = [
            self._with_end(text, block, trace) for block, owner in zip(blocks, owners, strict=True) if wanted[owner]
        ]
        trained += self._turns(trace, messages, others) if any(others) else []
        return MarkedText(text, joined(trained), literal)

    def _owners(self, blocks: Sequence[Range], trace: Trace, roles: Sequence[str]) -> list[int]:
        """Return the message that each generation block belongs to: by its text, or, if it has none, by its number."""
        assistants = [number for number, role in enumerate(roles) if role == "assistant"]
        owners: list[int] = []
        for number, (start, end) in enumerate(blocks):
            inside = {span.message for span in trace.spans if start <= span.start < end and span.message >= 0}
            if not inside and len(blocks) == len(assistants):
                inside = {assistants[number]}
            if len(inside) != 1:
                raise RecordRefusedError(
                    DropReason.UNTRACEABLE_TEMPLATE,
                    f"a generation block of {self._renderer.name} belongs to no single message",
                )
            owners += inside
        return owners

    def _with_end(self, text: str, block: Range, trace: Trace | None) -> Range:
        """Make a block end with its end-of-turn token, or before it; whitespace after that token is not trained."""
        start, end = block
        stripped = start + len(text[start:end].rstrip())
        for token in self.turn_marks.ends:
            if text.endswith(token, start, stripped) and not _is_said(trace, stripped - 1):
                return start, stripped if self._options.train_on_eot else stripped - len(token)
        if self._options.train_on_eot:
            end += max((len(token) for token in self.turn_marks.ends if text.startswith(token, end)), default=0)
        return start, end

    def _tools_need_marks(self, tools: Any) -> bool:
        return bool(tools and self._to_mark_in_tools.search(_as_json(tools)))

    def _warn_of_ordinary_ends(self, tokenizer: Tokenizer) -> None:
        ordinary = [end for end in self.turn_marks.ends if end not in tokenizer.control_tokens]
        if ordinary or not self.turn_marks.ends:
            logger.warning(
                "%s: a turn ends with %s for tokenizer %s; generation will have to stop at it",
                self._renderer.name,
                f"the ordinary text {', '.join(map(repr, ordinary))}" if ordinary else "nothing",
                tokenizer.name,
            )


def _is_said(trace: Trace | None, position: int) -> bool:
    return trace is not None and any(span.start <= position < span.end for span in trace.spans)


def _as_json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # numbers beyond 64 bits, or half a surrogate pair
        return json.dumps(value, ensure_ascii=False)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _take_out(marked: str, marks: GenerationMarks) -> tuple[str, list[Range]]:
    """Take generation marks out of a text and return it with the ranges between them."""
    first, *pieces = marked.split(marks.open)
    parts, blocks, position = [first], [], len(first)
    for piece in pieces:
        inside, _, outside = piece.partition(marks.close)
        blocks.append((position, position + len(inside)))
        parts += (inside, outside)
        position += len(inside) + len(outside)
    return "".join(parts), blocks
