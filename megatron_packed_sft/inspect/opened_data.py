"""Packed data opened to be looked at: its splits, what it records, and what its work directory still knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.data.factory import open_bins
from megatron_packed_sft.data.readers.interface import BinReader
from megatron_packed_sft.data.readers.shards import ShardBinReader
from megatron_packed_sft.inspect.find_tokenizer import FoundTokenizer, find_tokenizer
from megatron_packed_sft.prepare.origins import PreparedFrom
from megatron_packed_sft.storage.dataset_directory import DATASET, open_dataset
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.paths import local_path


@dataclass(frozen=True)
class OpenedData:
    """Packed data of any storage.

    Args:
        path: where it is.
        storage: the name of its storage.
        splits: the bins of each split; data without splits is one, called train.
        provenance: what its dataset.json says it was made from.
        prepared_from: the work directory that made it, if it is still there.
        num_shards: of each split, where it is known.
    """

    path: Path
    storage: str
    splits: Mapping[str, BinReader]
    provenance: Mapping[str, Any]
    prepared_from: PreparedFrom | None
    num_shards: Mapping[str, int]

    @property
    def recorded_tokenizer(self) -> Mapping[str, Any] | None:
        """Name and fingerprint of the tokenizer that made it, as far as anybody recorded."""
        return next((one.figures.tokenizer for one in self.splits.values() if one.figures.tokenizer), None)

    def find_tokenizer(self, given: str | os.PathLike[str] | None = None) -> FoundTokenizer:
        """Return its tokenizer: the given one, the one that prepared it, or one of its name beside the data."""
        recorded = self.recorded_tokenizer
        candidates: list[str | os.PathLike[str]] = []
        if self.prepared_from is not None and self.prepared_from.tokenizer_path:
            candidates.append(self.prepared_from.tokenizer_path)
        if recorded and recorded.get("name"):
            candidates += [folder / Path(str(recorded["name"])).name for folder in (self.path.parent, Path.cwd())]
        return find_tokenizer(recorded, given=given, candidates=candidates)


def open_data(
    path: str | os.PathLike[str],
    *,
    work_dir: str | os.PathLike[str] | None = None,
    stream: StreamOptions | None = None,
) -> OpenedData:
    """Open packed data: a dataset directory, a shard or file of any storage, or a directory of shards.

    Args:
        path: the data.
        work_dir: the work directory that made it, if that is not beside it.
        stream: how to read a token stream.
    """
    location = local_path(path)
    if (location / DATASET).exists():
        dataset = open_dataset(location)
        ordered = sorted(dataset.splits, key=lambda split: (split != "train", split))
        return OpenedData(
            location,
            dataset.storage.name,
            {split: ShardBinReader.of_dataset(dataset, split) for split in ordered},
            dataset.provenance,
            PreparedFrom.of(dataset, None if work_dir is None else local_path(work_dir, "work_dir")),
            {split: len(dataset.splits[split]) for split in ordered},
        )
    reader = open_bins(location, stream=stream).source
    storage, num_shards = "several storages", {}
    if isinstance(reader, ShardBinReader):
        storage, num_shards = reader.storage.name, {"train": len(reader.paths)}
    return OpenedData(location, storage, {"train": reader}, {}, None, num_shards)
