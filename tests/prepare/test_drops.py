"""Data that is lost: attributed to its source, shown, limited, and listed line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_packed_sft import open_dataset
from tests.prepare.preparing import chat, prepare, write_records

SHORT, LONG = chat("Why?", "Because."), chat("Why?", "Because. " * 60)


@pytest.fixture
def given(tmp_path: Path, tokenizer_path: str) -> list[str]:
    """Two sources; every second record of the second one is longer than a bin."""
    write_records(tmp_path / "zebra.jsonl", [SHORT] * 10)
    write_records(tmp_path / "apple.jsonl", [SHORT, "", LONG] * 5)
    return [
        f"sources.zebra.path={tmp_path}/zebra.jsonl", f"sources.apple.path={tmp_path}/apple.jsonl",
        f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml", "executor.num_workers=1",
        "packing.pack_size=64",
    ]  # fmt: skip


def table_of(shown: str, first: str) -> dict[str, list[str]]:
    """A table of the summary: the first cell of each line -> the others."""
    lines = shown[shown.index(f"{first} ") :].partition("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for line in lines if (cells := line.split())}


def test_too_much_loss_is_an_error_before_anything_is_published(given: list[str], tmp_path: Path) -> None:
    failed = prepare(*given)
    assert failed.code == 2
    remedy = (
        "5 records: longer than packing.pack_size (raise packing.pack_size, or set packing.overflow=split or truncate)"
    )
    for wanted in ("25.0 % of the records and ", remedy, "more than max_drop_share=0.2 allows", "rejects=PATH"):
        assert wanted in failed.err
    assert failed.err.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_the_tables_count_what_is_in_the_bins_and_name_the_source_of_drops(
    given: list[str], tmp_path: Path, more: list[str]
) -> None:
    done = prepare(*given, "max_drop_share=1", *more)
    assert done.code == 0, done.err
    assert "warning: 25.0 % of the records and " in done.err
    sources = table_of(done.out, "source")
    assert list(sources) == ["source", "zebra", "apple"]
    assert sources["zebra"][:3] == ["10", "0", "10"]
    assert sources["apple"][:3] == ["10", "5", "5"]
    split = table_of(done.out, "split")["train"]
    assert split[0] == "15"
    if not more:
        figures = open_dataset(tmp_path / "data").figures["train"]
        assert [figures["num_sequences"], figures["num_tokens"]] == [int(cell.replace(",", "")) for cell in split[:2]]
        provenance = open_dataset(tmp_path / "data").provenance["sources"]
        assert provenance["apple"]["dropped_by_plan"] == {"longer_than_pack": 5}
        assert provenance["zebra"]["dropped_by_plan"] == {}


def test_sources_keep_the_order_of_the_configuration_in_a_rerun(given: list[str]) -> None:
    first, again = (prepare(*given, "max_drop_share=1").out for _ in range(2))
    assert "2 reused, 0 encoded" in again
    assert table_of(first, "source") == table_of(again, "source")
    assert list(table_of(again, "source")) == ["source", "zebra", "apple"]


@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_long_records_are_cut_when_asked(given: list[str], tmp_path: Path, overflow: str) -> None:
    done = prepare(*given, f"packing.overflow={overflow}", "max_drop_share=1")
    assert done.code == 0, done.err
    sources, split = table_of(done.out, "source"), table_of(done.out, "split")["train"]
    assert [sources["apple"][1], split[0]] == ["0", "20"]
    assert open_dataset(tmp_path / "data").figures["train"]["num_tokens"] == int(split[1].replace(",", ""))
    assert ("cut off by packing.overflow=truncate (raise packing.pack_size, or set packing" in done.err) == (
        overflow == "truncate"
    )


def test_rejects_name_the_line_of_every_lost_record(given: list[str], tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "Hello?"}]}
    write_records(tmp_path / "zebra.jsonl", [SHORT, "{", silent, SHORT])
    rejects = tmp_path / "lost.jsonl"
    more = (f"rejects={rejects}", "max_errors=100", "deduplicate=false")
    failed = prepare(*given, *more)
    assert failed.code == 2  # the file helps to find out why
    lost = [json.loads(line) for line in rejects.read_text().splitlines()]
    places = [(Path(one["file"]).name, one["line"], one["reason"]) for one in lost]
    assert places == [
        ("zebra.jsonl", 2, "bad_row"),
        ("zebra.jsonl", 3, "nothing_to_train"),
        *(("apple.jsonl", line, "longer_than_pack") for line in (3, 6, 9, 12, 15)),
    ]
    assert "tokens, but at most 64 fit into a bin" in lost[-1]["detail"]
    before = rejects.read_bytes()
    assert prepare(*given, *more, "max_drop_share=1").code == 0
    assert rejects.read_bytes() == before


def test_a_file_that_is_no_rejects_file_is_never_replaced(given: list[str], tmp_path: Path) -> None:
    failed = prepare(*given, f"rejects={tmp_path}/zebra.jsonl")
    assert failed.code == 2
    assert "exists and is not a rejects file; choose another path" in failed.err


def test_another_dataset_is_replaced_only_when_asked(given: list[str], tmp_path: Path) -> None:
    given = [*given, "packing.pack_size=1024"]
    assert prepare(*given).code == 0
    write_records(tmp_path / "zebra.jsonl", [SHORT] * 11)
    failed = prepare(*given, "packing.pack_size=512")
    assert failed.code == 1
    for wanted in ("packing.pack_size 1024 -> 512", "sources.zebra.files changed (zebra.jsonl)", "add --overwrite"):
        assert wanted in failed.err
    assert open_dataset(tmp_path / "data").figures["train"]["pack_size"] == 1024
    assert prepare(*given, "packing.pack_size=512", "--overwrite").code == 0
    assert open_dataset(tmp_path / "data").figures["train"]["pack_size"] == 512
    assert "is up to date" in prepare(*given, "packing.pack_size=512").out


def test_other_peoples_folders_are_never_touched(given: list[str], tmp_path: Path) -> None:
    failed = prepare(*given, f"output={tmp_path}", f"work_dir={tmp_path}/work", "--overwrite")
    assert failed.code == 1
    assert f"output {tmp_path} holds other files (apple.jsonl, zebra.jsonl); choose another output" in failed.err
    assert "remove" not in failed.err
