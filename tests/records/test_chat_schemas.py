"""Chats of other makers: OpenAI's old form and batches, Anthropic, Gemini, LLaMA-Factory v1, NeMo, trajectories."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from megatron_packed_sft.records.record import Conversation, RecordError
from megatron_packed_sft.records.schemas.registry import adapter, recognise

USER = {"role": "user", "content": "How warm is it in Oslo?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "-3 C"}
ANSWER = {"role": "assistant", "content": "It is -3 degrees."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def adapt(record: dict[str, Any], schema: str) -> Conversation:
    before = copy.deepcopy(record)
    assert recognise(record) == schema
    found = adapter()(record)
    assert found == adapter(schema)(record)
    assert record == before, "the record was changed in place"
    assert isinstance(found, Conversation)
    return found


def refusal(record: dict[str, Any]) -> str:
    with pytest.raises(RecordError) as caught:
        adapter()(record)
    return str(caught.value)


# OpenAI: functions, function_call, refusal, batches


def test_functions_and_function_calls_are_tools_and_tool_calls() -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    record = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "weather", "content": "-3 C"},
            ANSWER,
        ],
        "functions": [{"name": "weather", "parameters": PARAMETERS}],
    }  # fmt: skip
    expected = Conversation([USER, CALLING, {**RESULT, "name": "weather"}, ANSWER], [TOOL])
    assert adapt(record, "messages") == expected
    assert adapt({**record, "tools": [TOOL]}, "messages") == expected


def test_a_role_for_a_call_is_an_assistant_who_calls() -> None:
    text = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    for content in (text, f"[{text}]"):
        turns = [USER, {"role": "tool_call", "content": content}, {"role": "tool_response", "content": "-3 C"}, ANSWER]
        assert adapt({"messages": turns}, "messages").messages == [USER, CALLING, RESULT, ANSWER]


def test_a_refusal_is_what_the_assistant_says() -> None:
    refusing = {"role": "assistant", "content": None, "refusal": "I cannot help with that.", "weight": 0.5}
    found = adapt({"messages": [USER, refusing]}, "messages")
    assert found.messages[1] == {"role": "assistant", "content": "I cannot help with that."}
    assert found.train == [None, 0.5]
    part = {"type": "refusal", "refusal": "I cannot help with that."}
    assert adapt({"messages": [{"role": "assistant", "content": [part]}]}, "messages").messages == found.messages[1:]
    assert adapt({"messages": [USER, {**ANSWER, "refusal": None}]}, "messages").messages == [USER, ANSWER]
    assert adapt({"messages": [USER, {**ANSWER, "refusal": ""}]}, "messages").messages == [USER, ANSWER]


def test_a_line_of_a_batch_is_a_chat_with_the_response_at_its_end() -> None:
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "temperature": 0}
    record: dict[str, Any] = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert adapt(record, "openai_batch") == Conversation([USER], [TOOL])
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    record["response"] = {"status_code": 200, "body": {"choices": [{"index": 0, "message": message}]}}
    assert adapt(record, "openai_batch") == Conversation([USER, CALLING], [TOOL])


def test_a_body_that_is_a_text_is_no_batch() -> None:
    assert recognise({"body": "Dear all, ...", "text": "Once."}) == "text"


# Anthropic


def test_blocks_of_anthropic_become_reasoning_calls_and_results() -> None:
    record = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "How warm is it "}, {"type": "text", "text": "in Oslo?"},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I need the weather.", "signature": "Eq8B"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "-3 C"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "Go on."},
            ]},
            ANSWER,
        ],
    }  # fmt: skip
    now = {"id": "toolu_2", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert adapt(record, "messages") == Conversation(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "I need the weather.",
                "tool_calls": [{"id": "toolu_1", **CALL}, now],
            },
            {**RESULT, "tool_call_id": "toolu_1"},
            {"role": "tool", "content": "no clock", "tool_call_id": "toolu_2", "is_error": True},
            {"role": "user", "content": "Go on."},
            ANSWER,
        ],
        [TOOL],
    )


def test_a_message_of_results_keeps_weights_aligned() -> None:
    results = [{"type": "tool_result", "tool_use_id": str(number), "content": "r"} for number in range(2)]
    record = {"messages": [USER, {"role": "user", "content": results, "train": False}, {**ANSWER, "weight": 2}]}
    found = adapt(record, "messages")
    assert [message["role"] for message in found.messages] == ["user", "tool", "tool", "assistant"]
    assert found.train == [None, False, False, 2]


def test_a_message_of_calls_alone_has_no_content() -> None:
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    found = adapt({"messages": [USER, {"role": "assistant", "content": [use]}]}, "messages")
    assert found.messages[1] == CALLING


# Gemini


def test_contents_of_gemini_become_messages() -> None:
    record = {
        "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "How warm is it "}, {"text": "in Oslo?"}]},
            {"role": "model", "parts": [
                {"text": "I need the weather.", "thought": True},
                {"functionCall": {"name": "weather", "args": {"city": "Oslo"}}, "thoughtSignature": "Eq8B"},
            ]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"celsius": -3}}}]},
            {"role": "model", "parts": [{"text": "It is -3 degrees."}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "weather", "parameters": PARAMETERS}]}],
    }  # fmt: skip
    assert adapt(record, "gemini") == Conversation(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            {**CALLING, "reasoning_content": "I need the weather."},
            {"role": "tool", "content": '{"celsius": -3}', "name": "weather"},
            ANSWER,
        ],
        [TOOL],
    )
    snake = json.loads(
        json.dumps(record)
        .replace("systemInstruction", "system_instruction")
        .replace("functionCall", "function_call")
        .replace("functionResponse", "function_response")
        .replace("functionDeclarations", "function_declarations")
    )
    assert adapt(snake, "gemini") == adapt(record, "gemini")


# LLaMA-Factory v1, NeMo, trajectories, dialogs


def test_parts_of_llama_factory_become_text_reasoning_and_calls() -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    record = {
        "messages": [
            {"role": "system", "content": [{"type": "tools", "value": json.dumps([TOOL])}], "loss_weight": 0.0},
            {"role": "user", "content": [{"type": "text", "value": USER["content"]}], "loss_weight": 0.0},
            {"role": "assistant", "content": [
                {"type": "reasoning", "value": "I need the weather."}, {"type": "tool_call", "value": call},
            ], "loss_weight": 1.0},
            {"role": "tool", "content": [{"type": "text", "value": "-3 C"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": ANSWER["content"]}], "loss_weight": 1.0},
        ]
    }  # fmt: skip
    thinking = {**CALLING, "reasoning_content": "I need the weather."}
    assert adapt(record, "messages") == Conversation(
        [{"role": "system", "content": ""}, USER, thinking, RESULT, ANSWER], [TOOL], [0, 0, 1, 0, 1]
    )


def test_nemo_s_speakers_and_mask_are_understood() -> None:
    turns = [{"from": "User", "value": "Hi"}, {"from": "Assistant", "value": "Hello."}]
    found = adapt({"system": "Be brief.", "mask": "User", "type": "VALUE_TO_TEXT", "conversations": turns}, "sharegpt")
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
    assert found.train == [None, False, None]


def test_a_trajectory_and_a_dialog_are_chats() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, "audio": None}
    result = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "-3 C"}
    traj = {"task_id": 3, "reward": 1.0, "info": {}, "traj": [USER, calling, result, ANSWER], "trial": 0}
    found = adapt(traj, "trajectory")
    assert found.messages == [USER, {**CALLING, "tool_calls": [{"id": "call_1", **CALL}]}, result, ANSWER]
    for name in ("conversation", "dialog", "dialogue"):
        assert adapt({name: [USER, ANSWER], "language": "English"}, "dialog") == Conversation([USER, ANSWER])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_its_name(key: str) -> None:
    message = {"role": "assistant", "content": "4", key: "2 and 2."}
    assert adapt({"messages": [USER, message]}, "messages").messages[1] == message
    alone = {"role": "assistant", "content": None, key: "2 and 2."}
    assert adapt({"messages": [USER, alone]}, "messages").messages[1] == {"role": "assistant", key: "2 and 2."}
    mapped = adapter(mapping={"messages": "log"})({"log": [message]})
    assert isinstance(mapped, Conversation)
    assert mapped.messages == [message]


def said(*parts: Any, role: str = "assistant", **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts), **keys}]}


TEXT = {"type": "text", "text": "Hi"}
THOUGHT = {"type": "thinking", "thinking": "Hm."}
USE = {"type": "tool_use", "name": "now", "input": {}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": [{**CALLING, "function_call": {"name": "f"}}]},
            "messages[0].function_call stands beside tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": "f()"}]},
            "messages[0].tool_calls[0] is a string; give an",
        ),
        ({"messages": [{"role": "tool_call", "content": "f()"}]}, "messages[0].content is not valid JSON"),
        ({"messages": [USER], "tools": [TOOL], "functions": [{"name": "f"}]}, "functions differs from the other tools"),
        ({"messages": [{**ANSWER, "refusal": "No."}]}, "messages[0].refusal stands beside a content; keep one of them"),
        ({"messages": [{**ANSWER, "refusal": 5}]}, "messages[0].refusal stands beside a content"),
        ({"messages": [{**ANSWER, "reasoning": "a", "thinking": "b"}]}, "messages[0].thinking differs from reasoning"),
        ({"messages": [{**ANSWER, "thinking": 5}]}, "messages[0].thinking is a number; give a string"),
        ({"body": {"messages": [USER]}, "response": {"error": "late"}}, "response.body.choices is not a list of one"),
        ({"messages": [USER], "system": "a", "system_prompt": "b"}, "system_prompt differs from system; keep one"),
        (said(THOUGHT, TEXT, THOUGHT), "messages[0].content[2] is reasoning in an unusual place; give reasoning, text"),
        (said(USE, TEXT), "messages[0].content[1] is text in an unusual place"),
        (said({"type": "tool_use", "input": {}}), "messages[0].content[0].name is missing or not a string"),
        (
            said({"type": "tool_use", "name": "f", "input": [1]}),
            "messages[0].content[0].input is a list; give an object",
        ),
        (said({"type": "text"}), "messages[0].content[0].text is missing; give a string"),
        (said({"type": "text", "text": None}), "messages[0].content[0].text is missing; give a string"),
        (said({"type": "text", "text": ["Hi"]}), "messages[0].content[0].text is a list; give a string"),
        (
            said({"type": "redacted_thinking", "data": "x"}),
            "messages[0].content[0] is a part of type 'redacted_thinking'",
        ),
        (
            said({"words": "Hi"}),
            "messages[0].content[0] has no type; only text, reasoning and tool calls are supported",
        ),
        (said(USE, tool_calls=[CALL]), "messages[0].content has parts that are also in tool_calls"),
        (said({"type": "tool_call", "value": "f()"}), "messages[0].content[0].value is not valid JSON"),
        (
            said({"type": "tool_result", "content": [{"type": "image", "source": {}}]}, role="user"),
            "messages[0].content[0].content[0] is a part of type 'image', an image; only text is supported",
        ),
        (
            {"contents": [{"role": "bot", "parts": [{"text": "Hi"}]}]},
            "contents[0].role is 'bot'; use one of user, model",
        ),
        ({"contents": [{"parts": [{"text": "Hi"}]}]}, "contents[0].role is missing"),
        ({"contents": [{"role": "user"}]}, "contents[0].parts is missing; give a list"),
        (
            {"contents": [{"role": "user", "parts": [{"inlineData": {}}]}]},
            "contents[0].parts[0] is a part of type 'inl",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"executableCode": {}}]}]},
            "contents[0].parts[0] holds executableC",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f"}}, {"text": "Hi"}]}]},
            "contents[0].parts[1] stands in an unusual place",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]},
            "contents[0].parts[0].functionCall.name is",
        ),
        ({"contents": [{"role": "user", "parts": [{"functionResponse": {}}]}]}, "contents[0].parts[0].functionRespo"),
        (
            {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], "systemInstruction": [1]},
            "systemInstruction is a list; give a string, or an object with parts",
        ),
        (
            {"mask": "Assistant", "conversations": [{"from": "User", "value": "Hi"}]},
            "mask is 'Assistant'; give 'User', or train flags",
        ),
        (
            {"conversations": [{"from": "User", "value": "Hi", "label": "quality:4"}]},
            "conversations[0].label is an attr",
        ),
        ({"dialog": [USER], "conversation": [USER]}, "the record has conversation and dialog; give one of them"),
        ({"dialogue": [{"speaker": "A", "content": "Hi"}]}, "dialogue[0].role is missing; use one of human"),
        ({"traj": [{"role": "ai", "content": "Hi"}]}, "traj[0].role is 'ai'; use one of assistant"),
        (
            {"messages": [USER], "conversations": [USER]},
            "the record fits the schemas messages and sharegpt; set sources.",
        ),
        ({"contents": [{"role": "user"}], "traj": [USER]}, "the record fits the schemas gemini and trajectory; set"),
    ],
)
def test_each_fault_is_told_with_its_field(record: dict[str, Any], message: str) -> None:
    assert refusal(record).startswith(message)
