"""`ChatMarker` turns a conversation into a marked text: what the model learns, and what only looks like control tokens.

a shape that repeats    guards, one join, the trained ranges          no render
known messages          one render, read with their recipes           one render
anything else           searched (`RenderingMarker`) and learnt       many renders
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import is_
from typing import Any

from megatron_packed_sft.encode.masks.authored_text import TOOLS, Recorder
from megatron_packed_sft.encode.masks.lost_text import Loss, find_losses
from megatron_packed_sft.encode.masks.probe import ControlMarks, literal_ranges
from megatron_packed_sft.encode.masks.recipes import HEAD, Kind, Lesson, Read, Recipe, RecipeBook
from megatron_packed_sft.encode.masks.rendering_marker import MarkedChat, Messages, RenderingMarker
from megatron_packed_sft.encode.masks.shapes import NotCompilable, Shape, compile_shape
from megatron_packed_sft.encode.masks.traced_renderer import TracedText
from megatron_packed_sft.encode.masks.turn_finder import TurnFinder
from megatron_packed_sft.encode.masks.turn_parts import Range, join_ranges
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.drop_reasons import DropReason

_MAX_SHAPES = 4096  # sequences of roles and keys to remember
_MAX_VARIANTS = 8  # compiled shapes of each
_MAX_COMPILED = 24  # attempts to compile one of each
_MAX_UNLEARNT = 16  # chats without recipes, after which learning stops
_NUM_CHECKS = 2  # comparisons of a compiled shape's text with a render


class _Compiled:
    def __init__(self, shape: Shape, losses: tuple[Loss, ...], num_marks: int) -> None:
        self.shape = shape
        self.losses = losses
        self.num_checks = _NUM_CHECKS
        self.num_marks = num_marks  # places in its constants where control tokens may begin


class _Known:
    """What is known about chats with one sequence of roles and keys."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.num_seen = 0
        self.num_compiled = 0
        self.is_direct = True
        self.shapes: list[_Compiled] = []

    def is_due(self, num_messages: int) -> bool:
        """Return whether to compile a shape, which takes a traced render and pays only if the shape repeats."""
        return self.num_compiled < _MAX_COMPILED and self.num_seen % max(8, 2 * num_messages) == 0


class ChatMarker(RenderingMarker):
    """Marks conversations, and learns from each how to mark the next one of its kind; see `RenderingMarker`."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, options: EncodeOptions, template_options: TemplateOptions
    ) -> None:
        super().__init__(tokenizer, template, options, template_options)
        self._count_marks = ControlMarks(self._escaped_tokens).count
        # Beginnings of control tokens that the template could write -> the characters that continue them.
        self._continued: dict[str, set[str]] = {}
        for token in self._escaped_tokens:
            for length in range(1, len(token)):
                if token[:length] in self._own_text:
                    self._continued.setdefault(token[:length], set()).add(token[length])
        self._beginnings = tuple(self._continued)
        self._known: dict[Any, _Known] = {}
        self._book = RecipeBook()
        self._num_unlearnt = {True: 0, False: 0}  # chats with tools, chats without
        self._do_tools_decide = False  # whether prompts ask more about tools than chats do

    def mark(self, conversation: Conversation, *, is_turn: bool = False) -> MarkedChat:
        """Return the text of a conversation and its trained characters; raise RecordRefusedError if they are unknown.

        Args:
            conversation: the chat.
            is_turn: whether only the last message counts; then losses in earlier messages are ignored.
        """
        if not conversation.weight:
            raise RecordRefusedError(DropReason.NOTHING_TO_TRAIN, "the weight of the record is 0")
        chat = self._mark_whole(conversation)
        if is_turn:
            last = len(conversation.messages) - 1
            chat = chat._replace(losses=tuple(loss for loss in chat.losses if loss.message in (last, TOOLS)))
        self._refuse_losses(chat.losses)
        return chat

    def _mark_whole(self, conversation: Conversation) -> MarkedChat:
        tools = None if conversation.tools is None else list(conversation.tools)
        kinds = self._book.kinds_of(conversation.messages)
        flags = tuple(self.trained_messages(conversation)) if conversation.train or conversation.parts else None
        key = (tools is None, flags, *[number for number, _, _ in kinds])
        known = self._known.get(key)
        if known is not None and known.shapes:
            found = self._mark_by_shape(conversation, tools, known)
            if found is not None:
                return found
        known = known or self._remember(key, self._require_trained(conversation))
        known.num_seen += 1
        marked = self._mark_by_recipes(conversation, tools, known, kinds)
        if marked is None:
            marked = self._mark_and_compile(conversation, tools, known)
        return marked

    def _remember(self, key: Any, wanted: list[bool]) -> _Known:
        if len(self._known) >= _MAX_SHAPES:
            self._known.clear()
        known = self._known[key] = _Known(wanted)
        return known

    def _mark_by_shape(self, conversation: Conversation, tools: Any, known: _Known) -> MarkedChat | None:
        """Mark a chat by a compiled shape; return None if it has none."""
        messages, plain = conversation.messages, None
        if not known.is_direct:
            messages, plain = self._first_form(conversation, tools)
        for number, compiled in enumerate(known.shapes):
            try:
                found = compiled.shape.run(messages, tools)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                continue  # another structure than the first chat's
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
        """Return where a shape's strings contain the text of control tokens, which is rare."""
        if self._count_marks(text) == compiled.num_marks:
            return ()
        starts = [0, *accumulate(map(len, parts))]
        return self._literal_between(text, ((starts[n], starts[n + 1]) for n in compiled.shape.slots))

    def _mark_by_recipes(
        self, conversation: Conversation, tools: Any, known: _Known, kinds: Sequence[Kind]
    ) -> MarkedChat | None:
        """Mark a chat by reading one render with recipes, learning those that are missing; None if that fails."""
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
                return None  # the full search refuses it and says why
        if not read.is_whole(plain, messages):
            return None
        literal: Sequence[Range] = ()
        if self._count_marks(plain) != read.num_marks:
            literal = self._literal_between(plain, read.slots(messages, tools))
        return MarkedChat(MarkedText(plain, tuple(join_ranges(read.turns)), literal), tuple(read.losses()))

    def _learn(
        self, messages: Messages, plain: str, tools: Any, known: _Known, kinds: Sequence[Kind], *, compiles: bool
    ) -> Read:
        """Read a chat, learning missing recipes, and compile its shape if asked.

        Raises:
            NotCompilable: the text cannot be divided among its messages.
        """
        recorder = Recorder()
        finder = self._finder(messages, plain, tools, recorder)
        self._refuse_roles(messages)
        if self._is_unsafe_to_learn(finder.chat, recorder):
            raise NotCompilable("a control token at the edge of a string")
        lesson = Lesson(messages, tools, finder.chat, recorder, self._count_marks)
        numbers: list[int] = []  # of messages around which recipes were learnt
        while not (read := self._book.read(plain, messages, kinds, tools, known.wanted)).is_whole(plain, messages):
            # If turns do not depend on tools, other tools only need another head, and nothing is searched.
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
        """Return the recipes of the messages around one, from after the last trained turn up to the next.

        While a turn is searched, most questions are about the messages right before it, so they are learnt together.
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
        """Compile the shape of a chat that was read with recipes."""
        known.num_compiled += 1
        turns = tuple(join_ranges(read.turns))
        lines = [(number, recipe.lines) for number, recipe in zip(read.numbers, read.recipes, strict=True)]
        try:
            shape = compile_shape(messages, chat, turns, recorder, lines)
        except NotCompilable:
            return
        marked = MarkedChat(MarkedText(chat.text, turns, ()), tuple(read.losses()))
        self._keep_shape(known, shape, marked, messages, tools)

    def _mark_and_compile(self, conversation: Conversation, tools: Any, known: _Known) -> MarkedChat:
        """Find the turns of a chat that cannot be divided among its messages; compile its shape if it repeats."""
        # This takes time quadratic in the chat's length, so it pays for shapes that repeat as often.
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
        """Return whether a string completes a control token, or a part that such chats share contains one as text."""
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
