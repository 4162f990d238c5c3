r"""Chats of unknown shape made of known messages: one plain render, read with what was learnt of single messages.

A recipe says what a template writes while it iterates over one message: constants and that message's strings, where its
trained ranges begin and end, and every answer that the template got about the message in the renders by which its turn
was found. For Qwen3 and an answer between two questions it is, in short:

    def run(message, tools):
        if '</think>' in message['content']: return None
        return '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n', (22, 32 + len(message['content']))

A chat whose text its messages' recipes give whole, character by character, needs no tracing. The render proves the
text; the answers about each message and its neighbours' kinds stand for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.shapes import Range, compiled

_MAX_RECIPES = 12  # of one kind of message among the same neighbours
_MAX_KINDS = 4096

HEAD = -1  # the number of what is written before the first message

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
        run: message, tools -> `Written`, or None if the template would have got other answers.
        slots: a program: message, tools -> where in the text its strings begin and end: (start, end, start, end, ...).
        num_marks: how often control tokens may begin in its constants, see `ControlMarks`.
        losses: what the template leaves out of the message.
        lines: the assignments and guards of `run`, for shapes.
        code: to tell recipes apart.
    """

    run: Callable[[Any, Any], Written | None]
    slots: str
    num_marks: int
    losses: tuple[Loss, ...]
    lines: tuple[str, ...]
    code: str


class Read(NamedTuple):
    """A text that was read, whole or up to a message that is not known.

    Args:
        turns: trained ranges.
        places: where the text of the head and of each message begins, and where the last one ends.
        recipes: of the head and each message.
    """

    turns: list[Range]
    places: list[int]
    recipes: list[Recipe]

    @property
    def num_messages(self) -> int:
        """How many messages are known, -1 if not even the head is."""
        return len(self.recipes) - 1

    def is_whole(self, text: str, messages: Messages) -> bool:
        """Whether nothing of the text is left over, and no message."""
        return self.places[-1] == len(text) and self.num_messages == len(messages)

    @property
    def num_marks(self) -> int:
        """How often control tokens may begin in constants."""
        return sum([recipe.num_marks for recipe in self.recipes])

    def losses(self) -> Iterator[Loss]:
        """Yield what is lost."""
        for number, recipe in enumerate(self.recipes, start=HEAD):
            if recipe.losses:
                yield from (loss._replace(message=number) for loss in recipe.losses)

    def slots(self, messages: Messages, tools: Any) -> Iterator[Range]:
        """Yield where messages and tools wrote."""
        for number, (place, recipe) in enumerate(zip(self.places, self.recipes, strict=False), start=HEAD):
            edges = compiled(recipe.slots)(messages[max(number, 0)], tools)
            yield from ((place + edges[n], place + edges[n + 1]) for n in range(0, len(edges), 2))


class RecipeBook:
    """Recipes of one template."""

    def __init__(self) -> None:
        self._recipes: dict[Any, list[Recipe]] = {}
        self._kinds: dict[Any, Kind] = {}
        self._numbers = count()

    def kinds_of(self, messages: Messages) -> list[Kind]:
        """Return what can be told of messages without looking at what they say."""
        known = self._kinds
        try:
            return [known[(message.get("role"), *message)] for message in messages]
        except KeyError:
            if len(known) > _MAX_KINDS:
                known.clear()
                self._recipes.clear()
            for message in messages:
                role = message.get("role")
                seen = (role, "tool_calls" in message)
                known.setdefault((role, *message), Kind(next(self._numbers), role, seen))
            return [known[(message.get("role"), *message)] for message in messages]

    def add(self, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool], learnt: dict[int, Recipe]) -> None:
        """Keep recipes of messages of a chat, by their numbers."""
        keys = _keys(kinds, tools, wanted)
        for number, recipe in learnt.items():
            known = self._recipes.setdefault(keys[number - HEAD], [])
            if all(recipe.code != other.code or recipe.losses != other.losses for other in known):
                known.append(recipe)
                known.sort(key=lambda one: -len(one.code))  # one that says more is tried first
                del known[_MAX_RECIPES:]

    def read(self, text: str, messages: Messages, kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> Read:
        """Read a rendered chat as far as it is known."""
        turns: list[Range] = []
        used: list[Recipe] = []
        position = 0
        places = [0]
        find, begins_with = self._recipes.get, text.startswith
        for message, key in zip((messages[0], *messages), _keys(kinds, tools, wanted), strict=True):
            for recipe in find(key, ()):
                try:
                    written = recipe.run(message, tools)
                except (KeyError, IndexError, TypeError, AttributeError, ValueError):
                    continue
                if written is not None and begins_with(written[0], position):
                    break
            else:
                break
            added, edges = written
            for place in range(0, len(edges), 2):
                turns.append((position + edges[place], position + edges[place + 1]))
            used.append(recipe)
            position += len(added)
            places.append(position)
        return Read(turns, places, used)


def _keys(kinds: Sequence[Kind], tools: Any, wanted: Sequence[bool]) -> list[Any]:
    """Return what decides on recipes beside answers, of the head and each message: kind, neighbours' kinds, place."""
    has_tools = bool(tools)
    keys: list[Any] = [("head", kinds[0][0], has_tools)]
    before = None
    after = [kind[1] for kind in kinds[1:]]
    after.append(None)
    for (kind, _, seen), is_wanted, following in zip(kinds, wanted, after, strict=True):
        keys.append((kind, is_wanted, before, following, has_tools))
        before = seen
    return keys
