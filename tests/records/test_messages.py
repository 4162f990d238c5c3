"""Chats in OpenAI's and ShareGPT's form: what they become, and how each error is reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megatron_packed_sft.records.record import Conversation, RecordError
from megatron_packed_sft.records.schemas.registry import adapter

USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def adapt(record: dict[str, Any]) -> Conversation:
    before = copy.deepcopy(record)
    conversation = adapter()(record)
    assert record == before, "the record was changed in place"
    assert isinstance(conversation, Conversation)
    return conversation


def test_plain_messages_stay_as_they_are() -> None:
    assert adapt({"messages": [USER, ASSISTANT], "id": 7}) == Conversation([USER, ASSISTANT])


def test_null_keys_are_left_out_at_every_depth() -> None:
    padded = {**USER, "tool_calls": None, "name": None, "reasoning_content": None, "weight": None, "train": None}
    call = {"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2, "c": None}}}
    caller = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"type": "function", "function": {**TOOL["function"], "strict": None}}  # type: ignore[dict-item]
    found = adapt({"messages": [padded, caller], "tools": [tool], "system": None})
    assert found == Conversation([USER, {"role": "assistant", "tool_calls": [CALL]}], [TOOL])


def test_values_that_json_cannot_hold_do_not_stop_nulls_from_being_left_out() -> None:
    assert adapt({"messages": [{**USER, "tags": {1, 2}, "name": None}]}).messages == [{**USER, "tags": {1, 2}}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?", "image_url": None}]
    assert adapt({"messages": [{"role": "user", "content": parts}]}).messages == [USER]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}},
        {"name": "add", "arguments": {"a": 2, "b": 2}},
        {"name": "add", "arguments": '{"a":2,"b":2}', "id": None},
    ],
)
def test_tool_calls_of_every_form_become_one(call: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert adapt({"messages": [USER, message]}).messages[1] == {"role": "assistant", "tool_calls": [CALL]}


def test_ids_and_names_of_calls_and_reasoning_are_kept() -> None:
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "Add them.", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"},
    ]
    assert adapt({"messages": messages}).messages == messages


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
    assert adapt({"messages": [message]}).messages[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_null_that_stands_in_the_text_of_arguments_is_kept() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": '{"near": null}'}}]}
    assert adapt({"messages": [message]}).messages[0]["tool_calls"][0]["function"]["arguments"] == {"near": None}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]',
        [{"name": "add", "parameters": {"type": "object"}}],
        [{"type": "function", "name": "add", "parameters": {"type": "object"}, "description": None}],
    ],
)
def test_tools_of_every_form_become_one(tools: Any) -> None:
    assert adapt({"messages": [USER], "tools": tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools: Any) -> None:
    assert adapt({"messages": [USER], "tools": tools}).tools is None


def test_a_system_prompt_of_the_record_goes_in_front_and_flags_stay_aligned() -> None:
    record = {"system": "Be brief.", "messages": [USER, {**ASSISTANT, "weight": 0}]}
    system = {"role": "system", "content": "Be brief."}
    assert adapt(record) == Conversation([system, USER, ASSISTANT], None, [None, None, False])
    assert adapt({"system": "Be brief.", "messages": [system, USER]}).messages == [system, USER]


def messages(*given: Any) -> dict[str, Any]:
    return {"messages": list(given)}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (messages(), "messages is empty; give at least one element, or remove the record"),
        ({"messages": {"role": "user"}}, "messages is an object; give a list"),
        ({"messages": "[{"}, "messages is not valid JSON (unexpected end of data at character 3)"),
        (messages(USER, "Hi"), "messages[1] is a string; give an object with role and content"),
        (messages(USER, ["role", "content"]), "messages[1] is a list; give an object with role and content"),
        (messages({"content": "Hi"}), "messages[0].role is missing; use one of"),
        (messages({"role": "human", "content": "Hi"}), "messages[0].role is 'human'; use one of assistant, developer"),
        (messages({"role": ["user"], "content": "Hi"}), "messages[0].role is ['user']; use one of"),
        (messages(USER, {"role": "assistant", "content": 4}), "messages[1].content is a number; give a string or"),
        (
            messages({"role": "user", "content": None}),
            "messages[0].content is null or missing, and there are no tool_calls",
        ),
        (
            messages({"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url"}]}),
            "messages[0].content[1] is a part of type 'image_url', an image; only text is supported",
        ),
        (messages({"role": "user", "content": ["Hi"]}), "messages[0].content[0] is a string; give a text part"),
        (messages({**ASSISTANT, "reasoning_content": 5}), "messages[0].reasoning_content is a number; give a string"),
        (messages({**ASSISTANT, "tool_calls": {"name": "f"}}), "messages[0].tool_calls is an object; give a list"),
        (messages({**ASSISTANT, "tool_calls": ["f"]}), "messages[0].tool_calls[0] is a string; give an object"),
        (messages({**ASSISTANT, "tool_calls": [{"id": "1"}]}), "messages[0].tool_calls[0].function.name is missing"),
        (
            messages({**ASSISTANT, "tool_calls": [CALL, {"name": "f", "arguments": "{'a': 1}"}]}),
            "messages[0].tool_calls[1].function.arguments is not valid JSON (",
        ),
        (
            messages({**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "[1]"}]}),
            "messages[0].tool_calls[0].function.arguments is a list; give an object, or its JSON text",
        ),
        ({"messages": [USER], "tools": {"name": "f"}}, "tools is an object; give a list"),
        ({"messages": [USER], "tools": [TOOL, {"type": "code"}]}, "tools[1] does not describe a function"),
        ({"messages": [USER], "tools": "nothing"}, "tools is not valid JSON ("),
        ({"messages": [USER], "system": ["Be brief."]}, "system[0] is a string; give a text part"),
        (
            {"messages": [{"role": "system", "content": "A"}], "system": "B"},
            "system differs from the system message at the start of the chat; keep one of them",
        ),
    ],
)
def test_each_fault_is_told_with_its_field(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter("messages")(record)
    assert str(caught.value).startswith(message)


def test_sharegpt_speakers_become_roles_and_function_calls_become_tool_calls() -> None:
    record = {
        "system": "Be brief.",
        "tools": '[{"name": "add", "parameters": {"type": "object"}}]',
        "conversations": [
            {"from": "human", "value": "What is 2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4", "weight": 0},
        ],
    }
    assert adapt(record) == Conversation(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            ASSISTANT,
        ],
        [TOOL],
        [None, None, None, None, False],
    )


def test_sharegpt_takes_lists_of_calls_and_role_content_turns() -> None:
    calls = '[{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 2}"}, {"name": "now"}]'
    record = {"conversations": [{"role": "user", "content": "Hi"}, {"role": "tool_call", "content": calls}]}
    names = [call["function"]["name"] for call in adapt(record).messages[1]["tool_calls"]]
    assert names == ["add", "now"]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "conversations is empty"),
        (["Hi"], "conversations[0] is a string; give an object with from and value"),
        ([{"from": "narrator", "value": "Hi"}], "conversations[0].from is 'narrator'; use one of human, user, gpt"),
        ([{"value": "Hi"}], "conversations[0].role is missing; use one of human"),
        ([{"from": "human", "value": None}], "conversations[0].value is null; give a string"),
        ([{"from": "human", "value": "Hi", "weight": []}], "conversations[0].weight is []; give 0"),
        ([{"from": "function_call", "value": "add(2)"}], "conversations[0].value is not valid JSON ("),
        ([{"from": "function_call", "value": '{"a": 1}'}], "conversations[0].value[0].function.name is missing"),
    ],
)
def test_each_fault_of_sharegpt_is_told_with_its_field(turns: list[Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter("sharegpt")({"conversations": turns})
    assert str(caught.value).startswith(message)
