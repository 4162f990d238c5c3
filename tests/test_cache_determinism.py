"""Acceptance test 4 of seed 002: the same iterable and the same seed give the same bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.caches import build_pretrain_cache, build_sft_cache, sha256_file
from tests.caches.small_tokenizer import CHATS, TEXTS, train

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


def checksums(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def build(folder: Path, model: str, *, seed: int = 42, shuffle_buffer: int | None = 7) -> dict[str, str]:
    """Both caches, under the same names, so that meta.json must be the same as well."""
    tokenizer = load_tokenizer(model)
    build_pretrain_cache(
        (text for text in TEXTS),
        str(folder / "pretrain"),
        tokenizer=tokenizer,
        max_train_tokens=900,
        max_val_tokens=90,
        shard_bytes=500,
        seed=seed,
        shuffle_buffer=shuffle_buffer,
    )
    build_sft_cache((chat for chat in CHATS), str(folder / "sft"), tokenizer=tokenizer, val_frac=0.25, seed=seed)
    return checksums(folder)


def test_the_same_input_and_seed_give_the_same_bytes(model: str, tmp_path: Path) -> None:
    first, second = build(tmp_path / "one", model), build(tmp_path / "two", model)
    assert first == second
    assert {"pretrain/train/shard_00000.bin", "pretrain/meta.json", "sft/val_idx.npy", "sft/meta.json"} <= set(first)


def test_another_process_gives_the_same_bytes(model: str, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.test_cache_determinism import build; "
        "build(Path(sys.argv[1]), sys.argv[2])"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77", "PATH": ""}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "one"), model], check=True, env=environment)
    assert checksums(tmp_path / "one") == build(tmp_path / "two", model)


def test_another_seed_gives_other_bytes(model: str, tmp_path: Path) -> None:
    first, second = build(tmp_path / "one", model), build(tmp_path / "two", model, seed=43)
    for name in ("pretrain/train/shard_00000.bin", "pretrain/val/shard_00000.bin", "sft/val_tokens.bin"):
        assert first[name] != second[name]


def test_how_texts_are_batched_does_not_matter(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path / "one", model)
    monkeypatch.setattr("megatron_packed_sft.caches.builders._BATCH_CHARACTERS", 50)
    assert build(tmp_path / "two", model) == first


def test_the_state_of_other_random_numbers_does_not_matter(model: str, tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    def texts() -> Iterator[str]:
        for text in TEXTS:
            random.random(), np.random.default_rng().random(), torch.rand(1)
            yield text

    found = []
    for number in range(2):
        random.seed(number)
        torch.manual_seed(number)
        folder = tmp_path / str(number) / "texts"
        build_pretrain_cache(
            texts(),
            str(folder),
            tokenizer=load_tokenizer(model),
            max_train_tokens=900,
            max_val_tokens=90,
            shard_bytes=500,
            seed=1,
            shuffle_buffer=5,
        )
        found.append(checksums(folder))
    assert found[0] == found[1]
