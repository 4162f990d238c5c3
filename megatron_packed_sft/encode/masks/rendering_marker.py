"""Marking conversations by rendering alone: where each turn begins and ends, and which parts of it are trained.

Nothing is learnt from one chat for the next; `ChatMarker` does that, and must give the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.lost_text import Loss, find_losses
from megatron_packed_sft.encode.masks.probe import literal_ranges, probe_template, tokens_to_escape
from megatron_packed_sft.encode.masks.shapes import note_parts
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedRenderer, TracedText
from megatron_packed_sft.encode.masks.trained_kinds import (
    MessageWeights,
    TurnKind,
    TurnSyntax,
    probe_syntax,
    segments_of,
)
from megatron_packed_sft.encode.masks.turn_finder import TurnFinder
from megatron_packed_sft.encode.masks.turn_parts import (
    Block,
    Range,
    Tokens,
    TurnOutline,
    generation_blocks,
    is_own,
    join_ranges,
    outline_of,
    scaffold_of,
)
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.renderer import (
    RecordRefusedError,
    Renderer,
    forms_of,
    reasoning_key,
    with_content_in_parts,
    with_reasoning_under,
)
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, control_pattern
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.drop_reasons import DropReason

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

_ANYBODY = Author(0, ())


class MarkedChat(NamedTuple):
    """A conversation as it is tokenized, and what the template omitted."""

    marked: MarkedText
    losses: tuple[Loss, ...] = ()


class Found(NamedTuple):
    """A chat that was searched, its traced render, and the form in which it was rendered."""

    marked: MarkedChat
    chat: TracedText
    messages: Messages
    is_direct: bool  # whether it was rendered in its original form


class ChatOutline(NamedTuple):
    """A rendered chat, who wrote what of it, and what the template writes for each message."""

    chat: TracedText
    turns: list[TurnOutline]


class RenderingMarker:
    """Renders conversations with one template, for one tokenizer.

    Args:
        tokenizer: gives the template's variables, control tokens and stop tokens.
        template: the chat template.
        options: which messages and parts are trained.
        template_options: the user's settings of the template.
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
        self._traced = TracedRenderer(self._renderer)
        self._reasoning_key = reasoning_key(self._renderer.tree)
        # Some tokenizers have thousands of control tokens, but a template can write only a few of them.
        self._own_text = "".join((template.source, *map(str, self._renderer.variables.values())))
        self._control = control_pattern(
            token for token in tokenizer.control_tokens if token.strip() and token in self._own_text
        )
        kinds = {TurnKind.ANSWER: "answers", TurnKind.REASONING: "reasoning", TurnKind.TOOL_CALL: "tool_calls"}
        self._untrained = frozenset(kind for kind, name in kinds.items() if not getattr(options.train, name))
        self._header, ends = template_options.header, template_options.end_of_turn
        self._stops = tuple(tokenizer.stop_tokens if ends is None else ends)
        probe = probe_template(self._traced, self._control, header=self._header, stops=self._stops)
        self.ends = probe.ends if ends is None else self._stops
        self._answer_ends = probe.answer_ends if ends is None else self._stops
        self._takes_parts = probe.takes_parts
        self._escaped_tokens: list[str] = []
        if options.special_tokens_in_content == "escape":
            self._escaped_tokens = tokens_to_escape(
                tokenizer.control_tokens, tokenizer.template_variables, probe.structure, probe.sought
            )
        self._escaped = control_pattern(self._escaped_tokens)
        self._warn_of_ordinary_ends(tokenizer, probe.ends)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation in the first form that the template accepts."""
        return self._first_form(conversation, None if conversation.tools is None else list(conversation.tools))[1]

    def outline(self, conversation: Conversation) -> ChatOutline:
        """Return what the template writes for each message, to show it to people."""
        tools = None if conversation.tools is None else list(conversation.tools)
        messages, _ = self._first_form(conversation, tools)
        chat = self._traced.render(messages, AuthoredChat(tools))
        return ChatOutline(chat, outline_of(messages, chat, self.ends))

    def generation_prompt(self, conversation: Conversation) -> str:
        """Return what the template adds after a conversation when the assistant speaks next."""
        tools = None if conversation.tools is None else list(conversation.tools)
        messages, _ = self._first_form(conversation, tools)
        chat = AuthoredChat(tools)
        prompt = self._traced.render(messages, chat, add_generation_prompt=True)
        scaffold = scaffold_of(prompt, self._traced.render(messages, chat))
        return scaffold.text[scaffold.num_bare :]

    def mark_by_rendering(self, conversation: Conversation) -> MarkedChat:
        """Mark a conversation without using what was learnt from others: slow; `mark` must give the same."""
        tools = None if conversation.tools is None else list(conversation.tools)
        found = self._mark_slowly(conversation, tools, self._require_trained(conversation), None).marked
        self._refuse_losses(found.losses)
        return found

    def trained_messages(self, conversation: Conversation) -> list[bool]:
        """Return for each message whether it is trained."""
        roles = self._options.roles_to_train
        flags = conversation.train or [None] * len(conversation.messages)
        wanted = [
            message.get("role") in roles if flag is None else bool(flag)
            for message, flag in zip(conversation.messages, flags, strict=True)
        ]
        for number, parts in (conversation.parts or {}).items():
            wanted[number] = any(wanted[number] if weight is None else weight > 0 for _, weight in parts)
        if self._options.last_turn_only and any(wanted):
            last = len(wanted) - 1 - wanted[::-1].index(True)
            wanted = [number == last for number in range(len(wanted))]
        return wanted

    def needs_segments(self, conversation: Conversation) -> bool:
        """Return whether a conversation has weights besides 0 and 1, or options exclude a part of its turns."""
        return bool(
            self._untrained
            or conversation.parts
            or conversation.weight != 1
            or (conversation.train and any(flag is not None and flag not in (0, 1) for flag in conversation.train))
        )

    def with_segments(self, conversation: Conversation, chat: MarkedChat) -> MarkedChat:
        """Return a marked conversation with the weight and the kind of every trained character."""
        tools = None if conversation.tools is None else list(conversation.tools)
        messages, plain = self._first_form(conversation, tools)
        parts = {number: [length for length, _ in found] for number, found in (conversation.parts or {}).items()}
        traced = self._traced.render(messages, AuthoredChat(tools, parts=parts))
        if traced.text != plain or plain != chat.marked.text:
            raise self._untraceable()
        roles = [str(message.get("role")) for message in messages]
        weights = self._weights_of(conversation)
        segments = segments_of(traced, chat.marked.trained, roles, weights, self._syntax, self._untrained)
        trained = tuple(join_ranges((segment.start, segment.end) for segment in segments))
        return chat._replace(marked=chat.marked._replace(trained=trained, segments=segments))

    @cached_property
    def _syntax(self) -> TurnSyntax:
        return probe_syntax(self._traced, self._reasoning_key, Tokens(self._control).pattern, self.ends)

    def _weights_of(self, conversation: Conversation) -> dict[int, MessageWeights]:
        """Return the weights of the trained messages."""
        found = {}
        flags = conversation.train or [None] * len(conversation.messages)
        for number, (is_wanted, flag) in enumerate(zip(self.trained_messages(conversation), flags, strict=True)):
            if is_wanted:
                by_role = conversation.messages[number].get("role") in self._options.roles_to_train
                weight = float(by_role) if flag is None else float(flag)
                parts = [own for _, own in (conversation.parts or {}).get(number, ())]
                scaled = [None if own is None else own * conversation.weight for own in parts]
                found[number] = MessageWeights(weight * conversation.weight, scaled)
        return found

    def _require_trained(self, conversation: Conversation) -> list[bool]:
        wanted = self.trained_messages(conversation)
        if not any(wanted):
            raise RecordRefusedError(
                DropReason.NOTHING_TO_TRAIN, "encode.roles_to_train and the record's flags leave no message to train"
            )
        return wanted

    def _mark_slowly(
        self, conversation: Conversation, tools: Any, wanted: Sequence[bool], recorder: Recorder | None
    ) -> Found:
        """Find every turn by rendering the chat, and the chat before and up to each of them."""
        messages, plain = self._first_form(conversation, tools)
        finder = self._finder(messages, plain, tools, recorder)
        turns, own = self._turns(finder, messages, wanted)
        losses = find_losses(messages, tools, finder.chat, own, recorder)
        marked = MarkedText(plain, tuple(join_ranges(turn for _, turn in turns)), self._literal(messages, finder.chat))
        is_direct = messages == list(conversation.messages)
        return Found(MarkedChat(marked, tuple(losses)), finder.chat, messages, is_direct)

    def _finder(self, messages: Messages, plain: str, tools: Any, recorder: Recorder | None) -> TurnFinder:
        authored = AuthoredChat(tools, recorder)
        renders: dict[tuple[int, bool], TracedText] = {}  # the chat up to one message is the chat before the next

        def render(
            messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False, probe: bool = False
        ) -> TracedText:
            key = (len(messages), add_generation_prompt)
            if not probe and key in renders:
                return renders[key]
            traced = self._traced.render(
                messages, authored, add_generation_prompt=add_generation_prompt, is_probe=probe
            )
            if recorder is not None:
                note_parts(traced, recorder)
            if not probe:
                renders[key] = traced
            return traced

        finder = TurnFinder(
            messages,
            render,
            control=self._control,
            stops=self._stops,
            header=self._header,
            recorder=recorder,
        )
        if finder.chat.text != plain:
            raise self._untraceable()
        return finder

    def _first_form(self, conversation: Conversation, tools: Any) -> tuple[Messages, str]:
        refusal = RecordRefusedError(DropReason.EMPTY, "the conversation has no messages")
        named = with_reasoning_under(self._reasoning_key, conversation.messages)
        if self._takes_parts:
            named = with_content_in_parts(named)
        for number, messages in enumerate(forms_of(named)):
            try:
                return messages, self._renderer.render(messages, tools)
            except RecordRefusedError as other:
                if number == 0:
                    refusal = other
        raise refusal

    def _turns(
        self, finder: TurnFinder, messages: Messages, wanted: Sequence[bool]
    ) -> tuple[list[tuple[int, Range]], dict[int, Sequence[Span]]]:
        """Return the trained ranges with their messages, and each trained message's own spans."""
        blocks = None
        if self._renderer.has_generation_marks:
            blocks = generation_blocks(finder.chat, [message.get("role", "") for message in messages])
        turns: list[tuple[int, Range]] = []
        own: dict[int, Sequence[Span]] = {}
        for number, (message, is_wanted) in enumerate(zip(messages, wanted, strict=True)):
            if not is_wanted:
                continue
            own[number] = [span for span in finder.chat.spans if is_own(span.author, number)]
            if message.get("role") != "assistant":
                ends = self.ends if self._options.train_on_eot else ()
                words = finder.words(number, ends)
                turns += [(number, words)] if words else []
            elif blocks is None:
                start, end = turn = finder.turn(number, is_loss_refused=self._options.on_lost != "warn")
                own[number] = [span for span in own[number] if start < span.end and span.start < end]
                turn = turn if self._options.train_on_eot else self._without_end(finder.chat, turn)
                turns.append((number, turn))
        ordered = sorted(turn for _, turn in turns)
        if any(second[0] < first[1] for first, second in pairwise(ordered)):
            raise RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, "two turns overlap in the rendered chat")
        for number, (block, owner) in enumerate(blocks or ()):
            if owner is None:
                raise RecordRefusedError(
                    DropReason.UNTRACEABLE_TEMPLATE,
                    f"a generation block of {self._renderer.name} does not belong to a single message",
                )
            if wanted[owner] and not self._is_over(finder.chat, (blocks or ())[:number], block, owner):
                turns.append((owner, self._with_end(finder, _after_prompt(finder, block, owner))))
        return turns, own

    def _without_end(self, chat: TracedText, turn: Range) -> Range:
        """Remove the end-of-turn token from a turn; a message's own text is never one."""
        start, end = turn
        said = max((span.end for span in chat.spans if span.start < end), default=0)
        for token in self.ends:
            if chat.text.endswith(token, max(start, said), end):
                return start, end - len(token)
        return turn

    def _with_end(self, finder: TurnFinder, block: Range) -> Range:
        """Make a block end with its end-of-turn token, or before it; blanks after it are not trained."""
        start, end = block
        text = finder.chat.text
        said = max((span.end for span in finder.chat.spans if start <= span.start < end), default=start)
        stripped = max(said, start + len(text[start:end].rstrip()))
        for token in self.ends:
            if text.endswith(token, said, stripped):
                return start, stripped if self._options.train_on_eot else stripped - len(token)
        length = finder.length_of_end(end, self._answer_ends)
        if not length:
            return start, stripped
        return start, end + (length if self._options.train_on_eot else 0)

    def _is_over(self, chat: TracedText, earlier: Sequence[Block], block: Range, owner: int) -> bool:
        """Return whether a block without texts of messages follows the stop token of its turn."""
        ends = [other.range[1] for other in earlier if other.owner == owner]
        if not ends or any(block[0] <= span.start < block[1] for span in chat.spans):
            return False
        return chat.text[: ends[-1]].rstrip().endswith(self._stops)

    def _literal(self, messages: Messages, chat: TracedText) -> list[Range]:
        self._refuse_roles(messages)
        return literal_ranges(chat.text, chat.spans, self._escaped)

    def _literal_between(self, text: str, slots: Iterable[Range]) -> list[Range]:
        spans = [Span(start, end, _ANYBODY) for start, end in slots if start < end]
        return literal_ranges(text, spans, self._escaped)

    def _refuse_roles(self, messages: Messages) -> None:
        for message in messages:
            if self._escaped.search(str(message.get("role", ""))):
                raise RecordRefusedError(
                    DropReason.UNESCAPABLE,
                    f"the role {message['role']!r} contains a control token; rename it, or set "
                    "encode.special_tokens_in_content=allow",
                )

    def _refuse_losses(self, losses: Sequence[Loss]) -> None:
        choice = self._options.on_lost
        for loss in losses:
            if choice == "drop":
                raise RecordRefusedError(DropReason.LOST_TEXT_DROPPED, loss.sentence(self._renderer.name))
            if choice == "error" or (choice is None and loss.is_grave):
                raise RecordRefusedError(
                    DropReason.LOST_TEXT,
                    f"{loss.sentence(self._renderer.name)}; choose another template, or set encode.on_lost=drop",
                )

    def _untraceable(self) -> RecordRefusedError:
        return RecordRefusedError(
            DropReason.UNTRACEABLE_TEMPLATE,
            f"{self._renderer.name} changes the text of messages in a way that cannot be traced",
        )

    def _warn_of_ordinary_ends(self, tokenizer: Tokenizer, found: Sequence[str]) -> None:
        ordinary = [end for end in found if end not in tokenizer.control_tokens]
        if ordinary or not found:
            logger.warning(
                "%s: with tokenizer %s, a turn ends with %s; make generation stop there",
                self._renderer.name,
                tokenizer.name,
                f"the ordinary text {', '.join(map(repr, ordinary))}" if ordinary else "no token at all",
            )


def _after_prompt(finder: TurnFinder, block: Range, owner: int) -> Range:
    """Remove from a generation block what the generation prompt already gives."""
    try:
        start, _ = finder.turn(owner)
    except RecordRefusedError:
        return block
    return (start, block[1]) if block[0] < start <= block[1] else block
