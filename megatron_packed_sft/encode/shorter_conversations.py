"""Conversations cut at turn boundaries: up to one turn, as at inference, or without the turns that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_packed_sft.records.record import Conversation

_PROMPTS = ("system", "developer")


def up_to_turn(conversation: Conversation, number: int) -> Conversation:
    """Return a conversation up to a message, with only that message trained.

    Example:
        >>> chat = Conversation([{"role": role, "content": role[0]} for role in ("user", "assistant") * 2])
        >>> up_to_turn(chat, 1)
        Conversation(messages=[{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': 'a'}], tools=None, \
train=[0.0, None], weight=1.0, parts=None, variables=None)
    """
    own = conversation.train[number] if conversation.train else None
    parts = {number: conversation.parts[number]} if conversation.parts and number in conversation.parts else None
    return replace(
        conversation,
        messages=list(conversation.messages[: number + 1]),
        train=[*[0.0] * number, own],
        parts=parts,
    )


def shorter_by_turns(conversation: Conversation, turns_to_keep: str) -> Iterator[Conversation]:
    """Yield a conversation with fewer and fewer turns, the longest first; the system prompt always stays.

    The newest turns that are kept begin with what a user says; the oldest end with what the assistant says. So a call
    and its result stay together, and every trained turn keeps its end.

    Example:
        >>> chat = Conversation([{"role": role} for role in ("system", "user", "assistant", "user", "assistant")])
        >>> [len(shorter.messages) for shorter in shorter_by_turns(chat, "newest")]
        [3]
    """
    roles = [message.get("role") for message in conversation.messages]
    num_prompts = next((number for number, role in enumerate(roles) if role not in _PROMPTS), len(roles))
    head = range(num_prompts)
    if turns_to_keep == "newest":
        begins = [number for number in range(num_prompts + 1, len(roles)) if roles[number] == "user"]
        yield from (_only(conversation, [*head, *range(begin, len(roles))]) for begin in begins)
    else:
        ends = [number + 1 for number in range(num_prompts, len(roles) - 1) if roles[number] == "assistant"]
        yield from (_only(conversation, range(end)) for end in reversed(ends))


def _only(conversation: Conversation, numbers: Sequence[int]) -> Conversation:
    parts = conversation.parts or {}
    return replace(
        conversation,
        messages=[conversation.messages[number] for number in numbers],
        train=[conversation.train[number] for number in numbers] if conversation.train else None,
        parts={place: parts[number] for place, number in enumerate(numbers) if number in parts} or None,
    )
