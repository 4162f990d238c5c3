"""Records of texts and ids: prompt and completion, which may also be messages, plain text, and token ids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError, TextRecord, TokenizedRecord, kind_of
from megatron_packed_sft.records.schemas.fields import record_weight
from megatron_packed_sft.records.schemas.messages import ROLES, ReadMessages, conversation_of, read_messages
from megatron_packed_sft.records.schemas.registry import CHATS, COLUMNS, PAIRS, Schema, has_keys

IGNORED_LABEL = -100  # what PyTorch's cross entropy ignores, and so what `labels` columns hold
_LARGEST_ID = 2**31 - 1
_WITH_MESSAGES = ("system", "system_prompt", "tools", "functions")


def adapt_prompt_completion(record: dict[str, Any], *, roles: Collection[str] = ROLES) -> Conversation | TextRecord:
    """Adapt a record with `prompt` and `completion`, both texts or both messages; only the completion is trained.

    Example:
        >>> adapt_prompt_completion({"prompt": "2 + 2 = ", "completion": "4"})
        TextRecord(parts=(('2 + 2 = ', False), ('4', True)))
    """
    prompt, completion = record.get("prompt"), record.get("completion")
    if type(prompt) is list and type(completion) is list:
        before, after = read_messages(prompt, "prompt", roles), read_messages(completion, "completion", roles)
        num_before = len(before.messages)
        train = [*[False] * num_before, *(after.train or [None] * len(after.messages))]
        parts = {num_before + index: weights for index, weights in (after.parts or {}).items()}
        tools = before.tools or after.tools
        return conversation_of(ReadMessages(before.messages + after.messages, train, parts or None, tools), record)
    if type(prompt) is not str or type(completion) is not str:
        kinds = f"is {kind_of(prompt)}, and completion is {kind_of(completion)}"
        raise RecordError("prompt", f"{kinds}; give two strings or two lists of messages")
    for name in _WITH_MESSAGES:
        if record.get(name):
            raise RecordError(
                name, "goes with messages, but prompt is a string; give prompt and completion as messages"
            )
    return TextRecord(((prompt, False), (completion, _weight_of(record))))


def adapt_text(record: dict[str, Any]) -> TextRecord:
    """Adapt a record with `text`, all of it trained.

    Example:
        >>> adapt_text({"text": "Once upon a time."}).parts
        (('Once upon a time.', True),)
    """
    text = record.get("text")
    if type(text) is not str:
        raise RecordError("text", f"is {kind_of(text)}; give a string")
    return TextRecord(((text, _weight_of(record)),))


def adapt_tokenized(record: dict[str, Any]) -> TokenizedRecord:
    """Adapt a record with `input_ids`, and `loss_mask` (1 for a trained token) or `labels` (-100 for all others).

    A loss mask may hold any weights, such as 0.5. Mask and labels are not shifted: each belongs to the token at its
    own position, as in Hugging Face.

    Example:
        >>> adapt_tokenized({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
        TokenizedRecord(input_ids=[5, 6, 7], train=[0, 1, 1])
    """
    import numpy as np

    ids = _integers(record, "input_ids")
    if len(ids) == 0 or ids.min() < 0 or ids.max() > _LARGEST_ID:
        problem = "is empty" if len(ids) == 0 else f"has ids from {ids.min()} to {ids.max()}"
        raise RecordError("input_ids", f"{problem}; give at least one id, each in 0..{_LARGEST_ID}")
    name = "labels" if record.get("loss_mask") is None else "loss_mask"
    if record.get(name) is None:
        raise RecordError("loss_mask", "is missing, and so is labels; give one of them, as long as input_ids")
    given = _integers(record, name) if name == "labels" else _numbers(record, name)
    if len(given) != len(ids):
        raise RecordError(name, f"has {len(given)} values, but there are {len(ids)} input_ids; give one for each")
    if name == "labels":
        train = given != IGNORED_LABEL
        wrong = np.flatnonzero(train & (given != ids))
        remedy = f"give the same id or {IGNORED_LABEL}; labels are not shifted"
    else:
        train = given
        wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
        remedy = "give 0, 1 or another weight from 0 up"
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(f"{name}[{at}]", f"is {given[at]}, at the input id {ids[at]}; {remedy}")
    weights = train * record_weight(record)
    is_plain = bool(np.isin(weights, (0, 1)).all())
    return TokenizedRecord(ids.tolist(), weights.astype(np.uint8 if is_plain else np.float64).tolist())


def _weight_of(record: dict[str, Any]) -> float:
    weight = record_weight(record)
    return bool(weight) if weight in (0, 1) else weight


def _integers(record: dict[str, Any], name: str) -> Any:
    import numpy as np

    array = _array(record.get(name), name, "integers")
    if array.ndim != 1 or array.dtype.kind not in "ib":
        raise RecordError(name, "holds something other than 64-bit integers; give a list of integers")
    return array.astype(np.int64)


def _numbers(record: dict[str, Any], name: str) -> Any:
    array = _array(record.get(name), name, "numbers")
    if array.ndim != 1 or array.dtype.kind not in "ibf":
        raise RecordError(name, "holds something other than numbers; give a list of numbers")
    return array


def _array(value: Any, name: str, noun: str) -> Any:
    import numpy as np

    if type(value) is not list:
        raise RecordError(name, f"is {kind_of(value)}; give a list of {noun}")
    try:
        return np.asarray(value if value else np.zeros(0, np.int64))
    except (ValueError, OverflowError):
        return np.zeros((0, 0))


PROMPT_COMPLETION = Schema(has_keys("prompt", "completion"), adapt_prompt_completion, PAIRS)
TEXT = Schema(has_keys("text"), adapt_text, COLUMNS)
TOKENIZED = Schema(has_keys("input_ids"), adapt_tokenized, CHATS)
