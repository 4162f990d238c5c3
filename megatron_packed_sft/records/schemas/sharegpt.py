"""ShareGPT's form: `conversations` of from/value, with function calls and observations."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError, kind_of
from megatron_packed_sft.records.schemas.messages import (
    TrainFlags,
    list_of,
    parse_json,
    read_tool_calls,
    train_flag,
    with_system_and_tools,
)
from megatron_packed_sft.records.schemas.registry import Schema, has_keys

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


def adapt_sharegpt(record: dict[str, Any]) -> Conversation:
    """Adapt a record with `conversations`, and perhaps `tools` and `system`.

    A `function_call` is JSON text: `{"name", "arguments"}`, or a list of these. Turns may also use role/content.

    Example:
        >>> adapt_sharegpt({"conversations": [{"from": "human", "value": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    turns = list_of(record.get("conversations"), "conversations")
    messages: list[dict[str, Any]] = []
    train: TrainFlags = None
    for index, turn in enumerate(turns):
        place = f"conversations[{index}]"
        if type(turn) is not dict:
            raise RecordError(place, f"is {kind_of(turn)}; give an object with from and value")
        flag = train_flag(turn, place)
        if flag is not None:
            train = train or [None] * len(turns)
            train[index] = flag
        messages.append(_message(turn, place))
    return with_system_and_tools(messages, train, record)


def _message(turn: dict[str, Any], place: str) -> dict[str, Any]:
    speaker_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
    speaker, text = turn.get(speaker_key), turn.get(text_key)
    role = _SPEAKERS.get(speaker) if type(speaker) is str else None
    if role is None:
        said = "is missing" if speaker is None else f"is {speaker!r}"
        raise RecordError(f"{place}.{speaker_key}", f"{said}; use one of {', '.join(_SPEAKERS)}, or give a mapping")
    if type(text) is not str:
        raise RecordError(f"{place}.{text_key}", f"is {kind_of(text)}; give a string")
    if role != _CALL:
        return {"role": role, "content": text}
    field = f"{place}.{text_key}"
    call = parse_json(text, field)
    return {"role": "assistant", "tool_calls": read_tool_calls(call if type(call) is list else [call], field)}


SHAREGPT = Schema(has_keys("conversations"), adapt_sharegpt)
