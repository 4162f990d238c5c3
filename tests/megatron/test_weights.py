"""Pretrained weights: our model computes what transformers computes, in every layout of the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder
from megatron_packed_sft.megatron.weights.safetensors_writer import write_weights
from megatron_packed_sft.megatron.weights.torch_dist import CheckpointWeights, TorchDistCheckpoint
from megatron_packed_sft.train.export import export_model
from tests.megatron import tiny_gpt
from tests.megatron.pretrained_models import CASES, NUM_POSITIONS, VOCAB_SIZE, build_from, save_model, tokens
from tests.megatron.tiny_gpt import batch_of, run_of_one
from tests.megatron.weights_two_ranks import FOR_MEGATRON, LAYOUTS

pytestmark = [pytest.mark.filterwarnings(text) for text in tiny_gpt.WARNINGS]
LIMIT = 1e-6  # rotary angles are float32 on both sides


class Models:
    """Folders with a model of each family, and the models of transformers that they hold."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # Several shards, so that a weight's tensors lie in different files.
        self.theirs = {case: save_model(case, home / case, max_shard_size="100KB") for case in CASES}
        for case in FOR_MEGATRON:
            export_model(home / case, home / f"{case}_megatron", to="megatron")

    def logits(self, case: str) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.theirs[case](tokens()).logits
        return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def two_ranks_done(models: Models) -> Path:
    """The folder in which two processes have left the logits of every layout."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.megatron.weights_two_ranks", str(models.home)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return models.home


@pytest.fixture(scope="module")
def one_rank() -> Any:
    with run_of_one():
        yield


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(models: Models, one_rank: None, case: str) -> None:
    model = build_from(models.home / case)
    with torch.no_grad():
        ours = model(tokens(), torch.arange(NUM_POSITIONS)[None].expand(2, -1), None)
    theirs = models.logits(case)
    assert theirs.abs().max() > 0.5
    assert (ours[..., :VOCAB_SIZE] - theirs).abs().max() < LIMIT
    assert (ours[..., VOCAB_SIZE:] < -1e30).all()  # padding never gets a probability


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_same_on_two_ranks(models: Models, two_ranks_done: Path, case: str, layout: str) -> None:
    ours = torch.load(two_ranks_done / f"{case}_{layout}.pt")
    assert (ours - models.logits(case)).abs().max() < LIMIT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_import_then_export_gives_the_same_bytes_from_every_layout(
    two_ranks_done: Path, tmp_path: Path, case: str, layout: str
) -> None:
    folder = HuggingFaceFolder.open(two_ranks_done / case)
    with TorchDistCheckpoint(two_ranks_done / f"{case}_{layout}_checkpoint") as checkpoint:
        weights = CheckpointWeights(checkpoint, folder.shape)
        write_weights(tmp_path, weights.weights(), weights.read, dtype=folder.dtype, max_shard_bytes=200_000)
    (tmp_path / "config.json").write_bytes((folder.path / "config.json").read_bytes())
    exported = HuggingFaceFolder.open(tmp_path)
    assert len(exported.files) > 1
    before, after = tensors_of(folder), tensors_of(exported)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("case", FOR_MEGATRON)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_an_exported_checkpoint_in_every_layout(two_ranks_done: Path, case: str, layout: str) -> None:
    """Two ranks have loaded it with `dist_checkpointing`, as Megatron-LM does, and found the weights of the folder."""
    for rank in (0, 1):
        assert torch.load(two_ranks_done / f"{case}_{layout}_{rank}_loaded.pt") == "equal"


@pytest.mark.parametrize("case", FOR_MEGATRON)
def test_a_checkpoint_for_megatron_comes_back_with_the_same_bytes(models: Models, tmp_path: Path, case: str) -> None:
    folder, root = models.home / case, models.home / f"{case}_megatron"
    report = export_model(root, tmp_path / "back", like=folder)
    assert report.source == str(root / "release")
    before, after = tensors_of(HuggingFaceFolder.open(folder)), tensors_of(HuggingFaceFolder.open(tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with pytest.raises(InvalidInputError, match="does not say which model it holds; add --like FOLDER"):
        export_model(root, tmp_path / "again")
    with pytest.raises(PackedSFTError, match=r"give the checkpoint of that model|which a .* model does not have"):
        export_model(root, tmp_path / "again", like=models.home / "llama")
    assert [entry.name for entry in tmp_path.iterdir()] == ["back"]


def test_megatron_lm_and_bridge_find_what_they_ask_for_first(models: Models) -> None:
    from megatron.core import dist_checkpointing

    release = models.home / f"{FOR_MEGATRON[0]}_megatron" / "release"
    state = dist_checkpointing.load_common_state_dict(str(release))
    assert (state["checkpoint_version"], state["args"].tensor_model_parallel_size) == (3.0, 1)
    config = yaml.safe_load((release / "run_config.yaml").read_text())  # as Megatron-Bridge does
    assert config["model"]["pipeline_model_parallel_size"] == 1
    assert config["checkpoint"] == {"save_optim": False, "save_rng": False, "fully_parallel_save": False}


def tensors_of(folder: HuggingFaceFolder) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.files:
        found |= load_file(folder.path / file)
    return found


@pytest.mark.parametrize("case", ["llama31", "mistral", "qwen2", "qwen3"])
def test_the_loss_of_packed_chats_is_that_of_transformers_one_by_one(models: Models, one_rank: None, case: str) -> None:
    rng = np.random.default_rng(5)
    lengths = (20, 33, 7)
    ids = rng.integers(3, VOCAB_SIZE, sum(lengths))
    ends = np.cumsum(lengths)
    mask = rng.integers(0, 2, sum(lengths))  # as the shards hold it: 1 where the prediction made here counts
    mask[ends - 1] = 0
    row = {"input_ids": ids, "seq_boundaries": [0, *ends.tolist()], "loss_mask": mask}
    with torch.no_grad():
        output, loss = forward_step(iter([batch_of(row, multiple=16)]), build_from(models.home / case))
    total, num_trained, _ = loss(output)
    expected = 0.0
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        sequence = torch.from_numpy(ids[start:end])[None]
        labels = sequence.clone()
        labels[0, 1:][torch.from_numpy(mask[start : end - 1]) == 0] = -100
        labels[0, 0] = -100
        with torch.no_grad():
            mean = models.theirs[case](sequence, labels=labels).loss.item()
        expected += mean * mask[start:end].sum()
    assert num_trained.item() == mask.sum()
    assert total.item() == pytest.approx(expected, rel=1e-6)
