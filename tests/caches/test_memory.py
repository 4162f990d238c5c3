"""Caches are mapped, not read: one that is far larger than memory costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_packed_sft.caches import PretrainTokenStreamDataset, SFTExampleDataset

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 1 << 36  # 128 GB, of which the file system keeps nothing: a hole


def test_a_shard_far_larger_than_memory_is_sampled_without_reading_it(tmp_path: Path) -> None:
    for name in ("shard_00000.bin", "tokens.bin"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(NUM_TOKENS * 2)
    windows = PretrainTokenStreamDataset(tmp_path, T=64, device="cpu")
    x, y = windows.get_batch(B=16, generator=torch.Generator().manual_seed(0))
    assert windows.num_windows == NUM_TOKENS - 64
    assert int(x.sum()) == int(y.sum()) == 0
    np.save(tmp_path / "idx.npy", np.array([0, 5, NUM_TOKENS - 7], np.int64))
    chats = SFTExampleDataset(tmp_path / "tokens.bin", tmp_path / "idx.npy", T=64, device="cpu", eot_id=3, asst_id=2)
    x, _, y_masked = chats.get_batch(B=16, generator=torch.Generator().manual_seed(0))
    assert set(y_masked.flatten().tolist()) == {-100}
    assert sorted({(row == 0).sum().item() for row in x}) == [5, 7, 64]


def test_building_takes_no_more_memory_for_more_texts() -> None:
    script = """
import resource, sys, tempfile
from megatron_packed_sft.caches import build_pretrain_cache, build_sft_cache
from tests.caches.small_tokenizer import Letters

def build(num_texts):
    texts = (f"{number} " + "a" * 1000 for number in range(num_texts))
    build_pretrain_cache(texts, tempfile.mkdtemp() + "/cache", tokenizer=Letters(), max_train_tokens=None,
        max_val_tokens=100, shard_bytes=1 << 20, seed=1, shuffle_buffer=100)
    chats = ([{"role": "user", "content": f"{number} " + "a" * 1000}] for number in range(num_texts))
    build_sft_cache(chats, tempfile.mkdtemp() + "/cache", tokenizer=Letters(), val_frac=0.1, seed=1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

build(5_000)
print(build(5_000), build(50_000))
"""
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}
    )
    few, many = map(float, shown.stdout.split())
    assert many - few < 25  # megabytes; the texts alone have 50, and as Python's ids 400
