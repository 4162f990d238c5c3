"""The plain training loop: it learns from packed data, and sequences of a bin do not see each other."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed_sft import PackedBin, create_sft_dataset
from tests.packed_bins import write_shard

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "hf_style_loop.py"
VOCAB_SIZE = 64
PACK_SIZE = 128
EOS = 2
NUM_STEPS = 30


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences that count up from a number of their own, which a model can learn; the first quarter is the prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(20):
        ids, mask, starts = [], [], []
        while sum(map(len, ids)) <= PACK_SIZE - 32:
            length = int(rng.integers(8, 32))
            starts.append(sum(map(len, ids)))
            ids.append((rng.integers(VOCAB_SIZE) + np.arange(length)) % VOCAB_SIZE)
            mask.append(np.append(np.arange(1, length) >= length // 4, False))
        rows.append(PackedBin(np.concatenate(ids), np.concatenate(mask).astype(np.uint8), np.array(starts)))
    path = tmp_path_factory.mktemp("data") / "shard"
    write_shard(path, rows, PACK_SIZE, pad_id=EOS, vocab_size=VOCAB_SIZE)
    return path


def test_the_recipe_is_short() -> None:
    assert len(RECIPE.read_text().splitlines()) <= 64


def losses_of(path: Path, *options: str) -> list[float]:
    command = [sys.executable, str(RECIPE), str(path), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # small steps: threads that wait for each other only cost
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120).stdout
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", shown, re.MULTILINE)]


def test_a_real_vocabulary_is_read_from_the_data(tmp_path: Path) -> None:
    size = 128_256
    bins = [PackedBin(np.arange(size - 32, size), np.append(np.ones(31, np.uint8), 0), np.array([0])) for _ in range(4)]
    write_shard(tmp_path / "shard", bins, 32, pad_id=size - 1, vocab_size=size)
    first, second = losses_of(tmp_path / "shard", "--steps=2")
    assert first == pytest.approx(np.log(size), rel=0.05)
    assert second < first


def test_the_loss_falls(shard: Path) -> None:
    losses = losses_of(shard, f"--steps={NUM_STEPS}", "--bins-per-step=2")
    assert len(losses) == NUM_STEPS
    assert losses[0] > 3.9  # knows nothing: log(64) is 4.16
    assert losses[-1] < losses[0] / 2


def test_the_trained_model_is_saved_and_loads_again(shard: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = losses_of(shard, "--steps=20", f"--output={tmp_path / 'model'}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    batch = create_sft_dataset(shard, EOS, PACK_SIZE, contract="hf").fetch_batch([0])
    assert model(**batch).loss.item() < (losses[0] + losses[-1]) / 2


def test_the_loss_of_a_step_is_that_of_its_sequences_one_by_one(shard: Path) -> None:
    from recipes.hf_style_loop import small_model, train

    torch.manual_seed(0)
    model = small_model(VOCAB_SIZE).eval()
    batch = create_sft_dataset(shard, EOS, PACK_SIZE, contract="hf").fetch_batch([0, 1])
    boundaries = batch["cu_seq_lens_q"].tolist()
    assert len(boundaries) > 5
    total = num_trained = 0.0
    [packed] = train(model, [batch], learning_rate=0)
    with torch.no_grad():
        for start, end in itertools.pairwise(boundaries):
            labels = batch["labels"][:, start:end]
            count = int((labels[:, 1:] != -100).sum())
            total += model(input_ids=batch["input_ids"][:, start:end], labels=labels).loss.item() * count
            num_trained += count
        as_one_text = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert packed == pytest.approx(total / num_trained, rel=1e-6)
    assert abs(as_one_text.item() - packed) > 1e-3  # the comparison can tell: without position ids, all see all
