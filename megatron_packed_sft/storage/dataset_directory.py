"""A dataset directory: splits of shards under one dataset.json, published together or not at all.

    my_dataset/
      dataset.json                    storage, splits, shards in order, totals, provenance, checksums
      train/shard_000000/ ...         shards of any storage: directories or files
      validation/shard_000000/ ...

`storage` is absent for memmap_v1, the storage that dataset.json was made for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.errors import InvalidInputError, ShardError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, is_missing
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.uploads import refuse_unfinished
from megatron_packed_sft.storage.dataset_document import (
    CARD,
    DATASET,
    FORMAT,
    MAX_DATASET_BYTES,
    PLAIN_NAME,
    VERSION,
    ShardEntry,
    checksum_key,
    parse_dataset,
)
from megatron_packed_sft.storage.figures import PROVENANCE_KEYS, BinFigures
from megatron_packed_sft.storage.interface import (
    FIRST_READ,
    PackedShard,
    PackedShardWriter,
    ReadOptions,
    Storage,
    WriterOptions,
)
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, dataset_storage
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import StagedWriter, fsync_directory, os_errors, write_file
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum, stored_size
from megatron_packed_sft.support.file_maps import LazyMaps
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import is_url, local_path, redacted

if TYPE_CHECKING:
    from megatron_packed_sft.remote.node_cache import NodeCache
    from megatron_packed_sft.storage.remote_shard import RemoteShard

__all__ = [
    "CARD",
    "DATASET",
    "FORMAT",
    "MAX_DATASET_BYTES",
    "VERSION",
    "DatasetDirectory",
    "DatasetWriter",
    "ShardEntry",
    "has_dataset",
    "open_dataset",
    "open_listed_shard",
]

_COMMON = ("tokenizer", "chat_template_fingerprint")  # shards of one split must agree on these


@dataclass(frozen=True, slots=True)
class DatasetDirectory:
    """An opened dataset.json. The shards are opened on demand.

    For a dataset in an object store, `url` is its address and `cache` the cache that its shards are fetched into.
    """

    path: Path
    storage: Storage
    splits: Mapping[str, tuple[ShardEntry, ...]]
    figures: Mapping[str, BinFigures]
    provenance: Mapping[str, Any]
    fingerprint: str
    url: str | None = None
    cache: NodeCache | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)  # README.md and the files beside shards, by path
    reading: ReadOptions = field(default_factory=ReadOptions)

    @property
    def location(self) -> str:
        """The path, or the URL without credentials, for messages."""
        return str(self.path) if self.url is None else redacted(self.url)

    def shard_path(self, split: str, entry: ShardEntry) -> Path:
        """Return the local path of a shard; a remote one exists there only while it is held (see `remote_shard`)."""
        remote = self.remote_shard(split, entry)
        return self.path / split / entry.name if remote is None else remote.path

    def remote_shard(self, split: str, entry: ShardEntry) -> RemoteShard | None:
        """Return the remote shard to fetch, or None if the dataset is local."""
        return None if self.url is None else _remote_shard(self.storage, self.url, self.cache, split, entry)

    def open_shard(self, split: str, entry: ShardEntry) -> PackedShard:
        """Open one shard and check that it is the one listed in dataset.json."""
        remote = self.remote_shard(split, entry)
        shard = open_listed_shard(self.storage, self.shard_path(split, entry), entry, remote)
        shard.read_with(self.reading)
        return shard

    def entries(self, split: str) -> tuple[ShardEntry, ...]:
        """Return the shards of a split, in order; an unknown split is an error that lists the known ones."""
        if split not in self.splits:
            raise InvalidInputError(
                f"{self.location} has no split {split!r}; choose one of {', '.join(sorted(self.splits))}"
            )
        return self.splits[split]

    def open_shards(self, split: str) -> list[PackedShard]:
        """Open all shards of a split, in order."""
        return [self.open_shard(split, entry) for entry in self.entries(split)]

    def is_whole(self) -> bool:
        """Return whether every listed shard exists and matches, judging by names, sizes and manifests."""
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


def _remote_shard(storage: Storage, url: str, cache: NodeCache | None, split: str, entry: ShardEntry) -> RemoteShard:
    from megatron_packed_sft.storage.remote_shard import RemoteShard

    assert cache is not None
    place = child(url, split, entry.name)
    return RemoteShard(storage, place, entry.checksum, entry.num_bytes, url, cache.directory, cache.asked_size)


def open_listed_shard(
    storage: Storage, path: Path, entry: ShardEntry, remote: RemoteShard | None = None
) -> PackedShard:
    """Open a shard listed in a dataset.json; refuse a different or changed one.

    A remote shard is fetched first, and stays in the cache while it is mapped.
    """
    if remote is not None:
        hold = remote.hold()
        shard = open_listed_shard(storage, path, entry)
        if isinstance(shard, LazyMaps):
            shard.holder = remote
        hold.release()
        return shard
    if not os.path.lexists(path):
        raise ShardError(f"{path} is missing; copy the dataset again")
    if entry.num_bytes is not None and stored_size(path) != entry.num_bytes:
        raise _not_listed(path, "its size differs")
    shard = storage.open(path)
    # A shard with a manifest was identified by it when it was opened.
    found = shard.fingerprint if storage.has_manifest else None
    if (found or storage.checksum(path)) != entry.checksum:
        raise _not_listed(path, "its checksum differs")
    if len(shard) != entry.num_bins:
        raise _not_listed(path, f"it has {len(shard)} bins, not {entry.num_bins}")
    return shard


def _not_listed(path: Path, problem: str) -> ShardError:
    return ShardError(
        f"{path} is not the shard that its dataset.json lists: {problem}; it was replaced or rewritten: restore "
        "it, or publish the dataset again"
    )


def open_dataset(
    path: str | os.PathLike[str], cache: NodeCache | None = None, *, verify: str = FIRST_READ
) -> DatasetDirectory:
    """Open a dataset directory: dataset.json is read and checked, shards are not touched yet.

    Args:
        path: the directory, or its URL.
        cache: where the shards of a URL are stored; by default the user's cache.
        verify: when bins of its shards are compared with their checksums; see `ReadOptions`.
    """
    reading = ReadOptions(verify)
    if is_url(path):
        from megatron_packed_sft.remote.node_cache import node_cache

        url, cache = os.fspath(path), cache or node_cache()
        try:
            data = cache.document(child(url, DATASET), MAX_DATASET_BYTES)
        except StorageIOError as error:
            if is_missing(error):
                refuse_unfinished(url)
            raise
        return replace(_parsed(data, cache.directory, url, cache), reading=reading)
    location = local_path(path)
    with CheckedDirectory.open(location) as directory:
        data = directory.read(DATASET, MAX_DATASET_BYTES)
    return replace(_parsed(data, location, None, None), reading=reading)


def has_dataset(path: str | os.PathLike[str], cache: NodeCache | None = None) -> bool:
    """Return whether a path or URL has a dataset.json; a copy in the cache counts, without asking the network."""
    if is_url(path):
        url = child(os.fspath(path), DATASET)
        return (cache is not None and cache.has_document(url)) or object_info(url) is not None
    return Path(path, DATASET).exists()


def _parsed(data: bytes, location: Path, url: str | None, cache: NodeCache | None) -> DatasetDirectory:
    file = str(location / DATASET) if url is None else redacted(child(url, DATASET))
    storage, splits, figures, provenance, files = parse_dataset(data, file)
    return DatasetDirectory(location, storage, splits, figures, provenance, checksum(data), url, cache, files)


class DatasetWriter(StagedWriter):
    """Stages a dataset directory; `finalize` publishes all of it by one rename.

    Args:
        target: the directory to publish.
        storage: the storage of its shards.
        overwrite: replace an existing target in one step.

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
        self._elsewhere: dict[Path, ShardEntry] = {}
        self._writers: list[tuple[Path, PackedShardWriter]] = []
        self._files: dict[str, FileRecord] = {}
        super().__init__(target, overwrite=overwrite)

    @property
    def path(self) -> Path:
        """The staging directory until `finalize`; other processes may write shards into it, too."""
        return self._staging.path

    def shard_path(self, split: str, number: int) -> Path:
        """Return where shard `number` of a split is staged."""
        if not PLAIN_NAME.fullmatch(split):
            raise InvalidInputError(f"split {split!r} is not a plain name of letters, digits, '_', '.' and '-'")
        return self.path / split / self.storage.shard_name(number)

    def shard_writer(
        self, split: str, number: int, options: WriterOptions | None = None, **arguments: Any
    ) -> PackedShardWriter:
        """Return a writer of shard `number` of a split.

        Args:
            split, number: where the shard belongs.
            options: see `WriterOptions`.
            arguments: the fields of `WriterOptions` by name, instead of `options`; those of its `provenance` may be
                given by name, too.
        """
        path = self.shard_path(split, number)
        if options is None:
            by_name = {name: arguments.pop(name) for name in PROVENANCE_KEYS if name in arguments}
            options = WriterOptions(**{**arguments, "provenance": {**arguments.get("provenance", {}), **by_name}})
        writer = self.storage.create_writer(path, options)
        self._writers.append((path, writer))
        return writer

    def record(self, path: Path, figures: BinFigures, entry: ShardEntry | None = None) -> None:
        """Record the figures of a shard that another process wrote, so that it is not read again.

        Args:
            path: where it is staged.
            figures: of its bins.
            entry: for a shard that was uploaded to an object store and is not in the staging directory.
        """
        self._figures[path] = figures
        if entry is not None:
            self._elsewhere[path] = entry
            with os_errors("create", path.parent):
                path.parent.mkdir(exist_ok=True)

    def finalize(self, *, provenance: Mapping[str, Any] | None = None, card: str | None = None) -> DatasetDirectory:
        """List every staged shard in dataset.json and publish.

        Args:
            provenance: what the dataset was made from: sources, tokenizer, plan, configuration.
            card: the text of README.md, the dataset card.
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
            self._write_recorded(CARD, card.encode())
        if self._files:
            document["files"] = {name: record._asdict() for name, record in self._files.items()}
        write_file(self.path / DATASET, json_document.render(document))
        with self._closing():
            self._staging.publish()
        return open_dataset(self.target)

    def _describe_split(self, split: str) -> dict[str, Any]:
        """Return the entry of a split for dataset.json, and write the files that belong beside its shards."""
        storage, folder = self.storage, self.path / split
        with os_errors("list", folder):
            paths = [path for path in folder.iterdir() if storage.recognises(path)]
        paths = sorted([*paths, *(path for path in self._elsewhere if path.parent == folder)])
        figures = [self._figures.get(path) or storage.open(path).figures for path in paths]
        together = BinFigures.over(figures)
        description: dict[str, Any] = {
            "shards": [
                _describe_shard(storage, *one, self._elsewhere.get(one[0])) for one in zip(paths, figures, strict=True)
            ],
            **together.numbers(),
            **{name: _agreed(paths, figures, name) for name in _COMMON},
        }
        if not storage.has_manifest:
            description |= {"vocab_size": together.vocab_size, "pad_id": together.pad_id}
        for name, content in storage.sidecars(together).items():
            self._write_recorded(f"{split}/{name}", content)
        with os_errors("publish", folder):
            fsync_directory(folder)
        return description

    def _write_recorded(self, name: str, content: bytes) -> None:
        """Write a file whose size and checksum go into dataset.json."""
        write_file(self.path / name, content)
        self._files[name] = FileRecord(len(content), checksum(content))


def _describe_shard(storage: Storage, path: Path, figures: BinFigures, elsewhere: ShardEntry | None) -> dict[str, Any]:
    if elsewhere is None:
        num_bytes = None if storage.has_manifest else stored_size(path)
        elsewhere = ShardEntry(path.name, figures.num_bins, storage.checksum(path), num_bytes)
    entry = {"name": path.name, "num_bins": figures.num_bins, checksum_key(storage): elsewhere.checksum}
    return entry if storage.has_manifest else {**entry, "bytes": elsewhere.num_bytes}


def _agreed(paths: Sequence[Path], figures: Sequence[BinFigures], name: str) -> Any:
    """Return a value that all shards of a split share; refuse shards that differ."""
    values = [getattr(one, name) for one in figures]
    for path, value in zip(paths, values, strict=True):
        if value != values[0]:
            raise InvalidInputError(
                f"{path.name} has {name} {value!r}, {paths[0].name} has {values[0]!r}; "
                "all shards of a split must have the same"
            )
    return values[0]
