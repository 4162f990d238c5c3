"""A storage: one JSON file per shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft import PackedBin, Storage
from megatron_packed_sft.storage.interface import PackedShardWriter


class JsonShard:
    """An open shard."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.path = path
        self.pack_size: int = content["pack_size"]
        self._bins: list[list[list[int]]] = content["bins"]

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids, mask, starts = self._bins[index]
        return PackedBin(np.array(ids, np.int32), np.array(mask, np.uint8), np.array(starts, np.uint32))

    def __iter__(self) -> Iterator[PackedBin]:
        return (self[index] for index in range(len(self)))


class JsonShardWriter(PackedShardWriter):
    """Collect bins in memory and write them at the end."""

    def __init__(self, path: str | os.PathLike[str], *, pack_size: int, overwrite: bool = False, **_: Any) -> None:
        super().__init__(path, overwrite=overwrite)
        self._pack_size = pack_size
        self._bins: dict[int, list[list[int]]] = {}

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Keep one bin."""
        self._bins[int(bin_id)] = [np.asarray(one).tolist() for one in (input_ids, loss_mask, seq_start_id)]

    def finalize(self) -> None:
        """Write the file and publish it."""
        bins = [self._bins[index] for index in range(len(self._bins))]
        with self._closing():
            (self._staging.path / "shard").write_text(json.dumps({"pack_size": self._pack_size, "bins": bins}))
            self._staging.publish_file("shard")


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

    def create_writer(self, path: str | os.PathLike[str], **options: Any) -> JsonShardWriter:
        """Return a writer of one file."""
        return JsonShardWriter(path, **options)


STORAGE = JsonStorage()
