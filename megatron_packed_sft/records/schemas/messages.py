"""Chats in OpenAI's form: `messages`, with tools, tool calls, reasoning and per-message training flags.

Messages are normalized, so that chat templates and hashes see one form:
- keys with null values are removed, at every depth (Parquet and Arrow give every message every key);
- content in text parts is joined; parts of another type are an error;
- tool calls are `{"type": "function", "function": {"name", "arguments"}}`, with arguments as an object. Given a string,
  some templates print it as it is, some quote it twice, some fail. So text is parsed, empty text is `{}`, and text that
  is not a JSON object is an error;
- tools are `{"type": "function", "function": {...}}`;
- a train flag is `train`, or else `weight`: 0 is false, any other number is true. Weights have no other effect.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from megatron_packed_sft.records.formats import json_files
from megatron_packed_sft.records.record import Conversation, RecordError, kind_of
from megatron_packed_sft.records.schemas.registry import Schema, has_keys

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

TrainFlags = list[bool | None] | None


def adapt_messages(record: dict[str, Any], *, roles: Collection[str] = ROLES) -> Conversation:
    """Adapt a record with `messages`, and perhaps `tools` and `system`.

    Args:
        record: the parsed record; messages that are already normalized are not copied.
        roles: the roles that messages may have.

    Example:
        >>> adapt_messages({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    messages, train = read_messages(record.get("messages"), "messages", roles)
    return with_system_and_tools(messages, train, record)


def read_messages(value: Any, field: str, roles: Collection[str] = ROLES) -> tuple[list[dict[str, Any]], TrainFlags]:
    """Return normalized messages, and their train flags if any message has one.

    Example:
        >>> read_messages([{"role": "assistant", "content": "Hello.", "weight": 0}], "messages")
        ([{'role': 'assistant', 'content': 'Hello.'}], [False])
    """
    given = list_of(value, field)
    messages = given
    train: TrainFlags = None
    for index, message in enumerate(given):
        try:  # nearly all messages are just a role and a text, and stay as they are
            if len(message) == 2 and message["role"] in roles and type(message["content"]) is str:
                continue
        except (KeyError, TypeError):
            pass  # reported with its field below
        place = f"{field}[{index}]"
        if type(message) is not dict:
            raise RecordError(place, f"is {kind_of(message)}; give an object with role and content")
        if messages is given:
            messages = list(given)
        messages[index] = _normalized(message, place, roles)
        flag = train_flag(message, place)
        if flag is not None:
            train = train or [None] * len(given)
            train[index] = flag
    return messages, train


def with_system_and_tools(messages: list[dict[str, Any]], train: TrainFlags, record: dict[str, Any]) -> Conversation:
    """Return the conversation, with the record's own `system` in front and its `tools`.

    Example:
        >>> with_system_and_tools([{"role": "user", "content": "Hi"}], None, {"system": "Be brief."}).messages[0]
        {'role': 'system', 'content': 'Be brief.'}
    """
    system = record.get("system")
    if system:
        if type(system) is not str:
            raise RecordError("system", f"is {kind_of(system)}; give a string")
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
            train = [None, *train] if train else None
        elif messages[0].get("content") != system:
            raise RecordError("system", "differs from the system message at the start of the chat; keep one of them")
    return Conversation(messages, _read_tools(record.get("tools"), "tools"), train)


def _read_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """Return tools as chat templates take them, or None if there are none.

    Example:
        >>> _read_tools('[{"name": "now", "parameters": {}}]', "tools")
        [{'type': 'function', 'function': {'name': 'now', 'parameters': {}}}]
    """
    if value is None or value == "" or value == [] or value == "[]":
        return None
    return [_tool(tool, f"{field}[{index}]") for index, tool in enumerate(_without_nulls(list_of(value, field)))]


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
        arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
        outside = {"id": call["id"]} if "id" in call else {}
        calls.append({**outside, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def train_flag(message: dict[str, Any], place: str) -> bool | None:
    """Return the train flag of a message, or None if it has none.

    Example:
        >>> train_flag({"role": "assistant", "content": "Hello.", "weight": 0.5}, "messages[1]")
        True
    """
    train, weight = message.get("train"), message.get("weight")
    if train is not None:
        if type(train) is not bool:
            raise RecordError(f"{place}.train", f"is {train!r:.40}; give true or false")
        return train
    if weight is None:
        return None
    if not isinstance(weight, int | float) or weight < 0:
        raise RecordError(f"{place}.weight", f"is {weight!r:.40}; give 0 to leave the message untrained, or 1")
    return weight != 0


def list_of(value: Any, field: str) -> list[Any]:
    """Return a non-empty list from a value that is one, or the JSON text of one.

    Example:
        >>> list_of('[{"role": "user", "content": "Hi"}]', "messages")
        [{'role': 'user', 'content': 'Hi'}]
    """
    if type(value) is str:
        value = parse_json(value, field)
    if type(value) is not list:
        raise RecordError(field, "is missing; give a list" if value is None else f"is {kind_of(value)}; give a list")
    if not value:
        raise RecordError(field, "is empty; give at least one element, or remove the record")
    return value


def parse_json(text: str, field: str) -> Any:
    """Return the value of a field that holds JSON as text.

    Example:
        >>> parse_json('{"a": 1}', "arguments")
        {'a': 1}
    """
    try:
        return json_files.parse(text.encode(), field)
    except orjson.JSONDecodeError as error:
        raise RecordError(
            field, f"is not valid JSON ({error.msg} at character {error.pos + 1}); fix the text"
        ) from error


def _without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at every depth; nulls in lists stay. Without nulls it is not copied.

    Example:
        >>> _without_nulls({"a": None, "b": [{"c": None}, None]})
        {'b': [{}, None]}
    """
    try:
        if b":null" not in orjson.dumps(value):  # much faster than walking through it
            return value
    except TypeError:
        pass  # Parquet columns may hold what JSON cannot
    return _without_nulls_anywhere(value)


def _without_nulls_anywhere(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_nulls_anywhere(inner) for key, inner in value.items() if inner is not None}
    if type(value) is list:
        return [_without_nulls_anywhere(inner) for inner in value]
    return value


def _normalized(message: dict[str, Any], place: str, roles: Collection[str]) -> dict[str, Any]:
    message = dict(_without_nulls(message))
    message.pop("train", None)
    message.pop("weight", None)
    role = message.get("role")
    if type(role) is not str or role not in roles:
        said = "is missing" if role is None else f"is {role!r}"
        raise RecordError(f"{place}.role", f"{said}; use one of {', '.join(sorted(roles))}, or map it with `roles`")
    if "function_call" in message:
        raise RecordError(f"{place}.function_call", "is the old form of a tool call; use tool_calls")
    if "content" in message:
        message["content"] = _text_of(message["content"], f"{place}.content")
    if type(message.get("reasoning_content", "")) is not str:
        raise RecordError(f"{place}.reasoning_content", f"is {kind_of(message['reasoning_content'])}; give a string")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = read_tool_calls(calls, f"{place}.tool_calls")
    elif "content" not in message and "reasoning_content" not in message:
        raise RecordError(f"{place}.content", "is missing, and there are no tool_calls; give one of them")
    return message


def _text_of(content: Any, field: str) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise RecordError(field, f"is {kind_of(content)}; give a string or a list of text parts")
    for index, part in enumerate(content):
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            kind = repr(part.get("type")) if type(part) is dict else kind_of(part)
            raise RecordError(f"{field}[{index}]", f"is a part of type {kind}; only text is supported, so remove it")
    return "".join(part["text"] for part in content)


def _arguments(value: Any, field: str) -> dict[str, Any]:
    if type(value) is dict:
        return value
    if value is None or value == "":
        return {}
    parsed = parse_json(value, field) if type(value) is str else value
    if type(parsed) is not dict:
        raise RecordError(field, f"is {kind_of(parsed)}; give an object, or its JSON text")
    return parsed


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if type(tool) is dict:
        if type(tool.get("function")) is dict:
            return tool
        if type(tool.get("name")) is str:
            return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    raise RecordError(place, "does not describe a function; give {'type': 'function', 'function': {'name': ...}}")


MESSAGES = Schema(has_keys("messages"), adapt_messages)
