"""Checkpoints that would run something: refused by name by every command, and never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as torch_checkpoint

import megatron_packed_sft
from megatron_packed_sft.errors import PackedSFTError, ShardFileError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.megatron.checkpoint_writer import write_tensors
from megatron_packed_sft.megatron.weights.torch_dist import (
    COMMON,
    METADATA,
    TorchDistCheckpoint,
    load_checkpoint,
    read_metadata,
    refuse_harmful_state,
    refuse_unreadable,
)
from megatron_packed_sft.support import json_document
from megatron_packed_sft.train.checkpoint import STATE, TrainingState
from tests.attacks.checkpoint_attacks import ATTACKS, PAYLOAD, Attack
from tests.train.counting_chats import write_dataset
from tests.train.launch import environment, torchrun


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], dict[str, Any]]]:
    """Every command on every attacked checkpoint: what it returned and printed."""
    home = tmp_path_factory.mktemp("hostile")
    data = write_dataset(home / "data", 8)
    command = torchrun(1, "-m", "tests.attacks.checkpoint_attacks", data, home)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return home, {(line["attack"], line["verb"]): line for line in lines}


EXPECTED = {"as_object": ""}  # what torch makes of it


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_payload_in_a_checkpoint_is_never_run(attack: str, calls: tuple[Path, dict[Any, Any]]) -> None:
    home, results = calls
    for verb in ("train", "export"):
        result = results[attack, verb]
        if (attack, verb) == ("in_common", "export"):  # does not read it
            continue
        assert result["code"] == 1, result
        [line] = result["stderr"].splitlines()
        assert EXPECTED.get(attack, "it names posix.mkdir, which no checkpoint needs") in line
        assert str(home / attack / "step_000001") in line
    assert results[attack, "info"]["code"] == 0  # says what the JSON files say, and opens nothing else
    assert not (home / f"{PAYLOAD}_{attack}").exists()


def test_a_genuine_checkpoint_is_resumed(calls: tuple[Path, dict[Any, Any]]) -> None:
    home, results = calls
    assert results["none", "train"]["code"] == 0, results["none", "train"]
    assert (home / "run" / "checkpoints" / "step_000002").is_dir()


@pytest.fixture
def one_rank() -> Iterator[None]:
    pytest.importorskip("megatron.core")
    from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed

    start_distributed(choose_backend())
    yield
    stop_distributed()


@pytest.mark.usefixtures("one_rank")
def test_objects_of_megatron_come_back_unless_they_would_run_something(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    def state(value: Any, weight: torch.Tensor) -> dict[str, Any]:
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", weight),
            "layers": {0: ShardedTensor.from_rank_offsets("layers", weight[0], (0, 0, 1), prepend_axis_num=1)},
            "extra": ShardedObject("layer._extra_state", value, (1,), (0,)),
            "step": 3,
        }

    for name, value in {"plain": {"scale": torch.ones(2)}, "hostile": Attack(tmp_path / PAYLOAD)}.items():
        folder = tmp_path / name
        folder.mkdir()
        write_tensors(state(value, torch.arange(6.0).view(2, 3)), folder, folder)
    loaded = load_checkpoint(state(None, torch.zeros(2, 3)), tmp_path / "plain")
    assert loaded["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["layers"][0].tolist() == [0, 1, 2]
    assert loaded["extra"]["scale"].tolist() == [1, 1]
    assert loaded["step"] == 3
    with pytest.raises(ShardFileError, match=r"hostile cannot be read: it names posix\.mkdir"):
        load_checkpoint(state(None, torch.zeros(2, 3)), tmp_path / "hostile")
    with pytest.raises(ShardFileError, match=r"cannot be read .*Global shape mismatch"):
        load_checkpoint({"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(3, 3))}, tmp_path / "plain")
    assert not (tmp_path / PAYLOAD).exists()


def test_the_state_of_fp8_may_hold_tensors_and_recipes_only(tmp_path: Path) -> None:
    def as_bytes(value: Any) -> torch.Tensor:  # as Transformer Engine makes it
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    refuse_harmful_state(torch.empty(0, dtype=torch.uint8), "extra")
    refuse_harmful_state(as_bytes({"scale_fwd": torch.ones(3), "dtype": torch.float32}), "extra")
    with pytest.raises(ShardFileError, match=r"extra cannot be read: it names posix\.mkdir"):
        refuse_harmful_state(as_bytes({"recipe": Attack(tmp_path / PAYLOAD)}), "extra")
    hidden = io.BytesIO()
    torch.save(Attack(tmp_path / PAYLOAD), hidden)

    class Storage:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (hidden.getvalue(),)

    # Made, thrown away, and not in what comes back: \x94 memoizes, 0 drops.
    dropped = pickle.dumps(Storage())[:-1] + b"0N."
    by_attribute = b"\x80\x04\x8c\x20transformer_engine.common.recipe\x8c\x09os.system\x93."
    with pytest.raises(ShardFileError, match=r"it names transformer_engine\.common\.recipe\.os\.system"):
        refuse_harmful_state(torch.frombuffer(bytearray(by_attribute), dtype=torch.uint8), "extra")
    for state in (as_bytes([Storage()]), torch.frombuffer(bytearray(dropped), dtype=torch.uint8)):
        with pytest.raises(ShardFileError, match=r"extra cannot be read: it names posix\.mkdir"):
            refuse_harmful_state(state, "extra")
    assert not (tmp_path / PAYLOAD).exists()


@pytest.fixture
def genuine(tmp_path: Path) -> Path:
    """A checkpoint of torch's own making."""
    folder = tmp_path / "genuine"
    state = {"weight": torch.arange(12.0).view(3, 4), "note": {"a": 1}}
    with pytest.warns(UserWarning, match="to save in a single process"):
        torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_torch_writes_is_read_in_every_protocol(genuine: Path) -> None:
    metadata = pickle.loads((genuine / METADATA).read_bytes())
    for protocol in (2, 4, 5):
        (genuine / METADATA).write_bytes(pickle.dumps(metadata, protocol))
        with TorchDistCheckpoint(genuine) as opened:
            assert opened.read("weight").tolist() == torch.arange(12.0).view(3, 4).tolist()
            assert list(opened.tensors) == ["weight"]


HOSTILE = {
    "an instance by name": b"(X\x01\x00\x00\x00aiposix\nmkdir\n.",
    "an object by class": b"(cposix\nmkdir\nX\x01\x00\x00\x00ao.",
    "builtins.eval": b"cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
    "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x0cserialization\x93.",
    "an attribute of an allowed class": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    "posix.system": pickle.dumps(os.system),
    "a class is changed": b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "a memo of 16 GB": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "nested lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA).write_bytes(data)
    with pytest.raises(ShardFileError) as caught:
        read_metadata(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["../other", "/etc/passwd", "a\nb", "a\0b", ".", "a" * 256])
def test_a_chunk_in_another_folder_or_with_an_odd_name_is_refused(genuine: Path, file: str) -> None:
    metadata = pickle.loads((genuine / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = file
    (genuine / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(PackedSFTError) as caught:
        TorchDistCheckpoint(genuine)
    assert str(caught.value).isprintable()


def test_a_tensor_larger_than_its_chunks_is_refused_before_memory_is_asked_for(genuine: Path) -> None:
    metadata = pickle.loads((genuine / METADATA).read_bytes())
    metadata.state_dict_metadata["weight"].size = torch.Size([1 << 40, 1 << 18])
    (genuine / METADATA).write_bytes(pickle.dumps(metadata))
    with TorchDistCheckpoint(genuine) as opened, pytest.raises(ShardFileError, match="holds only a part of weight"):
        opened.read("weight")


def test_common_state_that_would_run_something_is_refused(genuine: Path, tmp_path: Path) -> None:
    torch.save({"step": 3}, genuine / COMMON)
    refuse_unreadable(genuine)
    torch.save({"step": [Attack(tmp_path / PAYLOAD)]}, genuine / COMMON)
    with pytest.raises(ShardFileError, match=r"common\.pt cannot be read: it names posix\.mkdir"):
        refuse_unreadable(genuine)
    (genuine / COMMON).write_bytes(pickle.dumps(Attack(tmp_path / PAYLOAD)))  # not even an archive
    with pytest.raises(ShardFileError, match=r"common\.pt"):
        refuse_unreadable(genuine)
    assert not (tmp_path / PAYLOAD).exists()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_metadata_gives_our_errors_only(genuine: Path, data: st.DataObject) -> None:
    damaged = bytearray((genuine / METADATA).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            del damaged[at : at + data.draw(st.integers(1, 20))]
            damaged = damaged or bytearray(b".")
    folder = genuine.parent / "damaged"
    folder.mkdir(exist_ok=True)
    for file in genuine.glob("*.distcp"):
        shutil.copy(file, folder)
    (folder / METADATA).write_bytes(damaged)
    try:
        with TorchDistCheckpoint(folder) as opened:
            for name in opened.tensors:
                opened.read(name)
    except PackedSFTError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("text", ["[]", "{", "{}", "[" * 100_000])
def test_a_damaged_description_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(ShardFileError, match=r"metadata\.json cannot be read; restore the checkpoint"):
        TorchDistCheckpoint(tmp_path)


def test_a_state_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    state = TrainingState(step=1, data={}, scheduler={}, model={}, checksums={"/dev/zero": "0" * 32})
    (tmp_path / STATE).write_bytes(state.to_bytes())
    with pytest.raises(ShardFileError, match="has a checksum of /dev/zero, which is not one of its files"):
        TrainingState.load(tmp_path)
    (tmp_path / STATE).write_bytes(json_document.render({"files": {"a": "much"}}))
    with pytest.raises(PackedSFTError, match="a is 'much', not an integer"):
        describe(str(tmp_path))


def test_nothing_else_in_the_package_unpickles() -> None:
    """One reader, so that there is one place to get right."""
    risky = re.compile(r"torch\.load\(|pickle\.loads?\(|dist_checkpointing\.load\(|FileSystemReader")
    package = Path(megatron_packed_sft.__file__).parent
    found = {
        (str(path.relative_to(package)), line.strip())
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if risky.search(line)
    }
    assert {file for file, _ in found} == {
        "megatron/weights/torch_dist.py",
    }, found
    assert all("weights_only=True" in line for _, line in found if "torch.load(" in line)
