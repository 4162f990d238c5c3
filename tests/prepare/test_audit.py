"""`audit=true` shows what is trained, by kind; turn-by-turn rendering and cuts at turns are counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.encode import chat_templates
from tests.prepare.preparing import chat, prepare, write_records

THOUGHT = {
    "messages": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm, why?"},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it so?"},
    ]
}


@pytest.fixture
def given(tmp_path: Path, tokenizer_path: str) -> list[str]:
    (tmp_path / "thinking.jinja").write_text(chat_templates.THINKING)
    return [
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", f"template.name={tmp_path}/thinking.jinja",
        "template.end_of_turn=['<|im_end|>']", "executor.num_workers=1", "packing.pack_size=2048",
    ]  # fmt: skip


def write(tmp_path: Path, name: str, rows: list[Any]) -> str:
    return f"sources.{name}.path={write_records(tmp_path / f'{name}.jsonl', rows)}"


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["executor.num_workers=2"]])
def test_an_audit_counts_tokens_by_kind_and_source(given: list[str], tmp_path: Path, more: list[str]) -> None:
    late = chat("Why? " * 600, "So.")
    arguments = [write(tmp_path, "plain", [chat("Why?", "So."), late]), write(tmp_path, "deep", [THOUGHT] * 3)]
    done = prepare(*given, *arguments, "audit=true", *more)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("trained by kind"))
    assert lines[at].split("  ")[0] == "trained by kind"
    assert "reasoning" in lines[at]
    assert "tool call" not in lines[at]
    plain, deep = lines[at + 1].split(), lines[at + 2].split()
    assert plain[:3] == ["plain", "2", "2"]
    assert deep[:3] == ["deep", "3", "6"]
    assert (
        f"plain: 1 sequence trained on nothing before its last twentieth, such as {tmp_path}/plain.jsonl, line 2"
        in (done.out)
    )


def test_an_audit_names_records_that_train_only_an_end_of_turn(given: list[str], tmp_path: Path) -> None:
    arguments = [write(tmp_path, "one", [chat("Why?", "So."), chat("Why?", "")])]
    done = prepare(*given, *arguments, "audit=true", "encode.train.reasoning=false")
    assert done.code == 0, done.err
    assert f"one: 1 sequence trained on nothing but an end of turn, such as {tmp_path}/one.jsonl, line 2" in done.out


def test_without_an_audit_none_is_shown(given: list[str], tmp_path: Path) -> None:
    assert "trained by kind" not in prepare(*given, write(tmp_path, "one", [THOUGHT])).out


def test_sequences_that_were_added_turn_by_turn_are_counted(given: list[str], tmp_path: Path) -> None:
    arguments = [*given, write(tmp_path, "deep", [THOUGHT] * 3)]
    whole = prepare(*arguments)
    assert "the template left out reasoning 3 times (encode.render=turns keeps it); for example " in whole.out
    done = prepare(*arguments, "encode.render=auto", "--overwrite")
    assert done.code == 0, done.err
    assert "added by encode.render        3" in done.out.replace(",", "")
    assert "left out reasoning" not in done.out
    with open(tmp_path / "data" / "dataset.json") as file:
        provenance = json.load(file)["provenance"]
    assert provenance["sources"]["deep"]["num_added"] == 3
    assert provenance["splits"]["train"]["num_sequences"] == 6


def test_turns_that_were_left_out_are_counted(given: list[str], tmp_path: Path) -> None:
    turns = [message for n in range(20) for message in chat(f"Question {n}?", f"Answer {n}.")["messages"]]
    arguments = [write(tmp_path, "long", [{"messages": turns}])]
    done = prepare(*given, *arguments, "encode.max_len=200", "encode.truncation=turns")
    assert done.code == 0, done.err
    assert re.search(r"encode.max_len cut \d+ tokens and \d+ trained turns from 1 record\n", done.out)
