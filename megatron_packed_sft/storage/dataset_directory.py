"""A dataset directory: splits of shards under one dataset.json, published together or not at all.

my_dataset/
  dataset.json                    splits, shards in order, totals, provenance, checksums of the shards' manifests
  train/shard_000000/ ...
  validation/shard_000000/ ...
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.atomic import fsync_directory, os_errors, write_file
from megatron_packed_sft.disk.checked_files import CheckedDirectory
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.disk.staged_writer import StagedWriter
from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardError, UnsupportedFormatError
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY, MAX_NUM_BINS, ShardManifest
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard, open_memmap_shard
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

DATASET = "dataset.json"
FORMAT = "packed_sft_dataset_v1"
VERSION = "1.0"
MAX_DATASET_BYTES = 64 << 20
TOTALS = ("num_bins", "num_sequences", "num_tokens", "num_loss_tokens")
# What a dataset class must know before it opens a shard: the widest, the longest, the shortest of all.
EXTREMES: dict[str, Callable[..., int]] = {
    "pack_size": max,
    "max_seqs_per_bin": max,
    "max_seq_len": max,
    "min_packed_len": min,
    "pad_seq_to_mult": max,
}
# Split and shard names become paths, so only plain names pass: no separator, no leading dot, nothing odd.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as dataset.json lists it."""

    name: str
    num_bins: int
    manifest_checksum: str


@dataclass(frozen=True, slots=True)
class DatasetDirectory:
    """An opened dataset.json. The shards themselves are opened on demand.

    Example:
        >>> dataset = open_dataset("my_dataset")  # doctest: +SKIP
        >>> len(dataset.open_shards("train"))  # doctest: +SKIP
        8
    """

    path: Path
    splits: Mapping[str, tuple[ShardEntry, ...]]
    figures: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]
    fingerprint: str

    def shard_path(self, split: str, entry: ShardEntry) -> Path:
        """Where a shard lies."""
        return self.path / split / entry.name

    def open_shard(self, split: str, entry: ShardEntry) -> MemmapShard:
        """Open one shard and make sure that it is the one dataset.json means."""
        shard = open_memmap_shard(self.shard_path(split, entry))
        if shard.fingerprint != entry.manifest_checksum:
            raise ShardError(
                f"{shard.path} is not the shard that {self.path / DATASET} lists: its manifest differs; "
                "it was swapped or written again, so restore it or publish the dataset again"
            )
        return shard

    def entries(self, split: str) -> tuple[ShardEntry, ...]:
        """The shards of a split, in order; an unknown split is an error that lists the known ones."""
        if split not in self.splits:
            raise InvalidInputError(
                f"{self.path} has no split {split!r}; choose one of {', '.join(sorted(self.splits))}"
            )
        return self.splits[split]

    def open_shards(self, split: str) -> list[MemmapShard]:
        """Open all shards of a split, in order."""
        return [self.open_shard(split, entry) for entry in self.entries(split)]


def open_dataset(path: str | os.PathLike[str]) -> DatasetDirectory:
    """Read and check the dataset.json of a dataset directory.

    Example:
        >>> open_dataset("my_dataset").figures["train"]["num_tokens"]  # doctest: +SKIP
    """
    location = Path(os.path.abspath(path))
    with CheckedDirectory.open(location) as directory:
        data = directory.read(DATASET, MAX_DATASET_BYTES)
    file = str(location / DATASET)
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    if values.text("format") != FORMAT or values.text("version") != VERSION:
        raise UnsupportedFormatError(
            f"{file}: format {document['format']!r} version {document['version']!r} is not {FORMAT} {VERSION}; "
            "update megatron_packed_sft"
        )
    if json_document.SELF_CHECKSUM not in document:
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    listed = values.optional_object("splits")
    if not listed:
        raise values.error("splits", "is missing or empty")
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for split, description in listed.items():
        splits[split], figures[split] = _parse_split(split, description, file)
    return DatasetDirectory(location, splits, figures, values.optional_object("provenance") or {}, checksum(data))


def _parse_split(split: str, description: Any, file: str) -> tuple[tuple[ShardEntry, ...], dict[str, Any]]:
    where = f"{file}: splits.{split[:80]}"
    if not _NAME.fullmatch(split):
        raise ManifestError(f"{where} is not a plain name; restore the file from the original")
    if not isinstance(description, dict) or not isinstance(description.get("shards"), list):
        raise ManifestError(f"{where} has no list of shards; restore the file from the original")
    entries = []
    for number, listed in enumerate(description["shards"]):
        place = f"{where}.shards[{number}]"
        if not isinstance(listed, dict):
            raise ManifestError(f"{place} is not an object; restore the file from the original")
        fields = json_document.Fields(listed, place)
        name, digest = fields.text("name"), fields.text("manifest_checksum")
        if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
            raise fields.error("name or manifest_checksum", "is not of the right form")
        entries.append(ShardEntry(name, fields.integer("num_bins", 1, MAX_NUM_BINS), digest))
    if len({entry.name for entry in entries}) != len(entries):
        raise ManifestError(f"{where} lists a shard twice; restore the file from the original")
    fields = json_document.Fields(description, where)
    figures: dict[str, Any] = {
        name: value
        for name in (*TOTALS, *EXTREMES)
        if (value := fields.optional_integer(name, 0, (1 << 62) - 1)) is not None
    }
    figures["tokenizer"] = fields.optional_object("tokenizer")
    figures["chat_template_fingerprint"] = fields.optional_text("chat_template_fingerprint")
    return tuple(entries), figures


class DatasetWriter(StagedWriter):
    """Stages a dataset directory; `finalize` publishes all of it by one rename.

    Example:
        >>> with DatasetWriter("my_dataset") as dataset:  # doctest: +SKIP
        ...     with dataset.shard_writer("train", 0, num_bins=8, pack_size=4096) as writer:
        ...         ...
        ...         writer.finalize()
        ...     dataset.finalize()
    """

    @property
    def path(self) -> Path:
        """Where it is staged until then; other processes may write shards there, too."""
        return self._staging.path

    def shard_path(self, split: str, number: int) -> Path:
        """Where shard `number` of a split is staged."""
        if not _NAME.fullmatch(split):
            raise InvalidInputError(f"split {split!r} is not a plain name of letters, digits, '_', '.' and '-'")
        return self.path / split / f"shard_{number:06d}"

    def shard_writer(self, split: str, number: int, **arguments: Any) -> MemmapShardWriter:
        """A `MemmapShardWriter` for shard `number` of a split; takes that class's arguments."""
        return MemmapShardWriter(self.shard_path(split, number), **arguments)

    def finalize(self, *, provenance: Mapping[str, Any] | None = None, card: str | None = None) -> DatasetDirectory:
        """List every staged shard in dataset.json and publish.

        Args:
            provenance: sources, tokenizer, plan, configuration: whatever the dataset was made from.
            card: text of README.md, the dataset card.
        """
        self._require_open()
        splits: dict[str, Any] = {}
        with os_errors("list", self.path):
            names = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir())
        for split in names:
            shards = [open_memmap_shard(path) for path in sorted((self.path / split).glob("shard_*"))]
            splits[split] = {
                "shards": [
                    {"name": shard.path.name, "num_bins": len(shard), "manifest_checksum": shard.fingerprint}
                    for shard in shards
                ],
                **summarize([shard.manifest for shard in shards]),
                "tokenizer": _common(shards, "tokenizer"),
                "chat_template_fingerprint": _common(shards, "chat_template_fingerprint"),
            }
            with os_errors("publish", self.path / split):
                fsync_directory(self.path / split)
        if not splits:
            raise InvalidInputError(f"{self.target} would hold no shard; write at least one before finalize")
        document = {
            "format": FORMAT,
            "version": VERSION,
            "splits": splits,
            "checksum_algorithm": DEFAULT_ALGORITHM,
            "provenance": dict(provenance or {}),
            "created_by": CREATED_BY,
        }
        if card is not None:
            write_file(self.path / "README.md", card.encode())
        write_file(self.path / DATASET, json_document.render(document))
        with self._closing():
            self._staging.publish()
        return open_dataset(self.target)


def summarize(manifests: Sequence[ShardManifest]) -> dict[str, int]:
    """Totals and extremes over several manifests; a figure that one of them did not record is left out.

    Example:
        >>> summarize([ShardManifest(num_bins=2, pack_size=8, dtype="<i4", num_tokens=9)])["num_tokens"]
        9
    """
    figures: dict[str, Callable[..., int]] = {**dict.fromkeys(TOTALS, sum), **EXTREMES}
    values = {name: [getattr(manifest, name) for manifest in manifests] for name in figures}
    return {name: figures[name](found) for name, found in values.items() if None not in found}


def _common(shards: Sequence[MemmapShard], name: str) -> Any:
    """What all shards of a split have in common; shards that differ cannot be one split."""
    values = [getattr(shard.manifest, name) for shard in shards]
    for shard, value in zip(shards, values, strict=True):
        if value != values[0]:
            raise InvalidInputError(
                f"{shard.path.name} has {name} {value!r}, {shards[0].path.name} has {values[0]!r}; "
                "shards of one split must be made with the same"
            )
    return values[0]
