"""Chats in OpenAI's form: `messages`, with tools, tool calls, reasoning and weights. Also where others have the same.

Messages are normalized, so that chat templates and hashes see one form:
- keys with null values are removed, at every depth (Parquet and Arrow give every message every key);
- content in parts becomes one text, with reasoning and tool calls beside it (`content.py`);
- tools and tool calls have one form (`content.py`); `function_call` and the role `function` are their old names, and
  ms-swift has roles for them;
- a `refusal` becomes the content;
- weights (`fields.py`) are taken out of the messages.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Any, NamedTuple

from megatron_packed_sft.records.record import Conversation, RecordError, kind_of
from megatron_packed_sft.records.schemas.content import (
    PartWeights,
    is_result,
    read_parts,
    read_tool_calls,
    text_of,
    tools_of,
)
from megatron_packed_sft.records.schemas.fields import (
    RECORD_KEYS,
    WEIGHT_KEYS,
    Weights,
    list_of,
    object_of,
    parse_json,
    record_weight,
    refuse_keys,
    string_of,
    train_weight,
    without_nulls,
)
from megatron_packed_sft.records.schemas.registry import CHATS, Schema, has_keys, has_list

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SYSTEM_KEYS = ("system", "system_prompt")
# Keys that few messages have, and keys of a record beside its messages; most have none of them.
_UNUSUAL = frozenset({*WEIGHT_KEYS, *RECORD_KEYS, *REASONING_KEYS[1:], "function_call", "refusal"})
_BESIDE = frozenset({*_SYSTEM_KEYS, "tools", "functions", "weight", "loss_weight", "chat_template_kwargs"})


class ReadMessages(NamedTuple):
    """Normalized messages, with the weights and tools that they carry.

    Args:
        messages: in OpenAI's form.
        train: the weight of each, if any message gives one.
        parts: message -> characters and weight of each part of its content, where a part has a weight.
        tools: defined by a message.
    """

    messages: list[dict[str, Any]]
    train: Weights = None
    parts: dict[int, PartWeights] | None = None
    tools: list[dict[str, Any]] | None = None


def adapt_messages(record: dict[str, Any], *, roles: Collection[str] = ROLES, field: str = "messages") -> Conversation:
    """Adapt a record with `messages`, and perhaps `tools`, `system`, a weight and `chat_template_kwargs`.

    Args:
        record: the parsed record; messages that are already normalized are not copied.
        roles: the roles that messages may have.
        field: the key of the messages.

    Example:
        >>> adapt_messages({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    return conversation_of(read_messages(record.get(field), field, roles), record)


def adapt_batch(record: dict[str, Any]) -> Conversation:
    """Adapt a line of OpenAI's batches: a request in `body`, and perhaps its `response`, whose message comes last.

    Example:
        >>> adapt_batch({"body": {"messages": [{"role": "user", "content": "Hi"}]}}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """
    body = object_of(record.get("body"), "body", "give an object with messages")
    messages = list_of(body.get("messages"), "body.messages")
    if record.get("response") is not None:
        messages = [*messages, _answer_of(record["response"])]
    return conversation_of(read_messages(messages, "body.messages"), {**record, **body})


def read_messages(value: Any, field: str, roles: Collection[str] = ROLES) -> ReadMessages:
    """Return normalized messages, with their weights if any message has one.

    Example:
        >>> read_messages([{"role": "assistant", "content": "Hello.", "weight": 0}], "messages")[:2]
        ([{'role': 'assistant', 'content': 'Hello.'}], [0.0])
    """
    given = list_of(value, field)
    read, keep = None, None
    for index, message in enumerate(given):
        try:  # nearly all messages are just a role and a text, and stay as they are
            if len(message) == 2 and message["role"] in roles and type(message["content"]) is str:
                if keep is not None:
                    keep(message)
                continue
        except (KeyError, TypeError):
            pass  # reported with its field below
        place = f"{field}[{index}]"
        object_of(message, place, "give an object with role and content")
        if read is None:
            read = _Reader(given[:index])
            keep = read.messages.append
        read.add(dict(without_nulls(message)), place, roles)
    return ReadMessages(given) if read is None else read.result()


def conversation_of(read: ReadMessages, record: dict[str, Any]) -> Conversation:
    """Return the conversation, with the keys beside its messages: system prompt, tools, weight and variables.

    Example:
        >>> conversation_of(ReadMessages([{"role": "user", "content": "Hi"}]), {"system": "Be brief."}).messages[0]
        {'role': 'system', 'content': 'Be brief.'}
    """
    if read.tools is None and _BESIDE.isdisjoint(record):
        return Conversation(read.messages, None, read.train, 1.0, read.parts)
    messages, train, parts, tools = read
    system = _system_of(record)
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        train = [None, *train] if train else None
        parts = {index + 1: weights for index, weights in parts.items()} if parts else None
    elif system and messages[0].get("content") != system:
        raise RecordError("system", "differs from the system message at the start of the chat; keep one of them")
    variables = _variables_of(record["chat_template_kwargs"]) if "chat_template_kwargs" in record else None
    return Conversation(messages, tools_of(record, tools), train, record_weight(record), parts, variables)


class _Reader:
    """Collects normalized messages; one message of the record may become several."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._weights: dict[int, float] = {}
        self._parts: dict[int, PartWeights] = {}
        self._tools: list[dict[str, Any]] | None = None

    def add(self, message: dict[str, Any], place: str, roles: Collection[str]) -> None:
        content = message.get("content")
        if type(content) is list and any(map(is_result, content)):
            self._add_results(message, place, roles)
            return
        role = message.get("role")
        if type(role) is not str or role not in roles:
            _replace_role(message, place, roles)
            content = message.get("content")
        if not _UNUSUAL.isdisjoint(message):
            _replace_other_names(message, place)
            self._take_weight(message, place)
        elif "reasoning_content" in message:
            string_of(message["reasoning_content"], f"{place}.reasoning_content")
        if type(content) is not str and "content" in message:
            self._read_content(message, f"{place}.content")
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = read_tool_calls(calls, f"{place}.tool_calls")
        elif "content" not in message and not any(key in message for key in REASONING_KEYS):
            raise RecordError(f"{place}.content", "is null or missing, and there are no tool_calls; give one of them")
        self.messages.append(message)

    def _add_results(self, message: dict[str, Any], place: str, roles: Collection[str]) -> None:
        """Add a user's message in which Anthropic has the results of tools, each of them as a message."""
        for has_results, group in groupby(message["content"], is_result):
            parts = list(group)
            if not has_results:
                self.add({**message, "content": parts}, place, roles)
                continue
            for result in read_parts(parts, f"{place}.content").results:
                self._take_weight(dict(message), place)
                self.messages.append(result)

    def _take_weight(self, message: dict[str, Any], place: str) -> None:
        weight = train_weight(message, place)
        if weight is not None:
            self._weights[len(self.messages)] = weight
        for key in WEIGHT_KEYS:
            message.pop(key, None)

    def _read_content(self, message: dict[str, Any], field: str) -> None:
        content = message["content"]
        if type(content) is str:  # of a refusal
            return
        if type(content) is not list:
            raise RecordError(field, f"is {kind_of(content)}; give a string or a list of text parts")
        read = read_parts(content, field)
        # A message of nothing but calls or reasoning has no content; one of no parts at all has an empty one.
        if read.text is None and (read.calls or read.reasoning is not None):
            del message["content"]
        else:
            message["content"] = read.text or ""
        for key, found in (("reasoning_content", read.reasoning), ("tool_calls", read.calls)):
            if found:
                if message.get(key):
                    raise RecordError(f"{field}", f"has parts that are also in {key}; keep one of them")
                message[key] = found
        if read.weights:
            self._parts[len(self.messages)] = read.weights
        self._tools = read.tools or self._tools

    def result(self) -> ReadMessages:
        train = [self._weights.get(index) for index in range(len(self.messages))] if self._weights else None
        return ReadMessages(self.messages, train, self._parts or None, self._tools)


def _replace_role(message: dict[str, Any], place: str, roles: Collection[str]) -> None:
    """Give a message its usual role, if it has an old one (OpenAI) or one for a call alone (ms-swift)."""
    role = message.get("role")
    if role in ("function", "tool_response"):
        message["role"] = "tool"
    elif role in ("function_call", "tool_call"):
        field = f"{place}.content"
        calls = parse_json(string_of(message.pop("content", None), field), field)
        message |= {"role": "assistant", "tool_calls": calls if type(calls) is list else [calls]}
    else:
        said = "is missing" if role is None else f"is {role!r}"
        known = ", ".join(sorted(roles))
        raise RecordError(f"{place}.role", f"{said}; use one of {known}, or map it with `roles`")


def _replace_other_names(message: dict[str, Any], place: str) -> None:
    """Rename the unusual keys of a message, and refuse keys that would be lost."""
    refuse_keys(message, f"{place}.")
    if "function_call" in message:
        if message.get("tool_calls"):
            raise RecordError(f"{place}.function_call", "stands beside tool_calls; keep one of them")
        message["tool_calls"] = [message.pop("function_call")]
    if "refusal" in message:
        refusal = message.pop("refusal")
        if refusal and message.get("content"):
            raise RecordError(f"{place}.refusal", "stands beside a content; keep one of them")
        message["content"] = string_of(refusal, f"{place}.refusal") or message.get("content", "")
    given = [key for key in REASONING_KEYS if key in message]
    for name in given:
        if string_of(message[name], f"{place}.{name}") != message[given[0]]:
            raise RecordError(f"{place}.{name}", f"differs from {given[0]}; keep one of them")


def _answer_of(response: Any) -> Any:
    """Return the message of a response as OpenAI's batches give it."""
    body = object_of(response, "response", "give an object with body").get("body", response)
    choices = body.get("choices") if type(body) is dict else None
    if type(choices) is not list or len(choices) != 1 or type(choices[0]) is not dict:
        raise RecordError("response.body.choices", "is not a list of one choice; remove the record, or the others")
    return choices[0].get("message")


def _system_of(record: dict[str, Any]) -> str | None:
    given = {name: text_of(record[name], name) for name in _SYSTEM_KEYS if record.get(name)}
    if len(set(given.values())) > 1:
        raise RecordError("system_prompt", "differs from system; keep one of them")
    return next(iter(given.values()), None)


def _variables_of(value: Any) -> dict[str, Any] | None:
    field = "chat_template_kwargs"
    if type(value) is str and value:
        value = parse_json(value, field)
    return without_nulls(object_of(value, field, "give an object")) or None if value else None


def _adapt_trajectory(record: dict[str, Any]) -> Conversation:
    return adapt_messages(record, field="traj")


def _is_batch(record: dict[str, Any]) -> bool:
    return type(record.get("body")) is dict and record["body"].get("messages") is not None


MESSAGES = Schema(has_keys("messages"), adapt_messages, CHATS)
OPENAI_BATCH = Schema(_is_batch, adapt_batch, CHATS)
TRAJECTORY = Schema(has_list("traj"), _adapt_trajectory, CHATS)
