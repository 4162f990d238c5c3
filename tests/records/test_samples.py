"""The chats that the project makes itself."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.records.record import Conversation, content_hash
from megatron_packed_sft.records.samples import sample_conversations, write_sample_data
from megatron_packed_sft.records.schemas.registry import adapter, recognise
from tests.records.chat_files import values

SCHEMAS = {
    "chats.jsonl": "messages",
    "reasoning.jsonl.gz": "messages",
    "tools.jsonl": "messages",
    "sharegpt.json": "sharegpt",
    "alpaca.jsonl": "alpaca",
}


def num_words(chat: Conversation) -> int:
    return sum(len(message["content"].split()) for message in chat.messages)


def test_files_are_the_same_bytes_on_every_run_and_others_for_another_seed(tmp_path: Path) -> None:
    first, second = (write_sample_data(tmp_path / name, num_records=100, seed=5) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    other = write_sample_data(tmp_path / "c", num_records=100, seed=6)
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("num_records", [10, 57, 400])
def test_every_record_of_every_file_is_a_conversation_of_the_schema_it_shows(tmp_path: Path, num_records: int) -> None:
    paths = write_sample_data(tmp_path, num_records=num_records)
    assert [path.name for path in paths] == list(SCHEMAS)
    found = {path.name: values(path) for path in paths}
    assert sum(map(len, found.values())) == num_records
    for name, records in found.items():
        assert {recognise(record) for record in records} == {SCHEMAS[name]}
        for record in records:
            chat = adapter()(record)
            assert isinstance(chat, Conversation)
            assert chat.messages[-1]["role"] == "assistant"
            assert chat.messages[-1]["content"]


def test_the_files_show_what_their_names_say(tmp_path: Path) -> None:
    paths = {path.name: path for path in write_sample_data(tmp_path, num_records=300)}
    assert b'"reasoning_content"' in gzip.decompress(paths["reasoning.jsonl.gz"].read_bytes())
    assert b'"tool_calls"' in paths["tools.jsonl"].read_bytes()
    sharegpt = paths["sharegpt.json"].read_bytes()
    assert sharegpt.startswith(b"[\n")
    for speaker in (b"human", b"gpt", b"function_call", b"observation"):
        assert b'"from": "%s"' % speaker in sharegpt
    assert any(record["input"] for record in values(paths["alpaca.jsonl"]))


def test_chats_are_of_many_kinds_and_lengths_and_rarely_repeat() -> None:
    chats = list(sample_conversations(1500, seed=1))
    lengths = sorted(map(num_words, chats))
    assert lengths[0] < 20
    assert 50 < lengths[len(lengths) // 2] < 200
    assert lengths[-1] > 600
    assert len({content_hash(chat) for chat in chats}) > 0.97 * len(chats)
    assert {bool(chat.tools) for chat in chats} == {True, False}
    assert {"system", "user", "assistant", "tool"} == {message["role"] for chat in chats for message in chat.messages}
    assert any("reasoning_content" in message for chat in chats for message in chat.messages)
    assert {1, 2, 3, 4, 6} <= {sum(message["role"] == "user" for message in chat.messages) for chat in chats}


def test_a_record_does_not_depend_on_how_many_follow() -> None:
    assert list(sample_conversations(5)) == list(itertools.islice(sample_conversations(50), 5))


def test_the_sums_in_the_answers_are_right() -> None:
    num_checked = 0
    for chat in sample_conversations(800, seed=2):
        for message in chat.messages:
            for left, right, result in re.findall(
                r"(?<![\d.] )\b(\d+) [x*] (\d+) = (\d+)(?![\d.])", message["content"]
            ):
                assert int(left) * int(right) == int(result), message["content"]
                num_checked += 1
    assert num_checked > 100


def test_calls_name_given_tools_with_all_their_arguments_and_every_call_has_a_result() -> None:
    num_calls = 0
    for chat in sample_conversations(400, seed=3):
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools or []}
        calls = [call for message in chat.messages for call in message.get("tool_calls", [])]
        for call in calls:
            assert set(call["function"]["arguments"]) == set(parameters[call["function"]["name"]]["required"])
        results = [message["tool_call_id"] for message in chat.messages if message["role"] == "tool"]
        assert results == [call["id"] for call in calls]
        num_calls += len(calls)
    assert num_calls > 50


def test_too_few_records_and_a_folder_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="num_records is 3; use at least 10"):
        write_sample_data(tmp_path, num_records=3)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageIOError, match="cannot write sample chats into"):
        write_sample_data(tmp_path / "file", num_records=10)
