"""Limits of a render: how often a template may loop, and how much text it may make.

Jinja's sandbox keeps a template from the machine, not from its memory and its time: `'a' * 10**9` is one harmless
product, and two loops of 100,000 are ten billion. Here every operation that can make much out of little asks first, and
every one that can double a text looks at the result. Time is limited as well, but never by a clock, since what is
rendered must not depend on the machine: a step may look at every text there is, so the longer the longest text, the
fewer steps there are.

    LimitedGenerator         loops, sums, lists         in the code that a template is compiled to
    LimitedEnvironment       *, **, % and methods       'a'.center(n), text.replace(a, b)
    limit(environment)       filters and functions      indent, join, range, blocks, macros
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.runtime import Undefined, markup_join

MOST_STEPS = 10_000_000  # iterations of all loops, and calls of macros
MOST_CHARACTERS = 64_000_000  # of one text; also elements of a list
MOST_IN_ALL = 1_000_000_000  # characters of all long texts that a render makes
SMALL = 4096  # characters; what is shorter is not counted
_PER_VALUE = 64  # characters that every value counts as, since looking at it takes time as well
_PER_CALL = 10  # steps, since a call takes as long
_FEW_PARTS = 16
_CONTAINERS = (list, tuple, dict)
# What a step may look at: with more, it counts as several.
_CHARACTERS_OF_A_STEP = 1 << 14
_NODES_OF_A_STEP = 1 << 12  # of the template; those that are in use have some hundreds
_MANY_STEPS = 10_000  # from here on, the record's own texts count as well
_PER_GIVEN_VALUE = 16  # characters; fewer, since long chats are no attack


class TemplateLimitError(TemplateError):
    """A template asks for more than a render may use; the message goes on after the template's name."""


class _Used:
    """What this render has used; renders in several threads count together, which reaches a limit sooner."""

    __slots__ = ("factor", "given", "longest", "num_characters", "num_steps", "weight")

    def __init__(self) -> None:
        self.num_steps = self.num_characters = self.longest = 0
        self.factor = self.weight = 1
        self.given: Any = None


_used = _Used()


def begin(given: Any, factor: int) -> None:
    """Begin a render.

    Args:
        given: what the template gets; looked at only if it takes many steps.
        factor: how much a step of the template counts.
    """
    used = _used
    used.num_steps = used.num_characters = used.longest = 0
    used.factor = used.weight = factor
    used.given = given


def factor_of(tree: nodes.Template) -> int:
    """Return how much a step of a template counts."""
    return 1 + sum(1 for _ in tree.find_all(nodes.Node)) // _NODES_OF_A_STEP


def take_steps(number: int) -> None:
    """Count iterations."""
    _used.num_steps += number
    if _used.num_steps > _MANY_STEPS and _used.given is not None:
        given, _used.given = _used.given, None
        _weigh(_longest_in(given))
    if _used.num_steps * _used.weight > MOST_STEPS:
        reason = f"loops more than {MOST_STEPS // _used.factor:,} times"
        if _used.weight > _used.factor:
            reason = f"loops {_used.num_steps:,} times or more, too often with {_used.longest:,} characters to look at"
        raise TemplateLimitError(f"{reason}; shorten the record, or fix the template")


def take_characters(number: int, *, is_last: bool = False) -> None:
    """Count a text that is made, or is about to be.

    Args:
        number: of its characters.
        is_last: nothing will look at it any more.
    """
    if number < SMALL:
        return
    _used.num_characters += number
    if number > MOST_CHARACTERS or _used.num_characters > MOST_IN_ALL:
        most = f"a text of more than {MOST_CHARACTERS:,}" if number > MOST_CHARACTERS else f"more than {MOST_IN_ALL:,}"
        raise TemplateLimitError(f"makes {most} characters; shorten the record, or fix the template")
    if number > _used.longest and not is_last:
        _weigh(number)
        take_steps(0)


def _weigh(longest: int) -> None:
    """Let every step count as much as looking at the longest text may take."""
    if longest > _used.longest:
        _used.longest = longest
        _used.weight = _used.factor * (1 + longest // _CHARACTERS_OF_A_STEP)


def _longest_in(given: Any) -> int:
    """Return the length of the longest text or list inside, in characters."""
    longest, waiting = 0, [given]
    while waiting:
        one = waiting.pop()
        inside = inside_of(one)
        longest = max(longest, len(inside) * _PER_GIVEN_VALUE)
        for inner in inside:
            if isinstance(inner, str):
                longest = max(longest, str.__len__(inner))
            elif isinstance(inner, _CONTAINERS):
                waiting.append(inner)
    return longest


def size(value: Any) -> int:
    """Return how much text a value is, about; lists and objects with all that is in them.

    Authored values note every question that is asked about them, so they are not asked.
    """
    if isinstance(value, str):
        return str.__len__(value)
    if not isinstance(value, _CONTAINERS):
        return len(value) if isinstance(value, bytes | range) else _PER_VALUE
    total, waiting = 0, [value]
    while waiting and total <= MOST_CHARACTERS:
        one = waiting.pop()
        inside = [*dict.keys(one), *dict.values(one)] if isinstance(one, dict) else inside_of(one)
        total += _PER_VALUE * len(inside)
        kinds = set(map(type, inside))
        if any(issubclass(kind, str) for kind in kinds):
            total += sum(str.__len__(inner) for inner in inside if isinstance(inner, str))
        if any(issubclass(kind, _CONTAINERS) for kind in kinds):
            waiting += [inner for inner in inside if isinstance(inner, _CONTAINERS)]
    return total


def made(value: Any) -> Any:
    """Return a text or a list that was made, if it is not too large."""
    if isinstance(value, str):
        take_characters(str.__len__(value))
    elif isinstance(value, _CONTAINERS):
        inside = inside_of(value)
        if len(inside) >= SMALL or any(issubclass(kind, _CONTAINERS) for kind in set(map(type, inside))):
            take_characters(size(value))
    return value


def inside_of(value: Any) -> list[Any]:
    """Return what a list or an object holds, past the methods of authored ones."""
    if isinstance(value, dict):
        return list(dict.values(value))
    return list.copy(value) if isinstance(value, list) else list(tuple.__iter__(value))


def counted(iterable: Any) -> Any:
    """Return what a loop runs over, and count how often it will."""
    if type(iterable) is list:
        take_steps(len(iterable))
        return iterable
    if isinstance(iterable, Undefined):
        return iterable
    if isinstance(iterable, str | list | tuple | dict):
        base: Any = next(kind for kind in (list, str, dict, tuple) if isinstance(iterable, kind))
        take_steps(base.__len__(iterable))
        return iterable
    if hasattr(type(iterable), "__next__"):
        return _counting(iterable)
    if hasattr(type(iterable), "__len__"):
        take_steps(len(iterable))
    return iterable


def _counting(iterator: Iterator[Any]) -> Iterator[Any]:
    for item in iterator:
        take_steps(1)
        yield item


def measured(parts: Iterable[Any], *, is_last: bool = False) -> list[Any]:
    """Return the texts that a template, a block or a macro wrote, if they are not too long together."""
    found = parts if type(parts) is list else list(parts)
    take_steps(_PER_CALL)
    if len(found) > _FEW_PARTS:
        take_characters(sum(map(str.__len__, found)), is_last=is_last)
    return found


def joined(parts: Iterable[str]) -> str:
    """Join what a block or a macro wrote: `measured`, written out, since every macro comes by."""
    _used.num_steps += _PER_CALL
    if _used.num_steps * _used.weight > MOST_STEPS:
        take_steps(0)
    found = parts if type(parts) is list else list(parts)
    if len(found) > _FEW_PARTS:
        take_characters(sum(map(len, found)))
    text = "".join(found)
    if len(text) >= SMALL:
        take_characters(len(text))
    return text


def all_joined(parts: Iterable[str]) -> str:
    """Join what the whole template wrote."""
    found = list(parts)
    take_characters(sum(map(len, found)), is_last=True)
    return "".join(found)


def joined_values(values: tuple[Any, ...]) -> str:
    """Join the operands of `~`."""
    if len(values) > _FEW_PARTS:
        return joined([str(value) for value in values])
    text = "".join(map(str, values))
    if len(text) >= SMALL:
        take_characters(len(text))
    return text


def joined_markup(values: Iterable[Any]) -> Any:
    """Join the operands of `~` where texts are escaped."""
    return made(markup_join(values))


class LimitedGenerator(CodeGenerator):
    """Writes code that counts what loops run over and looks at what sums make."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._iterated: set[int] = set()

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        """Write a node; what a loop runs over is counted."""
        if id(node) not in self._iterated:
            return super().visit(node, *arguments, **named)
        self._iterated.discard(id(node))
        self.write("counted(")
        super().visit(node, *arguments, **named)
        return self.write(")")

    def write(self, x: str) -> None:
        """Write code; a loop that calls itself is counted there, too."""
        super().write("counted(reciter)" if x == "reciter" else x)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write a loop."""
        self._iterated.add(id(node.iter))
        super().visit_For(node, frame)

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write a sum."""
        self._made(lambda: self._sum(node, frame))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write a list."""
        self._container(node, node.items, lambda: super(LimitedGenerator, self).visit_List(node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write an object."""
        values = [pair.value for pair in node.items]
        self._container(node, values, lambda: super(LimitedGenerator, self).visit_Dict(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write a tuple; some are targets of an assignment."""
        items = node.items if node.ctx == "load" else []
        self._container(node, items, lambda: super(LimitedGenerator, self).visit_Tuple(node, frame))

    def _container(self, node: nodes.Expr, values: list[nodes.Expr], write: Callable[[], None]) -> None:
        """Write a list or an object; one of constants is as large as it stands there."""
        if all(isinstance(value, nodes.Const) for value in values):
            write()
        else:
            self._made(write)

    def _made(self, write: Callable[[], None]) -> None:
        self.write("made(")
        write()
        self.write(")")

    def _sum(self, node: nodes.BinExpr, frame: Frame, num_more: int = _FEW_PARTS) -> None:
        """Write a sum of sums; looking at the last result is enough if there are few."""
        if isinstance(node.left, nodes.Add) and num_more:
            self.write("(")
            self._sum(node.left, frame, num_more - 1)
            self.write(")")
        else:
            self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
