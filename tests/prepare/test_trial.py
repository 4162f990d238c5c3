"""The first records of every source are tried before the long stages begin."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_packed_sft.prepare import pipeline
from tests.prepare.preparing import chat, prepare, write_records

GOOD = chat("Yes?", "Yes.")
BAD = {"messages": [{"role": "user", "content": 5}]}
SILENT = {"messages": [{"role": "user", "content": "Hello?"}]}


def arguments(tmp_path: Path, tokenizer_path: str) -> list[str]:
    return [
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=256",
    ]  # fmt: skip


@pytest.fixture
def _nothing_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scan, and so every long stage after the trial, fail."""

    def never(*_: object) -> None:
        raise AssertionError("a long stage began")

    monkeypatch.setattr(pipeline, "scan", never)


@pytest.mark.usefixtures("_nothing_long")
@pytest.mark.parametrize(
    "how", [[], ["--dry-run"], ["executor=array", "executor.index=0", "executor.count=2"], ["executor=ray"]]
)
def test_a_first_record_that_cannot_be_used_stops_the_run_before_its_long_stages(
    tmp_path: Path, tokenizer_path: str, how: list[str]
) -> None:
    if "executor=ray" in how:
        pytest.importorskip("ray")
    good = write_records(tmp_path / "good.jsonl", [GOOD] * 9)
    bad = write_records(tmp_path / "bad.jsonl", [GOOD, BAD] + [GOOD] * 9)
    sources = f"sources={{one: {{path: {good}}}, two: {{path: [{good}.2, {bad}]}}}}"
    os.link(good, f"{good}.2.jsonl")
    failed = prepare(sources.replace(f"{good}.2,", f"{good}.2.jsonl,"), *arguments(tmp_path, tokenizer_path), *how)
    assert failed.code == 2
    assert "bad.jsonl, line 2: messages[0].content" in failed.err
    assert "max_errors=100" in failed.err
    assert failed.err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_skipped_records_are_only_a_warning_if_all_that_were_tried_are(tmp_path: Path, tokenizer_path: str) -> None:
    some = write_records(tmp_path / "some.jsonl", [BAD, GOOD] * 3)
    done = prepare(f"input={some}", *arguments(tmp_path, tokenizer_path), "max_errors=100")
    assert done.code == 0, done.err
    assert "would all be dropped" not in done.err
    late = write_records(tmp_path / "late.jsonl", [BAD] * 3 + [SILENT] + [GOOD] * 9)
    done = prepare(f"input={late}", *arguments(tmp_path, tokenizer_path), "max_errors=100", "max_drop_share=1",
                   "--overwrite")  # fmt: skip
    assert done.code == 0, done.err
    assert (
        "packed-sft prepare: warning: the first 4 records of source input would all be dropped (bad_row 3, "
        "nothing_to_train 1), such as " in done.err
    )
    assert "late.jsonl, line 1: messages[0].content" in done.err


def test_the_trial_changes_nothing_of_the_result(tmp_path: Path, tokenizer_path: str, chats: Path) -> None:
    given = [f"input={chats}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "--quiet"]
    written = []
    for number in (1, 2):
        if number == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipeline, "try_first_records", lambda *_: [])
                assert prepare(*given, f"output={tmp_path}/{number}").code == 0
        else:
            assert prepare(*given, f"output={tmp_path}/{number}").code == 0
        written.append(
            {
                path.relative_to(tmp_path / str(number)): path.read_bytes()
                for path in sorted((tmp_path / str(number)).rglob("*"))
                if path.is_file() and path.name != "README.md"
            }
        )
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["twice.jsonl", "twice.json"])
def test_a_key_that_stands_twice_in_a_first_record_is_a_warning(tmp_path: Path, tokenizer_path: str, name: str) -> None:
    twice = json.dumps(GOOD).replace('"content": "Yes."', '"content": "No.", "content": "Yes."')
    rows = [json.dumps(GOOD), twice, twice]
    (tmp_path / name).write_text("\n".join(rows) if name == "twice.jsonl" else f"[{','.join(rows)}]")
    done = prepare(f"input={tmp_path / name}", *arguments(tmp_path, tokenizer_path), "--dry-run")
    assert done.code == 0, done.err
    noun = "line" if name == "twice.jsonl" else "record"
    assert (
        f"packed-sft prepare: warning: {tmp_path / name}, {noun} 2: the key 'content' appears twice in one object, and "
        "only the last one counts\n" in done.err
    )
    assert done.err.count("twice in one object") == 1
