"""Schemas without messages, mappings, recognition and hashes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import (
    Conversation,
    Location,
    RecordError,
    TextRecord,
    TokenizedRecord,
    content_hash,
)
from megatron_packed_sft.records.schemas.registry import (
    SCHEMAS,
    Schema,
    adapter,
    has_keys,
    recognise,
    register_schema,
    schema_choices,
)

USER = {"role": "user", "content": "Add.\n\n2, 2"}
ASSISTANT = {"role": "assistant", "content": "4"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT], "text": "rendered", "prompt": "Add."},
    "dialog": {"dialog": [USER, ASSISTANT]},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], "text": "rendered"},
    "openai_batch": {"body": {"messages": [USER, ASSISTANT]}, "custom_id": "1"},
    "trajectory": {"traj": [USER, ASSISTANT], "reward": 1.0},
    "question_answer": {"question": USER["content"], "answer": "4"},
    "sharegpt": {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "4"}]},
    "alpaca": {"instruction": "Add.", "input": "2, 2", "output": "4", "text": "rendered"},
    "prompt_completion": {"prompt": "2 + 2 = ", "completion": "4"},
    "text": {"text": "2 + 2 = 4", "url": "example.org"},
    "tokenized": {"input_ids": [5, 6], "loss_mask": [0, 1], "text": "2 + 2"},
}


@pytest.mark.parametrize("schema", EXAMPLES)
def test_a_record_is_recognised_by_its_keys_even_among_null_ones(schema: str) -> None:
    nulls = dict.fromkeys(["messages", "conversations", "input_ids", "prompt", "completion", "instruction", "output"])
    assert recognise({**nulls, **EXAMPLES[schema]}) == schema
    assert adapter()(EXAMPLES[schema]) == adapter(schema)(EXAMPLES[schema])


def test_an_unknown_record_tells_its_keys() -> None:
    with pytest.raises(
        RecordError, match=r"^the record has the keys title, summary, which match no known schema; set schema"
    ):
        adapter()({"title": "?", "summary": "!"})
    with pytest.raises(RecordError, match=r"^the record has the keys text \(null\), id, which match no known schema"):
        adapter()({"text": None, "id": 5})
    steps = [{"role": "ai", "text": "I look around.", "mask": False}]
    with pytest.raises(RecordError, match=r"such as mapping: \{messages: trajectory, role: role, content: text\}$"):
        adapter()({"trajectory": steps, "exit_status": "submitted"})
    with pytest.raises(RecordError, match=r"^the record has no keys"):
        adapter()({})


def test_every_schema_has_an_example_here_and_unknown_ones_are_refused() -> None:
    assert set(schema_choices()) == {"auto", *EXAMPLES, "mapping"}
    with pytest.raises(InvalidInputError, match="schema 'chatml' is unknown; use one of auto, messages"):
        adapter("chatml")
    with pytest.raises(InvalidInputError, match="mapping is not set"):
        adapter("mapping")
    with pytest.raises(InvalidInputError, match="schema is 'text'; set schema to mapping"):
        adapter("text", {"text": "body"})


def test_a_registered_schema_is_recognised_after_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEMAS, "_values", dict(SCHEMAS._values))
    story = Schema(has_keys("story"), lambda record: TextRecord(((record["story"], True),)))
    register_schema("story", story)
    assert adapter()({"story": "Once."}) == adapter("story")({"story": "Once."}) == TextRecord((("Once.", True),))
    assert recognise({"story": "Once.", **EXAMPLES["text"]}) == "text"
    with pytest.raises(InvalidInputError, match="schema 'story' is registered already"):
        register_schema("story", story)
    with pytest.raises(InvalidInputError, match="schema 'auto' has a fixed meaning"):
        register_schema("auto", story)


def test_the_schema_of_an_installed_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "stories.py").write_text(
        "from megatron_packed_sft import Schema\n"
        "from megatron_packed_sft.records.record import TextRecord\n"
        "STORY = Schema(lambda record: 'story' in record, lambda record: TextRecord(((record['story'], True),)))\n"
    )
    info = tmp_path / "stories-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stories\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megatron_packed_sft.schemas]\nstory = stories:STORY\n")
    code = (
        "from megatron_packed_sft.records.schemas.registry import adapter; "
        "print(adapter()({'story': 'Once.'}), adapter('story')({'story': 'Once.'}).parts)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    assert run.stdout == "TextRecord(parts=(('Once.', True),)) (('Once.', True),)\n"


def test_alpaca_becomes_turns_with_history_and_system() -> None:
    record = {**EXAMPLES["alpaca"], "system": "Be brief.", "history": [["Hi", "Hello."]]}
    system, hi, hello = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))
    )
    assert adapter()(record) == Conversation([system, hi, hello, USER, ASSISTANT])
    for nothing in ("", None):
        alone = adapter()({**EXAMPLES["alpaca"], "input": nothing})
        assert isinstance(alone, Conversation)
        assert alone.messages[0]["content"] == "Add."


def test_prompt_and_completion_train_the_completion_alone() -> None:
    assert adapter()(EXAMPLES["prompt_completion"]) == TextRecord((("2 + 2 = ", False), ("4", True)))
    record = {"prompt": [USER, {**ASSISTANT, "train": True}], "completion": [USER, ASSISTANT]}
    found = adapter()(record)
    assert found == Conversation([USER, ASSISTANT, USER, ASSISTANT], None, [False, False, None, None])
    weighted = adapter()({"prompt": [USER], "completion": [{**ASSISTANT, "weight": 0}, ASSISTANT]})
    assert isinstance(weighted, Conversation)
    assert weighted.train == [False, False, None]


def test_ids_come_with_a_mask_or_with_labels() -> None:
    expected = TokenizedRecord([5, 6, 7], [0, 1, 1])
    assert adapter()({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) == expected
    assert adapter()({"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}) == expected
    assert adapter()({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": None}) == expected


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        ("alpaca", {"instruction": "Add."}, "output is missing; give a string"),
        ("alpaca", {"instruction": 5, "output": "4"}, "instruction is a number; give a string"),
        ("alpaca", {"instruction": "Add.", "input": {}, "output": "4"}, "input is an object; give a string"),
        ("alpaca", {**EXAMPLES["alpaca"], "history": "Hi"}, "history is a string; give a list"),
        (
            "alpaca",
            {**EXAMPLES["alpaca"], "history": [["Hi", "Hello."], ["Hi"]]},
            "history[1] is not a pair of strings",
        ),
        ("prompt_completion", {"prompt": "Hi", "completion": [ASSISTANT]}, "prompt is a string, and completion is a"),
        ("prompt_completion", {"prompt": "Hi"}, "prompt is a string, and completion is null; give two strings or"),
        ("prompt_completion", {"prompt": [USER], "completion": [{}]}, "completion[0].role is missing"),
        ("prompt_completion", {"prompt": "Hi", "completion": "", "tools": [{}]}, "tools goes with messages"),
        ("text", {"text": ["a"]}, "text is a list; give a string"),
        ("tokenized", {"input_ids": "5 6"}, "input_ids is a string; give a list of integers"),
        ("tokenized", {"input_ids": []}, "input_ids is empty; give at least one id"),
        ("tokenized", {"input_ids": [5, 6.5]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [5, "6"]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [5, None]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [[5], [6, 7]]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [5, -1]}, "input_ids has ids from -1 to 5; give at least one id, each in 0.."),
        ("tokenized", {"input_ids": [5, 2**40]}, "input_ids has ids from 5 to 1099511627776"),
        ("tokenized", {"input_ids": [5, 2**70]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [2**63]}, "input_ids holds something other than 64-bit integers"),
        ("tokenized", {"input_ids": [5]}, "loss_mask is missing, and so is labels"),
        ("tokenized", {"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask has 1 values, but there are 2 input_ids"),
        ("tokenized", {"input_ids": [5, 6], "loss_mask": [1, -2]}, "loss_mask[1] is -2, at the input id 6; give 0, 1"),
        ("tokenized", {"input_ids": [5, 6], "labels": [6, -100]}, "labels[0] is 6, at the input id 5; give the same"),
    ],
)
def test_each_fault_is_told_with_its_field(schema: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter(schema)(record)
    assert str(caught.value).startswith(message)


def test_a_mapping_reads_messages_by_dotted_paths_and_translates_roles() -> None:
    mapping = {
        "messages": "data.chat.turns",
        "role": "speaker.kind",
        "content": "utterance",
        "tools": "meta.tools",
        "roles": {"bot": "assistant", "me": "user", "judge": "judge"},
    }
    record = {
        "data": {"chat": {"turns": [
            {"speaker": {"kind": "me"}, "utterance": "Hi", "mood": "good"},
            {"speaker": {"kind": "bot"}, "utterance": "Hello.", "weight": 0},
            {"speaker": {"kind": "judge"}, "utterance": "Fair."},
        ]}},
        "meta": {"tools": [{"name": "now"}]},
    }  # fmt: skip
    adapt = pickle.loads(pickle.dumps(adapter("mapping", mapping)))
    assert adapt(record) == Conversation(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "judge", "content": "Fair."},
        ],
        [{"type": "function", "function": {"name": "now"}}],
        [None, False, None],
    )


@pytest.mark.parametrize(
    ("mapping", "record", "expected"),
    [
        (
            {"prompt": "q.text", "completion": "a.0.text"},
            {"q": {"text": "2 + 2 = "}, "a": [{"text": "4"}]},
            EXAMPLES["prompt_completion"],
        ),
        ({"text": "body"}, {"body": "2 + 2 = 4"}, EXAMPLES["text"]),
        (
            {"instruction": "task", "input": "more", "output": "best.answer"},
            {"task": "Add.", "more": "2, 2", "best": {"answer": "4"}},
            EXAMPLES["alpaca"],
        ),
        ({"input_ids": "tokens", "loss_mask": "mask"}, {"tokens": [5, 6], "mask": [0, 1]}, EXAMPLES["tokenized"]),
        (
            {"messages": "log", "role": "who"},
            {"log": '[{"who": "user", "content": "Add.\\n\\n2, 2"}, {"who": "assistant", "content": "4"}]'},
            EXAMPLES["messages"],
        ),
    ],
)
def test_a_mapping_reaches_every_schema(mapping: Any, record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert adapter(mapping=mapping)(record) == adapter()(expected)


@pytest.mark.parametrize(
    ("mapping", "record", "message"),
    [
        ({"messages": "data.turns"}, {"data": {}}, "data.turns is missing; give a list"),
        ({"messages": "turns.0"}, {"turns": []}, "turns.0 is missing; give a list"),
        ({"messages": "log", "content": "says"}, {"log": [{"role": "user", "says": 5}]}, "log[0].says is a number"),
        ({"messages": "log", "role": "who"}, {"log": [{"who": "bot", "content": ""}]}, "log[0].who is 'bot'; use one"),
        ({"messages": "log"}, {"log": ["Hi"]}, "log[0] is a string; give an object"),
        ({"prompt": "q", "completion": "a"}, {"q": "Hi", "a": None}, "q is a string, and completion is null"),
        ({"text": "body"}, {"text": "elsewhere"}, "body is null; give a string"),
        ({"input_ids": "ids", "loss_mask": "mask"}, {"ids": [5], "mask": [-3]}, "mask[0] is -3, at the input id 5"),
    ],
)
def test_faults_of_mapped_records_are_told_with_the_names_in_the_file(
    mapping: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError) as caught:
        adapter(mapping=mapping)(record)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"messages": "log", "speaker": "who"},
            "mapping has unknown keys: speaker; use keys of chat_template_kwargs, completion",
        ),
        ({"role": "who"}, "does not say where the text is; set one of: messages; completion and prompt; "),
        ({"text": "body", "role": "who"}, "mapping has keys that do not go with text: role"),
        ({"messages": "log", "prompt": "q"}, "mapping has keys that do not go with messages: prompt"),
        ({"text": 5}, "mapping.text is 5; give a dotted path"),
        ({"text": ""}, "mapping.text is ''; give a dotted path"),
        ({"messages": "log", "roles": "bot"}, r"mapping.roles is 'bot'; map names to roles"),
        ({"messages": "log", "roles": {"bot": 1}}, r"mapping.roles is \{'bot': 1\}; map names to roles"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused_before_any_record(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        adapter(mapping=mapping)


def test_equal_records_of_different_schemas_hash_equally_and_others_do_not() -> None:
    same = {
        content_hash(adapter()(EXAMPLES[schema]))
        for schema in ("messages", "sharegpt", "alpaca", "dialog", "question_answer")
    }
    assert len(same) == 1
    others = [
        {"messages": [USER, {**ASSISTANT, "content": "5"}]},
        {"messages": [USER, {**ASSISTANT, "weight": 0}]},
        {"messages": [USER, {**ASSISTANT, "weight": 1}]},
        {"messages": [USER, ASSISTANT], "tools": [{"name": "add"}]},
        EXAMPLES["prompt_completion"],
        EXAMPLES["text"],
        EXAMPLES["tokenized"],
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
    ]
    hashes = same | {content_hash(adapter()(record)) for record in others}
    assert len(hashes) == 1 + len(others)
    assert {len(one) for one in hashes} == {16}


def test_a_hash_does_not_depend_on_the_order_of_keys_or_on_flags_that_say_nothing() -> None:
    one = Conversation([{"role": "user", "content": "Hi"}], [], [None])
    two = Conversation([{"content": "Hi", "role": "user"}])
    assert content_hash(one) == content_hash(two)


def test_a_value_that_json_cannot_hold_is_the_fault_of_its_record() -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        content_hash(Conversation([{"role": "user", "content": "Hi", "price": Decimal("1.5")}]))


def test_an_error_keeps_its_parts_when_sent_to_another_process() -> None:
    error = RecordError("text", "is null; give a string").at(Location("a.jsonl", 3, "line"))
    sent = pickle.loads(pickle.dumps(error))
    assert str(sent) == str(error) == "a.jsonl, line 3: text is null; give a string"
    assert (sent.field, sent.where) == ("text", Location("a.jsonl", 3, "line"))
