"""What a row of any file becomes: a conversation, a text with trained stretches, or ids that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in OpenAI's form, whatever the file looked like.

    Args:
        messages: each a dict with `role` and, as given, `content`, `tool_calls` (arguments as objects), `tool_call_id`,
            `name`, `reasoning_content`; keys whose value was null are left out.
        tools: the tools' JSON schemas, as chat templates take them.
        train: per message: True or False where the row said so (`train`, or `weight` 0 or not), None to go by the role.

    Example:
        >>> Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]).train is None
        True
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    train: Sequence[bool | None] | None = None


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text in parts, each trained or not: prompt and completion, or one plain text that is all trained.

    The parts are joined as they are and tokenized as one text, so ids do not depend on where the parts meet.

    Example:
        >>> TextRecord((("2 + 2 = ", False), ("4", True))).parts[1]
        ('4', True)
    """

    parts: Sequence[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class TokenizedRecord:
    """Ids and a mask of the same length: `train[k]` is true where token k is one the model should learn to produce.

    Example:
        >>> TokenizedRecord([5, 6, 7], [0, 1, 1]).input_ids
        [5, 6, 7]
    """

    input_ids: Sequence[int]
    train: Sequence[int]


Record = Conversation | TextRecord | TokenizedRecord
