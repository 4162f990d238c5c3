"""transformers' Trainer over packed data: it learns, weighs every trained token alike, and saves a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft import create_sft_dataset
from tests.train.counting_chats import VOCAB_SIZE, write_dataset

pytest.importorskip("accelerate")
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "hf_trainer.py"
EOS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "data", 12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small steps: threads that wait for each other only cost
    yield
    torch.set_num_threads(before)


def trainer_of(data: Path, output: Path, **arguments: Any) -> Any:
    from transformers import TrainingArguments

    from recipes.hf_style_loop import small_model
    from recipes.hf_trainer import make_trainer

    torch.manual_seed(0)
    settings = {"remove_unused_columns": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    given = TrainingArguments(str(output), use_cpu=True, disable_tqdm=True, **{**settings, **arguments})
    return make_trainer(small_model(VOCAB_SIZE), str(data), given, EOS)


def test_the_recipe_trains_validates_and_saves_a_model_that_loads_again(data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "model"
    command = [sys.executable, str(RECIPE), str(data), "--steps=20", f"--output={output}", "--validate"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    [validated] = re.findall(r"'eval_loss': '?([\d.]+)", done.stdout)
    assert float(validated) == pytest.approx(losses[-1], rel=0.3)
    model = AutoModelForCausalLM.from_pretrained(output)
    batch = create_sft_dataset(data, EOS, contract="hf").fetch_batch([0])
    assert model(**batch).loss.item() < 0.6 * losses[0]


def test_bins_in_one_pass_and_bins_accumulated_are_the_same_step(data: Path, tmp_path: Path) -> None:
    shapes = ({"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4})
    weights = []
    for number, shape in enumerate(shapes):
        trainer = trainer_of(
            data, tmp_path / str(number), max_steps=2, learning_rate=0.1, optim="sgd", max_grad_norm=0, **shape
        )
        trainer.train()
        assert trainer.state.log_history[0]["grad_norm"] > 1
        weights.append({name: one.detach().clone() for name, one in trainer.model.named_parameters()})
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6)


def test_a_model_sees_packed_sequences_apart(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(data, tmp_path, max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {"cu_seq_lens_q", "position_ids", "labels"} <= batch.keys()
    assert len(batch["cu_seq_lens_q"]) > 3
    assert (batch["position_ids"] == 0).sum() > 3
