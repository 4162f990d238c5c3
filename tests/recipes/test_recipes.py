"""The files that a user copies: each is composed as its header says. The demo's test trains with smollm2_135m_sft."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megatron_packed_sft.config.schema import build
from megatron_packed_sft.prepare.app import main as prepare
from megatron_packed_sft.train.app import main as train
from megatron_packed_sft.train.config import TrainConfig
from tests.megatron import test_bridge_0_6
from tests.megatron.bridge_releases import TARGET, installed

ROOT = Path(__file__).parents[2]
# tests/caches/ reads caches.yaml, which lists sources of token caches and trains nothing.
FILES = sorted(file for file in (ROOT / "recipes").glob("*.yaml") if file.stem != "caches")
BRIDGE = ROOT / "recipes" / "megatron_bridge"


def header_commands(file: Path) -> list[list[str]]:
    """The commands of the comment that a file begins with."""
    header = re.findall(r"^# (.*)$", file.read_text().partition("\n\n")[0], re.MULTILINE)
    return [shlex.split(line) for line in header if line.startswith(("packed-sft ", "torchrun "))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_composed_by_the_line_in_its_header(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (_, verb, *preparing), (torchrun, *rest) = header_commands(file)
    assert (verb, torchrun) == ("prepare", "torchrun")
    assert prepare([*preparing, "--cfg", "job"]) == 0, capsys.readouterr().err
    data = yaml.safe_load(capsys.readouterr().out)
    assert data["encode"]["max_len"] <= data["packing"]["pack_size"]

    script = rest.index("recipes/sft.py")
    arguments = rest[script + 1 :]
    assert arguments == ["--config-dir", "recipes", "--config-name", file.stem]
    assert train([*arguments, "--cfg", "job"]) == 0, capsys.readouterr().err
    config = build(TrainConfig, yaml.safe_load(capsys.readouterr().out))
    assert config.model.path == data["tokenizer"]["path"]
    assert config.data.path == data["output"]
    assert config.output == f"runs/{file.stem}"
    num_ranks = int(rest[rest.index("--nproc-per-node") + 1])
    per_replica = config.parallel.tensor * config.parallel.pipeline
    assert num_ranks % per_replica == 0
    assert config.train.global_batch_size is not None
    assert config.train.global_batch_size % (num_ranks // per_replica) == 0
    assert (config.peft.method == "lora") == file.stem.endswith("_lora")


def test_there_is_a_recipe_for_each_job() -> None:
    assert [file.stem for file in FILES] == ["llama3_8b_lora", "llama3_8b_sft", "qwen3_8b_sft", "smollm2_135m_sft"]


def bridge_recipe() -> Any:
    """A recipe of Megatron-Bridge with the parts that our file changes."""
    recipe = test_bridge_0_6.make_recipe()
    sizes = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10}
    parts = {
        "dataset": recipe.dataset,
        "model": dataclasses.make_dataclass("Model", ["seq_length"])(99),
        "train": dataclasses.make_dataclass("Train", list(sizes))(**sizes),
        "checkpoint": dataclasses.make_dataclass("Checkpoint", ["pretrained_checkpoint", "save"])(None, None),
    }
    return dataclasses.make_dataclass("Recipe", list(parts))(**parts)


def test_the_start_script_hands_megatron_bridge_a_recipe_with_our_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = header_commands(BRIDGE / "packed.yaml")
    monkeypatch.chdir(ROOT)
    started: list[Any] = []
    with installed("0.6.2"):
        # These three import Transformer Engine.
        for module, members in {
            "recipes": {"llama31_8b_sft_config": bridge_recipe},
            "training.finetune": {"finetune": lambda *given: started.append(given)},
            "training.gpt_step": {"forward_step": "forward_step"},
        }.items():
            bare = ModuleType(f"megatron.bridge.{module}")
            vars(bare).update(members)
            monkeypatch.setitem(sys.modules, bare.__name__, bare)
            parent, _, leaf = bare.__name__.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], leaf, bare, raising=False)
        script = command.index("recipes/megatron_bridge/finetune.py")
        monkeypatch.setattr(sys, "argv", [*command[script:], "dataset.path=other_dataset"])
        runpy.run_path(command[script], run_name="__main__")
        [(config, step)] = started
        assert step == "forward_step"
        assert f"{type(config.dataset).__module__}.{type(config.dataset).__name__}" == TARGET
        assert (config.dataset.path, config.dataset.dataloader_type) == ("other_dataset", "single")
        assert (config.dataset.seq_length, config.model.seq_length) == (4096, 4096)
        assert (config.train.micro_batch_size, config.train.global_batch_size) == (1, 32)
        assert config.checkpoint.pretrained_checkpoint == "megatron_checkpoint"
        monkeypatch.undo()
