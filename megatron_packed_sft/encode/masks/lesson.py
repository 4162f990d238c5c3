"""A traced chat taken apart: a recipe for each of its messages.

A traced render is a straight-line program about the whole chat (see `Recorder`). Its lines are sorted by the message
that they are about, and the text is cut where the template begins to write for each message. Where a line is about
several messages, or a message's strings are written in another's place, the chat cannot be taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_packed_sft.encode.masks.authored_text import MESSAGE_NAME, MESSAGES_NAME, TOOLS_NAME, VARIABLE, Recorder
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.recipes import HEAD, Recipe
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

_Part = tuple[int, str, "str | None"]  # position, text, variable
_HEADER = f"def run({MESSAGE_NAME}, {TOOLS_NAME}):"
_ANYBODY = frozenset[int]()
_TOOLS = frozenset({HEAD})


class Lesson:
    """What can be learnt of one chat.

    Args:
        messages: of the chat.
        chat: its render; NotCompilable if that is not message by message.
        recorder: what templates asked about it. It may go on asking: a recipe holds what was asked so far.
        count_marks: see `ControlMarks`.
    """

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        chat: TracedText,
        recorder: Recorder,
        count_marks: Callable[[str], int],
    ) -> None:
        self._messages = messages
        self._recorder = recorder
        self._count_marks = count_marks
        self._edges = [0, *_beginnings(chat, len(messages)), len(chat.text)]
        self._regions = _regions(chat, self._edges)
        self._num_sorted = 0
        self._about: dict[str, frozenset[int]] = {}  # variables
        self._lines: dict[frozenset[int], list[tuple[int, bool, str]]] = {}  # by what they are about

    def recipe(self, number: int, ranges: Sequence[Range], losses: Sequence[Loss]) -> Recipe:
        """Return the recipe of a message, or of the head, with its trained ranges in the chat."""
        self._sort_lines()
        parts = self._regions[number - HEAD]
        lines = self._lines_about(number)
        for _, _, name in parts:
            if name is not None and not self._is_own(self._about[name], number):
                raise NotCompilable("a message that writes another's text")
        starts, slots = _starts(parts)
        region = (self._edges[number - HEAD], self._edges[number - HEAD + 1])
        edges = [_edge(edge, parts, region, starts) for turn in ranges for edge in turn]
        texts = [ascii(text) if name is None else name for _, text, name in parts]
        joined = f"''.join(({_listed(texts)}))" if len(texts) > 1 else texts[0] if texts else "''"
        program = _renamed(without_unused([*lines, f" return {joined},({_listed(edges)})"]))
        types = [] if number == HEAD else type_guard(MESSAGE_NAME, self._messages[number])
        assignments = [line for line in lines if line.startswith(f" {VARIABLE}")]
        return Recipe(
            compiled("\n".join([_HEADER, *types, *program])),
            "\n".join([_HEADER, *without_unused([*assignments, f" return ({_listed(slots)})"])]),
            sum(self._count_marks(text) for _, text, name in parts if name is None),
            tuple(losses),
            tuple(program[:-1]),
            "\n".join([*types, *program]),
        )

    def _lines_about(self, number: int) -> list[str]:
        """Return the lines that a recipe needs: a message's own; the head's may use strings of the first message."""
        found = []
        for about, lines in self._lines.items():
            if self._is_own(about, number):
                is_others = number == HEAD and bool(about - _TOOLS)
                found += [line for line in lines if line[1] or not is_others]
        return [text for _, _, text in sorted(found)]

    def _is_own(self, about: frozenset[int], number: int) -> bool:
        return about <= ({HEAD, 0} if number == HEAD else {number})

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
            elif len(about) > 1:
                raise NotCompilable("a question about several messages")
            line = f" {left}={right}" if is_assignment else guard_line(left, right)
            kept = self._lines.setdefault(about, [])
            kept.append((place, is_assignment, _MESSAGE.sub(MESSAGE_NAME, line)))
        self._num_sorted = len(recorder.lines)


def _renamed(lines: Sequence[str]) -> list[str]:
    """Number variables in the order in which they appear, so that equal recipes have equal code."""
    names: dict[str, str] = {}
    return [_VARIABLE.sub(lambda match: names.setdefault(match[0], f"{VARIABLE}{len(names)}"), line) for line in lines]


def _listed(expressions: Sequence[str]) -> str:
    return "".join(f"{expression}," for expression in expressions)


def _starts(parts: Sequence[_Part]) -> tuple[list[str], list[str]]:
    """Return expressions for where each part begins and the last one ends, and for the edges of the strings."""
    starts, slots = ["0"], []
    num_constant, lengths = 0, ""
    for _, text, name in parts:
        if name is None:
            num_constant += len(text)
        else:
            lengths += f"+len({name})"
            slots += [starts[-1], f"{num_constant}{lengths}"]
        starts.append(f"{num_constant}{lengths}")
    return starts, slots


def _beginnings(chat: TracedText, num_messages: int) -> list[int]:
    """Return where the template begins to write for each message; NotCompilable if that is not in their order."""
    found: dict[int, int] = {}
    for position, mark in chat.marks:
        if mark.kind == "enter":
            found[mark.message] = position
    beginnings = [found.get(number, -1) for number in range(num_messages)]
    if -1 in beginnings or beginnings != sorted(beginnings):
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
