"""`RecordMarker` turns a record into marked texts, one for each of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.masks.rendering_marker import MarkedChat
from megatron_packed_sft.encode.masks.turn_parts import join_ranges
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import MarkedText, Segment
from megatron_packed_sft.encode.templates.environment import time_limited
from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, control_pattern
from megatron_packed_sft.records.record import Conversation, TextRecord
from megatron_packed_sft.support.drop_reasons import DropReason

_MAX_MARKERS = 64  # one for each combination of template and variables that records ask for


class RenderedSequence(NamedTuple):
    """The rendered text of one sequence, before it is tokenized and cut.

    Args:
        marked: its text, and which characters are trained.
        losses: what the template omitted.
        num_turns: its number of trained turns.
        conversation: what was rendered; None for a text record.
        is_turn: whether it shows one turn of a longer chat, with what came before it.
    """

    marked: MarkedText
    losses: Sequence[Loss] = ()
    num_turns: int = 1
    conversation: Conversation | None = None
    is_turn: bool = False


class RecordMarker:
    """Renders records with one tokenizer, template and set of options.

    Args:
        tokenizer: gives the template's variables, control tokens and stop tokens.
        template: a `ChatTemplate`, `TemplateOptions`, what `load_template` takes, or None for the tokenizer's own. It
            is loaded with the first conversation; text records need none.
        options: what is trained.
        with_kinds: also return what every trained character is part of, which takes another render.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateOptions | str | None,
        options: EncodeOptions,
        *,
        with_kinds: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = options
        self._with_kinds = with_kinds
        self._loaded: tuple[ChatTemplate, TemplateOptions] | None = None
        self._markers: dict[tuple[bool, bytes], ChatMarker] = {}
        escapes_text = options.special_tokens_in_text == "escape"
        # Some tokenizers have control tokens of white space only; escaping those would be pointless.
        escaped = [token for token in tokenizer.control_tokens if escapes_text and token.strip()]
        self._escaped_in_text = control_pattern(escaped)

    def mark(self, record: Conversation | TextRecord) -> list[RenderedSequence]:
        """Return the marked texts of a record; raise RecordRefusedError if it cannot be encoded."""
        if isinstance(record, TextRecord):
            found = [self._mark_text(record)]
        elif self._options.render == "conversation":
            found = [self.mark_chat(record)]
        else:
            found = self._mark_turns(record)
        for one in found:
            _refuse_unusable(one.marked.text)
        return found

    def mark_chat(self, conversation: Conversation, *, is_turn: bool = False) -> RenderedSequence:
        """Return a conversation as one text; with `is_turn`, only losses in its last turn count."""
        marker = self.marker(conversation)
        return self._with_segments(marker, conversation, marker.mark(conversation, is_turn=is_turn), is_turn=is_turn)

    def marker(self, conversation: Conversation | None = None) -> ChatMarker:
        """Return the marker for a conversation, which depends on its template and its variables."""
        if self._loaded is None:
            given = self._template
            options = given if isinstance(given, TemplateOptions) else TemplateOptions()
            name = given.name if isinstance(given, TemplateOptions) else given
            loaded = name if isinstance(name, ChatTemplate) else load_template(name, self._tokenizer)
            self._loaded = loaded, options
        template, options = self._loaded
        with_tools = conversation is not None and conversation.tools is not None and template.tool_source is not None
        variables = conversation.variables if conversation is not None else None
        key = with_tools, _key_of_variables(variables, options.record_variables) if variables else b""
        if key not in self._markers:
            if with_tools:
                template = ChatTemplate(f"{template.name} (tool_use)", template.tool_source or "")
            if variables:
                options = replace(options, variables={**options.variables, **variables})
            if len(self._markers) >= _MAX_MARKERS:
                del self._markers[next(iter(self._markers))]
            with time_limited():
                self._markers[key] = ChatMarker(self._tokenizer, template, self._options, options)
        return self._markers[key]

    def _with_segments(
        self, marker: ChatMarker, conversation: Conversation, chat: MarkedChat, *, is_turn: bool
    ) -> RenderedSequence:
        num_turns = len(chat.marked.trained)
        if self._with_kinds or marker.needs_segments(conversation):
            chat = marker.with_segments(conversation, chat)
        return RenderedSequence(chat.marked, chat.losses, num_turns, conversation, is_turn)

    def _mark_turns(self, conversation: Conversation) -> list[RenderedSequence]:
        """Return one text for each trained turn, or one for the whole conversation if `auto` finds no difference."""
        marker = self.marker(conversation)
        numbers = [number for number, is_wanted in enumerate(marker.trained_messages(conversation)) if is_wanted]
        is_last = numbers == [len(conversation.messages) - 1]
        is_auto = self._options.render == "auto"
        if not numbers or (is_auto and is_last):
            return [self.mark_chat(conversation)]
        whole, refusal = None, None
        try:
            whole = marker.mark(conversation) if is_auto else None
        except RecordRefusedError as error:
            refusal = error  # rendered turn by turn, it may work
        try:
            prefixes = [up_to_turn(conversation, number) for number in numbers]
            turns = [marker.mark(prefix, is_turn=True) for prefix in prefixes]
        except RecordRefusedError:
            if refusal is not None:
                raise refusal from None
            if whole is None:
                raise
            return [self._with_segments(marker, conversation, whole, is_turn=False)]
        if whole is not None and _turns_in(marker, conversation, whole, numbers) == [*map(_trained_text, turns)]:
            return [self._with_segments(marker, conversation, whole, is_turn=False)]
        return [
            self._with_segments(marker, prefix, turn, is_turn=True)
            for prefix, turn in zip(prefixes, turns, strict=True)
        ]

    def _mark_text(self, record: TextRecord) -> RenderedSequence:
        text = "".join(part for part, _ in record.parts)
        segments, position = [], 0
        for part, weight in record.parts:
            if weight and part:
                segments.append(Segment(position, position + len(part), float(weight)))
            position += len(part)
        literal = join_ranges(match.span() for match in self._escaped_in_text.finditer(text))
        trained = join_ranges((segment.start, segment.end) for segment in segments)
        has_weights = self._with_kinds or any(segment.weight != 1 for segment in segments)
        return RenderedSequence(MarkedText(text, trained, literal, segments if has_weights else ()))


def _turns_in(
    marker: ChatMarker, conversation: Conversation, whole: MarkedChat, numbers: Sequence[int]
) -> list[tuple[str, ...]]:
    """Return what is trained of each turn when the whole conversation is rendered."""
    if len(whole.marked.trained) == len(numbers):
        return [(whole.marked.text[start:end],) for start, end in whole.marked.trained]
    found = []
    for number in numbers:  # some turns touch, or are empty
        own = conversation.train[number] if conversation.train else None
        train = [own if other == number else 0.0 for other in range(len(conversation.messages))]
        found.append(_trained_text(marker.mark(replace(conversation, train=train))))
    return found


def _trained_text(chat: MarkedChat) -> tuple[str, ...]:
    return tuple(chat.marked.text[start:end] for start, end in chat.marked.trained)


def _key_of_variables(variables: Mapping[str, Any], allowed: Sequence[str]) -> bytes:
    """Return a record's variables as a dictionary key; raise RecordRefusedError if one is not allowed."""
    foreign = sorted(set(variables) - set(allowed))
    if foreign:
        raise RecordRefusedError(
            DropReason.BAD_RECORD,
            f"chat_template_kwargs sets {foreign[0]}, which a record may not set; add it to "
            "template.record_variables, or remove it",
        )
    return orjson.dumps(variables, option=orjson.OPT_SORT_KEYS)


def _refuse_unusable(text: str) -> None:
    if not text:
        raise RecordRefusedError(DropReason.EMPTY, "the record has no text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordRefusedError(
                DropReason.INVALID_TEXT, f"character {error.start} is half a surrogate pair"
            ) from None


# Conversations cut at turn boundaries: up to one turn, as at inference, or without the turns that do not fit.

_PROMPTS = ("system", "developer")


def up_to_turn(conversation: Conversation, number: int) -> Conversation:
    """Return the conversation up to a message, with only that message trained.

    Example:
        >>> chat = Conversation([{"role": role, "content": role[0]} for role in ("user", "assistant") * 2])
        >>> up_to_turn(chat, 1)
        Conversation(messages=[{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': 'a'}], tools=None, \
train=[0.0, None], weight=1.0, parts=None, variables=None)
    """
    own = conversation.train[number] if conversation.train else None
    parts = {number: conversation.parts[number]} if conversation.parts and number in conversation.parts else None
    return replace(
        conversation,
        messages=list(conversation.messages[: number + 1]),
        train=[*[0.0] * number, own],
        parts=parts,
    )


def shorter_by_turns(conversation: Conversation, truncation: str) -> Iterator[Conversation]:
    """Yield the conversation with fewer and fewer turns, the longest first; the system prompt always stays.

    `turns` keeps the newest, which begin with a user message; `oldest_turns` the oldest, which end with an assistant
    message. So a call stays with its result, and every trained turn keeps its end.

    Example:
        >>> chat = Conversation([{"role": role} for role in ("system", "user", "assistant", "user", "assistant")])
        >>> [len(shorter.messages) for shorter in shorter_by_turns(chat, "turns")]
        [3]
    """
    roles = [message.get("role") for message in conversation.messages]
    num_prompts = next((number for number, role in enumerate(roles) if role not in _PROMPTS), len(roles))
    head = range(num_prompts)
    if truncation == "turns":
        begins = [number for number in range(num_prompts + 1, len(roles)) if roles[number] == "user"]
        yield from (_only(conversation, [*head, *range(begin, len(roles))]) for begin in begins)
    else:
        ends = [number + 1 for number in range(num_prompts, len(roles) - 1) if roles[number] == "assistant"]
        yield from (_only(conversation, range(end)) for end in reversed(ends))


def _only(conversation: Conversation, numbers: Sequence[int]) -> Conversation:
    parts = conversation.parts or {}
    return replace(
        conversation,
        messages=[conversation.messages[number] for number in numbers],
        train=[conversation.train[number] for number in numbers] if conversation.train else None,
        parts={place: parts[number] for place, number in enumerate(numbers) if number in parts} or None,
    )
