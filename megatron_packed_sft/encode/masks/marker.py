"""A conversation to a marked text: which characters the model is to learn, and which only look like control tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Author, Recorder
from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.escapes import ControlMarks, literal_ranges, tokens_to_escape
from megatron_packed_sft.encode.masks.lesson import Lesson
from megatron_packed_sft.encode.masks.lost_text import Loss, find_losses
from megatron_packed_sft.encode.masks.probe import probe_template
from megatron_packed_sft.encode.masks.recipes import HEAD, Kind, Read, Recipe, RecipeBook
from megatron_packed_sft.encode.masks.shapes import NotCompilable, Shape, compile_shape, note_parts
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedRenderer, TracedText
from megatron_packed_sft.encode.masks.turn_finder import Range, TurnFinder, is_own, joined
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.message_forms import forms_of, reasoning_key, with_reasoning_under
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
    is_direct: bool  # rendered in the form in which it came


class _Compiled:
    def __init__(self, shape: Shape, losses: tuple[Loss, ...], num_marks: int) -> None:
        self.shape = shape
        self.losses = losses
        self.num_checks = _NUM_CHECKS
        self.num_marks = num_marks  # where control tokens may begin in its constants


class _Known:
    """What is known of chats with one sequence of roles and keys."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.num_seen = 0
        self.num_compiled = 0
        self.is_direct = True
        self.shapes: list[_Compiled] = []

    def is_due(self, num_messages: int) -> bool:
        """Whether to compile a shape: that costs a traced render, so it pays for what repeats."""
        return self.num_compiled < _MAX_COMPILED and self.num_seen % max(8, 2 * num_messages) == 0


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
        escaped: list[str] = []
        if options.special_tokens_in_content == "escape":
            escaped = tokens_to_escape(
                tokenizer.control_tokens, tokenizer.template_variables, probe.structure, probe.sought
            )
        self._escaped = control_pattern(escaped)
        self._count_marks = ControlMarks(escaped).count
        # How control tokens begin that the template could write, and how they go on.
        self._continued: dict[str, set[str]] = {}
        for token in escaped:
            for length in range(1, len(token)):
                if token[:length] in known:
                    self._continued.setdefault(token[:length], set()).add(token[length])
        self._beginnings = tuple(self._continued)
        self._known: dict[Any, _Known] = {}
        self._book = RecipeBook()
        self._num_unlearnt = {True: 0, False: 0}  # chats with tools, chats without
        self._do_tools_decide = False  # whether prompts ask more about tools than chats do
        self._warn_of_ordinary_ends(tokenizer, probe.ends)

    def mark(self, conversation: Conversation) -> MarkedChat:
        """Render a conversation and say which characters are trained; RecordRefusedError if that cannot be said."""
        tools = None if conversation.tools is None else list(conversation.tools)
        kinds = self._book.kinds_of(conversation.messages)
        flags = conversation.train
        key = (tools is None, flags and tuple(flags), *[number for number, _, _ in kinds])
        known = self._known.get(key)
        if known is not None and known.shapes:
            found = self._mark_by_shape(conversation, tools, known)
            if found is not None:
                self._refuse_losses(found.losses)
                return found
        known = known or self._remember(key, self._checked_wanted(conversation))
        known.num_seen += 1
        marked = self._mark_by_recipes(conversation, tools, known, kinds)
        if marked is None:
            marked = self._mark_and_compile(conversation, tools, known)
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

    def _remember(self, key: Any, wanted: list[bool]) -> _Known:
        if len(self._known) >= _MAX_SHAPES:
            self._known.clear()
        known = self._known[key] = _Known(wanted)
        return known

    def _mark_by_recipes(
        self, conversation: Conversation, tools: Any, known: _Known, kinds: Sequence[Kind]
    ) -> MarkedChat | None:
        """Return a chat as the recipes of its messages read one render of it; those that are missing are learnt."""
        messages, plain = self._first_form(conversation, tools)
        is_direct = all(map(is_, messages, conversation.messages))
        if not is_direct:
            kinds = self._book.kinds_of(messages)
        read = self._book.read(plain, messages, kinds, tools, known.wanted)
        compiles = known.is_due(len(messages))
        can_learn = self._num_unlearnt[bool(tools)] < _MAX_UNLEARNT
        if can_learn and (compiles or not read.is_whole(plain, messages)):
            try:
                read = self._learn(messages, plain, tools, known, kinds, compiles=compiles)
                known.is_direct = is_direct
                self._num_unlearnt[bool(tools)] = 0
            except NotCompilable:
                self._num_unlearnt[bool(tools)] += 1
            except RecordRefusedError:
                return None  # the search in full will refuse it in its own words
        if not read.is_whole(plain, messages):
            return None
        literal: Sequence[Range] = ()
        if self._count_marks(plain) != read.num_marks:
            literal = self._literal_between(plain, read.slots(messages, tools))
        return MarkedChat(MarkedText(plain, tuple(joined(read.turns)), literal), tuple(read.losses()))

    def _literal_between(self, text: str, slots: Iterable[Range]) -> list[Range]:
        spans = [Span(start, end, _ANYBODY) for start, end in slots if start < end]
        return literal_ranges(text, spans, self._escaped)

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
        if self._count_marks(text) == compiled.num_marks:
            return ()
        starts = [0, *accumulate(map(len, parts))]
        return self._literal_between(text, ((starts[n], starts[n + 1]) for n in compiled.shape.slots))

    def _learn(
        self, messages: Messages, plain: str, tools: Any, known: _Known, kinds: Sequence[Kind], *, compiles: bool
    ) -> Read:
        """Read a chat, learning the recipes that are missing, and perhaps compile its shape.

        Raises:
            NotCompilable: its messages cannot be told apart.
        """
        recorder = Recorder()
        finder = self._finder(messages, plain, tools, recorder)
        self._refuse_roles(messages)
        if self._is_unsafe_to_learn(finder.chat, recorder):
            raise NotCompilable("a control token at the edge of a string")
        lesson = Lesson(messages, tools, finder.chat, recorder, self._count_marks)
        numbers: list[int] = []  # around which it was learnt
        while not (read := self._book.read(plain, messages, kinds, tools, known.wanted)).is_whole(plain, messages):
            # Where turns do not depend on tools, other tools are only another head, and nothing is searched.
            is_head = read.num_messages == HEAD and lesson.is_for_these_tools and not self._do_tools_decide
            numbers.append(HEAD if is_head and not numbers else max(read.num_messages, 0))
            if numbers[-1] in numbers[:-1]:
                raise NotCompilable("a recipe that does not read its own message")
            recipes = self._recipes_around(finder, lesson, tools, known.wanted, numbers[-1], recorder)
            self._book.add(messages, kinds, tools, known.wanted, lesson.head_size, recipes)
        if compiles:
            self._compile(known, finder.chat, read, messages, tools, recorder)
        return read

    def _recipes_around(
        self, finder: TurnFinder, lesson: Lesson, tools: Any, wanted: Sequence[bool], number: int, recorder: Recorder
    ) -> dict[int, Recipe]:
        """Return the recipes of the messages between two trained turns, and of the second, around a message.

        What a turn depends on is mostly asked about the messages right before it, while it is searched; so these are
        learnt together.
        """
        messages, size = list(finder.messages), lesson.head_size
        trained = [place for place, is_wanted in enumerate(wanted) if is_wanted]
        first = max((place + 1 for place in trained if place < number), default=HEAD)
        last = min((place for place in trained if place >= number), default=len(messages) - 1)
        if number == HEAD:
            last = size - 1
        asked = lesson.num_about_tools
        searched = [is_wanted and first <= place <= last for place, is_wanted in enumerate(wanted)]
        turns, own = self._turns(finder, messages, searched)
        losses = find_losses(messages, tools, finder.chat, own, recorder, range(first, last + 1))
        self._do_tools_decide |= lesson.num_about_tools > asked
        places = [*([HEAD] if first < size else []), *range(max(first, size), last + 1)]
        return {
            place: lesson.recipe(
                place,
                [turn for whose, turn in turns if place == whose or (place == HEAD and whose < size)],
                [loss for loss in losses if place == loss.message or (place == HEAD and loss.message < size)],
            )
            for place in places
        }

    def _compile(
        self, known: _Known, chat: TracedText, read: Read, messages: Messages, tools: Any, recorder: Recorder
    ) -> None:
        """Compile the shape of a chat that was read."""
        known.num_compiled += 1
        turns = tuple(joined(read.turns))
        lines = [(number, recipe.lines) for number, recipe in zip(read.numbers, read.recipes, strict=True)]
        try:
            shape = compile_shape(messages, chat, turns, recorder, lines)
        except NotCompilable:
            return
        marked = MarkedChat(MarkedText(chat.text, turns, ()), tuple(read.losses()))
        self._keep_shape(known, shape, marked, messages, tools)

    def _mark_and_compile(self, conversation: Conversation, tools: Any, known: _Known) -> MarkedChat:
        """Find the turns of a chat whose messages cannot be told apart; compile its shape if it repeats."""
        # This takes time that grows with the square of the chat: it pays for shapes that repeat as often.
        is_due = known.num_seen % max(2, len(conversation.messages) ** 2 // 2) == 0
        recorder = Recorder() if is_due and known.num_compiled < _MAX_COMPILED else None
        found = self._mark_slowly(conversation, tools, known.wanted, recorder)
        if recorder is None or self._is_unsafe_to_learn(found.chat, recorder):
            return found.marked
        known.num_compiled += 1
        known.is_direct = found.is_direct
        try:
            shape = compile_shape(found.messages, found.chat, found.marked.marked.trained, recorder)
        except NotCompilable:
            return found.marked
        self._keep_shape(known, shape, found.marked, found.messages, tools)
        return found.marked

    def _keep_shape(self, known: _Known, shape: Shape, marked: MarkedChat, messages: Messages, tools: Any) -> None:
        replayed = shape.run(messages, tools)
        if (
            replayed is not None
            and "".join(replayed[0]) == marked.marked.text
            and replayed[1] == tuple(marked.marked.trained)
        ):
            num_marks = sum(map(self._count_marks, shape.constants))
            known.shapes.insert(0, _Compiled(shape, marked.losses, num_marks))
            del known.shapes[_MAX_VARIANTS:]

    def _is_unsafe_to_learn(self, chat: TracedText, recorder: Recorder) -> bool:
        """Whether a string completes a control token, or a part that every such chat has holds one as a text."""
        parts = [part for part in chat.whole.parts if part[0]]
        for (text, before), (following, name) in pairwise(parts):
            if name is not None and before is None and text.endswith(self._beginnings):
                ends = (end for length, end in self._continued.items() if text.endswith(length))
                continued = "".join(sorted(set().union(*ends)))
                if following[0] in continued:
                    return True
                recorder.guard(f"{name}[0] in {continued!a}", False)
        starts = [0, *accumulate(len(text) for text, _ in parts)]
        slots = [(starts[number], starts[number + 1]) for number, (_, name) in enumerate(parts) if name is not None]
        return self._literal_between(chat.text, slots) != literal_ranges(chat.text, chat.spans, self._escaped)

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
        finder = self._finder(messages, plain, tools, recorder)
        turns, own = self._turns(finder, messages, wanted)
        losses = find_losses(messages, tools, finder.chat, own, recorder)
        marked = MarkedText(plain, tuple(joined(turn for _, turn in turns)), self._literal(messages, finder.chat))
        is_direct = messages == list(conversation.messages)
        return _Found(MarkedChat(marked, tuple(losses)), finder.chat, messages, is_direct)

    def _finder(self, messages: Messages, plain: str, tools: Any, recorder: Recorder | None) -> TurnFinder:
        authored = AuthoredChat(tools, recorder)
        renders: dict[tuple[int, bool], TracedText] = {}  # the chat up to a message is that before the next one

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
            raise RecordRefusedError(
                DropReason.UNTRACEABLE_TEMPLATE, f"{self._renderer.name} changes text in ways that cannot be followed"
            )
        return finder

    def _first_form(self, conversation: Conversation, tools: Any) -> tuple[Messages, str]:
        refusal = RecordRefusedError(DropReason.EMPTY, "the conversation has no messages")
        named = with_reasoning_under(self._reasoning_key, conversation.messages)
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
        blocks = _generation_blocks(finder.chat) if self._renderer.has_generation_marks else None
        turns: list[tuple[int, Range]] = []
        own: dict[int, Sequence[Span]] = {}
        for number, (message, is_wanted) in enumerate(zip(messages, wanted, strict=True)):
            if not is_wanted:
                continue
            if message.get("role") != "assistant":
                ends = self.ends if self._options.train_on_eot else ()
                words = finder.words(number, ends)
                turns += [(number, words)] if words else []
                own[number] = [span for span in finder.chat.spans if is_own(span.author, number)]
            elif blocks is None:
                turn = finder.turn(number)
                own[number] = [
                    span
                    for span in finder.chat.spans
                    if is_own(span.author, number) and turn[0] < span.end and span.start < turn[1]
                ]
                turn = turn if self._options.train_on_eot else self._without_end(finder.chat, turn)
                turns.append((number, turn))
        ordered = sorted(turn for _, turn in turns)
        if any(second[0] < first[1] for first, second in pairwise(ordered)):
            raise RecordRefusedError(DropReason.UNTRACEABLE_TEMPLATE, "two turns overlap in the chat")
        if blocks is not None:
            owners = self._owners(blocks, finder.chat, [message.get("role", "") for message in messages])
            for block, owner in zip(blocks, owners, strict=True):
                if wanted[owner]:
                    turns.append((owner, self._with_end(finder, _after_prompt(finder, block, owner))))
                    own[owner] = [span for span in finder.chat.spans if is_own(span.author, owner)]
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
        self._refuse_roles(messages)
        return literal_ranges(chat.text, chat.spans, self._escaped)

    def _refuse_roles(self, messages: Messages) -> None:
        for message in messages:
            if self._escaped.search(str(message.get("role", ""))):
                raise RecordRefusedError(
                    DropReason.UNESCAPABLE,
                    f"the role {message['role']!r} holds the text of a control token; rename it, or set "
                    "encode.special_tokens_in_content to allow",
                )

    def _owners(self, blocks: Sequence[Range], chat: TracedText, roles: Sequence[str]) -> list[int]:
        """Return the message that each generation block belongs to: by its text, or, if it has none, by its number."""
        assistants = [number for number, role in enumerate(roles) if role == "assistant"]
        owners: list[int] = []
        for number, (start, end) in enumerate(blocks):
            inside = {
                span.author.message
                for span in chat.spans
                if start <= span.start < end and span.author.message >= 0 and is_own(span.author, span.author.message)
            }
            if not inside and len(blocks) == len(assistants):
                inside = {assistants[number]}
            if len(inside) != 1:
                raise RecordRefusedError(
                    DropReason.UNTRACEABLE_TEMPLATE,
                    f"a generation block of {self._renderer.name} belongs to no single message",
                )
            owners += inside
        return owners

    def _with_end(self, finder: TurnFinder, block: Range) -> Range:
        """Make a block end with its end-of-turn token, or before it; whitespace after that token is not trained."""
        start, end = block
        text = finder.chat.text
        said = max((span.end for span in finder.chat.spans if start <= span.start < end), default=start)
        stripped = max(said, start + len(text[start:end].rstrip()))
        for token in self.ends:
            if text.endswith(token, said, stripped):
                return start, stripped if self._options.train_on_eot else stripped - len(token)
        if self._options.train_on_eot:
            end += finder.length_of_end(end, self.ends)
        return start, end

    def _warn_of_ordinary_ends(self, tokenizer: Tokenizer, found: Sequence[str]) -> None:
        ordinary = [end for end in found if end not in tokenizer.control_tokens]
        if ordinary or not found:
            logger.warning(
                "%s: a turn ends with %s for tokenizer %s; generation will have to stop at it",
                self._renderer.name,
                f"the ordinary text {', '.join(map(repr, ordinary))}" if ordinary else "nothing",
                tokenizer.name,
            )


def _after_prompt(finder: TurnFinder, block: Range, owner: int) -> Range:
    """Leave out of a generation block what the generation prompt gives."""
    try:
        start, _ = finder.turn(owner)
    except RecordRefusedError:
        return block
    return (start, block[1]) if block[0] < start <= block[1] else block


def _generation_blocks(chat: TracedText) -> list[Range]:
    begins = [position for position, event in chat.marks if event.kind == "begin"]
    ends = [position for position, event in chat.marks if event.kind == "end"]
    return list(zip(begins, ends, strict=True))
