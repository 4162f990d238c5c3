"""A dataset directory: splits of shards under one dataset.json, published together or not at all.

    my_dataset/
      dataset.json                    storage, splits, shards in order, totals, provenance, checksums
      train/shard_000000/ ...         shards of any storage: directories or files
      validation/shard_000000/ ...

`storage` is absent for memmap_v1, the storage that dataset.json was made for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.atomic import fsync_directory, os_errors, write_file
from megatron_packed_sft.disk.checked_files import CheckedDirectory
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM, checksum, stored_size
from megatron_packed_sft.disk.staged_writer import StagedWriter
from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardError, UnsupportedFormatError
from megatron_packed_sft.storage.bins import EXTREMES, PROVENANCE_KEYS, SUM_OF_WEIGHTS, TOTALS, BinFigures
from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY, MAX_NUM_BINS
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, dataset_storage, storage_named
from megatron_packed_sft.support.paths import local_path

DATASET = "dataset.json"
CARD = "README.md"
FORMAT = "packed_sft_dataset_v1"
VERSION = "1.0"
MAX_DATASET_BYTES = 64 << 20
_MAX_NUMBER = (1 << 62) - 1
_COMMON = ("tokenizer", "chat_template_fingerprint")  # shards of one split must agree on these
# Split and shard names become paths, so only plain names pass: no separator, no leading dot, nothing odd.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as dataset.json lists it; `num_bytes` is None where the shard's own manifest knows its size."""

    name: str
    num_bins: int
    checksum: str
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DatasetDirectory:
    """An opened dataset.json. The shards themselves are opened on demand."""

    path: Path
    storage: Storage
    splits: Mapping[str, tuple[ShardEntry, ...]]
    figures: Mapping[str, BinFigures]
    provenance: Mapping[str, Any]
    fingerprint: str

    def shard_path(self, split: str, entry: ShardEntry) -> Path:
        """Return the path of a shard."""
        return self.path / split / entry.name

    def open_shard(self, split: str, entry: ShardEntry) -> PackedShard:
        """Open one shard and make sure that it is the one dataset.json means."""
        return open_listed_shard(self.storage, self.shard_path(split, entry), entry)

    def entries(self, split: str) -> tuple[ShardEntry, ...]:
        """Return the shards of a split, in order; an unknown split is an error that lists the known ones."""
        if split not in self.splits:
            raise InvalidInputError(
                f"{self.path} has no split {split!r}; choose one of {', '.join(sorted(self.splits))}"
            )
        return self.splits[split]

    def open_shards(self, split: str) -> list[PackedShard]:
        """Open all shards of a split, in order."""
        return [self.open_shard(split, entry) for entry in self.entries(split)]

    def is_whole(self) -> bool:
        """Return whether every shard is there and is the one listed, as far as names, sizes and manifests tell."""
        try:
            for split, entries in self.splits.items():
                for entry in entries:
                    path = self.shard_path(split, entry)
                    if entry.num_bytes is None:
                        self.open_shard(split, entry)
                    elif stored_size(path) != entry.num_bytes:
                        return False
        except (ShardError, OSError):
            return False
        return True


def open_listed_shard(storage: Storage, path: Path, entry: ShardEntry) -> PackedShard:
    """Open a shard that a dataset.json lists; another shard, or one that was changed, is refused."""
    if not os.path.lexists(path):
        raise ShardError(f"{path} is missing; copy the dataset again")
    if entry.num_bytes is not None and stored_size(path) != entry.num_bytes:
        raise _not_listed(path, "its size differs")
    shard = storage.open(path)
    # A shard with a manifest was identified by it when it was opened.
    found = shard.fingerprint if storage.has_manifest and hasattr(shard, "fingerprint") else storage.checksum(path)
    if found != entry.checksum:
        raise _not_listed(path, "its checksum differs")
    if len(shard) != entry.num_bins:
        raise _not_listed(path, f"it has {len(shard)} bins, not {entry.num_bins}")
    return shard


def _not_listed(path: Path, problem: str) -> ShardError:
    return ShardError(
        f"{path} is not the shard that its dataset.json lists: {problem}; it was swapped or written again, so restore "
        "it or publish the dataset again"
    )


def open_dataset(path: str | os.PathLike[str]) -> DatasetDirectory:
    """Open a dataset directory: dataset.json is read and checked, shards are not touched yet."""
    location = local_path(path)
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
    storage = storage_named(values.optional_text("storage") or DEFAULT_STORAGE)
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    figures: dict[str, BinFigures] = {}
    for split, description in listed.items():
        splits[split], figures[split] = _parse_split(storage, location, split, description, file)
    provenance = values.optional_object("provenance") or {}
    return DatasetDirectory(location, storage, splits, figures, provenance, checksum(data))


def _parse_split(
    storage: Storage, location: Path, split: str, description: Any, file: str
) -> tuple[tuple[ShardEntry, ...], BinFigures]:
    where = f"{file}: splits.{split[:80]}"
    if not _NAME.fullmatch(split):
        raise ManifestError(f"{where} is not a plain name; restore the file from the original")
    if not isinstance(description, dict) or not isinstance(description.get("shards"), list):
        raise ManifestError(f"{where} has no list of shards; restore the file from the original")
    entries = tuple(
        _parse_entry(storage, listed, f"{where}.shards[{number}]")
        for number, listed in enumerate(description["shards"])
    )
    if len({entry.name for entry in entries}) != len(entries):
        raise ManifestError(f"{where} lists a shard twice; restore the file from the original")
    fields = json_document.Fields(description, where)
    numbers: dict[str, Any] = {
        name: fields.optional_integer(name, 0, _MAX_NUMBER) for name in (*TOTALS, *EXTREMES, "vocab_size", "pad_id")
    }
    if numbers["pack_size"] is None:  # a dataset.json of the first release: only the shards know
        parts = [BinFigures.of(open_listed_shard(storage, location / split / one.name, one)) for one in entries]
        return entries, BinFigures.over(parts)
    numbers["num_bins"] = sum(entry.num_bins for entry in entries)
    return entries, BinFigures(
        **numbers,
        tokenizer=fields.optional_object("tokenizer"),
        chat_template_fingerprint=fields.optional_text("chat_template_fingerprint"),
        has_weights=SUM_OF_WEIGHTS in description,
        sum_loss_weights=fields.optional_number(SUM_OF_WEIGHTS),
    )


def _parse_entry(storage: Storage, listed: Any, place: str) -> ShardEntry:
    if not isinstance(listed, dict):
        raise ManifestError(f"{place} is not an object; restore the file from the original")
    fields = json_document.Fields(listed, place)
    key = _checksum_key(storage)
    name, digest = fields.text("name"), fields.text(key)
    if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
        raise fields.error(f"name or {key}", "is not of the right form")
    num_bytes = fields.optional_integer("bytes", 0, _MAX_NUMBER)
    return ShardEntry(name, fields.integer("num_bins", 1, MAX_NUM_BINS), digest, num_bytes)


class DatasetWriter(StagedWriter):
    """Stages a dataset directory; `finalize` publishes all of it by one rename.

    Args:
        target: the directory to publish.
        storage: the storage of its shards.
        overwrite: replace whatever is published at the target, in one step.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with DatasetWriter(f"{home}/my_dataset", storage="legacy") as dataset:
        ...     with dataset.shard_writer("train", 0, num_bins=1, pack_size=8) as writer:
        ...         writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])
        ...         _ = writer.finalize()
        ...     _ = dataset.finalize()
        >>> open_dataset(f"{home}/my_dataset").figures["train"].num_tokens
        3
    """

    def __init__(
        self, target: str | os.PathLike[str], *, storage: str = DEFAULT_STORAGE, overwrite: bool = False
    ) -> None:
        self.storage = dataset_storage(storage)
        self._figures: dict[Path, BinFigures] = {}
        self._writers: list[tuple[Path, PackedShardWriter]] = []
        super().__init__(target, overwrite=overwrite)

    @property
    def path(self) -> Path:
        """Where the dataset is staged until `finalize`; other processes may also write shards there."""
        return self._staging.path

    def shard_path(self, split: str, number: int) -> Path:
        """Return where shard `number` of a split is staged."""
        if not _NAME.fullmatch(split):
            raise InvalidInputError(f"split {split!r} is not a plain name of letters, digits, '_', '.' and '-'")
        return self.path / split / self.storage.shard_name(number)

    def shard_writer(self, split: str, number: int, **arguments: Any) -> PackedShardWriter:
        """Return a writer of shard `number` of a split; takes the arguments of `create_shard_writer`.

        What goes into `provenance` there may also be given by name.
        """
        path = self.shard_path(split, number)
        by_name = {name: arguments.pop(name) for name in PROVENANCE_KEYS if name in arguments}
        provenance = {**arguments.pop("provenance", {}), **by_name}
        writer = self.storage.create_writer(path, provenance=provenance, **arguments)
        self._writers.append((path, writer))
        return writer

    def record(self, path: Path, figures: BinFigures) -> None:
        """Note the figures of a shard that another process wrote, so that it need not be read again."""
        self._figures[path] = figures

    def finalize(self, *, provenance: Mapping[str, Any] | None = None, card: str | None = None) -> DatasetDirectory:
        """List every staged shard in dataset.json and publish.

        Args:
            provenance: sources, tokenizer, plan, configuration: whatever the dataset was made from.
            card: text of README.md, the dataset card.
        """
        self._require_open()
        self._figures |= {path: writer.figures for path, writer in self._writers if writer.figures is not None}
        with os_errors("list", self.path):
            names = sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir())
        splits = {split: self._describe_split(split) for split in names}
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
        if self.storage.name != DEFAULT_STORAGE:
            document["storage"] = self.storage.name
        if card is not None:
            write_file(self.path / CARD, card.encode())
        write_file(self.path / DATASET, json_document.render(document))
        with self._closing():
            self._staging.publish()
        return open_dataset(self.target)

    def _describe_split(self, split: str) -> dict[str, Any]:
        """Return what dataset.json says of a split, and write the files that belong beside its shards."""
        storage, folder = self.storage, self.path / split
        with os_errors("list", folder):
            paths = sorted(path for path in folder.iterdir() if storage.recognises(path))
        figures = [self._figures.get(path) or storage.figures(storage.open(path)) for path in paths]
        together = BinFigures.over(figures)
        description: dict[str, Any] = {
            "shards": [_describe_shard(storage, *one) for one in zip(paths, figures, strict=True)],
            **together.numbers(),
            **{name: _agreed(paths, figures, name) for name in _COMMON},
        }
        if not storage.has_manifest:
            description |= {"vocab_size": together.vocab_size, "pad_id": together.pad_id}
        for name, content in storage.sidecars(together).items():
            write_file(folder / name, content)
        with os_errors("publish", folder):
            fsync_directory(folder)
        return description


def _describe_shard(storage: Storage, path: Path, figures: BinFigures) -> dict[str, Any]:
    entry = {"name": path.name, "num_bins": figures.num_bins, _checksum_key(storage): storage.checksum(path)}
    return entry if storage.has_manifest else {**entry, "bytes": stored_size(path)}


def _checksum_key(storage: Storage) -> str:
    return "manifest_checksum" if storage.has_manifest else "checksum"


def _agreed(paths: Sequence[Path], figures: Sequence[BinFigures], name: str) -> Any:
    """Return what all shards of a split have in common; shards that differ cannot be one split."""
    values = [getattr(one, name) for one in figures]
    for path, value in zip(paths, values, strict=True):
        if value != values[0]:
            raise InvalidInputError(
                f"{path.name} has {name} {value!r}, {paths[0].name} has {values[0]!r}; "
                "shards of one split must be made with the same"
            )
    return values[0]
