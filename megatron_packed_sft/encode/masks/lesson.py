"""A traced chat taken apart: a recipe for its head and one for each message that the template iterates over.

A traced render is a straight-line program about the whole chat (see `Recorder`). Its lines are sorted by the messages
that they are about, and the text is cut where the template begins to write for each message. What comes before the
loop is the head: tools, and messages that the template takes out of the list (a system prompt, with Llama the first
question). A message may repeat what is in the head, but where a question is about two messages of the loop, or one of
them is written in another's place, the chat cannot be taken apart.

Some templates write tools word by word instead of as JSON, and ask so much about them that every set of tools has a
program of its own. Then a recipe is for one set of tools, whose text is constant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_packed_sft.encode.masks.authored_text import MESSAGE_NAME, MESSAGES_NAME, TOOLS_NAME, VARIABLE, Recorder
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.recipes import HEAD, RUN, Recipe
from megatron_packed_sft.encode.masks.shapes import (
    NotCompilable,
    Range,
    compiled,
    guard_line,
    type_guard,
    without_unused,
)
from megatron_packed_sft.encode.masks.traced_renderer import TracedText

_VARIABLE = re.compile(rf"{VARIABLE}\d+")
_MESSAGE = re.compile(rf"{MESSAGES_NAME}\[(\d+)\]")
_IS_OTHER = re.compile(rf"{VARIABLE}\d+=={VARIABLE}\d+")
_ASKS_NAMES = re.compile(r"\['arguments'\](?:,\)|\)\))!=")  # see `guard_line` of a signature
_MAX_QUESTIONS = 4  # about one tool, above which each set of tools has its own recipes

_Part = tuple[int, str, "str | None"]  # position, text, variable
_Line = tuple[int, bool, str]  # place, whether it is an assignment, text
_ANYBODY = frozenset[int]()
_TOOLS = frozenset({HEAD})


class Lesson:
    """What can be learnt of one chat.

    Args:
        messages: of the chat.
        tools: of the chat.
        chat: its render; NotCompilable if that is not message by message.
        recorder: what templates asked about it. It may go on asking: a recipe holds what was asked so far.
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
        # What all messages depend on: prompts write the head again, and a system prompt may say how to think.
        is_system = messages[0].get("role") in ("system", "developer")
        self._shared = frozenset(range(max(self.head_size, is_system)))
        self._edges = [0, *beginnings, len(chat.text)]
        self._regions = _regions(chat, self._edges)
        self._num_sorted = 0
        self._about: dict[str, frozenset[int]] = {}  # variables
        self._lines: dict[frozenset[int], list[_Line]] = {}  # by what they are about
        self._sort_lines()
        self._num_in_chat = self._num_sorted  # what comes later is asked by prompts only
        self.is_for_these_tools = self.num_about_tools > _MAX_QUESTIONS * (1 + len(tools or ()))

    @property
    def num_about_tools(self) -> int:
        """How many questions about tools were asked."""
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
        joined = f"''.join(({_listed(texts)}))" if len(texts) > 1 else texts[0] if texts else "''"
        lines = list(self._lines_of(number))
        program = _renamed(without_unused([*lines, f" return {joined},({_listed(edges)})"]))
        types = self._type_guards(number)
        assignments = [line for line in lines if line.startswith(f" {VARIABLE}")]
        return Recipe(
            compiled("\n".join([RUN, *types, *program])),
            "\n".join([RUN, *without_unused([*assignments, f" return ({_listed(slots)})"])]),
            sum(self._count_marks(text) for text in templates if text is not None),
            tuple(losses),
            tuple(program[:-1]),
            "\n".join([*types, *program]),
            self.is_for_these_tools and (number == HEAD or _has_tools(parts, templates, program)),
            number != HEAD and any(map(_ASKS_NAMES.search, program)),
        )

    def _parts(self, number: int, place: int) -> tuple[list[_Part], list[str | None]]:
        """Return the parts of a region, and which of them are the template's own text, the same for all records."""
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
        """Whether a recipe may use a value; the head also writes strings of the loop's first message."""
        return about <= self._head | self._shared | {self.head_size if number == HEAD else number}

    def _lines_of(self, number: int) -> Iterator[str]:
        """Yield assignments that a recipe may need, and the guards that are its own."""
        found: list[_Line] = []
        for about, lines in self._lines.items():
            if not self._is_known_to(about, number):
                continue
            is_own = about <= self._head if number == HEAD else number in about or _ANYBODY < about <= self._shared
            if about == _TOOLS and self.is_for_these_tools:
                is_own = False
            first = self._num_in_chat if number != HEAD and about <= self._head else len(self._recorder.lines)
            found += [line for line in lines if line[1] or is_own or line[0] >= first]
        own = f"{MESSAGES_NAME}[{number}]"
        for _, _, text in sorted(found):
            yield text if number == HEAD else text.replace(own, MESSAGE_NAME)

    def _type_guards(self, number: int) -> list[str]:
        if number != HEAD:
            return type_guard(MESSAGE_NAME, self._messages[number])
        guards = (type_guard(f"{MESSAGES_NAME}[{n}]", self._messages[n]) for n in range(self.head_size))
        return [line for lines in guards for line in lines]

    def _sort_lines(self) -> None:
        """Sort what the recorder has written since the last time; NotCompilable if a question is about several."""
        recorder = self._recorder
        if recorder.obstacle:
            raise NotCompilable(recorder.obstacle)
        for place in range(self._num_sorted, len(recorder.lines)):
            left, right = recorder.lines[place]
            is_assignment = recorder.is_assignment[place]
            source = right if is_assignment else left
            about = frozenset(map(int, _MESSAGE.findall(source))).union(
                *(self._about[name] for name in _VARIABLE.findall(source)), _TOOLS if TOOLS_NAME in source else _ANYBODY
            )
            if is_assignment:
                self._about[left] = about
            elif len(about - self._head - self._shared) > 1:
                if right is False and _IS_OTHER.fullmatch(left):
                    continue  # whether a message is, say, the last question: seen in what is written
                raise NotCompilable("a question about several messages")
            line = f" {left}={right}" if is_assignment else guard_line(left, right)
            self._lines.setdefault(about, []).append((place, is_assignment, line))
        self._num_sorted = len(recorder.lines)


def _has_tools(parts: Sequence[_Part], templates: Sequence[str | None], program: Sequence[str]) -> bool:
    """Whether a recipe holds the text of tools, or reads them."""
    is_fixed = any(name is None and text is None for (_, _, name), text in zip(parts, templates, strict=True))
    return is_fixed or any(TOOLS_NAME in line for line in program)


def _renamed(lines: Sequence[str]) -> list[str]:
    """Number variables in the order in which they appear, so that equal recipes have equal code."""
    names: dict[str, str] = {}
    return [_VARIABLE.sub(lambda match: names.setdefault(match[0], f"{VARIABLE}{len(names)}"), line) for line in lines]


def _listed(expressions: Sequence[str]) -> str:
    return "".join(f"{expression}," for expression in expressions)


def _starts(parts: Sequence[_Part], templates: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """Return expressions for where each part begins and the last one ends, and for the edges of others' strings."""
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
    """Return where the template begins to write for each message of its loop; NotCompilable if not in their order."""
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
