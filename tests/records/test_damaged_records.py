"""A record that is damaged anywhere is read or refused with its field: no other error, and it is never changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_packed_sft.records.record import RecordError, content_hash
from megatron_packed_sft.records.schemas.registry import SCHEMAS, adapter

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
BLOCKS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "text", "text": "Let me look.", "train": False},
    {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "UTC"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12:00"}], "is_error": True}
RECORDS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": [{"type": "tools", "value": "[]"}]},
            {"role": "user", "content": [RESULT, {"type": "text", "value": "Go on."}], "loss_weight": 0.0},
            {"role": "assistant", "content": BLOCKS, "weight": 0.5, "train": True},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
            {"role": "function", "name": "now", "content": "12:00"},
            {"role": "tool_call", "content": '{"name": "now"}'},
            {"role": "assistant", "content": None, "refusal": "No."},
        ],
        "functions": [{"name": "now", "parameters": {}}],
        "chat_template_kwargs": {"enable_thinking": True},
        "weight": 0.5,
    },
    {
        "conversations": [{"from": "User", "value": "Hi"}, {"from": "function_call", "value": '{"name": "now"}'}],
        "system": "Be brief.",
        "mask": "User",
        "tools": TOOLS,
    },
    {
        "contents": [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"result": 1}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "f"}]}],
    },
    {
        "body": {"messages": [USER], "tools": TOOLS},
        "response": {"body": {"choices": [{"message": {"role": "assistant", "content": "Hello."}}]}},
    },
    {"traj": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "reward": 0.0},
    {"dialogue": [USER], "language": "English"},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": BLOCKS}], "label": None},
    {"instruction": "Add.", "input": "2, 2", "output": "4", "history": [["Hi", "Hello."]], "weight": 2},
    {"question": "Who?", "answer": "He.", "reasoning": "It says so.", "system_prompt": "Be brief."},
    {"text": "Once.", "weight": 1},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 0.5, 1], "weight": 1},
    {"input_ids": [5, 6], "labels": [-100, 6]},
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"},
    {"prompt": [USER], "chosen": [{"role": "assistant", "content": "4"}], "rejected": [USER]},
    {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "4", "weight": 1}},
    {"messages": [USER], "label": True, "images": []},
]
VALUES: list[Any] = [None, "", "Hi", "[", '{"a": 1}', 0, 1, -1, 0.5, True, float("nan"), 2**70, [], [[]], {}, {"a": 1}]
VALUES += ["user", {"type": "text"}, [{"role": "user"}], [None]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a value, the whole excepted."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def damaged(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The record with another value at one place; `...` removes it."""
    copied = copy.deepcopy(record)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = copy.deepcopy(value)
    return copied


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_damage_at_any_one_place_is_read_or_refused(number: int) -> None:
    record = RECORDS[number]
    adapters = [adapter(), adapter(take="chosen"), adapter(mapping={"messages": "messages"})]
    adapters += [adapter(name) for name in SCHEMAS.names() if SCHEMAS.origin(name) == "built in"]
    num_read = num_refused = 0
    random_ = random.Random(number)
    for path in places(record):
        for value in (*random_.sample(VALUES, 8), ...):
            wrong = damaged(record, path, value)
            before = repr(wrong)
            for adapt in adapters:
                try:
                    content_hash(adapt(wrong))
                    num_read += 1
                except RecordError as error:
                    num_refused += 1
                    assert "; " in error.problem or "only chosen records are taken" in error.problem
            assert repr(wrong) == before, "the record was changed in place"
    assert num_read
    assert num_refused
