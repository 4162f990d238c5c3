"""A storage: one JSON file per shard."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from megatron_packed_sft import PackedBin, PackedSFTError, Storage
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.flat_files import OrderedShardWriter
from megatron_packed_sft.storage.interface import PackedShard, WriterOptions


class JsonShard(PackedShard):
    """An open shard: a length, a pack size and bins by number are enough."""

    def __init__(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise PackedSFTError(f"{path} is not JSON ({error}); restore the file") from None
        self.path = path
        self._pack_size: int = content["pack_size"]
        self._bins: list[list[list[int]]] = content["bins"]

    @property
    def pack_size(self) -> int:
        """No bin is longer."""
        return self._pack_size

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids, mask, starts = self._bins[index]
        return PackedBin(np.array(ids, np.int32), np.array(mask, np.uint8), np.array(starts, np.uint32))


class JsonShardWriter(OrderedShardWriter):
    """Collects bins in memory and writes them at the end; the base class checks them."""

    _OUTPUT = "shard.json"

    def __init__(self, path: str | os.PathLike[str], options: WriterOptions) -> None:
        super().__init__(path, options)
        self._bins: list[list[list[int]]] = []

    def _append(self, first_bin: int, block: BinBlock) -> None:
        self._bins += [[values.tolist() for values in block[index]] for index in range(len(block))]

    def _complete(self, num_bins: int) -> int:
        pack_size = self.options.pack_size or max(len(ids) for ids, _, _ in self._bins)
        text = json.dumps({"pack_size": pack_size, "bins": self._bins})
        return (self._staging.path / self._OUTPUT).write_text(text)


class JsonStorage(Storage):
    """Bins as JSON."""

    name = "acme_json"
    summary = "one JSON file per shard"
    in_memory = True

    def recognises(self, path: Path) -> bool:
        """Return whether a path has our suffix."""
        return path.name.endswith(".acme.json")

    def shard_name(self, number: int) -> str:
        """Return the name of a file."""
        return f"shard_{number:06d}.acme.json"

    def open(self, path: Path) -> JsonShard:
        """Read a file."""
        return JsonShard(path)

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> JsonShardWriter:
        """Return a writer of one file."""
        return JsonShardWriter(path, options)


STORAGE = JsonStorage()
