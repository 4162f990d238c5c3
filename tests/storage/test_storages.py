"""Every storage keeps the promises of the interface, one that another package brings included."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron_packed_sft
from megatron_packed_sft import (
    PackedBin,
    PackedLoader,
    Storage,
    convert,
    create_sft_dataset,
    open_dataset,
    register_storage,
    validate,
)
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardError
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.flat_files import OrderedShardWriter
from megatron_packed_sft.storage.interface import PackedShard, WriterOptions
from megatron_packed_sft.storage.registry import STORAGES, storage_named, storage_names
from tests.data.test_datasets import assert_same_batch
from tests.packed_bins import make_bins, write_shard
from tests.storage.storage_checks import CHECKS, check_figures, check_names

EOS = 2


class JsonShard(PackedShard):
    """The least that a shard must offer: a length, a pack size, and bins by number."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ShardError(f"{path} is not JSON ({error}); restore the file") from None
        self.path = path
        self._pack_size: int = content["pack_size"]
        self._bins: list[dict[str, list[int]]] = content["bins"]

    @property
    def pack_size(self) -> int:
        return self._pack_size

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(index)
        one = self._bins[index]
        return PackedBin(
            np.array(one["input_ids"], np.int32),
            np.array(one["loss_mask"], np.uint8),
            np.array(one["seq_start_id"], np.uint32),
        )


class JsonShardWriter(OrderedShardWriter):
    """The base class checks the bins; what is left is to write them."""

    _OUTPUT = "shard.json"

    def __init__(self, path: Any, options: WriterOptions) -> None:
        super().__init__(path, options)
        self._bins: list[dict[str, list[int]]] = []

    def _append(self, first_bin: int, block: Any) -> None:
        for index in range(len(block)):
            self._bins.append({name: values.tolist() for name, values in block[index]._asdict().items()})

    def _complete(self, num_bins: int) -> int:
        text = json.dumps({"pack_size": self.options.pack_size, "bins": self._bins})
        return (self._staging.path / self._OUTPUT).write_text(text)


class JsonStorage(Storage):
    """One JSON file per shard."""

    name = "test_json"
    aliases = ("test_json_alias",)
    summary = "one JSON file per shard"

    def recognises(self, path: Path) -> bool:
        return path.name.endswith(".bins.json")

    def shard_name(self, number: int) -> str:
        return f"shard_{number:06d}.bins.json"

    def open(self, path: Path) -> Any:
        return JsonShard(path)

    def create_writer(self, path: Any, options: WriterOptions) -> JsonShardWriter:
        return JsonShardWriter(path, options)


class ReadOnlyStorage(Storage):
    """The least that a storage must define; it cannot write."""

    name = "test_read_only"

    def recognises(self, path: Path) -> bool:
        return path.suffix == ".read_only"

    def shard_name(self, number: int) -> str:
        return f"{number}.read_only"

    def open(self, path: Path) -> Any:
        return JsonShard(path)


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STORAGES, "_values", dict(STORAGES._values))  # what a test registers goes away again
    for storage in (JsonStorage(), ReadOnlyStorage()):
        register_storage(storage)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("storage", ["memmap_v1", "legacy", "parquet", "test_json"])
def test_every_storage_keeps_its_promises(storage: str, check: Callable[[str, Path], None], tmp_path: Path) -> None:
    check(storage, tmp_path)


def test_a_storage_that_breaks_a_promise_is_told_which(tmp_path: Path) -> None:
    class CarelessShard(JsonShard):
        @property
        def figures(self) -> BinFigures:
            return BinFigures(num_bins=len(self), pack_size=self.pack_size)

    class Careless(JsonStorage):
        name = "test_careless"
        aliases = ()

        def shard_name(self, number: int) -> str:
            return f"shard_{number}.bins.json"

        def open(self, path: Path) -> Any:
            return CarelessShard(path)

    register_storage(Careless())
    with pytest.raises(AssertionError, match="shard names do not sort by number"):
        check_names("test_careless", tmp_path)
    with pytest.raises(AssertionError, match="the figures differ from those of the bins"):
        check_figures("test_careless", tmp_path)


def test_a_storage_of_another_package_is_converted_to_validated_and_trained_on(tmp_path: Path) -> None:
    bins = make_bins(10, 24, seed=3)
    write_shard(tmp_path / "shards" / "a", bins[:6], 24, pad_id=EOS, tokenizer={"name": "t", "fingerprint": "f"})
    write_shard(tmp_path / "shards" / "b", bins[6:], 24, pad_id=EOS, tokenizer={"name": "t", "fingerprint": "f"})
    convert(tmp_path / "shards", tmp_path / "json", to="test_json_alias")
    assert "test_json" in storage_names()
    assert json.loads((tmp_path / "json" / "dataset.json").read_text())["storage"] == "test_json"
    assert validate(tmp_path / "json").ok
    expected = create_sft_dataset(tmp_path / "shards", seq_length=24)
    for path in ("json", "json/train", "json/train/*.bins.json"):
        dataset = create_sft_dataset(tmp_path / path, EOS, seq_length=24)
        assert_same_batch(dataset.fetch_batch([7, 0, -1, 9]), expected.fetch_batch([7, 0, -1, 9]))
        dataset.advise([1, 2])
    assert create_sft_dataset(tmp_path / "json").tokenizer_fingerprint == "f"  # dataset.json also knows the padding id
    with pytest.raises(InvalidInputError, match="seq_length is 3, but a bin of"):
        create_sft_dataset(tmp_path / "json", EOS, seq_length=3)
    loader = PackedLoader(
        create_sft_dataset(tmp_path / "json", opening=OpenOptions(storage="test_json")), micro_batch_size=2
    )
    assert sum(len(batch["tokens"]) for batch in loader) == 10
    convert(tmp_path / "json", tmp_path / "back")
    assert open_dataset(tmp_path / "back").figures["train"].tokenizer == {"name": "t", "fingerprint": "f"}


def test_a_storage_without_a_writer_is_read_and_says_that_it_cannot_write(tmp_path: Path) -> None:
    bins = make_bins(4, 24)
    write_shard(tmp_path / "shard", bins, 24)
    convert(tmp_path / "shard", tmp_path / "a.bins.json", to="test_json")
    (tmp_path / "a.bins.json").rename(tmp_path / "a.read_only")
    assert len(create_sft_dataset(tmp_path / "a.read_only", EOS)) == 4
    with pytest.raises(InvalidInputError, match="storage 'test_read_only' is read-only"):
        convert(tmp_path / "shard", tmp_path / "b", to="test_read_only")


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced() -> None:
    with pytest.raises(InvalidInputError, match="storage 'test_json' is registered already"):
        register_storage(JsonStorage())
    register_storage(JsonStorage(), replace=True)
    clash = JsonStorage()
    clash.name, clash.aliases = "another", ("legacy_npy_pickle",)
    with pytest.raises(PackedSFTError, match="'legacy_npy_pickle' is registered already"):
        register_storage(clash)


def test_nothing_asks_which_storage_it_has_before_it() -> None:
    """A storage is one class: others use the interface, and never isinstance of a concrete storage or shard."""
    package = Path(megatron_packed_sft.__file__).parent
    homes = [package / "storage" / name for name in ("memmap_v1", "legacy", "token_stream", "megatron_indexed")]
    concrete = {
        node.name
        for path in [package / "storage" / "parquet.py", *(file for home in homes for file in home.rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and re.search(r"Storage$|Shard$|Stream$|Documents$", node.name)
    }
    assert {"MemmapShard", "MemmapStorage", "LegacyShard", "ParquetShard", "TokenStream"} <= concrete
    concrete.add("FlatShard")
    asked = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if not any(home in path.parents for home in homes)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        if concrete & {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
    ]
    assert asked == []


def test_the_estimated_size_counts_every_column(tmp_path: Path) -> None:
    plain = make_bins(40, 24, seed=3)
    weighted = [one._replace(loss_mask=one.loss_mask * np.float32(0.5)) for one in plain]
    for bins in (plain, weighted):
        manifest = write_shard(tmp_path / "shard", bins, 24, vocab_size=1000, overwrite=True)
        on_disk = sum(record.bytes for record in manifest.files.values())
        headers = sum(spec.header_size for spec in manifest.arrays())
        assert storage_named("memmap_v1").stored_bytes(manifest.figures) == on_disk - headers
