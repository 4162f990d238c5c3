r"""Reading chats of unknown shape made of known messages: one plain render, read with what was learnt of messages.

A recipe says what a template writes while it iterates over one message: constants and the message's strings, where its
trained ranges begin and end, and every answer that the template got about the message in the renders that located its
turn. For Qwen3 and an answer between two questions, it is in short:

    def run(message, tools, messages):
        if '</think>' in message['content']: return None
        return '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n', (22, 32 + len(message['content']))

If the recipes of a chat's messages give its whole text, character by character, the chat needs no tracing. The render
proves the text; the guards about each message and the kinds of its neighbours prove the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.encode.masks.authored_text import (
    MESSAGE_NAME,
    MESSAGES_NAME,
    TOOLS_NAME,
    VARIABLE,
    Recorder,
    names_in,
    replace_names,
)
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.shapes import (
    ASSIGNMENT,
    NotCompilable,
    Range,
    compile_program,
    guard_line,
    type_guard,
    without_unused,
)
from megatron_packed_sft.encode.masks.traced_renderer import TracedText

_MAX_RECIPES = 12  # of one kind of message among the same neighbours
_MAX_KINDS = 4096

HEAD = -1  # stands for what is written before the loop over messages, as its number
# A program about a message, the tools, and all messages, of which it may read those in the head.
RUN = f"def run({MESSAGE_NAME}, {TOOLS_NAME}, {MESSAGES_NAME}):"

Messages = Sequence[dict[str, Any]]
# Of a message: its text, and where its trained ranges begin and end: (start, end, start, end, ...).
Written = tuple[str, tuple[int, ...]]


class Kind(NamedTuple):
    """What is known of a message without reading its texts.

    Args:
        number: of its role and keys.
        role: its role.
        seen: what the recipes of its neighbours depend on.
    """

    number: int
    role: Any
    seen: tuple[Any, bool]


class Recipe(NamedTuple):
    """What a template writes for a message.

    Args:
        run: the function `RUN` -> `Written`, or None if the template would get other answers.
        slots: the source of a function `RUN` -> where its strings begin and end: (start, end, start, end, ...).
        num_marks: how often control tokens may begin in its constants, see `ControlMarks`.
        losses: what the template omits from the message, or from the head.
        lines: the assignments and guards of `run`, for shapes.
        code: identifies the recipe.
        is_for_tools: whether it holds for the same tools only.
        is_for_arguments: whether it holds for calls whose arguments have the same names only.
    """

    run: Callable[[Any, Any, Any], Written | None]
    slots: str
    num_marks: int
    losses: tuple[Loss, ...]
    lines: tuple[str, ...]
    code: str
    is_for_tools: bool
    is_for_arguments: bool


class Read(NamedTuple):
    """A text that was read, completely or up to an unknown message.

    Args:
        turns: trained ranges.
        places: where the text of the head and of each message of the loop begins, and where the last one ends.
        numbers: of the messages, `HEAD` first.
        recipes: of each.
    """

    turns: list[Range]
    places: list[int]
    numbers: list[int]
    recipes: list[Recipe]

    @property
    def num_messages(self) -> int:
        """The number of known messages, -1 if not even the head is known."""
        return self.numbers[-1] + 1 if self.numbers else HEAD

    def is_whole(self, text: str, messages: Messages) -> bool:
        """Return whether the whole text and all messages were read."""
        return self.places[-1] == len(text) and self.num_messages == len(messages)

    @property
    def num_marks(self) -> int:
        """The number of places in constants where control tokens may begin."""
        return sum([recipe.num_marks for recipe in self.recipes])

    def losses(self) -> Iterator[Loss]:
        """Yield what the template omits."""
        for number, recipe in zip(self.numbers, self.recipes, strict=True):
            if recipe.losses:
                yield from (loss if number == HEAD else loss._replace(message=number) for loss in recipe.losses)

    def slots(self, messages: Messages, tools: Any) -> Iterator[Range]:
        """Yield the ranges that messages and tools wrote."""
        for place, number, recipe in zip(self.places, self.numbers, self.recipes, strict=False):
            edges = compile_program(recipe.slots)(messages[number], tools, messages)
            yield from ((place + edges[n], place + edges[n + 1]) for n in range(0, len(edges), 2))


class RecipeBook:
    """Recipes of one template."""

    def __init__(self) -> None:
        self._recipes: dict[Any, list[Recipe]] = {}
        self._kinds: dict[Any, Kind] = {}
        self._numbers = count()
        self._head_sizes: list[int] = []
        self._in_order: dict[Any, list[Recipe]] = {}  # the same, in the order in which they were learnt
        # What recipes are for: any tools and arguments, certain tools, certain arguments, or both.
        self._specials: list[tuple[bool, bool]] = [(False, False)]

    def kinds_of(self, messages: Messages) -> list[Kind]:
        """Return the kinds of messages."""
        known = self._kinds
        try:
            return [known[(message.get("role"), *message)] for message in messages]
        except KeyError:
            if len(known) > _MAX_KINDS:
                known.clear()
            for message in messages:
                role = message.get("role")
                seen = (role, "tool_calls" in message)
                known.setdefault((role, *message), Kind(next(self._numbers), role, seen))
            return [known[(message.get("role"), *message)] for message in messages]

    def add(
        self,
        messages: Messages,
        kinds: Sequence[Kind],
        tools: Any,
        wanted: Sequence[bool],
        head_size: int,
        learnt: dict[int, Recipe],
    ) -> None:
        """Keep the recipes of a chat's messages, by number, and of its head, which contains `head_size` messages."""
        if len(self._recipes) > _MAX_KINDS:  # each set of tools may have its own
            self._recipes.clear()
            self._in_order.clear()
        keys = dict(enumerate(_keys(head_size, kinds, tools, wanted)))
        keys[HEAD] = _head_key(head_size, kinds, tools, wanted)
        if head_size not in self._head_sizes:
            self._head_sizes.append(head_size)
        for number, recipe in learnt.items():
            special = (recipe.is_for_tools, recipe.is_for_arguments)
            if special not in self._specials:
                self._specials.append(special)
            key = _special_key(keys[number], special, tools, messages[number])
            known = self._in_order.setdefault(key, [])
            if all(recipe.code != other.code or recipe.losses != other.losses for other in known):
                del known[: len(known) + 1 - _MAX_RECIPES]
                known.append(recipe)
                self._recipes[key] = sorted(
                    known, key=lambda one: -len(one.code)
                )  # the most specific one is tried first

    def read(self, text: str, messages: Messages, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> Read:
        """Read a rendered chat as far as its messages are known."""
        for size in self._head_sizes:
            if size < len(kinds):
                steps = [(HEAD, _head_key(size, kinds, tools, wanted))]
                steps += list(enumerate(_keys(size, kinds, tools, wanted)))[size:]
                read = self._read(text, messages, tools, steps)
                if read.numbers:
                    return read
        return Read([], [0], [], [])

    def _read(self, text: str, messages: Messages, tools: Any, steps: Iterable[tuple[int, Any]]) -> Read:
        """Read what is written for one message after the other, given by number and key."""
        turns: list[Range] = []
        places, numbers, used = [0], [], []
        position = 0
        find, begins_with = self._recipes.get, text.startswith
        is_simple = len(self._specials) == 1
        for number, key in steps:
            message = messages[number]
            for recipe in find(key, ()) if is_simple else self._special_recipes(key, tools, message):
                try:
                    written = recipe.run(message, tools, messages)
                except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                    continue
                if written is not None and begins_with(written[0], position):
                    break
            else:
                break
            added, edges = written
            if edges:
                turns += [(position + edges[n], position + edges[n + 1]) for n in range(0, len(edges), 2)]
            position += len(added)
            places.append(position)
            numbers.append(number)
            used.append(recipe)
        return Read(turns, places, numbers, used)

    def _special_recipes(self, key: Any, tools: Any, message: dict[str, Any]) -> Iterator[Recipe]:
        for special in self._specials:
            yield from self._recipes.get(_special_key(key, special, tools, message), ())


def _special_key(key: Any, special: tuple[bool, bool], tools: Any, message: dict[str, Any]) -> Any:
    """Return the key of recipes that hold only for certain tools, or only for certain arguments of calls."""
    if not any(special):
        return key
    return key, _content_of(tools) if special[0] else None, _arguments_of(message) if special[1] else None


def _content_of(tools: Any) -> bytes | None:
    try:
        return orjson.dumps(tools)
    except TypeError:  # numbers beyond 64 bits, or half a surrogate pair
        return None


def _arguments_of(message: dict[str, Any]) -> Any:
    """Return the names of the arguments of a message's calls."""
    try:
        return tuple([tuple(call["function"]["arguments"]) for call in message.get("tool_calls") or ()])
    except (KeyError, TypeError):  # calls in another form
        return None


def _head_key(size: int, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> Any:
    """Return the key of recipes of a head: the kinds of its messages and of the next one."""
    return (size, bool(tools), *wanted[:size], *[kind.number for kind in kinds[: size + 1]])


def _keys(size: int, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> list[Any]:
    """Return the keys of recipes of each message: its kind, its neighbours, and the kinds in the head.

    The head matters because templates may repeat it elsewhere: Mistral's write the system prompt before the last
    question, and every prompt has another last question.
    """
    head = (bool(tools), *[kind.number for kind in kinds[:size]])
    keys: list[Any] = []
    before = None
    after = [kind[1] for kind in kinds[1:]]
    after.append(None)
    for (kind, _, seen), is_wanted, following in zip(kinds, wanted, after, strict=True):
        keys.append((kind, is_wanted, before, following, head))
        before = seen
    return keys


# Learning recipes: a traced chat is taken apart, into a recipe for its head and one for each message that the template
# iterates over.
#
# A traced render is a straight-line program about the whole chat (see `Recorder`). Its lines are sorted by the messages
# that they concern, and the text is cut where the template begins to write for each message. Whatever comes before the
# loop is the head: tools, and messages that the template takes out of the list (a system prompt, with Llama the first
# question). A message may repeat what is in the head. But if a question concerns two messages of the loop, or one of
# them is written in another's place, the chat cannot be taken apart.
#
# Some templates write tools word by word instead of as JSON, and ask so much about them that every set of tools has a
# program of its own. Then a recipe is for one set of tools, whose text is constant.

_IS_OTHER = re.compile(rf"{VARIABLE}\d+=={VARIABLE}\d+")
_ASKS_NAMES = re.compile(r"\['arguments'\](?:,\)|\)\))!=")  # see `guard_line` of a signature
_MAX_QUESTIONS = 4  # per tool; with more, each set of tools gets its own recipes

_Part = tuple[int, str, "str | None"]  # position, text, variable
_Line = tuple[int, bool, str]  # place, whether it is an assignment, text
_NOTHING = frozenset[int]()
_TOOLS = frozenset({HEAD})


class Lesson:
    """What can be learnt from one chat.

    Args:
        messages: of the chat.
        tools: of the chat.
        chat: its render; NotCompilable is raised if it is not written message by message.
        recorder: what the template has asked. It may record more later: a recipe contains what was asked so far.
        count_marks: see `ControlMarks`.
    """

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Any,
        chat: TracedText,
        recorder: Recorder,
        count_marks: Callable[[str], int],
    ) -> None:
        self._messages = messages
        self._recorder = recorder
        self._count_marks = count_marks
        beginnings = _beginnings(chat, len(messages))
        self.head_size = len(messages) - len(beginnings)  # messages that have no iteration of their own
        self._head = frozenset(range(HEAD, self.head_size))
        # All messages depend on these: prompts repeat the head, and a system prompt may say how to think.
        is_system = messages[0].get("role") in ("system", "developer")
        self._shared = frozenset(range(max(self.head_size, is_system)))
        self._edges = [0, *beginnings, len(chat.text)]
        self._regions = _regions(chat, self._edges)
        self._num_sorted = 0
        self._about: dict[str, frozenset[int]] = {}  # variables
        self._lines: dict[frozenset[int], list[_Line]] = {}  # by the messages that they concern
        self._sort_lines()
        self._num_in_chat = self._num_sorted  # later lines come from prompts only
        self.is_for_these_tools = self.num_about_tools > _MAX_QUESTIONS * (1 + len(tools or ()))

    @property
    def num_about_tools(self) -> int:
        """The number of questions about tools that were asked."""
        self._sort_lines()
        return sum(not line[1] for about, lines in self._lines.items() if HEAD in about for line in lines)

    def recipe(self, number: int, ranges: Sequence[Range], losses: Sequence[Loss]) -> Recipe:
        """Return the recipe of a message, or of the head, with its trained ranges in the chat."""
        self._sort_lines()
        place = 0 if number == HEAD else number - self.head_size + 1
        region = (self._edges[place], self._edges[place + 1])
        parts, templates = self._parts(number, place)
        starts, slots = _starts(parts, templates)
        edges = [_edge(edge, parts, region, starts) for turn in ranges for edge in turn]
        texts = [ascii(text) if name is None else name for _, text, name in parts]
        joined = f"''.join(({_tuple_of(texts)}))" if len(texts) > 1 else texts[0] if texts else "''"
        lines = list(self._lines_of(number))
        program = _number_variables(without_unused([*lines, f" return {joined},({_tuple_of(edges)})"]))
        types = self._type_guards(number)
        assignments = [line for line in lines if ASSIGNMENT.match(line)]
        return Recipe(
            compile_program("\n".join([RUN, *types, *program])),
            "\n".join([RUN, *without_unused([*assignments, f" return ({_tuple_of(slots)})"])]),
            sum(self._count_marks(text) for text in templates if text is not None),
            tuple(losses),
            tuple(program[:-1]),
            "\n".join([*types, *program]),
            self.is_for_these_tools and (number == HEAD or _has_tools(parts, templates, program)),
            number != HEAD and any(map(_ASKS_NAMES.search, program)),
        )

    def _parts(self, number: int, place: int) -> tuple[list[_Part], list[str | None]]:
        """Return the parts of a region, and the text of those that the template writes for every record."""
        parts: list[_Part] = []
        templates: list[str | None] = []
        for position, text, name in self._regions[place]:
            if name is not None and not self._is_known_to(self._about[name], number):
                raise NotCompilable("a message that writes another's text")
            is_fixed = name is not None and self.is_for_these_tools and self._about[name] == _TOOLS
            parts.append((position, text, None if is_fixed else name))
            templates.append(text if name is None else None)
        return parts, templates

    def _is_known_to(self, about: frozenset[int], number: int) -> bool:
        """Return whether a recipe may use a value; the head may also write strings of the loop's first message."""
        return about <= self._head | self._shared | {self.head_size if number == HEAD else number}

    def _lines_of(self, number: int) -> Iterator[str]:
        """Yield assignments that a recipe may need, and its guards."""
        found: list[_Line] = []
        for about, lines in self._lines.items():
            if not self._is_known_to(about, number):
                continue
            is_own = about <= self._head if number == HEAD else number in about or _NOTHING < about <= self._shared
            if about == _TOOLS and self.is_for_these_tools:
                is_own = False
            first = self._num_in_chat if number != HEAD and about <= self._head else len(self._recorder.lines)
            found += [line for line in lines if line[1] or is_own or line[0] >= first]
        own = f"{MESSAGES_NAME}[{number}]"
        for _, _, text in sorted(found):
            yield text if number == HEAD else replace_names(text, lambda name: MESSAGE_NAME if name == own else name)

    def _about_name(self, name: str) -> frozenset[int]:
        if name == TOOLS_NAME:
            return _TOOLS
        if name.startswith(MESSAGES_NAME):
            return frozenset({int(name[len(MESSAGES_NAME) + 1 : -1])})
        return self._about[name]

    def _type_guards(self, number: int) -> list[str]:
        if number != HEAD:
            return type_guard(MESSAGE_NAME, self._messages[number])
        guards = (type_guard(f"{MESSAGES_NAME}[{n}]", self._messages[n]) for n in range(self.head_size))
        return [line for lines in guards for line in lines]

    def _sort_lines(self) -> None:
        """Sort the recorder's new lines; raise NotCompilable if a question concerns several messages."""
        recorder = self._recorder
        if recorder.obstacle:
            raise NotCompilable(recorder.obstacle)
        for place in range(self._num_sorted, len(recorder.lines)):
            left, right = recorder.lines[place]
            is_assignment = recorder.is_assignment[place]
            source = right if is_assignment else left
            about = _NOTHING.union(*map(self._about_name, names_in(source)))
            if is_assignment:
                self._about[left] = about
            elif len(about - self._head - self._shared) > 1:
                if right is False and _IS_OTHER.fullmatch(left):
                    continue  # such as whether a message is the last question; the text shows it
                raise NotCompilable("a question about several messages")
            line = f" {left}={right}" if is_assignment else guard_line(left, right)
            self._lines.setdefault(about, []).append((place, is_assignment, line))
        self._num_sorted = len(recorder.lines)


def _has_tools(parts: Sequence[_Part], templates: Sequence[str | None], program: Sequence[str]) -> bool:
    """Return whether a recipe contains the text of tools, or reads them."""
    is_fixed = any(name is None and text is None for (_, _, name), text in zip(parts, templates, strict=True))
    return is_fixed or any(TOOLS_NAME in names_in(line) for line in program)


def _number_variables(lines: Sequence[str]) -> list[str]:
    """Number variables in the order in which they occur, so that equal recipes have equal code."""
    names: dict[str, str] = {}

    def number(name: str) -> str:
        return names.setdefault(name, f"{VARIABLE}{len(names)}") if name.startswith(VARIABLE) else name

    return [replace_names(line, number) for line in lines]


def _tuple_of(expressions: Sequence[str]) -> str:
    return "".join(f"{expression}," for expression in expressions)


def _starts(parts: Sequence[_Part], templates: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """Return expressions for the start of each part and the end of the last, and for the edges of records' strings."""
    starts, slots = ["0"], []
    num_constant, lengths = 0, ""
    for (_, text, name), template in zip(parts, templates, strict=True):
        if name is None:
            num_constant += len(text)
        else:
            lengths += f"+len({name})"
        starts.append(f"{num_constant}{lengths}")
        if template is None:
            slots += starts[-2:]
    return starts, slots


def _beginnings(chat: TracedText, num_messages: int) -> list[int]:
    """Return where the template begins to write for each message of its loop; NotCompilable if out of order."""
    found: dict[int, int] = {}
    for position, mark in chat.marks:
        if mark.kind == "enter":
            found[mark.message] = position
    first = min(found, default=num_messages)
    beginnings = [found.get(number, -1) for number in range(first, num_messages)]
    if not beginnings or -1 in beginnings or beginnings != sorted(beginnings):
        raise NotCompilable("no loop over the messages")
    return beginnings


def _regions(chat: TracedText, edges: Sequence[int]) -> list[list[_Part]]:
    """Cut the parts of a chat at the edges of its regions."""
    regions: list[list[_Part]] = [[] for _ in edges[1:]]
    position, region = 0, 0
    for text, name in chat.whole.parts:
        end = position + len(text)
        while position < end:
            while edges[region + 1] <= position:
                region += 1
            stop = min(end, edges[region + 1])
            if name is not None and stop < end:
                raise NotCompilable("a string in two regions")
            regions[region].append((position, text[len(text) - (end - position) :][: stop - position], name))
            position = stop
    return regions


def _edge(edge: int, parts: Sequence[_Part], region: Range, starts: Sequence[str]) -> str:
    """Return an expression for where an edge of a turn is, counted from the beginning of the region."""
    if edge < region[0]:
        raise NotCompilable("a turn that begins before its iteration")
    for (position, text, name), start in zip(parts, starts, strict=False):
        if edge == position or (name is None and position < edge < position + len(text)):
            return f"{start}+{edge - position}" if edge > position else start
        if position < edge < position + len(text):
            raise NotCompilable("an edge inside a string")
    return f"{starts[-1]}+{edge - region[1]}"
