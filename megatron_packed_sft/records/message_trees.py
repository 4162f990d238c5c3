"""Messages that name their parents, as OpenAssistant publishes them, to conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_packed_sft.records.record import RecordError, kind_of

_ROLES = {"prompter": "user", "user": "user", "assistant": "assistant", "system": "system"}


def conversations_in_trees(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield one conversation per tree: from its root along the best reply to each message, up to the last answer.

    The best reply has the lowest `rank`; of replies without one it is the first. The records of all trees are held in
    memory, since replies may come in any order. Conversations come in the order of their roots.

    Args:
        records: with `message_id`, `parent_id` (null for a root), `role`, `text`, and perhaps `rank` and `deleted`.

    Example:
        >>> rows = [
        ...     {"message_id": "a", "parent_id": None, "role": "prompter", "text": "Hi"},
        ...     {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "What?", "rank": 1},
        ...     {"message_id": "c", "parent_id": "a", "role": "assistant", "text": "Hello!", "rank": 0},
        ... ]
        >>> [[one["content"] for one in chat] for chat in conversations_in_trees(rows)]
        [['Hi', 'Hello!']]
    """
    roots: list[dict[str, Any]] = []
    replies: dict[str, list[dict[str, Any]]] = {}
    for number, record in enumerate(records, 1):
        message = _message(record, number)
        if record.get("deleted"):
            continue
        if record.get("parent_id") is None:
            roots.append(message)
        else:
            replies.setdefault(record["parent_id"], []).append(message)
    for root in roots:
        path = [root]
        while path[-1]["id"] in replies:
            path.append(min(replies.pop(path[-1]["id"]), key=lambda reply: reply["rank"]))
        while path and path[-1]["role"] != "assistant":
            path.pop()
        if path:
            yield [{"role": message["role"], "content": message["content"]} for message in path]


def _message(record: dict[str, Any], number: int) -> dict[str, Any]:
    for name in ("message_id", "text"):
        if type(record.get(name)) is not str:
            raise RecordError(name, f"of message {number:,} is {kind_of(record.get(name))}; give a string")
    role = record.get("role")
    if role not in _ROLES:
        raise RecordError("role", f"of message {number:,} is {role!r}; use prompter or assistant")
    rank = record.get("rank")
    return {
        "id": record["message_id"],
        "role": _ROLES[role],
        "content": record["text"],
        "rank": float("inf") if rank is None else rank,
    }
