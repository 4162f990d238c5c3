"""`build_all`: a YAML of sources to caches; one that cannot be read does not stop the others."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import create_sft_dataset, load_tokenizer, validate
from megatron_packed_sft.caches import PretrainTokenStreamDataset, read_meta, sha256_file
from megatron_packed_sft.caches.__main__ import main as caches
from megatron_packed_sft.caches.build_all import (
    SourceResult,
    build_all,
    conversations_in_trees,
    read_config,
    stream_dataset,
)
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError, StorageIOError, TargetExistsError
from megatron_packed_sft.records.record import RecordError
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from tests.caches.small_tokenizer import CHATS, TEXTS, processor, special_ids, train

ROOT = Path(__file__).parents[2]
CONTRACT = {
    *("dataset_name", "dataset_config", "split_rule", "seed", "token_dtype", "tokenizer_sha256", "vocab_size"),
    *("special_token_ids", "totals"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The same texts in every form, and chats in three."""
    import pyarrow
    import pyarrow.parquet

    home = tmp_path / "data"
    (home / "roam").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (home / "roam" / f"note_{number:02d}.md").write_text(text)
    lines = [json.dumps({"body": text}) for text in TEXTS]
    with gzip.open(home / "texts.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), home / "texts.parquet")
    (home / "zipped").mkdir()
    for number, text in enumerate(TEXTS[30:], 30):
        (home / "zipped" / f"note_{number:02d}.md.gz").write_bytes(gzip.compress(text.encode()))
    (home / "hub").mkdir()
    (home / "hub" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:50]))
    (home / "hub" / "validation.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[50:]))
    (home / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
    dolly = [{"instruction": "Sum.", "context": f"{n} 1", "response": f"{n + 1}", "category": "x"} for n in range(10)]
    (home / "dolly.jsonl").write_text("\n".join(map(json.dumps, dolly)))
    return home


def build(tmp_path: Path, model: str, sources: dict[str, Any], **options: Any) -> dict[str, SourceResult]:
    settings = {"tokenizer": model, "shard_bytes": 4096, "sources": sources}
    (tmp_path / "sources.yaml").write_text(json.dumps(settings))  # JSON is YAML
    config = read_config(tmp_path / "sources.yaml", options.pop("settings", ()))
    results = build_all(config, tmp_path / "cache", **options)
    return {result.name: result for result in results}


def tokens_of(folder: Path) -> list[int]:
    return [token for shard in sorted(folder.glob("shard_*.bin")) for token in np.fromfile(shard, "<u2").tolist()]


def documents(tokens: list[int], eot: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, text.split())) for text in " ".join(map(str, tokens)).split(f" {eot}") if text.strip()]


def test_texts_of_every_form_give_the_same_cache(model: str, data: Path, tmp_path: Path) -> None:
    common = {"kind": "pretrain", "max_train_tokens": 800, "max_val_tokens": 80, "shuffle_buffer": 0}
    results = build(
        tmp_path,
        model,
        {
            "roam": {**common, "path": f"{data}/roam/**/*.md"},
            "zipped": {**common, "path": [f"{data}/roam/note_[0-2]*.md", f"{data}/zipped/*.md.gz"]},
            "jsonl": {**common, "path": f"{data}/texts.jsonl.gz", "field": "body"},
            "parquet": {**common, "path": f"{data}/texts.parquet"},
        },
    )
    assert {result.status for result in results.values()} == {"built"}
    assert {tuple(result.totals.values()) for result in results.values()} == {(800, 80)}
    found = {name: tokens_of(tmp_path / "cache" / "pretrain" / name / "train") for name in results}
    eot = special_ids(model)["eot"]
    stream = [token for text in TEXTS for token in (*processor(model).encode(text), eot)]
    assert found["roam"] == found["zipped"] == found["jsonl"] == found["parquet"] == stream[80:880]
    for name in results:
        meta = read_meta(tmp_path / "cache" / "pretrain" / name / "meta.json")
        assert set(meta) >= {*CONTRACT, "shard_bytes"}
        assert (meta["dataset_name"], meta["streaming"], meta["built"], meta["seed"]) == (name, False, True, 42)


def test_a_dataset_is_streamed_and_shuffled_as_datasets_does_it(model: str, data: Path, tmp_path: Path) -> None:
    import datasets

    results = build(
        tmp_path,
        model,
        {
            "hub": {
                "kind": "pretrain",
                "dataset": str(data / "hub"),
                "max_train_tokens": 300,
                "max_val_tokens": 30,
                "shuffle_buffer": 20,
            },
            "own_val": {"kind": "pretrain", "dataset": str(data / "hub"), "val_split": "validation"},
        },
        settings=["seed=5"],
    )
    assert [result.status for result in results.values()] == ["built", "built"]
    stream = datasets.load_dataset(str(data / "hub"), split="train", streaming=True).shuffle(seed=5, buffer_size=20)
    eot = special_ids(model)["eot"]
    expected = [token for record in stream for token in (*processor(model).encode(record["text"]), eot)]
    assert tokens_of(tmp_path / "cache/pretrain/hub/val") == expected[:30]
    assert tokens_of(tmp_path / "cache/pretrain/hub/train") == expected[30:330]
    meta = read_meta(tmp_path / "cache/pretrain/hub/meta.json")
    assert (meta["streaming"], meta["dataset_name"], meta["dataset_config"]) == (True, str(data / "hub"), None)
    own = documents(tokens_of(tmp_path / "cache/pretrain/own_val/val"), eot)
    assert sorted(own) == sorted(tuple(processor(model).encode(text)) for text in TEXTS[50:])


def test_a_saved_dataset_is_read_by_name_and_by_path(model: str, data: Path, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(data / "saved")
    common = {"kind": "pretrain", "max_train_tokens": 300, "max_val_tokens": 30, "shuffle_buffer": 0}
    results = build(tmp_path, model, {"saved": {**common, "dataset": str(data / "saved")}})
    assert results["saved"].status == "built"
    eot = special_ids(model)["eot"]
    stream = [token for text in TEXTS for token in (*processor(model).encode(text), eot)]
    assert tokens_of(tmp_path / "cache/pretrain/saved/train") == stream[30:330]


def test_chats_of_several_shapes_become_sft_caches(model: str, data: Path, tmp_path: Path) -> None:
    tree = [
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi"},
        {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "Bad.", "rank": 1},
        {"message_id": "3", "parent_id": "1", "role": "assistant", "text": "Good.", "rank": 0},
        {"message_id": "4", "parent_id": "3", "role": "prompter", "text": "Thanks."},
        {"message_id": "5", "parent_id": None, "role": "prompter", "text": "No answer."},
    ]
    (data / "trees.jsonl").write_text("\n".join(map(json.dumps, tree)))
    results = build(
        tmp_path,
        model,
        {
            "chats": {"kind": "sft", "path": f"{data}/chats.jsonl"},
            "dolly15k": {"kind": "sft", "dataset": str(data), "split": "train"},
            "dolly_file": {"kind": "sft", "path": f"{data}/dolly.jsonl", "val_frac": 0.3},
            "oasst1": {"kind": "sft", "path": f"{data}/trees.jsonl", "message_trees": True},
        },
    )
    assert results["chats"].totals == {"train_examples": 27, "val_examples": 3}
    assert results["dolly_file"].totals == {"train_examples": 7, "val_examples": 3}
    assert results["oasst1"].totals == {"train_examples": 1, "val_examples": 0}
    tokenizer = load_tokenizer(model)
    text = tokenizer.decode(np.fromfile(tmp_path / "cache/sft/oasst1/train_tokens.bin", "<u2").tolist())
    assert text.split("|>")[1].startswith("Hi")
    assert "Good." in text
    assert "Thanks." not in text
    dolly = tokenizer.decode(np.fromfile(tmp_path / "cache/sft/dolly_file/train_tokens.bin", "<u2").tolist())
    assert "Sum.\n\n" in dolly
    meta = read_meta(tmp_path / "cache/sft/chats/meta.json")
    assert set(meta) >= CONTRACT
    # A folder of files of different shapes cannot be read; the others are built.
    assert results["dolly15k"].status == "not built"


def test_a_source_that_is_not_available_is_recorded_and_the_others_are_built(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # otherwise it waits for a network
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    sources = {
        "missing": {"kind": "pretrain", "path": f"{data}/none/*.txt"},
        "hub": {"kind": "sft", "dataset": "nobody/no-such-dataset"},
        "gutenberg": {"kind": "pretrain", "build": False},
        "broken": {"kind": "sft", "path": f"{data}/texts.parquet"},
        "roam": {"kind": "pretrain", "path": f"{data}/roam/*.md"},
    }
    results = build(tmp_path, model, sources)
    assert [result.status for result in results.values()] == [
        "not built",
        "not built",
        "left out",
        "not built",
        "built",
    ]
    assert "matches no file; check the path" in str(results["missing"].reason)
    assert "cannot read the split train of the dataset nobody/no-such-dataset" in str(results["hub"].reason)
    assert "is not a chat; set kind: pretrain" in str(results["broken"].reason)
    for kind, name in (("pretrain", "missing"), ("sft", "hub"), ("pretrain", "gutenberg")):
        meta = read_meta(tmp_path / "cache" / kind / name / "meta.json")
        assert meta["built"] is False
        assert meta["reason"] == results[name].reason
        assert set(meta) >= CONTRACT
    assert (tmp_path / "cache/pretrain/gutenberg/train").is_dir()
    assert (tmp_path / "cache/pretrain/gutenberg/val").is_dir()
    # What was not built is built as soon as it can be; what is there stays.
    (data / "none").mkdir()
    (data / "none" / "a.txt").write_text("Here it is. " * 20)
    again = build(tmp_path, model, sources)
    assert [result.status for result in again.values()] == ["built", "not built", "left out", "not built", "kept"]


def test_a_cache_is_kept_made_again_or_refused(model: str, data: Path, tmp_path: Path) -> None:
    sources = {"roam": {"kind": "pretrain", "path": f"{data}/roam/*.md", "max_val_tokens": 10}}
    shard = tmp_path / "cache/pretrain/roam/train/shard_00000.bin"
    assert build(tmp_path, model, sources)["roam"].status == "built"
    before = shard.read_bytes()
    stamp = shard.stat().st_mtime_ns
    assert build(tmp_path, model, sources)["roam"].status == "kept"
    assert shard.stat().st_mtime_ns == stamp
    (data / "roam" / "note_00.md").write_text("changed")
    refused = build(tmp_path, model, sources)["roam"]
    assert refused.status == "not built"
    assert "was built with another files; add --overwrite to replace it" in str(refused.reason)
    assert "was built with another seed, files" in str(
        build(tmp_path, model, sources, settings=["seed=7"])["roam"].reason
    )
    assert shard.read_bytes() == before
    assert build(tmp_path, model, sources, overwrite=True)["roam"].status == "built"
    assert shard.read_bytes() != before
    # A source that is gone does not take its cache with it.
    for note in (data / "roam").iterdir():
        note.unlink()
    assert build(tmp_path, model, sources)["roam"].status == "not built"
    assert read_meta(tmp_path / "cache/pretrain/roam/meta.json")["built"] is True


def test_the_tokenizer_is_copied_and_must_stay_the_same(model: str, data: Path, tmp_path: Path) -> None:
    sources = {"roam": {"kind": "pretrain", "path": f"{data}/roam/*.md"}}
    build(tmp_path, model, sources)
    copy = tmp_path / "cache/tokenizer"
    assert (copy / "spm.model").read_bytes() == Path(model).read_bytes()
    meta = read_meta(copy / "meta.json")
    assert meta["tokenizer_sha256"] == sha256_file(model)
    assert meta["special_token_ids"] == special_ids(model)
    assert load_tokenizer(copy).vocab_size == meta["vocab_size"]
    (tmp_path / "other").mkdir()
    other = train(tmp_path / "other", symbols=(*map(str, "0123"),))
    with pytest.raises(TargetExistsError, match="tokenizer holds another tokenizer; choose another cache_dir"):
        build(tmp_path, other, sources)


def test_a_cache_is_a_token_stream_for_training_and_for_validate(model: str, data: Path, tmp_path: Path) -> None:
    common = {"kind": "pretrain", "path": f"{data}/roam/*.md", "max_val_tokens": 200}
    build(tmp_path, model, {"roam": common}, settings=["shard_bytes=1000"])
    split = tmp_path / "cache/pretrain/roam/train"
    dataset = create_sft_dataset(split, load_tokenizer(model), seq_length=32)
    windows = PretrainTokenStreamDataset(split, T=32, device="cpu")
    assert 0 < len(dataset) < windows.num_windows
    first = np.fromfile(split / "shard_00000.bin", "<u2")[:33]
    assert dataset[0]["input_ids"].tolist()[:32] == first[:32].tolist()
    # Documents end where meta.json says, and not at the tokenizer's own end of sequence.
    packed = create_sft_dataset(split, load_tokenizer(model), seq_length=32, stream=StreamOptions(pack_sequences=True))
    ends = np.flatnonzero(first[:32] == special_ids(model)["eot"])
    assert np.flatnonzero(np.diff(packed[0]["doc_ids"])).tolist() == ends[ends < 31].tolist()
    report = validate(split)
    assert report.ok, report.findings
    assert report.num_tokens == read_meta(split.parent / "meta.json")["train_tokens"]


def test_the_first_bad_record_or_text_file_stops_a_source(model: str, data: Path, tmp_path: Path) -> None:
    (data / "mixed.jsonl").write_text('{"text": "Fine."}\n{"text": 5}\n')
    (data / "broken.jsonl").write_text('{"text": "Fine."}\n{"text"\n')
    (data / "latin.txt").write_bytes("ü".encode("latin-1"))
    reasons = {
        "mixed.jsonl": "mixed.jsonl, line 2: text is a number, and the record has text; set field to its text",
        "broken.jsonl": "broken.jsonl, line 2: the record is not valid JSON",
        "latin.txt": "latin.txt is not UTF-8 (0xFC); write the file in UTF-8, or remove it",
        "roam": "is a folder; give its files, such as ",
    }
    sources = {
        name.partition(".")[0]: {"kind": "pretrain", "path": f"{data}/{name}", "max_val_tokens": 0} for name in reasons
    }
    results = build(tmp_path, model, sources)
    for name, reason in reasons.items():
        assert reason in str(results[name.partition(".")[0]].reason)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sources: {a: {kind: pretrain, pth: x}}", r"sources\.a\.pth is not a key; did you mean sources\.a\.path"),
        ("sources: {a: {kind: audio, path: x}}", r"sources\.a\.kind is 'audio'; choose pretrain or sft"),
        ("sources: {a: {path: x}}", r"sources\.a\.kind has no value"),
        ("sources: {a: {kind: sft, path: x, dataset: y}}", r"sources\.a\.path or dataset must be given, and not both"),
        ("sources: {a: {kind: sft, path: x, max_val_tokens: 5}}", r"max_.*_tokens are for kind: pretrain"),
        ("sources: {a: {kind: pretrain, path: x, message_trees: true}}", "message_trees is for kind: sft"),
        ("sources: {a: {kind: pretrain, path: x, val_split: y}}", "val_split goes with dataset"),
        ("seed: many\nsources: {a: {kind: sft, path: x}}", "seed is 'many'; it must be an integer"),
        ("seed: 1\nseed: 2\nsources: {a: {kind: sft, path: x}}", "is not valid YAML .*duplicate key seed"),
        ("sources: {}", "sources is empty; give at least one source"),
        ("- a", "it is not a mapping of keys"),
        ("a: [", "is not valid YAML"),
        ("sources: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_a_wrong_yaml_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "sources.yaml").write_text(text if text[0] in "-a" else f"tokenizer: spm.model\n{text}\n")
    with pytest.raises(InvalidInputError, match=sentence):
        read_config(tmp_path / "sources.yaml")


def test_every_key_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "sources.yaml"
    path.write_text("tokenizer: spm.model\nsources: {a: {kind: pretrain, path: x}}\n")
    config = read_config(path, ["seed=7", "shard_bytes=1_000", "sources.a.max_train_tokens=5", "sources.a.path=[y, z]"])
    assert (config.seed, config.shard_bytes, config.sources["a"].max_train_tokens) == (7, 1000, 5)
    assert config.sources["a"].paths == ["y", "z"]
    assert (read_config(path).seed, read_config(path).shard_bytes, read_config(path).val_frac) == (42, 128 << 20, 0.10)
    for override, sentence in (("seed", "is not a setting; write KEY=VALUE"), ("sead=1", "sead is not a key")):
        with pytest.raises(InvalidInputError, match=sentence):
            read_config(path, [override])
    with pytest.raises(StorageIOError, match=r"cannot read .*none\.yaml: No such file"):
        read_config(tmp_path / "none.yaml")


def test_only_some_sources_can_be_built(model: str, data: Path, tmp_path: Path) -> None:
    sources = {name: {"kind": "pretrain", "path": f"{data}/roam/*.md"} for name in ("one", "two")}
    assert list(build(tmp_path, model, sources, only=["two"])) == ["two"]
    assert not (tmp_path / "cache/pretrain/one").exists()
    with pytest.raises(InvalidInputError, match="there is no source 'three'; the sources are one, two"):
        build(tmp_path, model, sources, only=["three"])


def test_the_command_line_builds_says_what_it_did_and_fails_when_a_source_did(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "sources.yaml"
    sources = {
        "roam": {"kind": "pretrain", "path": f"{data}/roam/*.md", "max_val_tokens": 10},
        "chats": {"kind": "sft", "path": f"{data}/chats.jsonl"},
        "missing": {"kind": "pretrain", "path": f"{data}/none.txt"},
    }
    config.write_text(json.dumps({"tokenizer": "overridden.model", "sources": sources}))
    words = ["build-all", "--config", str(config), "--cache-dir", str(tmp_path / "cache"), "--seed", "7"]
    words += [f"tokenizer={model}", "val_frac=0.2", "shard_bytes=100", "shuffle_buffer=5"]
    words += ["sources.roam.max_train_tokens=111"]
    assert caches(words) == 1
    out = capsys.readouterr().out
    assert re.search(r"roam +pretrain +built +111 +10", out)
    assert re.search(r"chats +sft +built +24 +6", out)
    assert re.search(r"missing +pretrain +not built", out)
    assert "missing was not built: " in out
    meta = read_meta(tmp_path / "cache/pretrain/roam/meta.json")
    assert (meta["seed"], meta["shard_bytes"], meta["shuffle_buffer"]) == (7, 100, 5)
    assert caches([*words, "--only", "roam", "--only", "chats"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"roam +pretrain +kept +111 +10", out)
    assert re.search(r"chats +sft +kept +24 +6", out)
    assert caches([*words, "--only", "roam", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert caches([*words, "seed"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "python -m megatron_packed_sft.caches: error: 'seed' is not a setting; write KEY=VALUE"
    ]
    for place in ("--config", "--cache-dir"):
        assert caches([*words, place, "s3://bucket/none"]) == 2
        assert "is a URL, but only local paths work here" in capsys.readouterr().err


def test_the_yaml_of_the_recipes_lists_the_sources_of_the_seed() -> None:
    config = read_config(ROOT / "recipes" / "caches.yaml")
    assert (config.seed, config.shard_bytes, config.shuffle_buffer, config.val_frac) == (42, 128 << 20, 10_000, 0.10)
    fineweb = config.sources["fineweb_edu"]
    assert (fineweb.dataset, fineweb.config) == ("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10")
    assert (fineweb.max_train_tokens, fineweb.max_val_tokens) == (200_000_000, 5_000_000)
    assert {name: source.kind for name, source in config.sources.items()} == {
        **dict.fromkeys(("fineweb_edu", "wikitext", "roam", "gutenberg"), "pretrain"),
        **dict.fromkeys(("dolly15k", "oasst1"), "sft"),
    }
    assert not config.sources["gutenberg"].build


def test_a_dataset_that_cannot_be_loaded_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        StorageIOError, match=r"cannot read the split train of the dataset .*nothing \(small\): .*; check"
    ):
        next(stream_dataset(str(tmp_path / "nothing"), "small", "train"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package datasets; .*megatron-packed-sft\[datasets\]"):
        next(stream_dataset("name", None, "train"))


def test_a_tree_follows_the_best_replies_and_ends_with_an_answer() -> None:
    def message(number: str, parent: str | None, role: str, **more: Any) -> dict[str, Any]:
        return {"message_id": number, "parent_id": parent, "role": role, "text": f"text {number}", **more}

    records = [
        message("d", "c", "prompter"),
        message("e", "d", "assistant", deleted=True),
        message("b", "a", "assistant"),
        message("c", "a", "assistant", rank=0),
        message("a", None, "prompter"),
        message("x", None, "prompter"),
        message("y", "x", "assistant", rank=None),
        message("z", "x", "assistant", rank=None),
        message("lost", "nobody", "assistant"),
    ]
    found = [[one["content"] for one in chat] for chat in conversations_in_trees(records)]
    assert found == [["text a", "text c"], ["text x", "text y"]]
    with pytest.raises(RecordError, match="role of message 1 is 'bot'; use prompter or assistant"):
        list(conversations_in_trees([message("a", None, "bot")]))
    with pytest.raises(RecordError, match="text of message 1 is a number; give a string"):
        list(conversations_in_trees([message("a", None, "assistant") | {"text": 5}]))
