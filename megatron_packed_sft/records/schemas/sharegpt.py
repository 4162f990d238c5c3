"""ShareGPT's form: `conversations` of from/value, with function calls and observations; NeMo's dialect of it too."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError, kind_of
from megatron_packed_sft.records.schemas.content import read_tool_calls
from megatron_packed_sft.records.schemas.fields import Weights, list_of, object_of, parse_json, train_weight
from megatron_packed_sft.records.schemas.messages import ReadMessages, conversation_of
from megatron_packed_sft.records.schemas.registry import CHATS, Schema, has_keys, has_list

_CALL = "function_call"
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": _CALL,
    "tool_call": _CALL,
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool": "tool",
}
_CONVERSATIONS = "conversations"
_DIALOGS = ("conversation", "dialog", "dialogue")


def adapt_sharegpt(record: dict[str, Any], *, field: str = _CONVERSATIONS) -> Conversation:
    """Adapt a record with `conversations`, and perhaps `tools`, `system` and NeMo's `mask`.

    A `function_call` is JSON text: `{"name", "arguments"}`, or a list of these. Turns may also use role/content.

    Example:
        >>> adapt_sharegpt({"conversations": [{"from": "human", "value": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    read = read_turns(record.get(field), field)
    if record.get("mask") is not None:
        read = read._replace(train=_masked(record["mask"], read))
    return conversation_of(read, record)


def read_turns(value: Any, field: str) -> ReadMessages:
    """Return turns of from/value, or of role/content, as messages.

    Example:
        >>> read_turns([{"from": "User", "value": "Hi"}], "conversations").messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    turns = list_of(value, field)
    messages: list[dict[str, Any]] = []
    train: Weights = None
    for index, turn in enumerate(turns):
        place = f"{field}[{index}]"
        object_of(turn, place, "give an object with from and value")
        weight = train_weight(turn, place)
        if weight is not None:
            train = train or [None] * len(turns)
            train[index] = weight
        messages.append(_message(turn, place))
    return ReadMessages(messages, train)


def _message(turn: dict[str, Any], place: str) -> dict[str, Any]:
    speaker_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    speaker, text = turn.get(speaker_key), turn.get(text_key)
    role = (_SPEAKERS.get(speaker) or _SPEAKERS.get(speaker.lower())) if type(speaker) is str else None
    if role is None:
        said = "is missing" if speaker is None else f"is {speaker!r}"
        raise RecordError(f"{place}.{speaker_key}", f"{said}; use one of {', '.join(_SPEAKERS)}, or give a mapping")
    if type(text) is not str:
        raise RecordError(f"{place}.{text_key}", f"is {kind_of(text)}; give a string")
    if type(turn.get("label")) is str:
        raise RecordError(f"{place}.label", "is an attribute of NeMo's SteerLM, which is not supported; remove it")
    if role != _CALL:
        return {"role": role, "content": text}
    field = f"{place}.{text_key}"
    call = parse_json(text, field)
    return {"role": "assistant", "tool_calls": read_tool_calls(call if type(call) is list else [call], field)}


def _masked(mask: Any, read: ReadMessages) -> Weights:
    """Return the weights of a record in which NeMo's `mask` names the speaker who is not trained."""
    if type(mask) is not str or _SPEAKERS.get(mask.lower()) != "user":
        raise RecordError("mask", f"is {mask!r:.40}; give 'User', or train flags in the turns, or remove it")
    flags = read.train or [None] * len(read.messages)
    return [False if message["role"] == "user" else flag for message, flag in zip(read.messages, flags, strict=True)]


def _adapt_dialog(record: dict[str, Any]) -> Conversation:
    given = [name for name in _DIALOGS if record.get(name) is not None]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else f"has none of {', '.join(_DIALOGS)}"
        raise RecordError("", f"{said}; give one of them, or a mapping such as {{messages: {_DIALOGS[0]}}}")
    return adapt_sharegpt(record, field=given[0])


SHAREGPT = Schema(has_keys(_CONVERSATIONS), adapt_sharegpt, CHATS)
DIALOG = Schema(has_list(*_DIALOGS), _adapt_dialog, CHATS)
