"""A conversation to a marked text: which characters the model is to learn, and which only look like control tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.escapes import literal_ranges, tokens_to_escape
from megatron_packed_sft.encode.masks.generation_blocks import Block, generation_blocks
from megatron_packed_sft.encode.masks.lost_text import Loss, find_losses
from megatron_packed_sft.encode.masks.probe import probe_template
from megatron_packed_sft.encode.masks.recipes import RecipeBook
from megatron_packed_sft.encode.masks.shapes import NotCompilable, Shape, compile_shape, note_parts
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedRenderer, TracedText
from megatron_packed_sft.encode.masks.turn_finder import TurnFinder
from megatron_packed_sft.encode.masks.turn_parts import Range, is_own, joined
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.message_forms import (
    forms_of,
    reasoning_key,
    with_content_in_parts,
    with_reasoning_under,
)
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.encode.tokenizers.control_tokens import control_pattern
from megatron_packed_sft.encode.tokenizers.interface import MarkedText, Tokenizer
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.drop_reasons import DropReason

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

_MAX_SHAPES = 4096  # sequences of roles and keys that are remembered
_MAX_VARIANTS = 8  # compiled shapes of each
_MAX_COMPILED = 24  # attempts to compile each
_MAX_UNLEARNT = 16  # chats that gave no recipes, after which none is tried
_NUM_CHECKS = 2  # of a compiled shape's texts against a render
_ANYBODY = Author(0, ())


class MarkedChat(NamedTuple):
    """A conversation as it is tokenized, and what the template left out of it."""

    marked: MarkedText
    losses: tuple[Loss, ...] = ()


class _Found(NamedTuple):
    marked: MarkedChat
    chat: TracedText
    messages: Messages
    turns: dict[int, Range] | None  # by message, if each has one
    is_direct: bool  # rendered in the form in which it came


class _Compiled:
    def __init__(self, shape: Shape, losses: tuple[Loss, ...], *, is_separate: bool) -> None:
        self.shape = shape
        self.losses = losses
        self.num_checks = _NUM_CHECKS
        self.is_separate = is_separate  # no control token can begin in a string and end behind it


class _Known:
    """What is known of chats with one sequence of roles, keys and kinds."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_compiled = 0
        self.is_direct = True
        self.shapes: list[_Compiled] = []


class ChatMarker:
    """Renders conversations with one template, for one tokenizer.

    Args:
        tokenizer: gives the template's variables, control tokens and stop tokens.
        template: the chat template.
        options: of the encoding.
        template_options: what the user says about the template.
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
        # Some tokenizers have thousands of control tokens; those that the template can write are few.
        known = "".join((template.source, *map(str, self._renderer.variables.values())))
        self._control = control_pattern(token for token in tokenizer.control_tokens if token.strip() and token in known)
        self._header, ends = template_options.header, template_options.end_of_turn
        self._stops = tuple(tokenizer.stop_tokens if ends is None else ends)
        probe = probe_template(self._traced, self._control, header=self._header, stops=self._stops)
        self.ends = probe.ends if ends is None else self._stops
        self._answer_ends = probe.answer_ends if ends is None else self._stops
        self._takes_parts = probe.takes_parts
        escaped: list[str] = []
        if options.special_tokens_in_content == "escape":
            escaped = tokens_to_escape(
                tokenizer.control_tokens, tokenizer.template_variables, probe.structure, probe.sought
            )
        self._escaped = control_pattern(escaped)
        first = sorted({token[0] for token in escaped})
        self._first_characters = re.compile("|".join(map(re.escape, first)) or r"(?!)")
        self._beginnings = {
            token[:length] for token in escaped for length in range(1, len(token)) if token[:length] in known
        }
        self._endings = {token[-length:] for token in escaped for length in range(1, len(token))}
        self._known: dict[Any, _Known] = {}
        self._book = RecipeBook()
        self._num_unlearnt = 0
        self._is_book_separate = True
        self._warn_of_ordinary_ends(tokenizer, probe.ends)

    def mark(self, conversation: Conversation) -> MarkedChat:
        """Render a conversation and say which characters are trained; RecordRefusedError if that cannot be said."""
        tools = None if conversation.tools is None else list(conversation.tools)
        key = _key_of(conversation)
        known = self._known.get(key)
        if known is not None and known.shapes:
            found = self._mark_by_shape(conversation, tools, known)
            if found is not None:
                self._refuse_losses(found.losses)
                return found
        wanted = self._checked_wanted(conversation)
        known = known or self._remember(key)
        known.num_seen += 1
        marked = None
        # Compiling takes time that grows with the square of the chat: it pays for shapes that repeat as often.
        if known.num_seen % max(2, len(conversation.messages) ** 2 // 2):
            marked = self._mark_by_recipes(conversation, tools, wanted)
        if marked is None:
            marked = self._mark_and_learn(conversation, tools, wanted, known)
        self._refuse_losses(marked.losses)
        return marked

    def render(self, conversation: Conversation) -> str:
        """Render a conversation once, in the first form that the template takes."""
        return self._first_form(conversation, None if conversation.tools is None else list(conversation.tools))[1]

    def mark_by_rendering(self, conversation: Conversation) -> MarkedChat:
        """Mark a conversation without anything that was learnt from others: slow, and what `mark` must equal."""
        tools = None if conversation.tools is None else list(conversation.tools)
        found = self._mark_slowly(conversation, tools, self._checked_wanted(conversation), None).marked
        self._refuse_losses(found.losses)
        return found

    def _checked_wanted(self, conversation: Conversation) -> list[bool]:
        wanted = self.wanted(conversation)
        if not any(wanted):
            raise RecordRefusedError(
                DropReason.NOTHING_TO_TRAIN, "no message is to be trained, by its role or its flag"
            )
        return wanted

    def _remember(self, key: Any) -> _Known:
        if len(self._known) >= _MAX_SHAPES:
            self._known.clear()
        known = self._known[key] = _Known()
        return known

    def _mark_by_recipes(self, conversation: Conversation, tools: Any, wanted: Sequence[bool]) -> MarkedChat | None:
        """Return a chat as the recipes of its messages read one render of it, if they know all of it."""
        messages, plain = self._first_form(conversation, tools)
        read = self._book.read(plain, messages, tools, wanted)
        if read is None:
            return None
        search = self._escaped.search
        literal: Sequence[Range] = ()
        if not self._is_book_separate or any(search(plain, start, end) for start, end in read.slots):
            spans = [Span(start, end, _ANYBODY) for start, end in read.slots if start < end]
            literal = literal_ranges(plain, spans, self._escaped)
        return MarkedChat(MarkedText(plain, tuple(joined(read.turns)), literal), tuple(read.losses))

    def _mark_by_shape(self, conversation: Conversation, tools: Any, known: _Known) -> MarkedChat | None:
        """Return a chat as a compiled shape says, if it is of one."""
        messages, plain = conversation.messages, None
        if not known.is_direct:
            messages, plain = self._first_form(conversation, tools)
        for number, compiled in enumerate(known.shapes):
            try:
                found = compiled.shape.run(messages, tools)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                continue  # an answer that the first record did not get
            if found is None:
                continue
            parts, trained = found
            text = "".join(parts)
            if compiled.num_checks:
                compiled.num_checks -= 1
                plain = self._renderer.render(list(messages), tools) if plain is None else plain
            if plain is not None and plain != text:
                del known.shapes[number]
                return None
            if number:
                known.shapes.insert(0, known.shapes.pop(number))
            return MarkedChat(MarkedText(text, trained, self._literal_in(text, parts, compiled)), compiled.losses)
        return None

    def _literal_in(self, text: str, parts: Sequence[str], compiled: _Compiled) -> Sequence[Range]:
        """Return where a shape's strings hold the text of control tokens; hardly any does."""
        search = self._escaped.search if compiled.is_separate else self._first_characters.search
        for number in compiled.shape.slots:
            if search(parts[number]):
                break
        else:
            return ()
        starts = [0, *accumulate(map(len, parts))]
        spans = [Span(starts[n], starts[n + 1], _ANYBODY) for n in compiled.shape.slots if parts[n]]
        return literal_ranges(text, spans, self._escaped)

    def _mark_and_learn(
        self, conversation: Conversation, tools: Any, wanted: Sequence[bool], known: _Known
    ) -> MarkedChat:
        """Find the turns of a chat by rendering; learn the recipes of its messages, compile its shape if it repeats."""
        compiles = known.num_seen > 1 and known.num_compiled < _MAX_COMPILED
        recorder = Recorder() if compiles or self._num_unlearnt < _MAX_UNLEARNT else None
        found = self._mark_slowly(conversation, tools, wanted, recorder)
        if recorder is None or self._could_span_parts(found.chat):
            return found.marked
        if compiles:
            known.num_compiled += 1
            self._compile(known, found, tools, recorder)
        try:
            if found.turns is None:
                raise NotCompilable("a turn in several pieces")
            losses = found.marked.losses
            self._is_book_separate &= self._is_separate(found.chat)
            self._book.learn(found.messages, tools, wanted, found.chat, found.turns, losses, recorder)
        except NotCompilable:
            self._num_unlearnt += 1
        return found.marked

    def _compile(self, known: _Known, found: _Found, tools: Any, recorder: Recorder) -> None:
        known.is_direct = found.is_direct
        try:
            shape = compile_shape(found.chat, found.marked.marked.trained, recorder)
            replayed = shape.run(found.messages, tools)
        except NotCompilable:
            return
        if (
            replayed is not None
            and "".join(replayed[0]) == found.chat.text
            and replayed[1] == found.marked.marked.trained
        ):
            known.shapes.insert(0, _Compiled(shape, found.marked.losses, is_separate=self._is_separate(found.chat)))
            del known.shapes[_MAX_VARIANTS:]

    def _is_separate(self, chat: TracedText) -> bool:
        """Whether no string's end and what follows it could make up a control token."""
        parts = [part for part in chat.whole.parts if part[0]]
        return not any(
            before is not None and (name is not None or any(text.startswith(end) for end in self._endings))
            for (_, before), (text, name) in pairwise(parts)
        )

    def _could_span_parts(self, chat: TracedText) -> bool:
        """Whether a constant ends with the beginning of a control token, which a string might complete."""
        parts = [part for part in chat.whole.parts if part[0]]
        return any(
            name is not None and before is None and any(text.endswith(beginning) for beginning in self._beginnings)
            for (text, before), (_, name) in pairwise(parts)
        )

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

    def _mark_slowly(
        self, conversation: Conversation, tools: Any, wanted: Sequence[bool], recorder: Recorder | None
    ) -> _Found:
        """Find every turn by rendering the chat, and the chat before and up to each of them."""
        messages, plain = self._first_form(conversation, tools)
        authored = AuthoredChat(tools, recorder)

        def render(
            messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False, probe: bool = False
        ) -> TracedText:
            traced = self._traced.render(
                messages, authored, add_generation_prompt=add_generation_prompt, is_probe=probe
            )
            if recorder is not None:
                note_parts(traced, recorder)
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
            raise RecordRefusedError(
                DropReason.UNTRACEABLE_TEMPLATE, f"{self._renderer.name} changes text in ways that cannot be followed"
            )
        turns, own = self._turns(finder, messages, wanted)
        losses = find_losses(messages, tools, finder.chat, own, recorder)
        marked = MarkedText(plain, tuple(joined(turn for _, turn in turns)), self._literal(messages, finder.chat))
        is_direct = messages == list(conversation.messages)
        by_message = dict(turns) if len(dict(turns)) == len(turns) else None
        return _Found(MarkedChat(marked, tuple(losses)), finder.chat, messages, by_message, is_direct)

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
        """Return the trained ranges with their messages, and what each trained message says in them."""
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
            raise RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, "two turns overlap in the chat")
        for number, (block, owner) in enumerate(blocks or ()):
            if owner is None:
                raise RecordRefusedError(
                    DropReason.UNTRACEABLE_TEMPLATE,
                    f"a generation block of {self._renderer.name} belongs to no single message",
                )
            if wanted[owner] and not self._is_over(finder.chat, (blocks or ())[:number], block, owner):
                turns.append((owner, self._with_end(finder, _after_prompt(finder, block, owner))))
        return turns, own

    def _without_end(self, chat: TracedText, turn: Range) -> Range:
        """Leave a turn's end-of-turn token out; what a message says itself is never one."""
        start, end = turn
        said = max((span.end for span in chat.spans if span.start < end), default=0)
        for token in self.ends:
            if chat.text.endswith(token, max(start, said), end):
                return start, end - len(token)
        return turn

    def _refuse_losses(self, losses: Sequence[Loss]) -> None:
        choice = self._options.on_lost
        for loss in losses:
            if choice == "drop":
                raise RecordRefusedError(DropReason.LOST_TEXT_DROPPED, loss.sentence(self._renderer.name))
            if choice == "error" or (choice is None and loss.is_grave):
                raise RecordRefusedError(
                    DropReason.LOST_TEXT,
                    f"{loss.sentence(self._renderer.name)}; choose another template, or set encode.on_lost to drop",
                )

    def _literal(self, messages: Messages, chat: TracedText) -> list[Range]:
        for message in messages:
            if self._escaped.search(str(message.get("role", ""))):
                raise RecordRefusedError(
                    DropReason.UNESCAPABLE,
                    f"the role {message['role']!r} holds the text of a control token; rename it, or set "
                    "encode.special_tokens_in_content to allow",
                )
        return literal_ranges(chat.text, chat.spans, self._escaped)

    def _with_end(self, finder: TurnFinder, block: Range) -> Range:
        """Make a block end with its end-of-turn token, or before it; the blanks behind it are not trained."""
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
        """Whether a block without words follows the stop token of its turn."""
        ends = [other.range[1] for other in earlier if other.owner == owner]
        if not ends or any(block[0] <= span.start < block[1] for span in chat.spans):
            return False
        return chat.text[: ends[-1]].rstrip().endswith(self._stops)

    def _warn_of_ordinary_ends(self, tokenizer: Tokenizer, found: Sequence[str]) -> None:
        ordinary = [end for end in found if end not in tokenizer.control_tokens]
        if ordinary or not found:
            logger.warning(
                "%s: a turn ends with %s for tokenizer %s; generation will have to stop at it",
                self._renderer.name,
                f"the ordinary text {', '.join(map(repr, ordinary))}" if ordinary else "nothing",
                tokenizer.name,
            )


def _key_of(conversation: Conversation) -> Any:
    """Return what of a chat is never guarded: roles, keys, kinds, flags."""
    return (
        conversation.tools is None,
        conversation.train and tuple(conversation.train),
        *[(message.get("role"), *message, *map(type, message.values())) for message in conversation.messages],
    )


def _after_prompt(finder: TurnFinder, block: Range, owner: int) -> Range:
    """Leave out of a generation block what the generation prompt gives."""
    try:
        start, _ = finder.turn(owner)
    except RecordRefusedError:
        return block
    return (start, block[1]) if block[0] < start <= block[1] else block
