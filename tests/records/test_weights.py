"""Weights of messages, parts and records, and template arguments of a record: how they are read."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.records.record import (
    Conversation,
    Record,
    RecordError,
    TextRecord,
    TokenizedRecord,
    content_hash,
)
from megatron_packed_sft.records.schemas.registry import adapter

USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


def chat(record: dict[str, Any], **options: Any) -> Conversation:
    found = adapter(**options)(record)
    assert isinstance(found, Conversation)
    return found


def test_weights_and_flags_of_messages_say_how_much_is_trained() -> None:
    flags: list[dict[str, Any]] = [
        {"weight": 0}, {"weight": 1}, {"weight": 0.5}, {"train": False}, {"train": True, "weight": 0.25}, {},
        {"loss_weight": 0}, {"loss_weight": 3}, {"loss_weight": 0.5, "weight": 0.5}, {"train": False, "weight": 1},
    ]  # fmt: skip
    found = chat({"messages": [{**ASSISTANT, **flag} for flag in flags]})
    assert found.messages == [ASSISTANT] * 10
    assert found.train == [0, 1, 0.5, False, 0.25, None, 0, 3, 0.5, False]
    assert found.weight == 1


def test_a_weight_is_read_by_every_schema_of_messages() -> None:
    expected = [None, 0.5]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.", "loss_weight": 0.5}]
    assert chat({"conversations": turns}).train == expected
    parts = [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Hey"}], "weight": 0.5}]
    assert chat({"contents": parts}).train == expected
    assert chat({"traj": [USER, {**ASSISTANT, "weight": 0.5}]}).train == expected
    mapping = {"messages": "log", "loss_weight": "importance"}
    assert chat({"log": [USER, {**ASSISTANT, "importance": 0.5}]}, mapping=mapping).train == expected


def test_the_weight_of_a_record_is_kept_beside_those_of_its_messages() -> None:
    for name in ("weight", "loss_weight"):
        found = chat({"messages": [USER, {**ASSISTANT, "weight": 0.5}], name: 2})
        assert found == Conversation([USER, ASSISTANT], None, [None, 0.5], 2.0)
    assert chat({"instruction": "Add.", "output": "4", "weight": 0}).weight == 0
    assert chat({"log": [USER], "stars": 0.2}, mapping={"messages": "log", "record_weight": "stars"}).weight == 0.2


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "Once.", "weight": 0.5}, TextRecord((("Once.", 0.5),))),
        ({"text": "Once.", "weight": 1}, TextRecord((("Once.", True),))),
        ({"prompt": "2 + 2 = ", "completion": "4", "loss_weight": 2}, TextRecord((("2 + 2 = ", 0), ("4", 2)))),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0.5, 3]}, TokenizedRecord([5, 6, 7], [0, 0.5, 3])),
        ({"input_ids": [5, 6], "labels": [-100, 6], "weight": 0.25}, TokenizedRecord([5, 6], [0, 0.25])),
        ({"input_ids": [5, 6], "loss_mask": [0.5, 1], "weight": 2}, TokenizedRecord([5, 6], [1, 2])),
        ({"input_ids": [5, 6], "loss_mask": [0.0, 1.0]}, TokenizedRecord([5, 6], [0, 1])),
    ],
)
def test_the_weight_of_a_record_multiplies_what_is_trained(record: dict[str, Any], expected: Record) -> None:
    assert adapter()(record) == expected


@pytest.mark.parametrize("schema", ["text", "prompt_completion"])
def test_a_mapping_finds_the_weight_of_a_text(schema: str) -> None:
    mapping = {"text": "body"} if schema == "text" else {"prompt": "q", "completion": "body"}
    found = adapter(mapping={**mapping, "record_weight": "meta.weight"})({"q": "", "body": "4", "meta": {"weight": 3}})
    assert isinstance(found, TextRecord)
    assert found.parts[-1] == ("4", 3)


def test_parts_of_a_content_are_joined_and_their_weights_kept_with_their_lengths() -> None:
    parts = [
        {"type": "text", "text": "Because "},
        {"type": "text", "text": "I guess", "train": False},
        {"type": "text", "text": " so.", "loss_weight": 0.5},
    ]
    plain = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    record = {"messages": [{"role": "user", "content": plain}, {"role": "assistant", "content": parts}]}
    found = chat(record)
    assert [message["content"] for message in found.messages] == ["Why?", "Because I guess so."]
    assert found.parts == {1: [(8, None), (7, False), (4, 0.5)]}
    assert chat({**record, "system": "Be brief."}).parts == {2: [(8, None), (7, False), (4, 0.5)]}
    completion = chat({"prompt": record["messages"], "completion": [record["messages"][1]]})
    assert completion.parts == {2: [(8, None), (7, False), (4, 0.5)]}
    assert completion.train == [False, False, None]


@pytest.mark.parametrize("value", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_template_arguments_of_a_record_become_its_variables(value: Any) -> None:
    assert chat({"messages": [USER], "chat_template_kwargs": value}).variables == {"enable_thinking": False}
    mapped = chat(
        {"log": [USER], "args": value}, mapping={"messages": "log", "chat_template_kwargs": "args"}
    )  # fmt: skip
    assert mapped.variables == {"enable_thinking": False}


@pytest.mark.parametrize("value", [None, {}, "", {"enable_thinking": None}])
def test_no_template_arguments_are_none(value: Any) -> None:
    assert chat({"messages": [USER], "chat_template_kwargs": value}) == Conversation([USER])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{**ASSISTANT, "weight": "no"}]}, "messages[0].weight is 'no'; give 0 to leave it untrained"),
        ({"messages": [{**ASSISTANT, "weight": -1}]}, "messages[0].weight is -1; give 0"),
        ({"messages": [{**ASSISTANT, "loss_weight": float("nan")}]}, "messages[0].loss_weight is nan; give 0"),
        ({"messages": [{**ASSISTANT, "loss_weight": float("inf")}]}, "messages[0].loss_weight is inf; give 0"),
        ({"messages": [{**ASSISTANT, "weight": 10**400}]}, "messages[0].weight is 1000"),
        (
            {"messages": [{**ASSISTANT, "weight": 0, "loss_weight": 1}]},
            "messages[0].loss_weight is 1, but weight is 0; keep one of them",
        ),
        ({"messages": [{**ASSISTANT, "train": True, "weight": 0}]}, "messages[0].train is true, but the weight is 0"),
        ({"messages": [{**ASSISTANT, "train": 1}]}, "messages[0].train is 1; give true or false"),
        ({"messages": [USER], "weight": -0.5}, "weight is -0.5; give 0"),
        ({"text": "Once.", "weight": "heavy"}, "weight is 'heavy'; give 0"),
        ({"text": "Once.", "weight": 1, "loss_weight": 2}, "loss_weight is 2, but weight is 1"),
        ({"input_ids": [5, 6], "loss_mask": [1, -1]}, "loss_mask[1] is -1, at the input id 6; give 0, 1 or another"),
        ({"input_ids": [5, 6], "loss_mask": [1, float("nan")]}, "loss_mask[1] is nan, at the input id 6"),
        ({"input_ids": [5], "loss_mask": ["1"]}, "loss_mask holds something other than numbers"),
        ({"input_ids": [5], "labels": [0.5]}, "labels holds something other than 64-bit integers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "train": "no"}]}]},
            "messages[0].content[0].train is 'no'; give true or false",
        ),
        (
            {"messages": [{**ASSISTANT, "content": [{"type": "thinking", "thinking": "Hm.", "weight": 0}]}]},
            "messages[0].content[0] is a reasoning with a weight of its own",
        ),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs is a list; give an object"),
        ({"messages": [USER], "chat_template_kwargs": "thinking"}, "chat_template_kwargs is not valid JSON"),
    ],
)
def test_a_weight_that_is_none_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter()(record)
    assert str(caught.value).startswith(message)


def test_records_that_differ_in_a_weight_or_a_variable_are_no_duplicates() -> None:
    part = {"type": "text", "text": "4", "train": False}
    records: list[dict[str, Any]] = [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
        {"messages": [USER, ASSISTANT], "weight": 0.5},
        {"messages": [USER, {**ASSISTANT, "content": [part]}]},
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"enable_thinking": True}},
        {"text": "4"},
        {"text": "4", "weight": 0.5},
        {"input_ids": [5], "loss_mask": [1]},
        {"input_ids": [5], "loss_mask": [0.5]},
    ]
    assert len({content_hash(adapter()(record)) for record in records}) == len(records)
    same = [{"messages": [USER, ASSISTANT], "weight": 1}, {"messages": [USER, ASSISTANT], "chat_template_kwargs": {}}]
    assert {content_hash(adapter()(record)) for record in same} == {content_hash(adapter()(records[0]))}
