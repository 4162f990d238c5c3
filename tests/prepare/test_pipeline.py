"""`packed-sft prepare` from files to published shards: every row accounted for, the same bytes every time."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import create_sft_dataset, open_dataset, open_token_store, validate
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.prepare import pipeline, work_directory
from tests.packed_bins import files_of
from tests.prepare.preparing import chat, prepare, write_records
from tests.records.chat_files import FORMATS
from tests.records.chat_files import write_records as write_file

TEMPLATE = "template=chatml"
SMALL = ("packing.pack_size=1024", "executor.num_workers=1")
LONG_FILES: dict[str, dict[str, int]] = {"jsonl": {}, "jsonl.gz": {}, "parquet": {"row_group_size": 300}}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_records(tmp_path / "few.jsonl", [chat(f"Say {number}.", f"It is {number}.") for number in range(40)])


def test_every_row_of_every_format_is_packed_or_counted(chats: Path, tokenizer_path: str, tmp_path: Path) -> None:
    output = tmp_path / "data"
    done = prepare(
        f"input={chats}/*", f"output={output}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL,
        "split.validation_fraction=0.2", "max_drop_share=0.6",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert validate(output).ok
    dataset = open_dataset(output)
    source = dataset.provenance["sources"]["input"]
    packed = sum(
        one["num_sequences"] - sum(one["accounting"]["dropped_sequences"].values())
        for one in dataset.provenance["splits"].values()
    )
    planned = sum(sum(one["accounting"]["dropped_sequences"].values()) for one in dataset.provenance["splits"].values())
    assert source["num_rows"] == 200 == packed + planned + sum(source["dropped"].values())
    assert packed > 150
    assert set(dataset.splits) == {"train", "validation"}
    assert sum(figures["num_sequences"] for figures in dataset.figures.values()) == packed
    for split, store in (("train", "train"), ("validation", "validation")):
        assert open_token_store(f"{output}.work/tokens/{store}").num_tokens == dataset.figures[split][
            "num_tokens"
        ] + sum(dataset.provenance["splits"][split]["accounting"]["dropped_tokens"].values())


def test_what_is_trained_is_the_answers_and_their_ends(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    output = tmp_path / "data"
    assert prepare(f"input={few}", f"output={output}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL).code == 0
    tokenizer = load_tokenizer(tokenizer_path)
    dataset = create_sft_dataset(output, tokenizer, seq_length=1024)
    texts = set()
    for index in range(len(dataset)):
        row = dataset[index]
        ids, mask, bounds = (np.asarray(row[key]) for key in ("input_ids", "loss_mask", "seq_boundaries"))
        for start, stop in itertools.pairwise(bounds):
            targets = ids[start + 1 : stop][mask[start : stop - 1] == 1]
            texts.add(tokenizer.decode(targets.tolist()))
    assert texts == {f"It is {number}.<|im_end|>" for number in range(40)}


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
def test_any_number_of_workers_gives_the_same_bytes(
    chats: Path, tokenizer_path: str, tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_packed_sft.prepare.sources._SMALLEST_SLICE", 1 << 18)
    contents = []
    files = [
        write_file(tmp_path / f"long.{suffix}", [{"text": f"{suffix} {row} " * 130} for row in range(1000)], **more)
        for suffix, more in LONG_FILES.items()
    ]
    for num_workers in (1, 2) if storage == "legacy" else (1, 2, 7):
        output = tmp_path / f"with_{num_workers}"
        done = prepare(
            f"input=[{chats}/*,{','.join(map(str, files))}]", f"output={output}", f"tokenizer.path={tokenizer_path}",
            TEMPLATE, f"storage={storage}", "packing.pack_size=1024", f"executor.num_workers={num_workers}",
            "split.validation_fraction=0.1", "shard_megabytes=1", "deduplicate=true", "max_drop_share=1",
            f"rejects={tmp_path}/rejects_{num_workers}.jsonl",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert int(done.out.partition("encode ")[2].split()[0]) > len(files) + 8  # long files are cut into units
        rejects = (tmp_path / f"rejects_{num_workers}.jsonl").read_bytes()
        assert rejects.count(b"longer_than_pack") > 1000
        contents.append({**files_of(output), "rejects": rejects})
    assert all(content == contents[0] for content in contents)
    assert len(contents[0]) > 4


def test_every_format_gives_the_same_tokens_whatever_null_keys_it_adds(tokenizer_path: str, tmp_path: Path) -> None:
    rows = []
    for number, (name, arguments) in enumerate([("find", {"city": "Rome"}), ("add", {"a": 1, "b": 2}), ("now", {})]):
        tool = {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "any"} for key in arguments}},
        }
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        thinking = {"role": "assistant", "content": "Done.", "reasoning_content": "It is said."}
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Yes"},
            thinking,
        ]
        more = {"tools": [{"type": "function", "function": tool}]} if number != 1 else {}
        rows.append({"messages": [*chat(f"Say {number}.", "One moment.")["messages"], *turns], **more})
    rows.append(chat("Without any tool?", "Yes."))
    stores = {}
    for suffix in FORMATS:
        path = write_file(tmp_path / f"rows.{suffix}", rows)
        given = (
            f"input={path}",
            f"output={tmp_path}/of_{suffix}",
            f"tokenizer.path={tokenizer_path}",
            TEMPLATE,
            *SMALL,
        )
        done = prepare(*given)
        assert done.code == 0, done.err
        store = open_token_store(tmp_path / f"of_{suffix}.work" / "tokens" / "train")
        stores[suffix] = [[array.tolist() for array in store[number]] for number in range(len(store))]
    assert all(store == stores["jsonl"] for store in stores.values())
    text = load_tokenizer(tokenizer_path).decode(stores["parquet"][0][0])
    assert '{"city": "Rome"}' in text
    assert "null" not in text
    assert "None" not in text


def test_texts_need_no_template_and_chats_say_that_they_do(tokenizer_path: str, tmp_path: Path) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [{"prompt": "2+2=", "completion": "4"}, {"text": "All of it."}])
    arguments = (f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", *SMALL)
    done = prepare(f"input={rows}", *arguments)
    assert done.code == 0, done.err
    assert "No chat template" in (tmp_path / "data" / "README.md").read_text()
    write_records(rows, [chat("Yes?", "Yes.")])
    assert (
        "has no chat template; set template.name to a Jinja file, or to one of chatml"
        in prepare(f"input={rows}", *arguments, "--overwrite").err
    )


def test_what_is_stored_is_the_rendered_chat(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    assert prepare(*arguments).code == 0
    store = open_token_store(tmp_path / "data.work" / "tokens" / "train")
    decode = load_tokenizer(tokenizer_path).decode
    assert [decode(store[number][0].tolist()) for number in range(len(store))] == [
        f"<|im_start|>user\nSay {number}.<|im_end|>\n<|im_start|>assistant\nIt is {number}.<|im_end|>\n"
        for number in range(40)
    ]


def test_a_rerun_redoes_nothing_and_says_so(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    first = prepare(*arguments)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    again = prepare(*arguments)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    assert before == after
    assert "1 slice: 0 reused, 1 encoded" in first.out
    assert "1 slice: 1 reused, 0 encoded" in again.out
    assert " bins" in again.out
    assert "is up to date" in again.out


def test_another_pack_size_tokenizes_nothing_again(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE)
    assert prepare(*arguments, *SMALL).code == 0
    again = prepare(*arguments, "packing.pack_size=512", "executor.num_workers=1", "--overwrite")
    assert "1 reused, 0 encoded" in again.out
    assert " bins" in again.out
    assert open_dataset(tmp_path / "data").figures["train"]["pack_size"] == 512
    assert validate(tmp_path / "data").ok


@pytest.mark.parametrize(
    "changed", ["encode.train_on_eot=false", "template=plain", "split.validation_fraction=0.5", "encode.max_len=20"]
)
def test_other_settings_encode_again(few: Path, tokenizer_path: str, tmp_path: Path, changed: str) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    assert prepare(*arguments).code == 0
    assert "0 reused, 1 encoded" in prepare(*arguments, changed, "--overwrite", "max_drop_share=1").out


def test_changed_input_encodes_again(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    prepare(*arguments)
    few.write_text(few.read_text().replace("It is 7.", "It was 7."))
    assert "0 reused, 1 encoded" in prepare(*arguments, "--overwrite").out


def test_damaged_parts_and_shards_are_made_again(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    output = tmp_path / "data"
    arguments = (f"input={few}", f"output={output}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    prepare(*arguments)
    whole = files_of(output)
    part = tmp_path / "data.work" / "tokens" / "train" / "part_000000" / "ids.npy"
    part.write_bytes(part.read_bytes()[:-2])
    assert "0 reused, 1 encoded" in prepare(*arguments).out
    shard = output / "train" / "shard_000000" / "input_ids.npy"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "1 reused, 0 encoded" in prepare(*arguments).out
    assert files_of(output) == whole


@pytest.mark.parametrize("stage", ["plan_splits", "publish"])
def test_a_bit_that_flips_before_shards_are_made_is_never_published(
    few: Path, tokenizer_path: str, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "data"
    arguments = (f"input={few}", f"output={output}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    ids = tmp_path / "data.work" / "tokens" / "train" / "part_000000" / "ids.npy"
    run = getattr(pipeline, stage)

    def run_after_damage(first: Any, second: Any, *others: Any) -> Any:
        for store in (first if stage == "plan_splits" else others[0]).values():
            for part in store.parts:
                part.unmap()  # as another process would read it
        data = bytearray(ids.read_bytes())
        data[300] ^= 1
        ids.write_bytes(data)
        return run(first, second, *others)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, stage, run_after_damage)
        refused = prepare(*arguments)
    assert refused.code != 0
    assert f"{ids} is damaged at sequence" in refused.err
    assert not output.exists()
    again = prepare(*arguments)
    assert again.code == 0, again.err
    assert "0 reused, 1 encoded" in again.out
    assert validate(output).ok


def test_tokens_of_another_layout_are_encoded_anew(
    few: Path, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    monkeypatch.setattr(work_directory, "_LAYOUT", 4)  # before sequences had checksums
    assert prepare(*arguments).code == 0
    monkeypatch.undo()
    assert "0 reused, 1 encoded" in prepare(*arguments).out


def test_a_dry_run_counts_and_writes_nothing(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    before = sorted(tmp_path.rglob("*"))
    dry = prepare(*arguments, "--dry-run")
    assert dry.code == 0, dry.err
    assert sorted(tmp_path.rglob("*")) == before
    assert "nothing was written" in dry.out
    real = prepare(*arguments)
    tables = [text[text.index("records read") :].strip().split("\n\n")[:3] for text in (dry.out, real.out)]
    assert tables[0] == tables[1]


def test_a_dry_run_knows_limits_and_duplicates(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    write_records(few, [chat("Same?", "Same."), *([chat("Same?", "Same.")] * 4), *([chat("Other?", "Other.")] * 5)])
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    dry = prepare(*arguments, "--dry-run", "limit=7", "deduplicate=true")
    lines = [line.split() for line in dry.out.splitlines() if line.startswith(("records r", "dropped:", "packed "))]
    dropped = ["dropped:", "equal", "to", "an", "earlier", "record", "5"]
    assert lines[:2] == [["records", "read", "7"], dropped]
    assert lines[2][:2] == ["packed", "2"]


def test_a_large_dry_run_looks_at_some_units(
    tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_packed_sft.prepare.encode_stage.ENOUGH_BYTES", 300_000)
    monkeypatch.setattr("megatron_packed_sft.prepare.sources._SMALLEST_SLICE", 1 << 18)
    rows = write_records(tmp_path / "rows.jsonl", [chat(f"{n}? " * 40, f"{n}. " * 40) for n in range(3000)])
    dry = prepare(
        f"input={rows}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL, "--dry-run"
    )
    assert dry.code == 0, dry.err
    assert "of the input; multiply by" in dry.out


def test_a_limit_takes_the_first_rows_of_each_source(tokenizer_path: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_records(tmp_path / f"{name}.jsonl", [chat(f"{name} {number}?", "Yes.") for number in range(30)])
    done = prepare(
        f"+sources={{a: {{path: {tmp_path}/a.jsonl}}, b: {{path: {tmp_path}/b.jsonl}}}}",
        f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL, "limit=5",
    )  # fmt: skip
    assert done.code == 0, done.err
    provenance = open_dataset(tmp_path / "data").provenance
    assert [source["num_rows"] for source in provenance["sources"].values()] == [5, 5]


def test_sources_have_weights_splits_and_statistics(tokenizer_path: str, tmp_path: Path) -> None:
    for name in ("twice", "half", "held"):
        write_records(tmp_path / f"{name}.jsonl", [chat(f"{name} {number}?", "Yes.") for number in range(100)])
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"""
defaults: [prepare, _self_]
output: {tmp_path}/data
tokenizer: {{path: {tokenizer_path}}}
sources:
  twice: {{path: {tmp_path}/twice.jsonl, weight: 2}}
  half: {{path: [{tmp_path}/half.jsonl], weight: 0.5}}
  held: {{path: {tmp_path}/held.jsonl, split: validation, weight: 3}}
"""
    )
    done = prepare("--config-dir", str(tmp_path), "--config-name", "mine", TEMPLATE, *SMALL)
    assert done.code == 0, done.err
    provenance = open_dataset(tmp_path / "data").provenance
    sources = provenance["sources"]
    assert sources["twice"]["splits"]["train"]["num_sequences"] == 200
    assert sources["twice"]["num_repeated"] == 100
    kept = sources["half"]["splits"]["train"]["num_sequences"]
    assert 30 < kept < 70
    assert sources["half"]["dropped"] == {"sampled_out": 100 - kept}
    assert sources["held"]["splits"] == {"validation": sources["held"]["splits"]["validation"]}
    assert sources["held"]["splits"]["validation"]["num_sequences"] == 100


def test_splits_stay_when_rows_are_added_or_moved(tokenizer_path: str, tmp_path: Path) -> None:
    rows = [chat(f"Row {number}?", f"Yes, {number}.") for number in range(100)]
    held_out = []
    for name, given in (("one", rows), ("two", [chat("New?", "New."), *reversed(rows)])):
        write_records(tmp_path / f"{name}.jsonl", given)
        done = prepare(
            f"input={tmp_path}/{name}.jsonl", f"output={tmp_path}/{name}", f"tokenizer.path={tokenizer_path}", TEMPLATE,
            *SMALL, "split.validation_fraction=0.3",
        )  # fmt: skip
        assert done.code == 0, done.err
        store = open_token_store(tmp_path / f"{name}.work/tokens/validation")
        held_out.append({tuple(store[index][0].tolist()) for index in range(len(store))})
    assert 15 < len(held_out[0]) < 45
    assert held_out[0] <= held_out[1]
    assert len(held_out[1] - held_out[0]) <= 1


def test_duplicates_are_dropped_once_asked_and_counted(tokenizer_path: str, tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", [chat("One?", "1"), chat("Two?", "2"), chat("One?", "1")])
    write_records(tmp_path / "b.jsonl", [{"instruction": "Two?", "output": "2"}, chat("Three?", "3")])
    arguments = (f"input=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    assert prepare(*arguments, f"output={tmp_path}/all").code == 0
    done = prepare(*arguments, f"output={tmp_path}/unique", "deduplicate=true")
    assert "dropped: equal to an earlier record" in done.out
    sources = [open_dataset(tmp_path / name).provenance["sources"]["input"] for name in ("all", "unique")]
    assert sources[0]["dropped"] == {}
    assert sources[1]["dropped"] == {"duplicate": 2}


def test_a_multirun_packs_several_sizes_from_one_token_store(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    done = prepare(
        f"input={few}", f"output={tmp_path}/data_${{packing.pack_size}}", f"work_dir={tmp_path}/work", TEMPLATE,
        f"tokenizer.path={tokenizer_path}", "executor.num_workers=1", "packing.pack_size=256,512",
        "--multirun",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [open_dataset(tmp_path / f"data_{size}").figures["train"]["pack_size"] for size in (256, 512)] == [256, 512]
    assert done.out.count("1 reused, 0 encoded") == 1


def test_a_work_directory_remembers_every_output_that_was_made_from_it(
    few: Path, tokenizer_path: str, tmp_path: Path
) -> None:
    arguments = (f"input={few}", f"tokenizer.path={tokenizer_path}", TEMPLATE, f"work_dir={tmp_path}/work")
    sizes = [(f"output={tmp_path}/data_{size}", f"packing.pack_size={size}") for size in (256, 512)]
    for size in sizes:
        assert " published" in prepare(*arguments, *size).out
    for size in sizes:
        again = prepare(*arguments, *size).out
        assert "1 reused, 0 encoded" in again
        assert "is up to date" in again


def test_a_layout_of_ranks_decides_the_multiple_that_sequences_are_padded_to(
    few: Path, tokenizer_path: str, tmp_path: Path
) -> None:
    arguments = [f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL]
    layout = "packing.for_parallel={tensor:4,context:2,sequence_parallel:true}"
    done = prepare(*arguments, layout)
    assert done.code == 0, done.err
    dataset = create_sft_dataset(tmp_path / "data", seq_length=1024)
    assert dataset.source.figures.pad_seq_to_mult == 8
    lengths = [np.diff(dataset[index]["seq_boundaries"]) - 1 for index in range(len(dataset))]
    assert not (np.concatenate(lengths) % 8).any()
    again = prepare(*arguments, "packing.pad_seq_to_mult=8")
    assert "is up to date" in again.out  # the same bytes, however the multiple was given
    refused = prepare(*arguments, layout, "packing.pad_seq_to_mult=12")
    assert refused.code == 2
    assert "packing.pad_seq_to_mult is 12, but packing.for_parallel needs a multiple of 8" in refused.err
    refused = prepare(*arguments, "packing.for_parallel.tensors=4")
    assert "did you mean packing.for_parallel.tensor?" in refused.err
