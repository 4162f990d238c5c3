r"""Chats of unknown shape made of known messages: one plain render, read with what was learnt of single messages.

A recipe says what a template writes while it iterates over one message: constants and that message's strings, where its
trained ranges begin and end, and every answer that the template got about the message in the renders by which its turn
was found. For Qwen3 and an answer between two questions it is, in short:

    def run(message, tools, messages):
        if '</think>' in message['content']: return None
        return '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n', (22, 32 + len(message['content']))

A chat whose text its messages' recipes give whole, character by character, needs no tracing. The render proves the
text; the answers about each message and its neighbours' kinds stand for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.encode.masks.authored_text import MESSAGE_NAME, MESSAGES_NAME, TOOLS_NAME
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.shapes import Range, compiled

_MAX_RECIPES = 12  # of one kind of message among the same neighbours
_MAX_KINDS = 4096

HEAD = -1  # the number of what is written before the loop over messages
# A program about a message, tools, and all messages, of which it may read those that are in the head.
RUN = f"def run({MESSAGE_NAME}, {TOOLS_NAME}, {MESSAGES_NAME}):"

Messages = Sequence[dict[str, Any]]
# Of a message: its text, and where its trained ranges begin and end: (start, end, start, end, ...).
Written = tuple[str, tuple[int, ...]]


class Kind(NamedTuple):
    """What can be told of a message without looking at what it says.

    Args:
        number: of its role and keys.
        role: as it is.
        seen: what its neighbours see of it.
    """

    number: int
    role: Any
    seen: tuple[Any, bool]


class Recipe(NamedTuple):
    """What a template writes for a message.

    Args:
        run: `RUN` -> `Written`, or None if the template would have got other answers.
        slots: a program `RUN` -> where in the text its strings begin and end: (start, end, start, end, ...).
        num_marks: how often control tokens may begin in its constants, see `ControlMarks`.
        losses: what the template leaves out of the message, or of the head.
        lines: the assignments and guards of `run`, for shapes.
        code: to tell recipes apart.
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
    """A text that was read, whole or up to a message that is not known.

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
        """How many messages are known, -1 if not even the head is."""
        return self.numbers[-1] + 1 if self.numbers else HEAD

    def is_whole(self, text: str, messages: Messages) -> bool:
        """Whether nothing of the text is left over, and no message."""
        return self.places[-1] == len(text) and self.num_messages == len(messages)

    @property
    def num_marks(self) -> int:
        """How often control tokens may begin in constants."""
        return sum([recipe.num_marks for recipe in self.recipes])

    def losses(self) -> Iterator[Loss]:
        """Yield what is lost."""
        for number, recipe in zip(self.numbers, self.recipes, strict=True):
            if recipe.losses:
                yield from (loss if number == HEAD else loss._replace(message=number) for loss in recipe.losses)

    def slots(self, messages: Messages, tools: Any) -> Iterator[Range]:
        """Yield where messages and tools wrote."""
        for place, number, recipe in zip(self.places, self.numbers, self.recipes, strict=False):
            edges = compiled(recipe.slots)(messages[number], tools, messages)
            yield from ((place + edges[n], place + edges[n + 1]) for n in range(0, len(edges), 2))


class RecipeBook:
    """Recipes of one template."""

    def __init__(self) -> None:
        self._recipes: dict[Any, list[Recipe]] = {}
        self._kinds: dict[Any, Kind] = {}
        self._numbers = count()
        self._head_sizes: list[int] = []
        self._in_order: dict[Any, list[Recipe]] = {}  # in which they were learnt
        # What recipes are for: any tools and arguments, certain tools, certain arguments, or both.
        self._specials: list[tuple[bool, bool]] = [(False, False)]

    def kinds_of(self, messages: Messages) -> list[Kind]:
        """Return what can be told of messages without looking at what they say."""
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
        """Keep recipes of a chat's messages, by their numbers, and of its head, which has some messages."""
        if len(self._recipes) > _MAX_KINDS:  # there may be as many as there are tools
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
                self._recipes[key] = sorted(known, key=lambda one: -len(one.code))  # one that says more is tried first

    def read(self, text: str, messages: Messages, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> Read:
        """Read a rendered chat as far as it is known."""
        for size in self._head_sizes:
            if size < len(kinds):
                steps = [(HEAD, _head_key(size, kinds, tools, wanted))]
                steps += list(enumerate(_keys(size, kinds, tools, wanted)))[size:]
                read = self._read(text, messages, tools, steps)
                if read.numbers:
                    return read
        return Read([], [0], [], [])

    def _read(self, text: str, messages: Messages, tools: Any, steps: Iterable[tuple[int, Any]]) -> Read:
        """Read what is written for messages, given by number and key, one after the other."""
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
    """Return the key of recipes that hold only for some tools, or only for some arguments of calls."""
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
    except (KeyError, TypeError):  # another form of calls
        return None


def _head_key(size: int, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> Any:
    """Return what decides on recipes of a head of some messages: their kinds and the next one's."""
    return (size, bool(tools), *wanted[:size], *[kind.number for kind in kinds[: size + 1]])


def _keys(size: int, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> list[Any]:
    """Return what decides on recipes beside answers, of each message: kind, neighbours' kinds, place, the head's kinds.

    A head counts because templates write it again elsewhere: Mistral's write the system prompt before the question that
    comes last, and in every prompt another question is the last one.
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
