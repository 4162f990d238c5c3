"""Tools, tool calls and content in parts, of every form, as chat templates take them.

Tools are `{"type": "function", "function": {...}}`. Calls are the same with `name` and `arguments`, an object: given a
string, some templates print it as it is, some quote it twice, some fail. So text is parsed, empty text is `{}`, and
text that is not a JSON object is an error.

Content in parts is that of OpenAI, Anthropic, Hugging Face and LLaMA-Factory: text, reasoning, calls, results. Texts
are joined as they are. Reasoning and calls become `reasoning_content` and `tool_calls`, which have no place among the
texts, so parts in an unusual order are an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_packed_sft.records.record import RecordError, kind_of
from megatron_packed_sft.records.schemas.fields import (
    WEIGHT_KEYS,
    list_of,
    object_of,
    parse_json,
    refuse_part,
    string_of,
    train_weight,
    without_nulls,
)

_DECLARATIONS = ("functionDeclarations", "function_declarations")  # Gemini groups functions
_SCHEMAS = ("input_schema", "inputSchema")  # what Anthropic calls the parameters
_NOT_OF_TOOLS = ("type", "cache_control")  # the latter is of Anthropic's caching

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


def tools_of(record: dict[str, Any], more: Any = None) -> list[dict[str, Any]] | None:
    """Return the tools of a record: its `tools`, its `functions` (OpenAI's old form), or those in its messages.

    Example:
        >>> tools_of({"functions": [{"name": "now", "parameters": {}}]})
        [{'type': 'function', 'function': {'name': 'now', 'parameters': {}}}]
    """
    tools = read_tools(record.get("tools"), "tools")
    if more is None and "functions" not in record:
        return tools
    for field, others in (("functions", read_tools(record.get("functions"), "functions")), ("tools", more)):
        if others and tools and others != tools:
            raise RecordError(field, "differs from the other tools of the record; keep one of them")
        tools = tools or others
    return tools


def read_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """Return tools as chat templates take them, or None if there are none.

    Example:
        >>> read_tools('[{"name": "now", "parameters": {}}]', "tools")
        [{'type': 'function', 'function': {'name': 'now', 'parameters': {}}}]
    """
    if value is None or value == "" or value == [] or value == "[]":
        return None
    given = without_nulls(list_of(value, field))
    if all(type(tool) is dict and type(tool.get("function")) is dict for tool in given):
        return list(given)
    return [one for index, tool in enumerate(given) for one in _functions(tool, f"{field}[{index}]")]


def read_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, with arguments as objects.

    Example:
        >>> read_tool_calls([{"name": "add", "arguments": '{"a": 1}'}], "tool_calls")
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    calls = []
    for index, call in enumerate(list_of(value, field)):
        place = f"{field}[{index}]"
        if type(call) is not dict:
            raise RecordError(place, f"is {kind_of(call)}; give an object with a function")
        function = call.get("function", call)
        if type(function) is not dict or type(function.get("name")) is not str:
            raise RecordError(f"{place}.function.name", "is missing or not a string; give the name of the function")
        arguments = arguments_of(function.get("arguments"), f"{place}.function.arguments")
        outside = {"id": call["id"]} if "id" in call else {}
        calls.append({**outside, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def tool_call(call: dict[str, Any], arguments: str, place: str) -> dict[str, Any]:
    """Return a call in OpenAI's form, from one that has its arguments under another name.

    Example:
        >>> tool_call({"id": "call_1", "name": "add", "input": {"a": 1}}, "input", "content[0]")
        {'id': 'call_1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    name = call.get("name")
    if type(name) is not str:
        raise RecordError(f"{place}.name", "is missing or not a string; give the name of the function")
    function = {"name": name, "arguments": arguments_of(call.get(arguments), f"{place}.{arguments}")}
    outside = {"id": call["id"]} if "id" in call else {}
    return {**outside, "type": "function", "function": function}


def arguments_of(value: Any, field: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Example:
        >>> arguments_of('{"a": 1}', "arguments")
        {'a': 1}
    """
    if type(value) is dict:
        return value
    if value is None or value == "":
        return {}
    parsed = parse_json(value, field) if type(value) is str else value
    return object_of(parsed, field, "give an object, or its JSON text")


def _functions(tool: Any, place: str) -> Iterator[dict[str, Any]]:
    if type(tool) is dict:
        if type(tool.get("function")) is dict:
            yield tool
            return
        if type(tool.get("name")) is str:
            yield {"type": "function", "function": _function(tool)}
            return
        declared = next((tool[name] for name in _DECLARATIONS if type(tool.get(name)) is list), None)
        if declared is not None and len(tool) == 1:
            for one in declared:
                yield from _functions(one, place)
            return
    raise RecordError(place, "does not describe a function; give {'type': 'function', 'function': {'name': ...}}")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if "parameters" not in tool:
        for name in _SCHEMAS:
            if name in tool:
                return {"parameters" if key == name else key: tool[key] for key in tool if key not in _NOT_OF_TOOLS}
    return {key: value for key, value in tool.items() if key != "type"}


# ---- content in parts


class ReadContent(NamedTuple):
    """The parts of a content, sorted by kind.

    Args:
        text: the joined texts; None if there is no text part.
        reasoning: likewise.
        calls: tool calls in OpenAI's form.
        results: tool messages, which Anthropic puts into the user's.
        weights: characters and weight of each text, if any has a weight of its own.
        tools: defined by a part of the system prompt.
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
    """Return whether a part is the result of a tool, as Anthropic puts it into the user's message."""
    return type(part) is dict and part.get("type") == "tool_result"


def _kind(part: Any, place: str) -> str:
    object_of(part, place, "give a text part, such as {'type': 'text', 'text': ...}")
    name = part.get("type")
    if name is None and type(part.get("text")) is str:
        return _TEXT
    refuse_part(name, place)
    if type(name) is not str or name not in _KINDS:
        said = "has no type" if name is None else f"is a part of type {name!r}"
        raise RecordError(place, f"{said}; only text, reasoning and tool calls are supported; remove it")
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
