"""Files that would hang, fill the memory or end in a traceback: each is one sentence of `packed-sft prepare`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft import open_dataset
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from tests.prepare.preparing import chat, prepare, write_records

GOOD = chat("Yes?", "Yes.")


def arguments(tmp_path: Path, tokenizer_path: str) -> list[str]:
    return [
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml", "executor.num_workers=1",
        "packing.pack_size=256", "max_drop_share=1",
    ]  # fmt: skip


def deep_record(depth: int) -> str:
    call = f'{{"function": {{"name": "f", "arguments": {nested(depth)}}}}}'
    return f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_deeply_nested_record_is_an_error_with_its_line_or_counted(
    tmp_path: Path, tokenizer_path: str, depth: int
) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, deep_record(depth), GOOD])
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path))
    assert failed.code == 2
    assert "rows.jsonl, line 2: the record is nested more than 100 levels deep" in failed.err
    assert failed.err.count("\n") == 1
    skipped = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), "max_errors=100")
    assert skipped.code == 0, skipped.err
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {"bad_row": 1}


def test_the_deepest_record_that_is_read_is_also_encoded(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, deep_record(90), deep_record(90), GOOD])
    done = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), "packing.pack_size=4096")
    assert done.code == 0, done.err
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {}


def test_a_large_record_is_dropped_or_an_error_and_the_limit_can_be_raised(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, chat("Why? " * 500, "Because."), GOOD])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path), "max_record_bytes=1000"]
    failed = prepare(*given)
    assert failed.code == 2
    assert "rows.jsonl, line 2: the record has more than max_record_bytes=1,000 bytes" in failed.err
    skipped = prepare(*given, "max_errors=100")
    assert skipped.code == 0, skipped.err
    again = prepare(*given[:-1], "packing.pack_size=4096", "--overwrite")
    assert again.code == 0, again.err  # what was dropped under another limit is read again
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {}
    assert "max_record_bytes is 0" in prepare(*given[:-1], "max_record_bytes=0").err


def test_errors_stop_a_slice_as_soon_as_there_are_too_many(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, *["1"] * 200_000])
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), "max_errors=100")
    assert "101 records could not be used, more than max_errors=100 allows" in failed.err


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.json.gz"])
def test_a_pipe_as_input_is_refused_and_never_waited_for(tmp_path: Path, tokenizer_path: str, name: str) -> None:
    os.mkfifo(tmp_path / name)
    failed = prepare(f"input={tmp_path}/*.{name.split('.')[-1]}", *arguments(tmp_path, tokenizer_path))
    assert failed.code == 2
    assert f"{name} is a named pipe" in failed.err


def test_pipes_in_place_of_other_files_are_refused(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD])
    pipe = tmp_path / "tokenizer.model"
    os.mkfifo(pipe)
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path)]
    for wrong in (f"rejects={pipe}", f"template.name={pipe}", f"tokenizer.path={pipe}", f"tokenizer.path={tmp_path}"):
        failed = prepare(*given, wrong)
        assert failed.code == 2
        assert failed.err.count("\n") == 1, failed.err


DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}


def _token(**changed: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 1, "content": "<x>", "special": True, **flags, **changed}


@pytest.mark.parametrize(
    ("changed", "config", "problem"),
    [
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, {}, "tokenizer.json has an empty vocabulary"),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, {}, "tokenizer.json has an empty vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": 5}}, {}, "has merges that are not a list"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}},
            {},
            "has an id of 2,147,483,647 or more",
        ),
        ({"model": None}, {}, "has no model"),
        ({"model": {}}, {}, "is not a tokenizer"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            {},
            "is not a tokenizer that",
        ),  # panics
        ({"added_tokens": None}, {}, "has added_tokens that are not a list of objects"),
        ({"added_tokens": [{"id": 1}]}, {}, "has an added token without a text or an id"),
        ({"added_tokens": [_token(content="x" * 1_000_000)]}, {}, "has an added token of 1,000,000 characters"),
        ({}, {"added_tokens_decoder": [1]}, "differ from what Hugging Face writes"),
        ({}, {"chat_template": [5]}, "differ from what Hugging Face writes"),
        ({}, {"additional_special_tokens": 5}, "differ from what Hugging Face writes"),
    ],
)
def test_a_degenerate_tokenizer_is_one_sentence(
    tmp_path: Path, changed: dict[str, Any], config: dict[str, Any], problem: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(DOCUMENT | changed))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInputError, match=problem):
        load_tokenizer(tmp_path)


def test_a_pattern_that_looks_for_ever_is_one_sentence(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(DOCUMENT | {"pre_tokenizer": pattern}))
    with pytest.raises(InvalidInputError, match="cannot encode a text"):
        load_tokenizer(tmp_path).encode_many([MarkedText("a" * 40 + "!", ())])


@pytest.mark.parametrize(
    "text",
    [
        "output: !!python/object/apply:os.system ['touch hacked']\n",
        "output: !!python/name:os.system\n",
        "output: [\n",
        "\toutput: x\n",
        "output: a\noutput: b\n",
        "output: " + "[" * 3000 + "]" * 3000 + "\n",
        "output: " + "9" * 5000 + "\n",
    ],
)
def test_yaml_that_is_not_plain_is_one_sentence(tmp_path: Path, tokenizer_path: str, text: str) -> None:
    (tmp_path / "my.yaml").write_text(f"defaults:\n  - prepare\n  - _self_\n{text}")
    given = ["--config-dir", str(tmp_path), "--config-name", "my"]
    failed = prepare("input=none.jsonl", *arguments(tmp_path, tokenizer_path), *given)
    assert failed.code == 2
    assert "packed-sft prepare: error: my.yaml or a file that it names is not plain YAML (" in failed.err
    assert failed.err.count("\n") == 1
    assert not Path("hacked").exists()


def test_a_template_without_end_is_an_error_before_anything_is_encoded(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "evil.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% for n in range(99999) %}{{ 'a'.center(999) }}{% endfor %}{% endfor %}"
    )
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), f"template.name={tmp_path}/evil.jinja")
    assert failed.code == 2
    assert "evil.jinja writes more than 64,000,000 characters" in failed.err
    assert failed.err.count("\n") == 1
