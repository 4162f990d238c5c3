"""Preference data and media are never trained on by accident; `take: chosen` takes the chosen side."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, Location, NotTakenError, Record, RecordError, TextRecord
from megatron_packed_sft.records.schemas.registry import adapter

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
HUMAN = {"from": "human", "value": "What is 2 + 2?"}
CHAT = Conversation([USER, GOOD], None, [False, None])

PAIRS: dict[str, tuple[dict[str, Any], Record]] = {
    "texts": (
        {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"},
        TextRecord((("2 + 2 = ", False), ("4", True))),
    ),
    "messages with a prompt": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, CHAT),
    "messages without a prompt": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT),
    "messages that begin with a prompt in text": (
        {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
        CHAT,
    ),
    "ultrafeedback": (
        {"prompt": USER["content"], "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        CHAT,
    ),
    "answers in messages after a prompt in text": ({"prompt": USER["content"], "chosen": [GOOD]}, CHAT),
    "llama-factory v1": ({"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, CHAT),
    "orca": (
        {"system": "Be brief.", "question": USER["content"], "chosen": "4", "rejected": "5"},
        Conversation([SYSTEM, USER, GOOD]),
    ),
    "alpaca ranking": (
        {"instruction": "What is", "input": "2 + 2?", "chosen": "4", "rejected": "5"},
        Conversation([{"role": "user", "content": "What is\n\n2 + 2?"}, GOOD]),
    ),
    "sharegpt ranking": (
        {"conversations": [HUMAN], "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}},
        CHAT,
    ),
    "an answer in text after messages": ({"messages": [USER], "chosen": "4", "rejected": "5"}, CHAT),
    "ms-swift": ({"messages": [USER, GOOD], "rejected_response": "5"}, Conversation([USER, GOOD])),
    "ms-swift columns": (
        {"query": USER["content"], "response": "4", "rejected_response": "5"},
        Conversation([USER, GOOD]),
    ),
    "openai": (
        {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        CHAT,
    ),
    "identical sides": ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, CHAT),
    "a weight and tools": (
        {"prompt": [USER], "chosen": [{**GOOD, "weight": 2}], "rejected": [BAD], "weight": 0.5, "tools": []},
        Conversation([USER, GOOD], None, [False, 2], 0.5),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_refused_unless_the_chosen_side_is_asked_for(name: str) -> None:
    record, expected = PAIRS[name]
    before = copy.deepcopy(record)
    with pytest.raises(RecordError) as caught:
        adapter()(record)
    assert str(caught.value).startswith("the record is preference data (keys ")
    assert "set sources.NAME.take=chosen" in str(caught.value)
    assert adapter(take="chosen")(record) == expected
    assert record == before, "the record was changed in place"


def test_what_both_sides_begin_with_is_the_prompt() -> None:
    greeting = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    record = {"chosen": [*greeting, USER, GOOD], "rejected": [*greeting, USER, BAD]}
    assert adapter(take="chosen")(record) == Conversation([*greeting, USER, GOOD], None, [False, False, False, None])


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2 + 2 = ", "completion": "5"},
        {"prompt": [USER], "completion": [BAD]},
        {"messages": [USER, BAD]},
        {"conversations": [HUMAN, {"from": "gpt", "value": "5"}]},
        {"instruction": "Add 2 and 2.", "output": "5"},
    ],
)
@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_a_verdict_of_true_or_false_is_kto(record: dict[str, Any], label: str) -> None:
    for value in (True, False, 1, 0):
        with pytest.raises(RecordError, match=rf"^{label} is {value}: preference data \(KTO\)"):
            adapter()({**record, label: value})
    assert adapter(take="chosen")({**record, label: True}) == adapter()(record)
    with pytest.raises(NotTakenError, match=rf"^{label} is False, and only chosen records are taken") as caught:
        adapter(take="chosen")({**record, label: False})
    assert isinstance(caught.value.at(Location("a.jsonl", 3, "line")), NotTakenError)


def test_a_schema_that_is_named_does_not_hide_a_verdict() -> None:
    with pytest.raises(RecordError, match=r"^label is False: preference data"):
        adapter("messages")({"messages": [USER, BAD], "label": False})
    with pytest.raises(RecordError, match=r"^the record is preference data"):
        adapter("messages")({"messages": [USER, GOOD], "rejected": [BAD]})
    mapped = adapter(mapping={"messages": "messages"})({"messages": [USER, BAD], "label": False})
    assert mapped == Conversation([USER, BAD])


def test_columns_that_hold_nothing_say_nothing() -> None:
    record = {"messages": [USER, GOOD], "chosen": "", "rejected": [], "chosen_messages": None, "responses": []}
    assert adapter()(record) == Conversation([USER, GOOD])


def test_a_label_that_is_a_class_says_nothing() -> None:
    assert adapter()({"messages": [USER, GOOD], "label": "arithmetic"}) == Conversation([USER, GOOD])
    assert adapter()({"messages": [USER, GOOD], "label": 7}) == Conversation([USER, GOOD])
    assert adapter()({"messages": [USER, GOOD], "label": None}) == Conversation([USER, GOOD])
    assert adapter()({"text": "A fine film.", "label": 1}) == TextRecord((("A fine film.", True),))


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"instruction": "Add.", "completions": [{"response": "4"}]},
            "{instruction: instruction, output: completions.0}",
        ),
        ({"prompt": "2 + 2?", "responses": ["4", "5"], "scores": [1, 0]}, "{instruction: prompt, output: responses.0}"),
        ({"messages": [USER], "responses": ["4", "5"], "scores": [1, 0]}, "{instruction: prompt, output: responses.0}"),
        ({"prompt": "2 + 2?", "response_0": "4", "response_1": "5"}, "{instruction: prompt, output: response_0}"),
        ({"question": "2 + 2?", "answer_a": "4", "answer_b": "5"}, "{instruction: question, output: answer_a}"),
        (
            {"conversation_a": [USER, GOOD], "conversation_b": [USER, BAD]},
            "{instruction: prompt, output: conversation_a.",
        ),
        ({"history": "2 + 2?", "human_ref_A": "4", "human_ref_B": "5"}, "{instruction: prompt, output: human_ref_A}"),
    ],
)
@pytest.mark.parametrize("take", [None, "chosen"])
def test_rankings_are_refused_with_a_mapping_to_write(record: dict[str, Any], line: str, take: str | None) -> None:
    with pytest.raises(RecordError) as caught:
        adapter(take=take)(record)
    assert str(caught.value).startswith("the record is preference data (several answers: ")
    assert f"such as mapping: {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER, GOOD]}, "the record has no chosen side, but take is chosen; remove take, or the record"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello."}, "chosen is a text without a prompt, so the answer cannot"),
        ({"prompt": "Hi", "chosen": 4}, "chosen is a number; give a string or a list of messages"),
        ({"prompt": [USER], "chosen": [{"role": "bot", "content": "4"}]}, "chosen[0].role is 'bot'; use one of"),
        ({"prompt": "Other.", "chosen": [USER, GOOD]}, "prompt is not in the messages of chosen, which begin with an"),
        ({"prompt": "Hi", "rejected": "5"}, "the record has the keys prompt, which match no known schema"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "images": ["cat.png"]}, "images holds an image"),
    ],
)
def test_a_chosen_side_that_is_not_there_is_an_error(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter(take="chosen")(record)
    assert str(caught.value).startswith(message)


def test_take_goes_with_recognised_records_alone() -> None:
    with pytest.raises(InvalidInputError, match="take is 'rejected'; use chosen"):
        adapter(take="rejected")
    with pytest.raises(InvalidInputError, match="take goes with schema auto"):
        adapter("messages", take="chosen")
    with pytest.raises(InvalidInputError, match="take goes with schema auto"):
        adapter(mapping={"text": "body"}, take="chosen")


SEEING = {"role": "user", "content": "<image>What is this?"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [SEEING, GOOD], "images": ["cat.png"]}, "images holds an image; only"),
        ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "cat.png"}, "image holds an image"),
        ({"messages": [SEEING, GOOD], "videos": ["cat.mp4"]}, "videos holds a video"),
        ({"text": "Hello.", "audio": {"path": "a.wav", "array": [0.1]}}, "audio holds audio"),
        ({"query": "<audio>What?", "response": "A cat.", "audios": ["a.wav"]}, "audios holds audio"),
        ({"input_ids": [5], "labels": [5], "pixel_values": [[0.5]]}, "pixel_values holds an image"),
        ({"messages": [{**USER, "images": ["cat.png"]}]}, "messages[0].images holds an image"),
        ({"messages": [{**GOOD, "audio": {"id": "audio_1"}}]}, "messages[0].audio holds audio"),
    ],
)
def test_media_beside_the_text_are_refused_by_name(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter()(record)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "medium"),
    [
        ("image_url", "an image"), ("image", "an image"), ("input_image", "an image"), ("input_audio", "audio"),
        ("audio", "audio"), ("audio_url", "audio"), ("video", "a video"), ("video_url", "a video"), ("file", "a file"),
        ("document", "a file"),
    ],
)  # fmt: skip
def test_parts_that_are_media_are_refused_by_name(kind: str, medium: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "See: "}, {"type": kind, kind: {"url": "x"}}]}
    with pytest.raises(RecordError) as caught:
        adapter()({"messages": [message]})
    assert str(caught.value).startswith(f"messages[0].content[1] is a part of type {kind!r}, {medium}; only text is")


@pytest.mark.parametrize("nothing", [None, [], "", False])
def test_a_key_for_media_that_holds_none_does_no_harm(nothing: Any) -> None:
    record = {"messages": [USER, GOOD], "images": nothing, "videos": nothing, "audio": nothing}
    assert adapter()(record) == adapter("messages")(record) == Conversation([USER, GOOD])
