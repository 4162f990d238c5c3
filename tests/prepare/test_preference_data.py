"""Preference data through `packed-sft prepare`: refused, or its chosen side taken, with input= and with sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import load_tokenizer, open_dataset, open_token_store
from tests.prepare.preparing import chat, prepare, write_records

PAIR = {
    "chosen": [{"role": "user", "content": "Which number?"}, {"role": "assistant", "content": "seven"}],
    "rejected": [{"role": "user", "content": "Which number?"}, {"role": "assistant", "content": "eight"}],
}


@pytest.fixture
def arguments(tmp_path: Path, tokenizer_path: str) -> list[str]:
    """What every run has, but for its input."""
    return [
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml", "executor.num_workers=1",
        "packing.pack_size=256",
    ]  # fmt: skip


def texts_of(work: Path, tokenizer_path: str) -> tuple[str, str]:
    """All text of the only sequence, and what of it is trained."""
    ids, train = open_token_store(work / "tokens" / "train")[0]
    decode = load_tokenizer(tokenizer_path).decode
    return decode(ids.tolist()), decode(ids[np.asarray(train) != 0].tolist())


@pytest.mark.parametrize("named", [False, True])
def test_pairs_are_refused_with_a_remedy_that_works(
    tmp_path: Path, tokenizer_path: str, arguments: list[str], named: bool
) -> None:
    path = write_records(tmp_path / "pairs.jsonl", [PAIR])
    name, given = ("maths", f"sources.maths.path={path}") if named else ("input", f"input={path}")
    refused = prepare(given, *arguments)
    assert refused.code == 2
    assert "pairs.jsonl, line 1: the record is preference data (keys chosen, rejected)" in refused.err
    assert "set sources.NAME.take=chosen" in refused.err
    done = prepare(given, *arguments, f"sources.{name}.take=chosen")
    assert done.code == 0, done.err
    text, trained = texts_of(tmp_path / "data.work", tokenizer_path)
    assert trained.strip().startswith("seven")
    assert "Which number?" in text
    assert "eight" not in text


def test_records_that_are_not_taken_are_counted_and_cost_no_share(tmp_path: Path, arguments: list[str]) -> None:
    records = [{**chat(f"Question {number}?", "Answer."), "label": number % 4 == 0} for number in range(8)]
    path = write_records(tmp_path / "kto.jsonl", records)
    done = prepare(f"input={path}", *arguments, "sources.input.take=chosen", "max_drop_share=0")
    assert done.code == 0, done.err
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {"not_taken": 6}
    again = prepare(f"input={path}", *arguments, "sources.input.take=chosen", "max_drop_share=0")
    assert "1 reused, 0 encoded" in again.out


def test_taking_or_not_is_part_of_what_a_dataset_was_made_from(tmp_path: Path, arguments: list[str]) -> None:
    path = write_records(tmp_path / "pairs.jsonl", [PAIR])
    assert prepare(f"input={path}", *arguments, "sources.input.take=chosen").code == 0
    assert "the record is preference data" in prepare(f"input={path}", *arguments, "--overwrite").err


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sources.input.take=rejected", "sources.input.take is 'rejected'; choose chosen or null"),
        ("sources.input={take: chosen, schema: messages}", "sources.input.take goes with schema auto"),
        ("sources.input.path=other.jsonl", "input and sources were both given"),
        ("sources.other.take=chosen", "input and sources were both given"),
        ("sources.input.schema=text", "pairs.jsonl, line 1: the record is preference data"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, arguments: list[str], override: str, sentence: str) -> None:
    path = write_records(tmp_path / "pairs.jsonl", [PAIR])
    failed = prepare(f"input={path}", *arguments, override)
    assert failed.code == 2
    assert sentence in failed.err
    assert failed.err.count("\n") == 1


def test_other_keys_of_the_input_are_those_of_its_source(tmp_path: Path, arguments: list[str]) -> None:
    path = write_records(tmp_path / "log.jsonl", [{"log": chat("Which number?", "seven")["messages"]}])
    done = prepare(f"input={path}", *arguments, "sources.input={mapping: {messages: log}, weight: 2}")
    assert done.code == 0, done.err
    assert open_dataset(tmp_path / "data").figures["train"]["num_sequences"] == 2


def test_a_source_without_files_is_told_so(arguments: list[str]) -> None:
    assert (
        "sources.maths.path has no value; add sources.maths.path=..."
        in prepare(*arguments, "sources.maths.take=chosen").err
    )
