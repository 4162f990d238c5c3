"""`make demo-pretrained` in real processes: with a tiny random model, and in `make test-real` with SmolLM2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft.train.metrics import read_metrics
from tests.real_data import IS_WHOLE, model_file
from tests.train.chat_models import save_chat_model

ROOT = Path(__file__).parents[2]
LOSSES = re.compile(r"^pretrained  (\S+) by transformers, (\S+) at step 0 of our runs$", re.MULTILINE)


def demonstrate(home: Path, *options: str) -> str:
    command = [sys.executable, "-m", "recipes.demo_pretrained", "--output", str(home), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def assert_as_promised(home: Path, printed: str, num_steps: int) -> None:
    found = LOSSES.search(printed)
    assert found is not None
    by_transformers, ours = map(float, found.groups())
    assert ours == pytest.approx(by_transformers, rel=1e-4)
    for name in ("lora", "full"):
        before, after = (one["loss"] for one in read_metrics(home / f"{name}_run" / "metrics.jsonl", "validation"))
        assert before == pytest.approx(by_transformers, rel=1e-4)
        assert after < before
        assert f"{name:<11} {after:.5f} after {num_steps} steps" in printed
        assert (home / f"{name}_model" / "model.safetensors").exists()
    for heading in ("question", "in the data", "before", "after LoRA", "after all weights"):
        assert f"--- {heading}\n" in printed


def test_the_demo_fine_tunes_exports_and_asks_a_tiny_model(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", "llama")
    rows = [
        [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(400)
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    options = ["--model", str(model), "--chats", str(chats), "--rows", "300", "--steps", "4"]
    printed = demonstrate(tmp_path / "demo", *options)
    assert_as_promised(tmp_path / "demo", printed, 4)
    assert "--- question\nWhat is 300 + 1?\n--- in the data\nIt is 301.\n" in printed
    assert "300 + 1" not in (tmp_path / "demo" / "chats.jsonl").read_text()


@pytest.mark.skipif(not IS_WHOLE, reason="make test-real fine-tunes a real model")
def test_the_demo_fine_tunes_exports_and_asks_a_real_model(tmp_path: Path) -> None:
    model_file()
    printed = demonstrate(tmp_path / "demo", "--steps", "6")
    assert_as_promised(tmp_path / "demo", printed, 6)
