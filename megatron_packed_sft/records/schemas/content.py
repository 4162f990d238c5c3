"""Content in parts, as OpenAI, Anthropic, Hugging Face and LLaMA-Factory write it: text, reasoning, calls, results.

Texts are joined as they are. Reasoning and calls become `reasoning_content` and `tool_calls`, which have no place among
the texts, so a part that stands behind another kind than usual is an error, not moved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_packed_sft.records.record import RecordError, kind_of
from megatron_packed_sft.records.schemas.media import refuse_part
from megatron_packed_sft.records.schemas.tools import read_tool_calls, read_tools, tool_call
from megatron_packed_sft.records.schemas.values import object_of, parse_json, string_of
from megatron_packed_sft.records.schemas.weights import WEIGHT_KEYS, train_weight

PartWeights = list[tuple[int, float | None]]

_TEXT, _REASONING, _CALL, _RESULT, _TOOLS = "text", "reasoning", "tool call", "tool result", "tools"
_KINDS = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), _TEXT),
    **dict.fromkeys(("thinking", "reasoning"), _REASONING),
    **dict.fromkeys(("tool_use", "tool_call", "tool_calls"), _CALL),
    "tool_result": _RESULT,
    "tools": _TOOLS,
}
_TEXT_KEYS = ("text", "value", "content", "refusal")
_REASONING_KEYS = ("thinking", "reasoning", *_TEXT_KEYS)
_ORDER = {_REASONING: 0, _TEXT: 1, _CALL: 2}
_USUAL = "reasoning, text, tool calls"


class ReadContent(NamedTuple):
    """What the parts of a content say.

    Args:
        text: the joined texts; None if there is no text part.
        reasoning: likewise.
        calls: tool calls in OpenAI's form.
        results: tool messages, which Anthropic puts into the user's.
        weights: characters and weight of each text, if any has a weight of its own.
        tools: that a part of the system prompt defines.
    """

    text: str | None
    reasoning: str | None
    calls: list[dict[str, Any]]
    results: list[dict[str, Any]]
    weights: PartWeights | None
    tools: list[dict[str, Any]] | None


def read_parts(content: list[Any], field: str) -> ReadContent:
    """Read a content in parts.

    Example:
        >>> parts = [{"type": "text", "text": "2 + 2 = "}, {"type": "text", "text": "4", "train": False}]
        >>> read_parts(parts, "content").text, read_parts(parts, "content").weights
        ('2 + 2 = 4', [(8, None), (1, False)])
    """
    texts: list[str] = []
    reasoning: list[str] = []
    weights: PartWeights = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    tools = None
    latest = 0
    for index, part in enumerate(content):
        place = f"{field}[{index}]"
        kind = _kind(part, place)
        if kind != _TEXT and any(part.get(key) is not None for key in WEIGHT_KEYS):
            raise RecordError(
                place, f"is a {kind} with a weight of its own; only texts and whole messages have weights"
            )
        if kind == _RESULT:
            results.append(_result(part, place))
            continue
        if kind == _TOOLS:
            tools = read_tools(part.get("value"), f"{place}.value")
            continue
        if kind == _TEXT:
            texts.append(_text(part, place))
            weights.append((len(texts[-1]), train_weight(part, place)))
            if not texts[-1]:
                continue
        elif kind == _REASONING:
            reasoning.append(_reasoning(part, place))
        else:
            calls += _calls(part, place)
        if _ORDER[kind] < latest:
            raise RecordError(
                place, f"is {kind} in an unusual place; give {_USUAL}, in this order, or several messages"
            )
        latest = _ORDER[kind]
    has_weights = any(weight is not None for _, weight in weights)
    return ReadContent(
        "".join(texts) if texts else None,
        "".join(reasoning) if reasoning else None,
        calls,
        results,
        weights if has_weights else None,
        tools,
    )


def text_of(value: Any, field: str) -> str:
    """Return a text that may come in parts, all of them texts.

    Example:
        >>> text_of([{"type": "text", "text": "Be brief."}], "system")
        'Be brief.'
    """
    if type(value) is str:
        return value
    if type(value) is not list:
        raise RecordError(field, f"is {kind_of(value)}; give a string or a list of text parts")
    for index, part in enumerate(value):
        kind = _kind(part, f"{field}[{index}]")
        if kind != _TEXT:
            raise RecordError(f"{field}[{index}]", f"is a {kind}; give text only")
    return "".join(_text(part, f"{field}[{index}]") for index, part in enumerate(value))


def is_result(part: Any) -> bool:
    """Whether a part is the result of a tool, as Anthropic puts it into the user's message."""
    return type(part) is dict and part.get("type") == "tool_result"


def _kind(part: Any, place: str) -> str:
    object_of(part, place, "give a text part, such as {'type': 'text', 'text': ...}")
    name = part.get("type")
    if name is None and type(part.get("text")) is str:
        return _TEXT
    refuse_part(name, place)
    if type(name) is not str or name not in _KINDS:
        said = "has no type" if name is None else f"is a part of type {name!r}"
        raise RecordError(place, f"{said}; only text, reasoning and tool calls are supported, so remove it")
    return _KINDS[name]


def _text(part: dict[str, Any], place: str) -> str:
    value = next((part[key] for key in _TEXT_KEYS if part.get(key) is not None), None)
    return string_of(value, f"{place}.text")


def _reasoning(part: dict[str, Any], place: str) -> str:
    value = next((part[key] for key in _REASONING_KEYS if part.get(key) is not None), None)
    return text_of(value, f"{place}.{part['type']}")


def _calls(part: dict[str, Any], place: str) -> list[dict[str, Any]]:
    if part["type"] == "tool_use":
        return [tool_call(part, "input", place)]
    value = part.get("value", part.get(part["type"], part))
    if type(value) is str:
        value = parse_json(value, f"{place}.value")
    return read_tool_calls(value if type(value) is list else [value], f"{place}.value")


def _result(part: dict[str, Any], place: str) -> dict[str, Any]:
    content = part.get("content")
    message: dict[str, Any] = {
        "role": "tool",
        "content": "" if content is None else text_of(content, f"{place}.content"),
    }
    if part.get("tool_use_id") is not None:
        message["tool_call_id"] = part["tool_use_id"]
    if part.get("is_error"):
        message["is_error"] = True
    return message
