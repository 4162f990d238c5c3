"""Folders and checkpoints that are incomplete, damaged or hostile: one sentence, and nothing of theirs is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, WriterStateError
from megatron_packed_sft.megatron.weights.folder import INDEX, HuggingFaceFolder
from megatron_packed_sft.megatron.weights.layout import TensorShape, Weight, dense_weights
from megatron_packed_sft.megatron.weights.safetensors_writer import SafetensorsWriter, write_weights
from megatron_packed_sft.megatron.weights.torch_dist import METADATA, TorchDistCheckpoint
from tests.faults.injection import Injector
from tests.megatron.pretrained_models import save_model

# What torch says when one process alone saves a checkpoint.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "llama"
    save_model("llama", folder, max_shard_size="300KB", dtype=torch.float32)
    return folder


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def cut(folder: Path) -> None:
    file = first_file(folder)
    file.write_bytes(file.read_bytes()[:-10])


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(first_file(folder))
    change(tensors)
    save_file(tensors, first_file(folder), {"format": "pt"})


def put_into_index(folder: Path, file: str) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file}))


def only_pickles(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 63)


def quantized(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: first_file(folder).unlink(), "is missing, and model.safetensors.index.json names it"),
        (cut, "is cut or damaged (incomplete metadata, file not fully covered); copy or download it again"),
        (lambda folder: first_file(folder).write_bytes(b"\xff" * 100), "is cut or damaged (header too large)"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a local Hugging Face"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map; download it again"),
        (
            lambda folder: put_into_index(folder, "../model.safetensors"),
            "is not a safetensors file of this folder",
        ),
        (lambda folder: put_into_index(folder, "model.bin"), "is not a safetensors file of this folder"),
        (lambda folder: put_into_index(folder, first_file(folder).name), "is in the index and not in the file"),
        (only_pickles, "has its weights in pytorch_model.bin, a pickle, which can run anything"),
        (lambda folder: edit_tensors(folder, narrower), "has the sizes [64, 63], and config.json gives [64, 64]"),
        (lambda folder: edit_tensors(folder, quantized), "is stored as I8, and only F64, F32, BF16, F16 can be read"),
        (
            lambda folder: edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=3)),
            "has the tensor model.layers.3.",
        ),
        (
            lambda folder: edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=5)),
            "lacks the tensor model.layers.4.input_layernorm.weight and 8 more, which config.json asks for",
        ),
        (
            lambda folder: edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True)),
            "config.json ties the embeddings, so save the model again",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_before_a_weight_is_read(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    assert len(HuggingFaceFolder.open(folder).files) > 1
    damage(folder)
    with pytest.raises(PackedSFTError) as caught:
        HuggingFaceFolder.open(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_written_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(7).bfloat16(), "é": torch.zeros(0, 2).bfloat16()}
    shapes = [TensorShape(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with SafetensorsWriter(tmp_path / "x.safetensors", shapes, torch.bfloat16) as writer:
        for name in ("a", "é", "b"):
            writer.write(name, tensors[name].double())
        with pytest.raises(WriterStateError, match="no room for a"):
            writer.write("a", tensors["a"])
        writer.finalize()
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with SafetensorsWriter(tmp_path / "y.safetensors", shapes, torch.bfloat16) as writer:
        with pytest.raises(WriterStateError, match="lacks b"):
            writer.finalize()
        with pytest.raises(InvalidInputError, match="has the sizes"):
            writer.write("b", torch.zeros(2))


def test_values_that_do_not_fit_are_refused(sharded: Path, tmp_path: Path) -> None:
    weights = list(dense_weights(HuggingFaceFolder.open(sharded).shape))[:1]

    def filled(value: float) -> Callable[[Weight], torch.Tensor]:
        return lambda weight: torch.full(weight.sizes, value)

    for value, message in ((1e30, "which do not fit into torch.float16; choose"), (float("nan"), "are not finite")):
        folder = tmp_path / message[:3]
        folder.mkdir()
        with pytest.raises(PackedSFTError, match=message):
            write_weights(folder, weights, filled(value), dtype=torch.float16, max_shard_bytes=1 << 30)


def test_a_full_disk_while_writing_is_one_sentence(sharded: Path, tmp_path: Path) -> None:
    weights = list(dense_weights(HuggingFaceFolder.open(sharded).shape))[:1]
    for step in range(4):  # open, reserve, header, tensor
        folder = tmp_path / str(step)
        folder.mkdir()
        with Injector(step, error=28), pytest.raises(PackedSFTError, match="No space left on device"):
            write_weights(
                folder, weights, lambda one: torch.zeros(one.sizes), dtype=torch.float32, max_shard_bytes=1 << 30
            )


class Attack:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/packed_sft_was_attacked",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of torch's own making, without Megatron-Core."""
    from torch.distributed import checkpoint as torch_checkpoint

    folder = tmp_path / "checkpoint"
    torch_checkpoint.save({"weight": torch.arange(12.0).view(3, 4)}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_is_read_whole_and_by_layer(checkpoint: Path) -> None:
    with TorchDistCheckpoint(checkpoint) as opened:
        assert opened.tensors["weight"].size == (3, 4)
        assert torch.equal(opened.read("weight"), torch.arange(12.0).view(3, 4))
        assert opened.read("weight", 2).tolist() == [8.0, 9.0, 10.0, 11.0]


def test_a_pickle_in_a_checkpoint_runs_nothing(checkpoint: Path) -> None:
    target = Path("/tmp/packed_sft_was_attacked")
    (checkpoint / METADATA).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(PackedSFTError, match=r"names posix.system, which no checkpoint needs"):
        TorchDistCheckpoint(checkpoint)
    assert not target.exists()


def test_a_chunk_of_a_checkpoint_runs_nothing(checkpoint: Path) -> None:
    target = Path("/tmp/packed_sft_was_attacked")
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    [(index, place)] = metadata.storage_data.items()
    torch.save(Attack(), checkpoint / place.relative_path)
    length = (checkpoint / place.relative_path).stat().st_size
    metadata.storage_data = {index: type(place)(place.relative_path, 0, length)}
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    with (
        TorchDistCheckpoint(checkpoint) as opened,
        pytest.raises(PackedSFTError, match=r"weight cannot be read: it names \w+\.system"),
    ):
        opened.read("weight")
    assert not target.exists()


def test_a_checkpoint_that_names_a_file_elsewhere_is_refused(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    [(index, place)] = metadata.storage_data.items()
    metadata.storage_data = {index: type(place)("../secret", place.offset, place.length)}
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(PackedSFTError, match="outside the checkpoint"):
        TorchDistCheckpoint(checkpoint)


@pytest.mark.parametrize("keep", [0, 10, -100])
def test_a_cut_checkpoint_is_one_sentence(checkpoint: Path, keep: int) -> None:
    [file] = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:keep])
    with TorchDistCheckpoint(checkpoint) as opened, pytest.raises(PackedSFTError) as caught:
        opened.read("weight")
    assert "weight cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value)
    (checkpoint / METADATA).write_bytes((checkpoint / METADATA).read_bytes()[:-20])
    with pytest.raises(PackedSFTError, match="cannot be read"):
        TorchDistCheckpoint(checkpoint)


def test_a_checkpoint_of_another_backend_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(PackedSFTError, match="written by 'zarr', and only torch_dist"):
        TorchDistCheckpoint(checkpoint)
