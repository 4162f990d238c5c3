"""Gemini's form: `contents` of role and parts, with function calls and responses; `systemInstruction` and tools."""

from __future__ import annotations

import json
from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError
from megatron_packed_sft.records.schemas.content import tool_call
from megatron_packed_sft.records.schemas.fields import (
    Weights,
    list_of,
    object_of,
    refuse_part,
    string_of,
    train_weight,
    without_nulls,
)
from megatron_packed_sft.records.schemas.messages import ReadMessages, conversation_of
from megatron_packed_sft.records.schemas.registry import CHATS, Schema, has_list

_ROLES = {"user": "user", "model": "assistant", "function": "user", "tool": "user"}
_SYSTEM_KEYS = ("systemInstruction", "system_instruction")
_CALLS, _RESPONSES = ("functionCall", "function_call"), ("functionResponse", "function_response")
_SIDE = frozenset({"thought", "thoughtSignature", "thought_signature"})


def adapt_gemini(record: dict[str, Any]) -> Conversation:
    """Adapt a record with `contents`, and perhaps `systemInstruction` and `tools` of function declarations.

    Example:
        >>> adapt_gemini({"contents": [{"role": "model", "parts": [{"text": "Hello."}]}]}).messages
        [{'role': 'assistant', 'content': 'Hello.'}]
    """
    messages: list[dict[str, Any]] = []
    weights: list[float | None] = []
    for index, content in enumerate(list_of(record.get("contents"), "contents")):
        place = f"contents[{index}]"
        object_of(content, place, "give an object with role and parts")
        weight = train_weight(content, place)
        for message in _messages(without_nulls(content), place):
            messages.append(message)
            weights.append(weight)
    train: Weights = weights if any(weight is not None for weight in weights) else None
    given = next((name for name in _SYSTEM_KEYS if record.get(name)), None)
    if given is not None:
        record = {**record, "system": _system_of(record[given], given)}
    return conversation_of(ReadMessages(messages, train), record)


def _messages(content: dict[str, Any], place: str) -> list[dict[str, Any]]:
    given = content.get("role")
    role = _ROLES.get(given) if type(given) is str else None
    if role is None:
        said = "is missing" if given is None else f"is {given!r:.40}"
        raise RecordError(f"{place}.role", f"{said}; use one of {', '.join(_ROLES)}")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, part in enumerate(list_of(content.get("parts"), f"{place}.parts")):
        field = f"{place}.parts[{index}]"
        kind, value = _kind(part, field)
        is_late = bool(calls) if kind == "text" else kind in _RESPONSES and bool(texts or calls)
        if (is_late or (part.get("thought") and texts)) and value:
            raise RecordError(
                field, "stands in an unusual place; give responses, thoughts, text and calls in this order"
            )
        if kind == "text":
            (thoughts if part.get("thought") else texts).append(value)
        elif kind in _CALLS:
            object_of(value, f"{field}.{kind}", "give an object with name and args")
            calls.append(tool_call(value, "args", f"{field}.{kind}"))
        else:
            results.append(_result(value, f"{field}.{kind}"))
    message: dict[str, Any] = {"role": role}
    if texts or not (calls or results or thoughts):
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if len(message) > 1 else results


def _kind(part: Any, field: str) -> tuple[str, Any]:
    object_of(part, field, "give an object with text")
    found = [(key, value) for key, value in part.items() if key not in _SIDE]
    if len(found) == 1:
        kind, value = found[0]
        if kind == "text":
            return kind, string_of(value, f"{field}.text")
        refuse_part(kind, field)
        if kind in (*_CALLS, *_RESPONSES):
            return kind, value
    said = ", ".join(key for key, _ in found) or "nothing"
    raise RecordError(field, f"holds {said}; give one of text, functionCall and functionResponse")


def _result(value: Any, field: str) -> dict[str, Any]:
    object_of(value, field, "give an object with name and response")
    response = value.get("response", {})
    text = response if type(response) is str else json.dumps(response, ensure_ascii=False)
    message = {"role": "tool", "content": text, "name": string_of(value.get("name"), f"{field}.name")}
    return message if value.get("id") is None else {**message, "tool_call_id": value["id"]}


def _system_of(value: Any, field: str) -> str:
    if type(value) is str:
        return value
    parts = object_of(value, field, "give a string, or an object with parts").get("parts")
    parts = [parts] if type(parts) is dict else list_of(parts, f"{field}.parts")
    texts = [
        string_of(object_of(part, f"{field}.parts[{index}]", "give an object with text").get("text"), f"{field}.parts")
        for index, part in enumerate(parts)
    ]
    return "".join(texts)


GEMINI = Schema(has_list("contents"), adapt_gemini, CHATS)
