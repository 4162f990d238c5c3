"""reliability.md rows 5-7: every bit, every length, every file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import DatasetWriter, open_shard, validate
from megatron_packed_sft.errors import ShardError
from megatron_packed_sft.storage.memmap_v1.manifest import ARRAY_FILES
from megatron_packed_sft.support.json_document import MANIFEST
from tests.packed_bins import make_bins, write_shard

FILES = (*ARRAY_FILES, MANIFEST)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_shard(tmp_path / "shard", make_bins(3, 8, seed=1), 8, vocab_size=1000, tokenizer={"name": "t"})
    return tmp_path / "shard"


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_file_is_named(name: str, shard: Path) -> None:
    path = shard / name
    whole = path.read_bytes()
    missed = []
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(whole)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([whole[position] ^ (1 << bit)]), position)
                report = validate(shard)
                named = any(name in f"{finding.file} {finding.message}" for finding in report.findings)
                if report.ok or not named:
                    missed.append((position, bit))
            os.pwrite(file.fileno(), whole[position : position + 1], position)
    assert missed == []
    assert validate(shard).ok


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_length_is_an_error_at_open(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write_shard(path, make_bins(3, 8, seed=1), 8)
    whole = (path / name).read_bytes()
    for length in range(len(whole)):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(ShardError, match=name):
            open_shard(path)
    assert not validate(path).ok
    for extra in (b"\0", b"\n", whole):
        (path / name).write_bytes(whole + extra)
        with pytest.raises(ShardError, match=name):
            open_shard(path)


def test_swapped_files_are_an_error_at_open(shard: Path, tmp_path: Path) -> None:
    for first in FILES:
        for second in FILES:
            if first < second:
                broken = tmp_path / "broken"
                shutil.copytree(shard, broken)
                (broken / first).rename(broken / "x")
                (broken / second).rename(broken / first)
                (broken / "x").rename(broken / second)
                with pytest.raises(ShardError):
                    open_shard(broken)
                shutil.rmtree(broken)


@pytest.mark.parametrize("name", ARRAY_FILES)
def test_a_foreign_npy_is_an_error_at_open(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write_shard(path, make_bins(3, 8, seed=1), 8)
    original = np.load(path / name)
    for foreign in (
        original.astype(np.float64),
        original.astype(original.dtype.newbyteorder(">")) if original.dtype.itemsize > 1 else original.astype(np.int8),
        original[..., :-1],
        original[None],
        np.asfortranarray(np.zeros((3, 8), original.dtype)),
        np.array({"a": 1}, dtype=object),
    ):
        np.save(path / name, foreign, allow_pickle=True)
        if foreign.shape == original.shape and foreign.dtype == original.dtype and not np.isfortran(foreign):
            continue
        with pytest.raises(ShardError, match=name):
            open_shard(path)


def test_a_deleted_file_is_named_and_so_is_an_added_one(shard: Path, tmp_path: Path) -> None:
    for name in FILES:
        broken = tmp_path / "broken"
        shutil.copytree(shard, broken)
        (broken / name).unlink()
        with pytest.raises(ShardError, match=name):
            open_shard(broken)
        shutil.rmtree(broken)
    (shard / "notes.txt").write_text("mine")
    [finding] = validate(shard).findings
    assert finding.file.endswith("notes.txt")


def write_dataset(path: Path) -> None:
    with DatasetWriter(path) as dataset:
        for number in range(3):
            with dataset.shard_writer("train", number, num_bins=2, pack_size=8) as writer:
                for index, row in enumerate(make_bins(2, 8, seed=number)):
                    writer.write_bin(index, *row)
                writer.finalize()
        dataset.finalize()


def test_a_deleted_an_added_and_two_swapped_shards_are_named(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    train = tmp_path / "dataset" / "train"

    (train / "shard_000001").rename(tmp_path / "aside")
    assert any("shard_000001" in str(finding) for finding in validate(tmp_path / "dataset").findings)

    (tmp_path / "aside").rename(train / "shard_000007")
    named = "\n".join(str(finding) for finding in validate(tmp_path / "dataset").findings)
    assert "shard_000001" in named
    assert "shard_000007" in named
    (train / "shard_000007").rename(train / "shard_000001")
    assert validate(tmp_path / "dataset").ok

    (train / "shard_000000").rename(tmp_path / "aside")
    (train / "shard_000002").rename(train / "shard_000000")
    (tmp_path / "aside").rename(train / "shard_000002")
    named = "\n".join(str(finding) for finding in validate(tmp_path / "dataset").findings)
    assert "shard_000000 is not the shard that" in named
    assert "shard_000002 is not the shard that" in named


def test_every_flipped_bit_of_dataset_json_is_found(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    path = tmp_path / "dataset" / "dataset.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (0, 3, 6):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << bit)]) + whole[position + 1 :])
            report = validate(tmp_path / "dataset", level="structure")
            assert not report.ok, (position, bit)
            assert any("dataset.json" in str(finding) for finding in report.findings)
