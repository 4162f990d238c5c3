"""Checkpoints that would run something: refused by name by every command, and never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import megatron_packed_sft
from megatron_packed_sft.errors import PackedSFTError, ShardFileError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.megatron.checkpoint_loader import load_checkpoint, refuse_harmful_state
from megatron_packed_sft.megatron.checkpoint_writer import write_tensors
from megatron_packed_sft.megatron.weights.checkpoint_metadata import parse_metadata
from megatron_packed_sft.megatron.weights.saved_archive import load_saved
from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint, read_common
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


EXPECTED = {
    "as_object": "embedding.word_embeddings.weight;",
    "odd_settings": "(ValueError: betas of a parameter group is not what an optimizer writes); restore the checkpoint",
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_payload_in_a_checkpoint_is_never_run(attack: str, calls: tuple[Path, dict[Any, Any]]) -> None:
    home, results = calls
    for verb in ("train", "export"):
        result = results[attack, verb]
        if (attack, verb) in (("in_common", "export"), ("odd_settings", "export")):  # does not read it
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
    with pytest.raises(ShardFileError, match=r"layer\._extra_state.* cannot be read: it names posix\.mkdir"):
        load_checkpoint(state(None, torch.zeros(2, 3)), tmp_path / "hostile")
    with pytest.raises(ShardFileError, match=r"weight has the sizes \[2, 3\] instead of \[3, 3\]"):
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


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("genuine")
    state = {"weight": torch.arange(12.0).view(3, 4), "note": {"a": 1}}
    with pytest.warns(UserWarning, match="to save in a single process"):
        torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


def test_what_torch_writes_is_read(genuine: bytes) -> None:
    for protocol in (2, 4, 5):
        metadata = parse_metadata(pickle.dumps(pickle.loads(genuine), protocol))
        assert metadata.tensors["weight"].sizes == (3, 4)
        assert list(metadata.objects) == ["note.a"]


HOSTILE = {
    "an instance by name": b"(X\x01\x00\x00\x00aiposix\nmkdir\n.",
    "an object by class": b"(cposix\nmkdir\nX\x01\x00\x00\x00ao.",
    "named arguments": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93)}\x92.",
    "a buffer from elsewhere": b"\x80\x05\x97\x98.",
    "a frame of a terabyte": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "builtins.eval": b"cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
    "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x0cserialization\x93.",
    "posix.system": pickle.dumps(os.system),
    "a class is changed": b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "two gigabytes": b"\x80\x05\x96\x00\x00\x00\x80\x00\x00\x00\x00.",
    "a memo of 16 GB": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "nested lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples that repeat each other": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 200 + b"K\x01s.",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_is_one_sentence(data: bytes) -> None:
    with pytest.raises(ShardFileError) as caught:
        parse_metadata(data)
    assert "\n" not in str(caught.value)


def test_a_list_that_is_repeated_and_sizes_that_are_not_there_are_refused(genuine: bytes) -> None:
    metadata: Metadata = pickle.loads(genuine)
    tensor = metadata.state_dict_metadata["weight"]
    assert isinstance(tensor, TensorStorageMetadata)
    tensor.chunks *= 3000
    many = {f"copy_{number}": tensor for number in range(3000)}
    places = {type(index)(name, index.offset): place for index, place in metadata.storage_data.items() for name in many}
    with pytest.raises(ShardFileError, match="repeats the same values too often"):
        parse_metadata(pickle.dumps(Metadata(many, None, places)))  # nine million chunks
    tensor.chunks = tensor.chunks[:1]
    tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 40, 1 << 20])
    with pytest.raises(ShardFileError, match="impossible sizes"):
        parse_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize("file", ["../other", "/etc/passwd", "a\nb", "a\0b", "\ud800", ".", "a" * 256])
def test_a_chunk_in_another_folder_or_with_an_odd_name_is_refused(genuine: bytes, file: str) -> None:
    metadata: Metadata = pickle.loads(genuine)
    for place in metadata.storage_data.values():
        place.relative_path = file
    with pytest.raises(ShardFileError, match="outside the checkpoint") as caught:
        parse_metadata(pickle.dumps(metadata))
    assert str(caught.value).isprintable()


def test_a_tensor_larger_than_its_chunks_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="to save in a single process"):
        torch_checkpoint.save({"weight": torch.zeros(3, 4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["weight"].size = torch.Size([1 << 40, 1 << 18])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with TorchDistCheckpoint(tmp_path) as opened, pytest.raises(ShardFileError, match="holds only a part of weight"):
        opened.read("weight")
    metadata.state_dict_metadata["weight"].chunks = []
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with TorchDistCheckpoint(tmp_path) as opened, pytest.raises(ShardFileError, match="holds only a part of weight"):
        opened.read("weight")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_metadata_gives_our_errors_only(genuine: bytes, data: st.DataObject) -> None:
    damaged = bytearray(genuine)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[at] = data.draw(st.integers(0, 255))
        else:
            del damaged[at : at + data.draw(st.integers(1, 20))]
            damaged = damaged or bytearray(b".")
    try:
        parse_metadata(bytes(damaged))
    except PackedSFTError as error:
        assert "\n" not in str(error)


def archive_of(pickled: bytes, **members: bytes) -> io.BytesIO:
    """An archive as torch.save writes it, around any pickle."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return written


def load_all(saved: io.BytesIO) -> Any:
    return load_saved(saved, len(saved.getvalue()), "a chunk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_what_torch_saves_is_read_without_torch(dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(dtype)
    saved = {
        "whole": whole,
        "part": whole[1:, 2],
        "turned": whole.t(),
        "none": whole[:0],
        "one": whole[0, 1],
        3: [True],
    }
    written = io.BytesIO()
    torch.save(saved, written)
    read = load_all(written)
    assert read.keys() == saved.keys()
    assert read[3] == [True]
    for name in ("whole", "part", "turned", "none", "one"):
        assert read[name].dtype == dtype
        assert read[name].stride() == saved[name].stride()
        assert read[name].tolist() == saved[name].tolist()
    assert read["part"].untyped_storage().data_ptr() == read["whole"].untyped_storage().data_ptr()


def a_tensor(num_items: int, sizes: bytes, strides: bytes, offset: bytes = b"K\x00") -> bytes:
    """The pickle of a tensor of float32 with any numbers."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK%ctQ" % num_items
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + sizes + strides + b"\x89}tR."


TWICE = b"q\x00h\x00\x86"
SAVED = {
    "six gigabytes": (b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x80\x01\x85R.", "names builtins.bytearray"),
    "text that is encoded": (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.", "codecs.enc"),
    "a key without end": (b"\x80\x02}K\x01" + TWICE * 99 + b"K\x01s.", "a dict with keys that are neither"),
    "a call without end": (b"\x80\x02K\x01" + TWICE * 99 + b")R.", "calls something that is not a name"),
    "values without end": (b"\x80\x02K\x01" + TWICE * 99 + b".", "repeats the same values too often"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "repeats the same values too often"),
    "a class is made": (b"\x80\x02ctorch\nFloatStorage\n)\x81.", "calls torch.FloatStorage"),
    "another id": (b"\x80\x02K\x01Q.", "cannot unpack"),
    "a large tensor of little": (a_tensor(2, b"K\xffK\xff\x86", b"K\x00K\x00\x86"), "larger than its storage of 2"),
    "a tensor behind its storage": (a_tensor(2, b"K\x02\x85", b"K\x01\x85", b"K\x05"), "out of bounds"),
    "a storage of another size": (a_tensor(9, b"K\x02\x85", b"K\x01\x85"), "8 bytes instead of 9 items"),
}  # fmt: skip


@pytest.mark.parametrize(("pickled", "reason"), SAVED.values(), ids=SAVED.keys())
def test_what_torch_would_have_called_or_walked_is_refused(pickled: bytes, reason: str) -> None:
    with pytest.raises(ShardFileError, match="a chunk cannot be read") as caught:
        load_all(archive_of(pickled, **{"data/0": b"\0" * 8}))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_archive_that_unfolds_to_more_than_it_has_is_refused(tmp_path: Path) -> None:
    written = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 20)}, written)
    with (
        zipfile.ZipFile(written) as archive,
        zipfile.ZipFile(tmp_path / "common.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
    assert (tmp_path / "common.pt").stat().st_size < 1 << 15
    with pytest.raises(ShardFileError, match=r"is compressed, which torch\.save never does"):
        read_common(tmp_path)
    (tmp_path / "common.pt").write_bytes(pickle.dumps(Attack(tmp_path / PAYLOAD)))  # not even an archive
    with pytest.raises(ShardFileError, match="is cut or damaged"):
        read_common(tmp_path)
    with pytest.raises(ShardFileError, match="is cut or damaged"):
        load_saved(io.BytesIO(b""), 0, "nothing")


@pytest.mark.parametrize("text", ["[]", "{", '{"sharded_backend": "torch_dist", "more": 1}', "[" * 100_000])
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
        "megatron/checkpoint_loader.py",  # with strategies of its own; storages of FP8 with weights_only=True
        "storage/testing.py",  # what it pickled itself
    }, found
    assert all("weights_only=True" in line for _, line in found if "torch.load(" in line)
