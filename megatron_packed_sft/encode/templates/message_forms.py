"""Messages as templates take them: the same chat in the forms that different templates ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def forms_of(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a chat as it is, then as some templates want it: `content: None` by tool calls, arguments as JSON text.

    A template that renders the first form never sees the others.

    Example:
        >>> call = {"function": {"name": "add", "arguments": {"a": 1}}}
        >>> list(forms_of([{"role": "assistant", "tool_calls": [call]}]))[-1]
        [{'role': 'assistant', 'content': None, 'tool_calls': [{'function': {'name': 'add', 'arguments': '{"a": 1}'}}]}]
    """
    yield list(messages)
    if not any("tool_calls" in message or "content" not in message for message in messages):
        return
    with_content = [message if "content" in message else _with_null_content(message) for message in messages]
    yield with_content
    yield [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in with_content
    ]


def _with_null_content(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message.get("role"), "content": None, **message}


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}
