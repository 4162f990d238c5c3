"""Real templates, tokenizers and chats, with transformers as the judge; skipped where they are not at hand."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.real_data import DATA, IS_WHOLE, tokenizer_folder

NAMES = ["qwen3", "qwen2_5", "llama3_1", "mistral_nemo", "gemma3"] if IS_WHOLE else ["qwen3"]
NUM_ROWS = None if IS_WHOLE else 25

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")


@cache
def chats() -> list[dict[str, Any]]:
    return [record for path in sorted(DATA.glob("*.messages.jsonl*")) for record in islice(rows_of(path), NUM_ROWS)]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from map(json.loads, file)


def normal(text: str) -> str:
    """Qwen's tokenizer composes accents, so a decoded text may differ from what was written in that alone."""
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_apply_chat_template_and_trained_text_is_the_answers(name: str) -> None:
    path = tokenizer_folder(name)
    transformers = pytest.importorskip("transformers")
    judge = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    # Some of the chats speak of control tokens; the judge would take those for control tokens.
    encoder = RecordEncoder(load_tokenizer(path), None, EncodeOptions(special_tokens_in_content="allow"))
    records = [Conversation(record["messages"], record.get("tools")) for record in chats()]
    encoded = encoder.encode_records(records)
    found = encoded.sequences
    refused = {record: reason for record, reason, _ in encoded.dropped}
    starts = dict(zip(found.record.tolist(), zip(found.ends - found.lengths, found.ends, strict=True), strict=True))
    for number, record in enumerate(records):
        try:
            expected = judge.apply_chat_template(
                list(record.messages), tools=record.tools, tokenize=True, return_dict=False
            )
        except Exception:
            assert refused.get(number, "template_error") == "template_error"  # or another form of it renders
            continue
        if refused.get(number) == "lost_text":  # the template leaves a call out
            continue
        start, end = starts[number]
        ids, train = encoded.sequences.input_ids[start:end], encoded.sequences.train[start:end] == 1
        assert ids.tolist() == expected
        trained = normal(encoder.tokenizer.decode(ids[train].tolist()))
        answers = [message for message in record.messages if message["role"] == "assistant"]
        position = 0
        for message in answers:  # every answer, in order, with an end of turn behind it
            position = trained.index(normal(message.get("content") or "").strip(), position)
        mark = encoder.marker().ends[0]
        assert trained.count(mark) == len(answers)
        assert trained.endswith(mark)
        assert all(message["content"] not in trained for message in record.messages if message["role"] == "system")
    assert len(starts) + len(refused) == len(records)
    assert len(starts) >= len(records) // 3
