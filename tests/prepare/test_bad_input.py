"""Wrong input to `packed-sft prepare`: one sentence with what, where and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_packed_sft import open_dataset
from tests.prepare.preparing import chat, prepare, write_records

GOOD = chat("Yes?", "Yes.")


def arguments(tmp_path: Path, tokenizer_path: str) -> list[str]:
    return [
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml", "executor.num_workers=1",
        "packing.pack_size=256",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{not json", "rows.jsonl, line 2: the record is not valid JSON"),
        ('{"messages": [{"role": "user", "content": 5}]}', "rows.jsonl, line 2: messages[0].content"),
        ('{"weather": "fine"}', "rows.jsonl, line 2: "),
        ("[1, 2]", "rows.jsonl, line 2: the record is "),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line_or_counted(
    tmp_path: Path, tokenizer_path: str, row: str, sentence: str
) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, row, GOOD])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path)]
    failed = prepare(*given)
    assert failed.code == 2
    assert sentence in failed.err
    assert "max_errors=100" in failed.err
    assert failed.err.count("\n") == 1
    assert not (tmp_path / "data").exists()
    skipped = prepare(*given, "max_errors=100")
    assert skipped.code == 0, skipped.err
    assert sentence in skipped.out
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {"bad_row": 1}


def test_skipping_has_a_limit(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", ["{", GOOD, "{", "{"])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path)]
    failed = prepare(*given, "max_errors=2")
    assert failed.code == 2
    assert "3 records could not be used, more than max_errors=2 allows; the first: " in failed.err
    assert prepare(*given, "max_errors=3").code == 0


def test_rows_without_anything_to_train_are_counted_or_an_error(tmp_path: Path, tokenizer_path: str) -> None:
    silent = {"messages": [{"role": "user", "content": "Hello?"}]}
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, silent])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path)]
    assert prepare(*given, "max_drop_share=0.5").code == 0
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {"nothing_to_train": 1}
    failed = prepare(*given, "max_drop_share=0", "--overwrite")
    assert failed.code == 2
    assert "more than max_drop_share=0 allows" in failed.err


def test_nothing_left_is_an_error_with_the_reasons(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "Hello?"}]}])
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path))
    assert failed.code == 2
    assert "all 1 records were dropped (nothing_to_train 1)" in failed.err
    empty = write_records(tmp_path / "empty.jsonl", [])
    assert "the input has no records" in prepare(f"input={empty}", *arguments(tmp_path, tokenizer_path)).err


def test_an_answer_that_is_cut_away_is_counted(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, chat("Why? " * 100, "Because.")])
    done = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), "encode.max_len=64", "max_drop_share=1")
    assert done.code == 0, done.err
    assert open_dataset(tmp_path / "data").provenance["sources"]["input"]["dropped"] == {"answer_cut_away": 1}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("packing_length=256", "packing_length is not a key; use packing.pack_size"),
        ("packing.pack_sise=256", "packing.pack_sise is not a key; did you mean packing.pack_size?"),
        ("packing.pack_size=long", "packing.pack_size is 'long'; it must be an integer"),
        ("template.path=x.jinja", "template.path is not a key; use template.name"),
        ("tokenizer.name=x", "tokenizer.name is not a key; use tokenizer.path"),
        ("template.files=x.jinja", "template.files is not a key; template has the keys name, date"),
        ("date=2026-01-31", "date is not a key; did you mean template.date?"),
        ("max_errors=-1", "max_errors is -1; it must be 0 or more"),
        ("limit=0", "limit is 0"),
        ("shard_megabytes=0", "shard_megabytes is 0"),
        ("packed_storage=zarr", "storage 'zarr' is unknown; use one of memmap_v1, legacy, parquet"),
        ("tokenizer.path=/nowhere", "/nowhere"),
        ("template.name=/nowhere.jinja", "/nowhere.jinja"),
        ("packing.strategy=best", "strategy 'best' is unknown"),
        ("+sources={other: {path: x.jsonl}}", "input and sources were both given"),
        ("split.validation_fraction=2", "split.validation_fraction is 2"),
        ("encode.truncation=middle", "encode.truncation is 'middle'"),
        ("packing.overflow=single", "choose from error, drop, truncate, split"),
        ("max_drop_share=2", "max_drop_share is 2; it must be from 0 to 1"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, tokenizer_path: str, override: str, sentence: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD])
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), override)
    assert failed.code == 2
    assert sentence in failed.err
    assert failed.err.count("\n") == 1


def test_a_template_that_writes_the_date_names_the_key_that_sets_it(tmp_path: Path, tokenizer_path: str) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = write_records(tmp_path / "rows.jsonl", [GOOD])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path), f"template.name={template}"]
    failed = prepare(*given)
    assert failed.code == 2
    assert "dated.jinja writes today's date, so ids would differ between runs; set template.date, such as" in failed.err
    assert prepare(*given, "template.date=2026-01-31").code == 0


def test_content_that_is_null_is_the_record_s_fault_only_if_nothing_else_is_said(
    tmp_path: Path, tokenizer_path: str
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip() }}{{ m.reasoning_content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    calling = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    thinking = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "reasoning_content": "Hm."}]}
    rows = write_records(tmp_path / "rows.jsonl", [GOOD, calling, thinking])
    given = [f"input={rows}", *arguments(tmp_path, tokenizer_path), f"template.name={template}"]
    done = prepare(*given)
    assert done.code == 0, done.err
    write_records(rows, [{"messages": [GOOD["messages"][0], {"role": "assistant", "content": None}]}])
    failed = prepare(*given, "--overwrite")
    assert "line 1: messages[1].content is null or missing, and there are no tool_calls; give one" in failed.err


def test_missing_input_is_one_sentence(tmp_path: Path, tokenizer_path: str) -> None:
    given = arguments(tmp_path, tokenizer_path)
    assert "no input: give input=FILES" in prepare(*given).err
    assert "nothing*.jsonl" in prepare(f"input={tmp_path}/nothing*.jsonl", *given).err
    assert "output has no value" in prepare("input=x.jsonl", "tokenizer.path=x").err


def test_what_prepare_did_not_make_is_never_replaced(tmp_path: Path, tokenizer_path: str) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("years of work")
    failed = prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path), "--overwrite")
    assert failed.code == 1
    assert "holds other files (" in failed.err
    assert "remove" not in failed.err
    assert os.listdir(tmp_path / "data") == ["thesis.txt"]


def test_read_only_input_is_read(tmp_path: Path, tokenizer_path: str) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    rows = write_records(folder / "rows.jsonl", [GOOD])
    rows.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert prepare(f"input={rows}", *arguments(tmp_path, tokenizer_path)).code == 0
        assert os.listdir(folder) == ["rows.jsonl"]
    finally:
        folder.chmod(0o755)
