"""Acceptance test 3 of seed 002: what is in a cache is what the tokenizer gave, for texts and for chats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.caches import SFTExampleDataset, build_pretrain_cache, build_sft_cache, read_meta, sha256_file
from tests.caches.small_tokenizer import CHATS, TEXTS, processor, special_ids, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


def sequences(folder: Path, split: str) -> list[list[int]]:
    tokens = np.fromfile(folder / f"{split}_tokens.bin", dtype="<u2")
    offsets = np.load(folder / f"{split}_idx.npy")
    assert offsets.dtype == np.int64
    assert offsets.ndim == 1
    ends = [*offsets[1:], len(tokens)]
    assert all(start < end for start, end in zip(offsets, ends, strict=True))
    return [tokens[start:end].tolist() for start, end in zip(offsets, ends, strict=True)]


def test_chats_come_back_as_they_were_tokenized(model: str, tmp_path: Path) -> None:
    plain, ids = processor(model), special_ids(model)
    roles = {"system": ids["sys"], "user": ids["usr"], "assistant": ids["asst"]}
    expected = [
        [token for message in chat for token in (roles[message["role"]], *plain.encode(message["content"]), ids["eot"])]
        for chat in CHATS
    ]
    build_sft_cache(CHATS, str(tmp_path / "chats"), tokenizer=load_tokenizer(model), val_frac=0.2, seed=42)
    drawn = torch.randperm(30, generator=torch.Generator().manual_seed(42))[:6].tolist()
    assert sequences(tmp_path / "chats", "val") == [expected[number] for number in sorted(drawn)]
    assert sequences(tmp_path / "chats", "train") == [one for number, one in enumerate(expected) if number not in drawn]
    meta = read_meta(str(tmp_path / "chats" / "meta.json"))
    assert (meta["train_examples"], meta["val_examples"]) == (24, 6)
    assert meta["totals"] == {"train_examples": 24, "val_examples": 6}
    assert meta["token_dtype"] == "uint16-le"
    assert meta["special_token_ids"] == ids
    assert meta["tokenizer_sha256"] == sha256_file(model)
    assert meta["vocab_size"] == plain.vocab_size()
    assert meta["dataset_config"] is None
    assert {"dataset_name", "split_rule", "seed"} <= set(meta)


def test_texts_come_back_as_they_were_tokenized(model: str, tmp_path: Path) -> None:
    plain, eot = processor(model), special_ids(model)["eot"]
    stream = [token for text in TEXTS for token in (*plain.encode(text), eot)]
    build_pretrain_cache(
        TEXTS,
        str(tmp_path / "texts"),
        tokenizer=load_tokenizer(model),
        max_train_tokens=1000,
        max_val_tokens=101,
        shard_bytes=256,
        seed=42,
        shuffle_buffer=None,
    )
    found = {}
    for split in ("train", "val"):
        shards = sorted((tmp_path / "texts" / split).glob("shard_*.bin"))
        assert [shard.name for shard in shards] == [f"shard_{number:05d}.bin" for number in range(len(shards))]
        assert {shard.stat().st_size for shard in shards[:-1]} <= {256}
        found[split] = np.concatenate([np.fromfile(shard, dtype="<u2") for shard in shards]).tolist()
    assert found["val"] == stream[:101]
    assert found["train"] == stream[101:1101]
    meta = read_meta(str(tmp_path / "texts" / "meta.json"))
    assert (meta["train_tokens"], meta["val_tokens"], meta["shard_bytes"]) == (1000, 101, 256)
    assert meta["totals"] == {"train_tokens": 1000, "val_tokens": 101}
    for name, record in meta["files"].items():
        assert record == {
            "bytes": (tmp_path / "texts" / name).stat().st_size,
            "checksum": sha256_file(str(tmp_path / "texts" / name)),
        }
    assert json.loads((tmp_path / "texts" / "meta.json").read_text())["seed"] == 42


def test_the_dataset_reads_back_what_was_built(model: str, tmp_path: Path) -> None:
    build_sft_cache(CHATS, str(tmp_path / "chats"), tokenizer=load_tokenizer(model), val_frac=0.1, seed=1)
    dataset = SFTExampleDataset(
        str(tmp_path / "chats" / "train_tokens.bin"),
        str(tmp_path / "chats" / "train_idx.npy"),
        T=200,
        device="cpu",
        eot_id=special_ids(model)["eot"],
    )
    known = {tuple(one) for one in sequences(tmp_path / "chats", "train")}
    x, y, y_masked = dataset.get_batch(B=20, generator=torch.Generator().manual_seed(0))
    for tokens, target, masked in zip(x.tolist(), y.tolist(), y_masked.tolist(), strict=True):
        whole = [tokens[0], *target]
        assert any(tuple(whole[: len(one)]) == one for one in known)
        answer = [token for token in masked if token != -100]
        assert load_tokenizer(model).decode(answer).endswith("<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>")
