"""Tools and tool calls of every form, as chat templates take them.

Tools are `{"type": "function", "function": {...}}`. Calls are the same with `name` and `arguments`, an object: given a
string, some templates print it as it is, some quote it twice, some fail. So text is parsed, empty text is `{}`, and
text that is not a JSON object is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_packed_sft.records.record import RecordError, kind_of
from megatron_packed_sft.records.schemas.values import list_of, object_of, parse_json, without_nulls

_DECLARATIONS = ("functionDeclarations", "function_declarations")  # Gemini groups functions
_SCHEMAS = ("input_schema", "inputSchema")  # what Anthropic calls the parameters


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
                return {"parameters" if key == name else key: tool[key] for key in tool if key not in ("type", *_OTHER)}
    return {key: value for key, value in tool.items() if key != "type"}


_OTHER = ("cache_control",)  # of Anthropic's caching, not of the tool
