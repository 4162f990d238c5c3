"""Compiling chats of one shape: guards, then one join of constants and the record's strings, then trained ranges.

A traced render is a straight-line program: the questions that the template asked, with their answers, and the parts of
its text. For another record with the same answers, the template would write the same constants around that record's
strings, so nothing needs to be rendered. For Qwen3 and a question with an answer, the program has five lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import (
    MESSAGE_NAME,
    MESSAGES_NAME,
    TOOLS_NAME,
    VARIABLE,
    Author,
    Part,
    Recorder,
    names_in,
    replace_names,
)
from megatron_packed_sft.encode.masks.authored_values import signature
from megatron_packed_sft.encode.masks.traced_renderer import TracedText
from megatron_packed_sft.encode.templates.environment import json_inside, json_text

Range = tuple[int, int]
# messages, tools -> parts of the text, trained ranges; None where a guard fails
Program = Callable[[Sequence[dict[str, Any]], Any], "tuple[tuple[str, ...], tuple[Range, ...]] | None"]

_NAMES = {"json_text": json_text, "json_inside": json_inside, "signature": signature, "NoneType": NoneType}
_MAX_COMPILED = 4096
_QUESTION = re.compile(r"(bool|signature)\(([^()]*(?:\(\))?)\)")
_CONTAINED = ("str", "dict", "list")
_TYPES = frozenset({str, list, dict, int, float, bool, NoneType})
ASSIGNMENT = re.compile(rf" ({VARIABLE}\d+)=(?!=)")


class NotCompilable(Exception):  # noqa: N818 (not an error: the record is marked all the same)
    """A program cannot repeat what the template did, so the chat is marked by rendering."""


class Shape(NamedTuple):
    """A compiled chat.

    Args:
        run: see `Program`.
        slots: the numbers of the parts that are the record's strings.
        constants: the other parts.
    """

    run: Program
    slots: tuple[int, ...]
    constants: tuple[str, ...]


def compile_shape(
    messages: Sequence[dict[str, Any]],
    chat: TracedText,
    ranges: Sequence[Range],
    recorder: Recorder,
    recipes: Iterable[tuple[int, Sequence[str]]] = (),
) -> Shape:
    """Turn a traced chat and its trained ranges into a program; raise NotCompilable if that is impossible.

    Args:
        messages: of the chat; another chat of the shape must have the same keys.
        chat: the render.
        ranges: its trained ranges.
        recorder: what the template asked while they were found.
        recipes: where ranges come from recipes, the messages' numbers and the lines of their recipes.

    Example:
        >>> from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
        >>> from megatron_packed_sft.encode.masks.traced_renderer import TracedRenderer
        >>> from megatron_packed_sft.encode.templates.renderer import Renderer
        >>> recorder = Recorder()
        >>> renderer = TracedRenderer(Renderer("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"))
        >>> messages = [{"role": "user", "content": " Hi "}]
        >>> traced = renderer.render(messages, AuthoredChat(None, recorder))
        >>> compile_shape(messages, traced, [(1, 4)], recorder).run([{"role": "user", "content": "Hello"}], None)
        (('[', 'Hello', ']'), ((1, 7),))
    """
    if recorder.obstacle:
        raise NotCompilable(recorder.obstacle)
    parts = _merge_parts(chat.whole.parts)
    places = _places(parts, sorted({edge for edges in ranges for edge in edges}), recorder.edges_in_slots)
    lines = [f"def run({MESSAGES_NAME}, {TOOLS_NAME}):"]
    for number, message in enumerate(messages):
        lines += type_guard(f"{MESSAGES_NAME}[{number}]", message)
    lines += [*_program(recorder), *_linked(recipes, recorder)]
    names = {}
    for line, edge, name in _edge_lines(places):
        lines.append(line)
        names[edge] = name
    texts = ",".join(name or ascii(text) for text, name in parts)
    edges = "".join(f"({names[start]},{names[end]})," for start, end in ranges)
    lines.append(f" return ({texts}{',' if parts else ''}),({edges})")
    return Shape(
        compile_program("\n".join(without_unused(lines))),
        tuple(number for number, (_, name) in enumerate(parts) if name is not None),
        tuple(text for text, name in parts if name is None),
    )


@lru_cache(_MAX_COMPILED)
def compile_program(source: str) -> Any:
    """Return the function `run` of a program."""
    namespace: dict[str, Any] = dict(_NAMES)
    exec(source, namespace)
    return namespace["run"]


def note_parts(render: TracedText, recorder: Recorder) -> None:
    """Require that the same parts of a render are empty again, and that each part has one author."""
    position = 0
    owners = _owners(render)
    for text, name in render.whole.parts:
        if name is not None:
            recorder.guard(f"bool({name})", bool(text))
            if len(owners(position, position + len(text))) > 1:
                recorder.give_up("a string of several authors")
        position += len(text)


def _owners(render: TracedText) -> Callable[[int, int], set[int | None]]:
    runs: list[tuple[int, int, int | None]] = []
    position = 0
    for length, author in render.whole.authors:
        if length:
            runs.append((position, position + length, author.message if isinstance(author, Author) else None))
        position += length
    state = [0]

    def owners(start: int, end: int) -> set[int | None]:
        while state[0] < len(runs) and runs[state[0]][1] <= start:
            state[0] += 1
        found = set()
        for first, _, owner in runs[state[0] :]:
            if first >= end:
                break
            found.add(owner)
        return found

    return owners


def _merge_parts(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for text, name in parts:
        if not text:
            continue  # guarded to be empty
        if name is None and merged and merged[-1][1] is None:
            merged[-1] = (merged[-1][0] + text, None)
        else:
            merged.append((text, name))
    return merged


def _places(
    parts: Sequence[Part], edges: Sequence[int], edges_in_slots: set[int]
) -> dict[int, tuple[int, list[str], int]]:
    """Return for each edge: constant characters before it, slots before it, characters of the slot it stands in."""
    places: dict[int, tuple[int, list[str], int]] = {}
    waiting = list(edges)
    const, position = 0, 0
    slots: list[str] = []
    for text, name in parts:
        end = position + len(text)
        while waiting and waiting[0] <= (end if name is None else position):
            places[waiting[0]] = (const + (waiting[0] - position if name is None else 0), list(slots), 0)
            waiting.pop(0)
        while waiting and name is not None and waiting[0] < end:
            if waiting[0] not in edges_in_slots:
                raise NotCompilable("an edge inside a string")
            places[waiting[0]] = (const, list(slots), waiting[0] - position)
            waiting.pop(0)
        if name is None:
            const += len(text)
        else:
            slots.append(name)
        position = end
    for edge in waiting:
        places[edge] = (const, list(slots), 0)
    return places


def _edge_lines(places: dict[int, tuple[int, list[str], int]]) -> Iterator[tuple[str, int, str]]:
    """Yield a line that computes each edge from the one before it, the edge, and its expression."""
    before, const_before, num_before = "0", 0, 0
    for number, (edge, (const, slots, offset)) in enumerate(places.items()):
        terms = [before, *(f"len({name})" for name in slots[num_before:]), str(const - const_before)]
        before, const_before, num_before = f"b{number}", const, len(slots)
        yield f" {before}={'+'.join(terms)}", edge, f"{before}+{offset}" if offset else before


def _program(recorder: Recorder) -> list[str]:
    lines = []
    for (left, right), is_assignment in zip(recorder.lines, recorder.is_assignment, strict=True):
        if is_assignment:
            lines.append(f" {left}={right}")
        else:
            lines.append(guard_line(left, right))
    return lines


def _linked(recipes: Iterable[tuple[int, Sequence[str]]], recorder: Recorder) -> Iterator[str]:
    """Yield the lines of recipes, renamed for the messages of a chat, without those that the chat already has."""
    names = dict(recorder.names)
    seen = set(_program(recorder))
    for number, lines in recipes:
        known = {MESSAGE_NAME: f"{MESSAGES_NAME}[{number}]"}  # its names -> the chat's
        for line in lines:
            assigned = ASSIGNMENT.match(line)
            source = line[assigned.end() :] if assigned else line
            source = replace_names(source, lambda name: known.get(name, name))  # noqa: B023
            if assigned and source in names:
                known[assigned[1]] = names[source]
            elif assigned:
                known[assigned[1]] = names[source] = f"{VARIABLE}{len(names)}"
                yield f" {names[source]}={source}"
            elif source not in seen:
                seen.add(source)
                yield source


def guard_line(source: str, answer: Any) -> str:
    """Return a line of a program that continues only if an expression gives the same answer.

    Example:
        >>> guard_line("bool(x)", True), guard_line("len(x)", 2)
        (' if not x: return None', ' if (len(x))!=2: return None')
    """
    asked = _QUESTION.fullmatch(source)
    if answer is True or answer is False:
        source = asked[2] if asked and asked[1] == "bool" else f"({source})"
        return f" if {'not ' if answer else ''}{source}: return None"
    if answer is None:
        return f" if ({source}) is not None: return None"
    if asked and asked[1] == "signature" and (differs := _differs(asked[2], answer)):
        return f" if {differs}: return None"
    return f" if ({source})!={answer!a}: return None"


def _differs(source: str, found: Any) -> str | None:
    """Return an expression for whether a container's `signature` differs, without a call; None for rare signatures."""
    if not isinstance(found, tuple) or not found:
        return None
    if all(kind in _CONTAINED for kind in found if isinstance(kind, str)) and all(isinstance(k, str) for k in found):
        kinds = [f"type({source}[{number}]) is not {kind}" for number, kind in enumerate(found)]
        return " or ".join([f"len({source})!={len(found)}", *kinds])
    if all(isinstance(item, tuple) and isinstance(item[0], str) and item[1] in _CONTAINED for item in found):
        kinds = [f"type({source}[{key!a}]) is not {kind}" for key, kind in found]
        return " or ".join([f"(*{source},)!={tuple(key for key, _ in found)!a}", *kinds])
    return None


def type_guard(source: str, message: dict[str, Any]) -> list[str]:
    """Return a line that continues only if the values of a message have the same types; empty for an empty message."""
    unusual = [value for value in message.values() if type(value) not in _TYPES]
    if unusual:
        raise NotCompilable("a value of an unusual type")
    asked = [f"type({source}[{key!a}]) is not {type(value).__name__}" for key, value in message.items()]
    return [f" if {' or '.join(asked)}: return None"] if asked else []


def without_unused(lines: Sequence[str]) -> list[str]:
    """Remove unused assignments; going backwards, one pass is enough."""
    kept: list[str] = []
    needed: set[str] = set()
    for line in reversed(lines):
        assigned = ASSIGNMENT.match(line)
        if assigned and assigned[1] not in needed:
            continue
        needed.update(names_in(line[assigned.end() :] if assigned else line))
        kept.append(line)
    return kept[::-1]
