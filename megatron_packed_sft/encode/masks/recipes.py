"""Chats of unknown shape made of known messages: one plain render, read with what was learnt of single messages.

A recipe says what a template writes while it iterates over one message: constants and that message's strings, where its
turn begins and ends, and every answer that the template got about the message in any of the renders by which the turn
was found. A chat whose text its messages' recipes give whole, character by character, needs no tracing. The render
proves the text; the answers about each message and its neighbours' kinds stand for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import MESSAGES_NAME, TOOLS_NAME, VARIABLE, Recorder
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.shapes import NAMES, NotCompilable, Range, guard_line
from megatron_packed_sft.encode.masks.traced_renderer import TracedText

_VARIABLE = re.compile(rf"{VARIABLE}\d+")
_MESSAGE = re.compile(rf"{MESSAGES_NAME}\[(\d+)\]")
_MAX_RECIPES = 12  # of one kind of message among the same neighbours
_MAX_KINDS = 4096

HEAD = -1


# What a recipe says of a message: its text, where its turn begins and ends (-1 if it has none), and where in the text
# its strings begin and end.
Written = tuple[str, int, int, tuple[int, ...]]


class Recipe(NamedTuple):
    """What a template writes for a message.

    Args:
        run: message, tools -> `Written`, or None if the template would have got other answers.
        losses: what the template leaves out of the message.
        code: to tell recipes apart.
    """

    run: Callable[[Any, Any], Written | None]
    losses: tuple[Loss, ...]
    code: str


class Read(NamedTuple):
    """A text that was read whole: trained ranges, what messages and tools wrote, and what is lost."""

    turns: list[Range]
    slots: list[Range]
    losses: list[Loss]


class RecipeBook:
    """Recipes of one template."""

    def __init__(self) -> None:
        self._recipes: dict[Any, list[Recipe]] = {}

    def learn(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Any,
        wanted: Sequence[bool],
        chat: TracedText,
        turns: dict[int, Range],
        losses: Sequence[Loss],
        recorder: Recorder,
    ) -> None:
        """Take a traced chat apart; raise NotCompilable if its messages depend on each other."""
        if recorder.obstacle:
            raise NotCompilable(recorder.obstacle)
        learnt = list(_recipes_of(messages, chat, turns, losses, recorder))
        if len(self._recipes) > _MAX_KINDS:
            self._recipes.clear()
        for key, recipe in zip(_keys(messages, tools, wanted), learnt, strict=True):
            known = self._recipes.setdefault(key, [])
            if all(recipe.code != other.code or recipe.losses != other.losses for other in known):
                known.append(recipe)
                known.sort(key=lambda one: -len(one.code))  # one that says more is tried first
                del known[_MAX_RECIPES:]

    def read(self, text: str, messages: Sequence[dict[str, Any]], tools: Any, wanted: Sequence[bool]) -> Read | None:
        """Read a rendered chat; None if a part of it is unknown."""
        turns: list[Range] = []
        slots: list[Range] = []
        losses: list[Loss] = []
        position = 0
        for number, key in enumerate(_keys(messages, tools, wanted), start=HEAD):
            message = messages[max(number, 0)]
            for recipe in self._recipes.get(key, ()):
                try:
                    written = recipe.run(message, tools)
                except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                    continue
                if written is not None and text.startswith(written[0], position):
                    break
            else:
                return None
            added, start, end, places = written
            if start >= 0:
                turns.append((position + start, position + end))
            if recipe.losses:
                losses += [loss._replace(message=number) for loss in recipe.losses]
            slots += [(position + places[n], position + places[n + 1]) for n in range(0, len(places), 2)]
            position += len(added)
        return Read(turns, slots, losses) if position == len(text) else None


def _keys(messages: Sequence[dict[str, Any]], tools: Any, wanted: Sequence[bool]) -> Iterator[Any]:
    """Yield what decides on a message's recipes beside its answers: its kind, its neighbours', its place."""
    kinds = [(message.get("role"), *message, *map(type, message.values())) for message in messages]
    has_tools = bool(tools)
    yield HEAD, kinds[0], has_tools
    last = len(kinds) - 1
    before = None
    for number, kind in enumerate(kinds):
        after = kinds[number + 1][0] if number < last else None
        yield kind, wanted[number], before, after, number == 0, has_tools
        before = kind[0], "tool_calls" in messages[number]


def _recipes_of(
    messages: Sequence[dict[str, Any]],
    chat: TracedText,
    turns: dict[int, Range],
    losses: Sequence[Loss],
    recorder: Recorder,
) -> Iterator[Recipe]:
    edges = [0, *_beginnings(chat, len(messages)), len(chat.text)]
    sources = _Sources(recorder)
    guards = sources.guards_by_message(len(messages))
    regions = _regions(chat, edges)
    for number, (start, end) in enumerate(pairwise(edges), start=HEAD):
        allowed = {max(number, 0)}
        parts = regions[number + 1]
        lines = [f"def run(x, {TOOLS_NAME}):", *guards[number]]
        lines += _writing(parts, turns.get(number), (start, end), sources, allowed, with_tools=number == HEAD)
        code = "\n".join(lines)
        namespace: dict[str, Any] = dict(NAMES)
        exec(code, namespace)
        yield Recipe(namespace["run"], tuple(loss for loss in losses if loss.message == number), code)


def _writing(
    parts: Sequence[tuple[int, str, str | None]],
    turn: Range | None,
    region: Range,
    sources: _Sources,
    allowed: set[int],
    *,
    with_tools: bool,
) -> list[str]:
    """Return the lines that put a message's text together and count its characters."""
    lines, texts, places = [], [], []
    starts = []  # of parts: an expression each
    const, slots = 0, ""
    for number, (_, text, name) in enumerate(parts):
        starts.append(f"{const}{slots}")
        if name is None:
            texts.append(ascii(text))
            const += len(text)
            continue
        lines.append(f" s{number}={_own(sources.expanded(name), allowed, with_tools=with_tools)}")
        lines.append(f" n{number}=len(s{number})")
        texts.append(f"s{number}")
        slots += f"+n{number}"
        places += [starts[-1], f"{const}{slots}"]
    starts.append(f"{const}{slots}")
    edges = ["-1", "-1"] if turn is None else [_edge(edge, parts, region, starts) for edge in turn]
    joined = f"''.join(({','.join(texts)},))" if texts else "''"
    return [*lines, f" return {joined},{edges[0]},{edges[1]},({','.join(places)}{',' if places else ''})"]


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


def _regions(chat: TracedText, edges: Sequence[int]) -> list[list[tuple[int, str, str | None]]]:
    """Cut the parts of a chat at the edges of its regions: (position, text, variable)."""
    regions: list[list[tuple[int, str, str | None]]] = [[] for _ in edges[1:]]
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


def _edge(edge: int, parts: Sequence[tuple[int, str, str | None]], region: Range, starts: Sequence[str]) -> str:
    """Return an expression for where an edge of a turn is, counted from the beginning of the region."""
    if edge < region[0]:
        raise NotCompilable("a turn that begins before its iteration")
    for (position, text, name), start in zip(parts, starts, strict=False):
        if edge == position or (name is None and position < edge < position + len(text)):
            return f"{start}+{edge - position}"
        if position < edge < position + len(text):
            raise NotCompilable("an edge inside a string")
    return f"{starts[-1]}+{edge - region[1]}"


class _Sources:
    """Expressions of a recorder, written out in terms of messages and tools."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        lines = zip(recorder.lines, recorder.is_assignment, strict=True)
        self._sources = {left: right for (left, right), is_assignment in lines if is_assignment}
        self._expanded: dict[str, str] = {}

    def expanded(self, name: str) -> str:
        if name not in self._expanded:
            self._expanded[name] = f"({self.written_out(self._sources[name])})"
        return self._expanded[name]

    def written_out(self, source: str) -> str:
        if len(source) > 20_000:
            raise NotCompilable("a long expression")
        return _VARIABLE.sub(lambda match: self.expanded(match[0]), source)

    def guards_by_message(self, num_messages: int) -> dict[int, list[str]]:
        """Return the guards on each message alone, and on tools, as lines; NotCompilable if one is on several."""
        found: dict[int, list[str]] = {number: [] for number in range(HEAD, num_messages)}
        lines = zip(self._recorder.lines, self._recorder.is_assignment, strict=True)
        for (source, answer), is_assignment in lines:
            if is_assignment:
                continue
            text = self.written_out(source)
            about = {int(number) for number in _MESSAGE.findall(text)}
            if len(about) > 1 or (about and TOOLS_NAME in text):
                raise NotCompilable("a question about several messages")
            line = guard_line(_MESSAGE.sub("x", text), answer)
            found[about.pop() if about else HEAD].append(line)
        return found


def _own(source: str, allowed: set[int], *, with_tools: bool) -> str:
    about = {int(number) for number in _MESSAGE.findall(source)}
    if not about <= allowed or (TOOLS_NAME in source and not with_tools):
        raise NotCompilable("a message that writes another's text")
    return _MESSAGE.sub("x", source)
