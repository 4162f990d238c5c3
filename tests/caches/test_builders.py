"""Budgets, splits, memory and publishing of the cache builders."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.caches import (
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    read_meta,
    write_meta,
)
from megatron_packed_sft.errors import InvalidInputError, ManifestError, StorageIOError, TargetExistsError
from tests.caches.small_tokenizer import CHATS, TEXTS, processor, special_ids, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


def build(texts: Any, out_dir: Path, model: str, **options: Any) -> dict[str, Any]:
    settings = {
        "max_train_tokens": 500,
        "max_val_tokens": 50,
        "shard_bytes": 1 << 20,
        "seed": 42,
        "shuffle_buffer": None,
        **options,
    }
    build_pretrain_cache(texts, str(out_dir), tokenizer=load_tokenizer(model), **settings)
    return read_meta(out_dir / "meta.json")


def tokens_of(folder: Path) -> list[int]:
    shards = sorted(folder.glob("shard_*.bin"))
    return [token for shard in shards for token in np.fromfile(shard, "<u2").tolist()]


def documents(tokens: list[int], eot: int) -> list[tuple[int, ...]]:
    ends = [place for place, token in enumerate(tokens) if token == eot]
    return [tuple(tokens[start:end]) for start, end in zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True)]


def parameters(function: Any) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.default is inspect.Parameter.empty and one.name != "self"]


def test_the_signatures_are_those_of_the_seed() -> None:
    assert parameters(build_pretrain_cache) == [
        *("texts", "out_dir", "tokenizer", "max_train_tokens", "max_val_tokens", "shard_bytes", "seed"),
        "shuffle_buffer",
    ]
    assert parameters(build_sft_cache) == ["examples", "out_dir", "tokenizer", "val_frac", "seed"]
    assert parameters(PretrainTokenStreamDataset.__init__) == ["shards_dir", "T", "device"]
    assert parameters(SFTExampleDataset.__init__) == ["tokens_path", "idx_path", "T", "device", "eot_id"]
    for dataset in (PretrainTokenStreamDataset, SFTExampleDataset):
        assert parameters(dataset.get_batch) == ["B", "generator"]


@pytest.mark.parametrize(("max_train", "max_val"), [(500, 50), (1, 1), (700, 0), (0, 70), (333, 777)])
def test_budgets_are_exact_and_val_comes_first(model: str, tmp_path: Path, max_train: int, max_val: int) -> None:
    eot = special_ids(model)["eot"]
    stream = [token for text in TEXTS for token in (*processor(model).encode(text), eot)]
    meta = build(TEXTS, tmp_path / "cache", model, max_train_tokens=max_train, max_val_tokens=max_val)
    assert tokens_of(tmp_path / "cache" / "val") == stream[:max_val]
    assert tokens_of(tmp_path / "cache" / "train") == stream[max_val : max_val + max_train]
    assert (meta["train_tokens"], meta["val_tokens"]) == (max_train, max_val)
    assert meta["split_rule"].startswith("by token, in stream order: the first to val (at most ")


def test_a_stream_that_ends_early_fills_what_it_can(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = build(TEXTS[:2], tmp_path / "cache", model, max_train_tokens=10**9, max_val_tokens=10**6)
    assert meta["train_tokens"] == 0
    assert "all tokens went to val; lower max_val_tokens, or use val_frac" in caplog.text


def test_reading_stops_when_both_budgets_are_full_and_the_corpus_is_never_held(model: str, tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0
    num_read = 0

    class Text(str):
        __slots__ = ("number",)

        def __del__(self) -> None:
            alive.discard(self.number)

    def endless() -> Iterator[str]:
        nonlocal most, num_read
        while True:
            text = Text(TEXTS[num_read % len(TEXTS)])
            text.number = num_read
            alive.add(num_read)
            num_read += 1
            most = max(most, len(alive))
            yield text
            del text

    build(endless(), tmp_path / "cache", model, max_train_tokens=300_000, max_val_tokens=999, shuffle_buffer=100)
    assert num_read > 10_000
    assert most < 100 + 2 * 1024 + 10  # the shuffle, and the batch that is being made beside the one before


def test_a_share_of_documents_goes_to_val_whole(model: str, tmp_path: Path) -> None:
    eot = special_ids(model)["eot"]
    found = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        meta = build(TEXTS, folder, model, max_train_tokens=None, max_val_tokens=None, val_frac=0.1, seed=seed)
        val, train_ = (documents(tokens_of(folder / split), eot) for split in ("val", "train"))
        assert sorted(val + train_) == sorted(tuple(processor(model).encode(text)) for text in TEXTS)
        assert (len(val), len(train_)) == (6, 54)
        assert meta["split_rule"].startswith("by document: one of every 1/0.1, drawn by the seed")
        found.append(val)
    assert found[0] != found[1]


def test_val_may_have_texts_of_its_own(model: str, tmp_path: Path) -> None:
    meta = build(TEXTS[:30], tmp_path / "cache", model, val_texts=TEXTS[30:], max_train_tokens=None, shuffle_buffer=5)
    eot = special_ids(model)["eot"]
    kept = documents(tokens_of(tmp_path / "cache" / "train"), eot)
    assert sorted(kept) == sorted(tuple(processor(model).encode(text)) for text in TEXTS[:30])
    assert meta["val_tokens"] == 50
    assert (
        meta["split_rule"] == "val: at most 50 tokens of the documents given for val; train: all tokens of the others"
    )


def test_a_shuffle_as_large_as_the_stream_keeps_every_document(model: str, tmp_path: Path) -> None:
    eot = special_ids(model)["eot"]
    expected = [tuple(processor(model).encode(text)) for text in TEXTS]
    for buffer in (1, 7, 60, 1000):
        build(TEXTS, tmp_path / str(buffer), model, max_train_tokens=None, max_val_tokens=0, shuffle_buffer=buffer)
        found = documents(tokens_of(tmp_path / str(buffer) / "train"), eot)
        assert sorted(found) == sorted(expected)
        assert (found == expected) == (buffer == 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_train_tokens": -1}, "max_train_tokens is -1; give an integer of at least 0"),
        ({"max_val_tokens": 1.5}, "max_val_tokens is 1.5; give an integer"),
        ({"max_train_tokens": 0, "max_val_tokens": 0}, "are both 0"),
        ({"max_val_tokens": None}, "all tokens would go to val; give a number or val_frac"),
        ({"val_frac": 1.0}, "val_frac is 1.0; give a share of at least 0 and below 1"),
        ({"val_frac": 0.1, "val_texts": ["a"]}, "val_texts and val_frac are both given"),
        ({"shard_bytes": 1}, "shard_bytes is 1; a shard must hold at least one token"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0; give at least 1, or None"),
        ({"seed": -1}, r"seed is -1; give an integer from 0 to 2\*\*63 - 1"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_wrong_arguments_get_a_sentence_and_leave_nothing(
    model: str, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        build(TEXTS, tmp_path / "cache", model, **options)
    assert list(tmp_path.iterdir()) == []


def test_wrong_documents_and_examples_are_named(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def chats(examples: Any) -> None:
        build_sft_cache(examples, tmp_path / "cache", tokenizer=load_tokenizer(model), val_frac=0.5, seed=1)

    with pytest.raises(InvalidInputError, match="document 3 is of the type bytes; give strings"):
        build(["a", "", b"c"], tmp_path / "cache", model)
    with pytest.raises(InvalidInputError, match=r"no text was given for .*cache; give at least one document"):
        build(["", ""], tmp_path / "cache", model)
    for examples, sentence in [
        ([CHATS[0], "text"], "example 2 is of the type str; give a list of messages"),
        (
            [[{"role": "tool", "content": ""}]],
            "example 1, message 0 has the role 'tool'; use system, user or assistant",
        ),
        ([CHATS[0], [{"role": "user", "content": None}]], "example 2, message 0 has content of the type NoneType"),
        ([["x"]], "example 1, message 0 has the role None"),
        ([], "no examples were given for .*cache"),
        ([[], []], "no examples were given for .*cache"),
    ]:
        with pytest.raises(InvalidInputError, match=sentence):
            chats(examples)
    assert list(tmp_path.iterdir()) == []
    caplog.clear()
    chats([[], CHATS[0], [{"role": "user", "content": "Hello?"}]])
    assert "1 example without messages dropped" in caplog.text
    assert "1 example without an assistant message" in caplog.text
    meta = read_meta(tmp_path / "cache" / "meta.json")
    assert (meta["train_examples"], meta["val_examples"]) == (1, 1)


@pytest.mark.parametrize(("val_frac", "num_val"), [(0.0, 0), (0.01, 1), (0.1, 3), (0.5, 15), (1.0, 30)])
def test_val_examples_are_counted_exactly(model: str, tmp_path: Path, val_frac: float, num_val: int) -> None:
    build_sft_cache(CHATS, tmp_path / "cache", tokenizer=load_tokenizer(model), val_frac=val_frac, seed=7)
    assert len(np.load(tmp_path / "cache" / "val_idx.npy")) == num_val
    assert len(np.load(tmp_path / "cache" / "train_idx.npy")) == 30 - num_val
    with pytest.raises(InvalidInputError, match=r"val_frac is 1\.5"):
        build_sft_cache(CHATS, tmp_path / "other", tokenizer=load_tokenizer(model), val_frac=1.5, seed=7)


def test_examples_are_dealt_block_by_block(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_sft_cache(CHATS, tmp_path / "one", tokenizer=load_tokenizer(model), val_frac=0.3, seed=7)
    monkeypatch.setattr("megatron_packed_sft.caches.builders._BLOCK_TOKENS", 40)
    build_sft_cache(CHATS, tmp_path / "two", tokenizer=load_tokenizer(model), val_frac=0.3, seed=7)
    for name in ("train_tokens.bin", "val_tokens.bin", "train_idx.npy", "val_idx.npy"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        *("meta.json", "train_idx.npy", "train_tokens.bin", "val_idx.npy", "val_tokens.bin")
    ]


def test_only_a_cache_of_ours_is_ever_replaced(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    build(TEXTS, folder, model)
    with pytest.raises(TargetExistsError, match=r"exists already; .*overwrite=True"):
        build(TEXTS, folder, model, seed=1)
    meta = build(TEXTS, folder, model, seed=1, overwrite=True)
    assert meta["seed"] == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(TargetExistsError, match="exists and is not a cache"):
        build(TEXTS, tmp_path / "mine", model, overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_build_that_fails_leaves_the_earlier_cache(model: str, tmp_path: Path) -> None:
    build(TEXTS, tmp_path / "cache", model)
    before = (tmp_path / "cache" / "meta.json").read_bytes()

    def broken() -> Iterator[str]:
        yield from TEXTS
        raise RuntimeError("the network is gone")

    with pytest.raises(RuntimeError, match="the network is gone"):
        build(broken(), tmp_path / "cache", model, overwrite=True, max_train_tokens=None)
    assert (tmp_path / "cache" / "meta.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_meta_comes_back_as_it_was_and_damage_is_noticed(tmp_path: Path) -> None:
    meta = {"dataset_name": "wikitext", "dataset_config": None, "totals": {"train_tokens": 5}, "list": [1, 2.5, "ü"]}
    path = tmp_path / "meta.json"
    write_meta(str(path), meta)
    assert read_meta(str(path)) == meta
    write_meta(str(path), {"seed": 42})
    assert read_meta(str(path)) == {"seed": 42}
    path.write_text(path.read_text().replace("42", "43"))
    with pytest.raises(ManifestError, match="was damaged or edited"):
        read_meta(str(path))
    path.write_text('{"seed": 42}')  # by another program
    assert read_meta(str(path)) == {"seed": 42}
    path.write_text("[1]")
    with pytest.raises(ManifestError, match="is not a JSON object"):
        read_meta(str(path))
    with pytest.raises(StorageIOError, match=r"cannot read .*none.json: No such file or directory; check the path"):
        read_meta(str(tmp_path / "none.json"))
    with pytest.raises(InvalidInputError, match="meta cannot be written as JSON"):
        write_meta(str(path), {"share": float("nan")})


def test_progress_counts_every_token(model: str, tmp_path: Path) -> None:
    seen: list[int] = []
    build(TEXTS, tmp_path / "texts", model, on_tokens=seen.append)
    assert sum(seen) == 550
    seen.clear()
    build_sft_cache(
        CHATS, tmp_path / "chats", tokenizer=load_tokenizer(model), val_frac=0.1, seed=1, on_tokens=seen.append
    )
    meta = read_meta(tmp_path / "chats" / "meta.json")
    assert sum(seen) == meta["train_tokens"] + meta["val_tokens"]


def test_documents_without_tokens_are_left_out_and_said(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    build(["a", "", "b"], tmp_path / "cache", model, max_val_tokens=0)
    assert len(documents(tokens_of(tmp_path / "cache" / "train"), special_ids(model)["eot"])) == 2
    assert "1 document without text dropped" in caplog.text
