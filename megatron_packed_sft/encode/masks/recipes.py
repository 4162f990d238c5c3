"""Chats of unknown shape made of known messages: one plain render, read with what was learnt of single messages.

A recipe says what a template writes while it iterates over one message: constants and that message's strings, where its
trained ranges begin and end, and every answer that the template got about the message in the renders by which its turn
was found. For Qwen3 and an answer between two questions it is, in short:

    def run(message, tools):
        if '</think>' in message['content']: return None
        return '<|im_start|>assistant\\n' + message['content'] + '<|im_end|>\\n', (22, 32 + len(message['content']))

A chat whose text its messages' recipes give whole, character by character, needs no tracing. The render proves the text;
the answers about each message and its neighbours' kinds stand for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.encode.masks.shapes import Range

_MAX_RECIPES = 12  # of one kind of message among the same neighbours
_MAX_KINDS = 4096

HEAD = -1  # the number of what is written before the first message

Messages = Sequence[dict[str, Any]]
# Of a message: its text, and where its trained ranges begin and end: (start, end, start, end, ...).
Written = tuple[str, tuple[int, ...]]


# A number for a message's role and keys, its role, and what a neighbour sees of it.
_Kind = tuple[int, Any, Any]
_UNKNOWN: _Kind = (-1, None, None)


class Recipe(NamedTuple):
    """What a template writes for a message.

    Args:
        run: message, tools -> `Written`, or None if the template would have got other answers.
        slots: message, tools -> where in the text its strings begin and end: (start, end, start, end, ...).
        num_marks: how often control tokens may begin in its constants, see `ControlMarks`.
        losses: what the template leaves out of the message.
        lines: the assignments and guards of `run`, for shapes.
        code: to tell recipes apart.
    """

    run: Callable[[Any, Any], Written | None]
    slots: Callable[[Any, Any], tuple[int, ...]]
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
            edges = recipe.slots(messages[max(number, 0)], tools)
            yield from ((place + edges[n], place + edges[n + 1]) for n in range(0, len(edges), 2))


class RecipeBook:
    """Recipes of one template."""

    def __init__(self) -> None:
        self._recipes: dict[Any, list[Recipe]] = {}
        self._kinds: dict[Any, _Kind] = {}

    def add(self, messages: Messages, tools: Any, wanted: Sequence[bool], learnt: dict[int, Recipe]) -> None:
        """Keep recipes of messages of a chat, by their numbers."""
        if len(self._recipes) > _MAX_KINDS or len(self._kinds) > _MAX_KINDS:
            self._recipes.clear()
            self._kinds.clear()
        keys = list(_keys([self._kind_of(message) for message in messages], tools, wanted))
        for number, recipe in learnt.items():
            known = self._recipes.setdefault(keys[number - HEAD], [])
            if all(recipe.code != other.code or recipe.losses != other.losses for other in known):
                known.append(recipe)
                known.sort(key=lambda one: -len(one.code))  # one that says more is tried first
                del known[_MAX_RECIPES:]

    def read(self, text: str, messages: Messages, tools: Any, wanted: Sequence[bool]) -> Read:
        """Read a rendered chat as far as it is known."""
        turns: list[Range] = []
        used: list[Recipe] = []
        position = 0
        places = [0]
        known = self._kinds.get
        kinds = [known((message.get("role"), *message), _UNKNOWN) for message in messages]
        find = self._recipes.get
        begins_with = text.startswith
        for number, key in enumerate(_keys(kinds, tools, wanted), start=HEAD):
            message = messages[number if number > 0 else 0]
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
            if edges:
                turns += [(position + edges[n], position + edges[n + 1]) for n in range(0, len(edges), 2)]
            used.append(recipe)
            position += len(added)
            places.append(position)
        return Read(turns, places, used)

    def _kind_of(self, message: dict[str, Any]) -> _Kind:
        role = message.get("role")
        keys = (role, *message)
        if keys not in self._kinds:
            self._kinds[keys] = (len(self._kinds), role, (role, "tool_calls" in message))
        return self._kinds[keys]


def _keys(kinds: Sequence[_Kind], tools: Any, wanted: Sequence[bool]) -> Iterator[Any]:
    """Yield what decides on a message's recipes beside its answers: its kind, its neighbours', its place."""
    has_tools = bool(tools)
    yield "head", kinds[0][0], has_tools
    before = None
    after = [kind[1] for kind in kinds[1:]]
    after.append(None)
    for (kind, _, seen), is_wanted, following in zip(kinds, wanted, after, strict=True):
        yield kind, is_wanted, before, following, has_tools
        before = seen
