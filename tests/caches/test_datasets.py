"""Caches that were cut, mixed up or made elsewhere: one sentence each, and never a wrong batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import load_tokenizer, validate
from megatron_packed_sft.caches import (
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    write_meta,
)
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError, StorageIOError
from tests.caches.small_tokenizer import CHATS, TEXTS, special_ids, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def texts(model: str, tmp_path: Path) -> Path:
    build_pretrain_cache(
        TEXTS,
        tmp_path / "texts",
        tokenizer=load_tokenizer(model),
        max_train_tokens=1000,
        max_val_tokens=30,
        shard_bytes=600,
        seed=1,
        shuffle_buffer=None,
    )
    return tmp_path / "texts"


@pytest.fixture
def chats(model: str, tmp_path: Path) -> Path:
    build_sft_cache(CHATS, tmp_path / "chats", tokenizer=load_tokenizer(model), val_frac=0.1, seed=1)
    return tmp_path / "chats"


def windows(folder: Path, length: int = 16) -> Any:
    dataset = PretrainTokenStreamDataset(folder, T=length, device="cpu")
    return dataset.get_batch(B=500, generator=torch.Generator().manual_seed(0))


def examples(folder: Path, eot_id: int, **options: Any) -> Any:
    dataset = SFTExampleDataset(
        folder / "train_tokens.bin", folder / "train_idx.npy", T=64, device="cpu", eot_id=eot_id, **options
    )
    return dataset.get_batch(B=500, generator=torch.Generator().manual_seed(0))


def test_windows_longer_than_every_shard_are_refused_and_short_shards_are_said(
    texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        InvalidInputError, match=r"a window takes T \+ 1 = 301 tokens, but the longest shard has 300; lower"
    ):
        windows(texts / "train", 300)
    with pytest.raises(InvalidInputError, match="lower T to at most 29"):
        windows(texts / "val", 200)
    x, _ = windows(texts / "train", 150)
    assert x.shape == (500, 150)
    assert "1 shard is shorter than a window of 151 tokens, so 100 tokens are never drawn" in caplog.text
    with pytest.raises(InvalidInputError, match="T is 0; give an integer of at least 1"):
        windows(texts / "train", 0)
    with pytest.raises(InvalidInputError, match="B is 0"):
        PretrainTokenStreamDataset(texts / "train", T=4, device="cpu").get_batch(B=0, generator=torch.Generator())


def test_a_shard_that_was_cut_or_is_missing_is_named(texts: Path) -> None:
    shard = texts / "train" / "shard_00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3])
    with pytest.raises(
        ShardFileError, match=r"shard_00001.bin has 597 bytes, which is not a multiple of the 2 bytes of a uint16 token"
    ):
        windows(texts / "train")
    shard.write_bytes(whole[:-4])
    with pytest.raises(ShardFileError, match=r"has 596 bytes, but the meta\.json of its cache says 600 bytes; copy it"):
        windows(texts / "train")
    shard.unlink()
    with pytest.raises(ShardFileError, match=r"shard_00001\.bin is missing, but the meta\.json of its cache"):
        windows(texts / "train")


def test_a_shard_that_is_cut_while_it_is_read_is_an_error_and_no_crash(texts: Path) -> None:
    dataset = PretrainTokenStreamDataset(texts / "train", T=16, device="cpu")
    (texts / "train" / "shard_00000.bin").write_bytes(b"")
    with pytest.raises(PackedSFTError, match=r"shard_00000\.bin has 0 bytes"):
        dataset.get_batch(B=100, generator=torch.Generator().manual_seed(0))


def test_an_id_outside_the_vocabulary_is_named_with_its_place(texts: Path, chats: Path, model: str) -> None:
    shard = texts / "train" / "shard_00001.bin"
    ids = np.fromfile(shard, "<u2")
    ids[123] = 60_000
    ids.tofile(shard)
    with pytest.raises(
        ShardFileError, match=r"shard_00001\.bin: the token at position 123 is 60000, but the vocabulary"
    ):
        windows(texts / "train")
    ids = np.fromfile(chats / "train_tokens.bin", "<u2")
    ids[1] = 60_000
    ids.tofile(chats / "train_tokens.bin")
    with pytest.raises(ShardFileError, match=r"token 1 of example 0 is 60000, but the vocabulary"):
        examples(chats, special_ids(model)["eot"])


def test_folders_without_shards_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none is not a folder; give one that holds shard_\*\.bin"):
        windows(tmp_path / "none")
    with pytest.raises(InvalidInputError, match=r"no file that matches 'shard_\*\.bin'"):
        windows(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "sentence"),
    [
        (np.array([3, 9], np.int64), "example 0 begins at 3"),
        (np.array([0, 9, 9], np.int64), "example 1 begins at 9 and has 0 of the"),
        (np.array([0, 9, 5], np.int64), "example 1 begins at 9 and has -4 of the"),
        (np.array([0, 10**9], np.int64), "example 1 begins at 1,000,000,000 and has"),
        (np.array([0, -5], np.int64), "example 0 begins at 0 and has -5"),
        (np.array([0, 5], np.int32), r"holds <i4 of shape \(2,\), not a list of int64 offsets"),
        (np.array([[0, 5]], np.int64), r"holds <i8 of shape \(1, 2\), not a list of int64 offsets"),
        (np.zeros(0, np.int64), r"lists no examples, but train_tokens\.bin has tokens"),
    ],
)
def test_offsets_that_are_wrong_are_refused(chats: Path, model: str, offsets: Any, sentence: str) -> None:
    (chats / "train_idx.npy").unlink()
    np.save(chats / "train_idx.npy", offsets)
    with pytest.raises(PackedSFTError, match=sentence):
        examples(chats, special_ids(model)["eot"])


def test_files_of_chats_that_were_cut_are_refused(chats: Path, model: str) -> None:
    eot = special_ids(model)["eot"]
    tokens, index = (chats / "train_tokens.bin"), (chats / "train_idx.npy")
    whole = index.read_bytes()
    for data, sentence in [
        (whole[:-8], "in its header; it was truncated or changed"),
        (b"", "is not a .npy file"),
        (whole[:50], "damaged"),
    ]:
        index.write_bytes(data)
        with pytest.raises(ShardFileError, match=sentence):
            examples(chats, eot)
    index.write_bytes(whole)
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-2])
    with pytest.raises(ShardFileError, match=r"train_tokens\.bin has .* bytes instead of the .* in its meta\.json"):
        examples(chats, eot)
    tokens.write_bytes(data[:-1])
    with pytest.raises(ShardFileError, match="not a multiple of the 2 bytes of a token"):
        examples(chats, eot)
    tokens.unlink()
    with pytest.raises(StorageIOError, match=r"cannot open .*train_tokens\.bin: No such file"):
        examples(chats, eot)


def test_a_split_without_examples_is_refused(model: str, tmp_path: Path) -> None:
    build_sft_cache(CHATS, tmp_path / "chats", tokenizer=load_tokenizer(model), val_frac=0, seed=1)
    with pytest.raises(InvalidInputError, match=r"val_idx\.npy lists no examples"):
        SFTExampleDataset(
            tmp_path / "chats" / "val_tokens.bin",
            tmp_path / "chats" / "val_idx.npy",
            T=4,
            device="cpu",
            eot_id=special_ids(model)["eot"],
        )


def test_a_meta_that_is_wrong_is_named(chats: Path, model: str) -> None:
    write_meta(chats / "meta.json", {"token_dtype": "float16", "special_token_ids": {"asst": 1, "eot": 2}})
    with pytest.raises(InvalidInputError, match=r"meta\.json: the dtype is 'float16', which is not an integer dtype"):
        examples(chats, special_ids(model)["eot"])
    write_meta(chats / "meta.json", {"special_token_ids": {"asst": "x"}})
    with pytest.raises(PackedSFTError, match=r"meta\.json: asst is 'x', not an integer"):
        examples(chats, special_ids(model)["eot"])


def test_validate_compares_every_shard_with_its_checksum(texts: Path) -> None:
    shard = texts / "train" / "shard_00001.bin"
    assert validate(texts / "train").ok
    ids = np.fromfile(shard, "<u2")
    ids[5] = 7 if ids[5] != 7 else 8
    ids.tofile(shard)
    [finding] = validate(texts / "train").findings
    assert (finding.file, finding.message) == (
        str(shard),
        "its content does not match its checksum in meta.json; copy it again",
    )
    assert validate(texts / "train", level="structure").ok
    shard.write_bytes(shard.read_bytes()[:-2])
    [finding] = validate(texts / "train", level="structure").findings
    assert finding.message == "has 598 bytes instead of the 600 in its meta.json"
    shard.unlink()
    [finding] = validate(texts / "train", level="structure").findings
    assert finding.message == "is missing, but its meta.json lists it"
    assert validate(texts / "val").ok
    meta = (texts / "meta.json").read_text()
    (texts / "meta.json").write_text(meta.replace('"seed": 1', '"seed": 2'))
    [finding] = validate(texts / "val").findings
    assert "was damaged or edited" in finding.message
