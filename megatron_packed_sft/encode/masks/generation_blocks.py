"""The blocks that a template marks with `{% generation %}`, and the messages that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_packed_sft.encode.masks.authored_text import Author
from megatron_packed_sft.encode.masks.traced_renderer import TracedText
from megatron_packed_sft.encode.masks.turn_parts import Range, is_own


class Block(NamedTuple):
    """A generation block.

    Args:
        range: its characters.
        owner: the message that it belongs to; None if that cannot be said.
    """

    range: Range
    owner: int | None


def generation_blocks(chat: TracedText, roles: Sequence[str]) -> list[Block]:
    """Return the generation blocks of a render; a turn may have several, and some have no words."""
    found: list[tuple[Range, int | None]] = []
    entered: dict[int, int] = {}  # loop -> message
    begun: list[tuple[int, int | None]] = []
    for position, event in chat.marks:
        if event.kind == "begin":
            begun.append((position, next(reversed(entered.values()), None)))
        elif event.kind == "end":
            start, message = begun.pop()
            found.append(((start, position), message))
        else:
            entered.pop(event.loop, None)
            if event.kind == "enter":
                entered[event.loop] = event.message
    assistants = [number for number, role in enumerate(roles) if role == "assistant"]
    by_number = assistants if len(assistants) == len(found) else [None] * len(found)
    return [
        Block(block, _owner(chat, block, message, number))
        for (block, message), number in zip(found, by_number, strict=True)
    ]


def _owner(chat: TracedText, block: Range, in_loop: int | None, by_number: int | None) -> int | None:
    """Return the message that a block belongs to: by its words, by the loop that writes it, or by its place."""
    start, end = block
    said = {span.author.message for span in chat.spans if start <= span.start < end and _is_message(span.author)}
    if said:
        return said.pop() if len(said) == 1 else None
    if in_loop is not None or by_number is not None:
        return in_loop if in_loop is not None else by_number
    # Written after all messages: for whoever spoke last.
    before = [span.author.message for span in chat.spans if span.end <= start and _is_message(span.author)]
    return before[-1] if before else None


def _is_message(author: Author) -> bool:
    return author.message >= 0 and is_own(author, author.message)
