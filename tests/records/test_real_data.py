"""Real chats, where they lie on this machine: every record is accounted for."""

from __future__ import annotations

import orjson
import pytest

from megatron_packed_sft.records.record import Conversation, content_hash
from megatron_packed_sft.records.schemas.registry import adapter
from tests.real_data import DATA
from tests.records.chat_files import raw_records, values

FOLDER = DATA
NUM_ROWS = {
    "gsm8k_train.messages.jsonl.gz": 7473,
    "gsm8k_test.messages.jsonl": 1319,
    "gpteacher.alpaca.jsonl.gz": 14131,
    "sgd_tools.messages.jsonl.gz": 3000,
    "taskmaster4.messages.jsonl": 3710,
    "oasst_en100.messages.jsonl": 626,
    "reason_tool_use.messages.jsonl": 50,
    "glaive_toolcall_en.sharegpt.json": 300,
}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"needs the chats in {FOLDER}")


@pytest.mark.parametrize("name", NUM_ROWS)
def test_every_record_becomes_a_conversation_with_a_user_and_an_assistant(name: str) -> None:
    given = values(FOLDER / name, slice_bytes=1 << 18)
    records = [adapter()(value) for value in given]
    assert len(records) == NUM_ROWS[name]
    for record in records:
        assert isinstance(record, Conversation)
        roles = {message["role"] for message in record.messages}
        assert {"user", "assistant"} <= roles <= {"system", "user", "assistant", "tool"}
    different = {orjson.dumps({**value, "id": None}, option=orjson.OPT_SORT_KEYS) for value in given}
    assert len({content_hash(record) for record in records}) == len(different)


def test_units_of_any_size_give_the_same_records_of_real_chats() -> None:
    path = FOLDER / "glaive_toolcall_en.sharegpt.json"
    whole = [(raw.number, raw.value) for raw in raw_records(path)]
    assert [(raw.number, raw.value) for raw in raw_records(path, slice_bytes=5000)] == whole


def test_function_calls_of_real_sharegpt_chats_become_tool_calls_of_tools_that_are_there() -> None:
    num_calls = 0
    for value in values(FOLDER / "glaive_toolcall_en.sharegpt.json"):
        record = adapter()(value)
        assert isinstance(record, Conversation)
        names = {tool["function"]["name"] for tool in record.tools or []}
        for message in record.messages:
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in names
                assert isinstance(call["function"]["arguments"], dict)
                num_calls += 1
    assert num_calls == str(values(FOLDER / "glaive_toolcall_en.sharegpt.json")).count("'from': 'function_call'")
    assert num_calls > 100
