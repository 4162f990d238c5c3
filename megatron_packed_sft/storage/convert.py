"""`convert`: rewrite packed data from one storage to another; every bin keeps its tokens, masks and boundaries.

One shard or file becomes one shard or file. Several become a dataset directory, published together or not at all.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.remote.uploads import refuse_existing, scratch_directory, upload, uploading
from megatron_packed_sft.storage.bins import cannot_keep, clear_sequence_ends, masks_would_be_lost
from megatron_packed_sft.storage.dataset_directory import (
    DATASET,
    DatasetWriter,
    ShardEntry,
    has_dataset,
    open_dataset,
    open_listed_shard,
)
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.megatron_indexed.index import INDEX, TOKENS, indexed_path, pair_of
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.memmap_v1.reader import open_memmap_shard
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, STORAGES, shards_inside, storage_named, storage_of
from megatron_packed_sft.storage.remote_shard import RemoteShard, local_copy
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.progress import Progress

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The result of `convert`."""

    target: str
    packed_storage: str
    num_files: int
    num_bins: int
    num_tokens: int
    pack_size: int
    asked_pack_size: int | None
    num_cleared_masks: int
    num_dropped_masks: int = 0


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of `convert` that describe the output."""

    storage: Storage
    pack_size: int | None
    overlong: str
    vocab_size: int | None
    pad_id: int | None
    split: str
    drop_masks: bool
    overwrite: bool
    progress: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """One shard to convert, and where the result goes: shard `number` of a split, or the target itself (None)."""

    path: Path
    storage: Storage
    split: str
    number: int | None = None
    entry: ShardEntry | None = None  # its entry in a dataset.json
    recorded: BinFigures | None = None  # the figures of its split in that dataset.json
    remote: RemoteShard | None = None  # set for a shard in an object store

    def open(self) -> PackedShard:
        """Open the shard."""
        if self.entry is None:
            return self.storage.open(self.path)
        return open_listed_shard(self.storage, self.path, self.entry, self.remote)


def convert(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    to: str = DEFAULT_STORAGE,
    pack_size: int | None = None,
    overlong: Literal["grow", "error"] = "grow",
    vocab_size: int | None = None,
    pad_id: int | None = None,
    split: str = "train",
    drop_masks: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> ConversionReport:
    """Convert packed data from one storage to another.

    Args:
        sources: files, shards, dataset directories, directories of such files, or globs.
        target: where the result is published, whole or not at all. For `megatron_indexed` it is a prefix, to which the
            names of several splits are added (PREFIX_train, PREFIX_validation).
        to: the name of a storage: `memmap_v1`, `legacy`, `parquet`, `megatron_indexed`, or a registered one.
        pack_size: the width of the shards; by default the longest bin.
        overlong: bins longer than `pack_size` (Megatron-Bridge packs by length - 1, so it writes such bins) make the
            width grow to fit, or are an error.
        vocab_size: ids must be below it; by default as recorded in the sources, or the largest id + 1.
        pad_id: the padding id; by default as recorded in the sources, or 0.
        split: the split for the shards of several files.
        drop_masks: for `megatron_indexed`, which keeps no loss masks: accept untrained tokens; readers of the
            result train on them.
        overwrite: replace an existing target.
        progress: show a bar over the bins.

    Megatron-Bridge leaves the loss mask at 1 on the last token of a sequence for data without a chat template. No
    collate function reads that position (it has no prediction); `convert` sets it to 0 and the report counts these.
    """
    storage = storage_named(to)
    if overlong not in ("grow", "error"):
        raise InvalidInputError(f"overlong is {overlong!r}; use 'grow' or 'error'")
    if pack_size is not None and pack_size < 1:
        raise InvalidInputError(f"pack_size is {pack_size}; it must be at least 1")
    if drop_masks and storage.keeps_masks:
        raise InvalidInputError(f"{storage.name} keeps loss masks; remove --drop-masks")
    settings = _Settings(storage, pack_size, overlong, vocab_size, pad_id, split, drop_masks, overwrite, progress)
    if not is_url(target):
        return _convert(sources, local_path(target, "target"), settings)
    url = os.fspath(target)
    refuse_existing(url, overwrite=overwrite)
    with scratch_directory() as scratch:
        local = scratch / base_name(url)
        report = _convert(sources, local, replace(settings, overwrite=False))
        if storage.keeps_masks:
            upload(local, url, overwrite=overwrite)
        else:  # a prefix: PREFIX.bin and the .idx that makes it a dataset, for each split
            for file in sorted(scratch.iterdir(), key=lambda file: file.suffix == INDEX):
                upload(file, url.removesuffix(local.name) + file.name, overwrite=overwrite)
    return replace(report, target=redacted(url))


def _convert(sources: PathLike | Sequence[PathLike], target: Path, settings: _Settings) -> ConversionReport:
    """Convert to a local path."""
    storage, found = settings.storage, _find(sources, settings.split)
    for source in found:
        if source.storage.name == storage.name:
            raise InvalidInputError(f"{source.path} is already {storage.name}; choose another storage with --to")
    conversion = _Conversion(settings)
    conversion.survey(found)
    with Progress(f"convert to {storage.name}", conversion.num_bins, "bin", quiet=not settings.progress) as bar:
        if not storage.keeps_masks:
            return conversion.join(found, target, bar)
        if found[0].number is None:
            with storage.create_writer(target, conversion.options(found[0])) as writer:
                conversion.copy(found[0], writer, bar)
                writer.finalize()
        else:
            with DatasetWriter(target, storage=storage.name, overwrite=settings.overwrite) as dataset:
                for source in found:
                    options = replace(conversion.options(source), overwrite=False)
                    with dataset.shard_writer(source.split, source.number or 0, options) as writer:
                        conversion.copy(source, writer, bar)
                        writer.finalize()
                dataset.finalize(provenance={"converted_from": [source.path.name for source in found]})
    return conversion.report(target, len(found))


def convert_legacy_to_memmap(legacy_npy_path: PathLike, output_dir: PathLike) -> ShardManifest:
    """Convert one pickled .npy file to a memmap_v1 shard, and return its manifest."""
    if is_url(output_dir):
        with uploading(os.fspath(output_dir)) as local:
            return convert_legacy_to_memmap(legacy_npy_path, local)
    convert(legacy_npy_path, output_dir, to=DEFAULT_STORAGE)
    return open_memmap_shard(output_dir).manifest


class _Conversion:
    """The state of one call."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._storage = settings.storage
        self._vocab_size = settings.vocab_size
        self._pad_id = settings.pad_id
        self._pack_size = settings.pack_size or 1
        self._num_tokens = 0
        self._num_cleared = 0
        self._num_untrained = 0
        self._figures: dict[Path, BinFigures] = {}
        self._opened: dict[Path, PackedShard] = {}
        self.num_bins = 0

    def survey(self, sources: Sequence[_Source]) -> None:
        """Find the width, the vocabulary and the padding id that fit every source, so that all shards agree."""
        # Legacy and Parquet files are read whole, so each is opened twice rather than all held in memory at once.
        bounds = []
        for source in sources:
            shard = source.open()
            figures = shard.figures
            self._figures[source.path] = figures
            if figures.has_weights and not self._storage.keeps_weights:
                raise cannot_keep(str(source.path), self._storage.name)
            if not self._storage.keeps_masks:
                self._survey_masks(source, shard, figures)
            self.num_bins += len(shard)
            asked = self._settings.pack_size
            if asked is not None and shard.pack_size > asked and self._settings.overlong == "error":
                raise InvalidInputError(
                    f"{source.path} has a bin of {shard.pack_size} tokens, longer than pack_size {asked}; "
                    f"use a pack_size of {shard.pack_size} or overlong='grow'"
                )
            self._pack_size = max(
                self._pack_size, shard.pack_size, self._known(source, "pack_size") if asked is None else 1
            )
            vocab_size = self._known(source, "vocab_size")
            bounds.append(shard.vocab_bound if vocab_size is None and self._vocab_size is None else vocab_size or 1)
            if len(sources) == 1:
                self._opened[source.path] = shard
        if self._pad_id is None:
            pad_ids = {self._known(source, "pad_id") for source in sources}
            self._pad_id = (pad_ids.pop() if len(pad_ids) == 1 else None) or 0
        if self._vocab_size is None:
            self._vocab_size = max(self._pad_id + 1, *bounds)

    def _survey_masks(self, source: _Source, shard: PackedShard, figures: BinFigures) -> None:
        """Count untrained predictions, and refuse them before anything is written."""
        multiple = self._known(source, "pad_seq_to_mult") or 1
        if multiple > 1:
            raise InvalidInputError(
                f"{source.path} is padded to multiples of {multiple} for parallel ranks, and the padding would become "
                "tokens of documents; pack the data without it"
            )
        if figures.num_tokens is None or figures.num_sequences is None or figures.num_loss_tokens is None:
            return  # the writer counts them
        num_predictions = figures.num_tokens - figures.num_sequences
        num_untrained = num_predictions - (figures.num_loss_tokens - shard.num_masks_at_sequence_end)
        if num_untrained and not self._settings.drop_masks:
            raise masks_would_be_lost(str(source.path), num_untrained, num_predictions)
        self._num_untrained += num_untrained

    def join(self, sources: Sequence[_Source], target: Path, bar: Progress) -> ConversionReport:
        """Write all bins of each split into one shard; publish once all are written."""
        by_split: dict[str, list[_Source]] = {}
        for source in sources:
            by_split.setdefault(source.split, []).append(source)
        prefix = pair_of(target)[0].with_suffix("") if target.suffix in (INDEX, TOKENS) else target
        targets = [prefix if len(by_split) == 1 else prefix.with_name(f"{prefix.name}_{split}") for split in by_split]
        with contextlib.ExitStack() as stack:
            writers = []
            for path, parts in zip(targets, by_split.values(), strict=True):
                num_bins = sum(self._figures[source.path].num_bins for source in parts)
                options = replace(self.options(parts[0]), num_bins=num_bins)
                writers.append(stack.enter_context(self._storage.create_writer(path, options)))
                first_bin = 0
                for source in parts:
                    first_bin = self.copy(source, writers[-1], bar, first_bin)
            for writer in writers:
                writer.finalize()
        return self.report(", ".join(map(str, targets)), len(sources))

    def _known(self, source: _Source, name: str) -> Any:
        """Return a figure of a source, from its dataset.json or else from the shard."""
        recorded = None if source.recorded is None else source.recorded[name]
        return self._figures[source.path][name] if recorded is None else recorded

    def options(self, source: _Source) -> WriterOptions:
        """Return the writer's options for one source."""
        provenance = {
            name: value
            for name in ("tokenizer", "chat_template_fingerprint", "pad_seq_to_mult")
            if (value := self._known(source, name)) is not None
        }
        return WriterOptions(
            num_bins=self._figures[source.path].num_bins,
            pack_size=self._pack_size,
            vocab_size=self._vocab_size,
            pad_id=self._pad_id or 0,
            overwrite=self._settings.overwrite,
            provenance=provenance,
            drop_masks=self._settings.drop_masks,
        )

    def copy(self, source: _Source, writer: PackedShardWriter, bar: Progress, first_bin: int = 0) -> int:
        """Write all bins of a source, starting at bin `first_bin`; return the number of the next bin."""
        shard = self._opened.pop(source.path, None) or source.open()
        for block in shard.blocks(self._pack_size, self._pad_id or 0):
            self._num_cleared += clear_sequence_ends(block)
            try:
                writer.write_block(first_bin, block)
            except InvalidInputError as error:
                raise InvalidInputError(f"{source.path}: {error}") from None
            self._num_tokens += int(block.packed_len.sum())
            first_bin += len(block)
            bar.update(len(block))
        return first_bin

    def report(self, target: Path | str, num_files: int) -> ConversionReport:
        """Return the figures of the whole call."""
        return ConversionReport(
            target=str(target),
            packed_storage=self._storage.name,
            num_files=num_files,
            num_bins=self.num_bins,
            num_tokens=self._num_tokens,
            pack_size=self._pack_size,
            asked_pack_size=self._settings.pack_size,
            num_cleared_masks=self._num_cleared,
            num_dropped_masks=self._num_untrained,
        )


def _find(sources: PathLike | Sequence[PathLike], split: str) -> list[_Source]:
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not given:
        raise InvalidInputError("nothing to convert; name at least one file")
    paths = [path for item in given for path in _expand(item)]
    found = [source for path in paths for source in _sources_at(path, split)]
    if len(given) == len(found) == 1 and found[0].path == paths[0]:
        return found  # a shard that was named directly becomes one shard
    counts: dict[str, int] = {}
    numbered = []
    for source in found:
        number = counts.get(source.split, 0)
        counts[source.split] = number + 1
        numbered.append(replace(source, number=number))
    return numbered


def _sources_at(path: Path | str, split: str) -> list[_Source]:
    if isinstance(path, str) or (path / DATASET).exists():
        dataset = open_dataset(path)
        return [
            _Source(
                dataset.shard_path(name, entry),
                dataset.storage,
                name,
                None,
                entry,
                dataset.figures[name],
                dataset.remote_shard(name, entry),
            )
            for name, entries in dataset.splits.items()
            for entry in entries
        ]
    storage = storage_of(path)
    if storage is not None:
        return [_Source(path, storage, split)]
    inside = shards_inside(path)
    if not inside:
        raise InvalidInputError(
            f"{path} is not packed data of a known storage ({', '.join(STORAGES.names())}); check the path"
        )
    return [_Source(shard, storage, split) for shard, storage in inside]


def _expand(source: PathLike) -> list[Path] | list[str]:
    """Return the paths that a source matches; the URL of a dataset is kept, other URLs are fetched."""
    if is_url(source):
        return [os.fspath(source)] if has_dataset(source) else [local_copy(os.fspath(source))]
    path = indexed_path(local_path(source, "source"))
    if os.path.lexists(path):
        return [path]
    found = sorted(glob.glob(str(path)))
    if not found:
        raise InvalidInputError(f"{os.fspath(source)} does not exist and matches nothing; check the path")
    return [Path(name) for name in found]
