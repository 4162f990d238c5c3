# ruff: noqa: RUF001 (signs that the painter writes)
"""`packed-sft preview DATASET`: bins, sequences of token stores, and the tokenizer that made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import PackPlan, create_sft_dataset
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from tests.inspect.previewing import packed_sft, preview_json, tokenizer_path
from tests.prepare.preparing import chat, prepare, write_records

__all__ = ["tokenizer_path"]


@pytest.fixture(scope="module")
def home(tokenizer_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared dataset of two splits, whose sequences are padded and weighted, and its work."""
    folder = tmp_path_factory.mktemp("packed")
    records = [chat(f"{number}?", f"It is {number}, and more.") for number in range(60)]
    records[7]["messages"][1]["weight"] = 0.5
    path = write_records(folder / "chats.jsonl", records)
    done = prepare(
        f"input={path}", f"output={folder}/data", f"tokenizer.path={tokenizer_path}", "template=chatml",
        "packing.pack_size=128", "packing.pad_seq_to_mult=8", "split.validation_fraction=0.2", "executor.num_workers=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    return folder


def arrays(shown: dict[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Ids, loss mask and boundaries of a previewed bin, put together as a dataset has them."""
    ids: list[int] = []
    mask: list[float] = []
    boundaries = [0]
    for sequence in shown["sequences"]:
        tokens = sequence["tokens"]
        ids += [token["id"] for token in tokens]
        mask += [*(token["weight"] for token in tokens[1:]), 0]  # the prediction made at a position
        boundaries.append(len(ids))
    return ids, mask, boundaries


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_bin_is_shown_as_a_dataset_reads_it(home: Path, split: str) -> None:
    dataset = create_sft_dataset(home / "data", split=split)
    for number in range(len(dataset)):
        shown = preview_json(home / "data", "--split", split, "--bin", number)
        ids, mask, boundaries = arrays(shown)
        sample = dataset[number]
        assert ids == sample["input_ids"].tolist()
        assert mask == pytest.approx(sample["loss_mask"].tolist())
        assert boundaries == list(sample["seq_boundaries"])
        assert shown["num_trained"] == np.count_nonzero(sample["loss_mask"])
        assert shown["of"] == len(dataset)


def test_a_sample_is_numbered_as_a_shuffled_dataset_numbers_it(home: Path) -> None:
    for seed in (1234, 7):
        dataset = create_sft_dataset(home / "data", max_num_samples=50, seed=seed)
        for position in (0, 3, 41):
            more = [] if seed == 1234 else ["--seed", seed]
            shown = preview_json(home / "data", "--sample", position, *more)
            assert arrays(shown)[0] == dataset[position]["input_ids"].tolist()
            trained = SampleOrder(len(create_sft_dataset(home / "data")), seed)[position]
            assert f"packed-sft train seed={seed} reads bin {trained} there" in shown["notes"][0]


def test_the_text_weights_padding_and_origin_of_a_bin_are_shown(home: Path) -> None:
    shown = "".join(
        packed_sft("preview", home / "data", "--random", 100, "--split", split).out for split in ("train", "validation")
    )
    assert "⟦It is 8, and more.<|im_end|>⟧⏎" in shown
    assert "⟦×0.5 It is 7, and more.<|im_end|>⟧⏎" in shown
    assert " padding tokens›" in shown
    assert f"trained, from {home}/chats.jsonl, line 9" in shown


def test_a_token_store_is_shown_by_sequence_and_with_a_plan_by_bin(home: Path) -> None:
    store = home / "data.work" / "tokens" / "train"
    shown = preview_json(store, "--sequence", 3)
    text = "".join(token["text"] for token in shown["sequences"][0]["tokens"])
    assert text.startswith("<|im_start|>user\n")
    assert shown["tokenizer"]["name"] == "sp.model"
    plan = home / "data.work" / "plans" / "train.npz"
    number = PackPlan.load(plan).num_bins - 1
    ours, packed = preview_json(store, "--plan", plan, "--bin", number), preview_json(home / "data", "--bin", number)
    assert [one["tokens"] for one in ours["sequences"]] == [one["tokens"] for one in packed["sequences"]]
    for words in (["--bin", 1], ["--sample", 1]):
        refused = packed_sft("preview", store, *words)
        assert refused.code == 2
        assert "--sequence" in refused.err


@pytest.mark.parametrize("storage", ["legacy", "parquet"])
def test_other_storages_are_shown_the_same_way(home: Path, tmp_path: Path, storage: str, tokenizer_path: str) -> None:
    records = write_records(tmp_path / "chats.jsonl", [chat(f"{number}?", f"It is {number}.") for number in range(9)])
    given = [f"input={records}", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=64"]
    for name in ("memmap_v1", storage):
        done = prepare(*given, f"output={tmp_path}/{name}", f"storage={name}", "executor.num_workers=1")
        assert done.code == 0, done.err
    expected = preview_json(tmp_path / "memmap_v1", "--bin", 1)["sequences"]
    assert preview_json(tmp_path / storage, "--bin", 1)["sequences"] == expected
    [file] = (tmp_path / storage / "train").glob("shard_*")
    alone = preview_json(file, "--bin", 1, "--tokenizer", tokenizer_path)["sequences"]
    assert [one["tokens"] for one in alone] == [one["tokens"] for one in expected]


def test_without_its_tokenizer_a_bin_is_shown_by_ids(home: Path, tmp_path: Path, tokenizer_path: str) -> None:
    alone = shutil.copytree(home / "data", tmp_path / "moved")
    shown = packed_sft("preview", alone)
    assert shown.code == 0
    assert "was not found; give its path with --tokenizer to see text" in shown.out
    ids = [token["id"] for token in preview_json(alone)["sequences"][0]["tokens"]]
    assert f"\n{ids[0]} {ids[1]} {ids[2]} " in shown.out
    given = packed_sft("preview", alone, f"tokenizer.path={tokenizer_path}")
    assert given.out == packed_sft("preview", alone, "--tokenizer", tokenizer_path).out
    assert "<|im_start|>user⏎" in given.out


def test_another_tokenizer_is_refused(home: Path, tmp_path: Path) -> None:
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece

    texts = ["some other words to learn from, and more", "of them"] * 50
    other = train_sentencepiece(texts, tmp_path / "other.model", vocab_size=300)
    refused = packed_sft("preview", home / "data", "--tokenizer", other)
    assert refused.code == 2
    assert "so its text would be wrong" in refused.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--bin", 10_000], "choose one"),
        (["--bin", -1], "choose one"),
        (["--sample", -1], "samples are counted from 0"),
        (["--split", "test"], "has no split 'test'; choose one of train, validation"),
        (["--bin", 1, "--random", 2], "--bin and --random exclude each other"),
        (["--bin", 1, "--seed", 2], "--seed needs --random or --sample"),
        (["--row", 3], "--row is for chats, but "),
        (["--plan", "plan.npz"], "--plan needs a token store"),
        (["--sequence", 0], "use --bin"),
        (["encode.max_len=3"], "is a setting for chats, but "),
    ],
)
def test_a_wrong_question_about_packed_data_is_one_sentence(home: Path, words: list[Any], problem: str) -> None:
    done = packed_sft("preview", home / "data", *words)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert done.err.count("\n") == 1


def test_damaged_data_is_exit_code_1(home: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(home / "data", tmp_path / "damaged")
    manifest = alone / "train" / "shard_000000" / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "num_bins": document["num_bins"] + 1}))
    done = packed_sft("preview", alone)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1


def test_a_token_stream_is_shown_by_window_and_by_document(home: Path, tmp_path: Path, tokenizer_path: str) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    ids: list[int] = []
    for number in range(40):
        text = MarkedText(f"Document {number} says something.")
        ids += [*tokenizer.encode_many([text]).input_ids.tolist(), tokenizer.eos_id or 0]
    (tmp_path / "stream").mkdir()
    np.save(tmp_path / "stream" / "tokens.npy", np.array(ids, np.uint16))
    given = [tmp_path / "stream", "--tokenizer", tokenizer_path, "--seq-length", 64]
    whole = preview_json(*given, "--bin", 1)
    assert [token["id"] for sequence in whole["sequences"] for token in sequence["tokens"]] == ids[64 : 64 + 65]
    apart = preview_json(*given, "--bin", 1, "--pack-sequences")
    assert len(apart["sequences"]) > len(whole["sequences"]) == 1
    assert "says something." in packed_sft("preview", *given).out
    unknown = packed_sft("preview", tmp_path / "stream", "--seq-length", 64)
    assert "the data records no tokenizer; give its path with --tokenizer" in unknown.out
    for words in (["--seq-length", 4], ["--pack-sequences"], ["--eos-id", 2]):
        refused = packed_sft("preview", home / "data", *words)
        assert refused.code == 2
        assert f"{words[0]} needs a token stream" in refused.err
    by_id = [tmp_path / "stream", "--seq-length", 64, "--pack-sequences", "--bin", 1]
    assert "pass a tokenizer or --eos-id" in packed_sft("preview", *by_id).err
    assert len(preview_json(*by_id, "--eos-id", tokenizer.eos_id)["sequences"]) == len(apart["sequences"])
