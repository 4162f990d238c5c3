"""`open_bins`: a source of bins from a path of any kind: shards, datasets, plans, streams, lists and blends."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.data.bin_readers import BinReader, JoinedBinReader, PlanBinReader
from megatron_packed_sft.data.made_with import refuse_mixed
from megatron_packed_sft.data.options import AUTO, OpenOptions
from megatron_packed_sft.data.order.blend import BlendedSources
from megatron_packed_sft.data.order.blend_weights import mixing_of
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.data.shard_readers import ShardBinReader
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.dataset_directory import DATASET, DatasetDirectory, has_dataset, open_dataset
from megatron_packed_sft.storage.interface import Storage
from megatron_packed_sft.storage.megatron_indexed.index import indexed_path
from megatron_packed_sft.storage.registry import STORAGES, shards_inside, storage_named, storage_of
from megatron_packed_sft.storage.remote_shard import local_copy
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.tokens.store import open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike] | Mapping[str, PathLike]
Weights = Sequence[float] | Mapping[str, Any]


class OpenedBins(NamedTuple):
    """Bins that are open but not yet a dataset: their figures are known, and for a blend its sources."""

    source: BinReader
    blended: BlendedSources | None


def open_bins(
    path: Paths,
    *,
    split: str = "train",
    plan: PathLike | PackPlan | None = None,
    weights: Weights | None = None,
    seed: int = 1234,
    pad_id: int = 0,
    stream: StreamOptions | None = None,
    opening: OpenOptions | None = None,
    id_limit: Callable[[], int | None] | None = None,
) -> OpenedBins:
    """Return the bins at a path without making a dataset of them, which would need torch.

    Args:
        path, split, plan, weights, seed, stream, opening: as in `create_sft_dataset`.
        pad_id: fills the gaps between the sequences of a plan's bins.
        id_limit: tells what the ids of token streams must be below, if `stream` does not; called only for a stream,
            because some tokenizers take long to tell.
    """
    opening = opening or OpenOptions()
    stream = stream or StreamOptions()
    names, groups = _named_groups(path)
    paths = [found for group in groups for found in group]
    mixing = mixing_of(weights, names, num_sources=len(groups))
    if plan is not None:
        if len(paths) != 1 or opening.storage != AUTO:
            raise InvalidInputError("plan goes with the path of one token store; leave storage at 'auto'")
        loaded = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
        opened: list[list[BinReader]] = [[PlanBinReader(open_token_store(paths[0]), loaded, pad_id=pad_id)]]
    else:
        opener = _Opener(split, opening, stream, id_limit)
        opened = [opener.end_to_end(group) for group in (groups if mixing is not None else [paths])]
    _refuse_stream_options([one for group in opened for one in group], stream)
    sources = [_joined(group) for group in opened] if mixing is not None else opened[0]
    source = _joined(sources)
    if len(sources) > 1:
        refuse_mixed(source.made_with(), opening.tolerance)
    blended = None
    if mixing is not None:
        orders = tuple(SampleOrder(len(one), seed=seed, fingerprint=one.fingerprint) for one in sources)
        blended = BlendedSources(orders, mixing, tuple(names or _path_names(paths)))
    return OpenedBins(source, blended)


def _named_groups(path: Paths) -> tuple[list[str], list[list[Path | str]]]:
    """Return the names of the sources, if they have any, and the paths of each; the finds of a glob are listed."""
    if isinstance(path, Mapping):
        return [str(name) for name in path], [_expand(one) for one in path.values()]
    given = [path] if isinstance(path, str | os.PathLike) else path
    return [], [[found] for one in given for found in _expand(one)]


def _path_names(paths: Sequence[Path | str]) -> list[str]:
    names = [redacted(str(path)) for path in paths]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _joined(sources: list[BinReader]) -> BinReader:
    return sources[0] if len(sources) == 1 else JoinedBinReader(sources)


class _Opener:
    """Opens paths, each as what it is."""

    def __init__(
        self, split: str, opening: OpenOptions, stream: StreamOptions, id_limit: Callable[[], int | None] | None
    ) -> None:
        self._split = split
        self._opening = opening
        self._wanted = None if opening.storage == AUTO else storage_named(opening.storage)
        self._stream = stream
        self._id_limit = id_limit

    def end_to_end(self, paths: Sequence[Path | str]) -> list[BinReader]:
        """Open paths that follow each other: as one source if all of them are shards of one storage."""
        local = [path for path in paths if isinstance(path, Path)]
        storages = [storage_of(path) for path in local]
        first = storages[0] if storages else None
        if len(local) == len(paths) > 1 and first is not None and all(one is first for one in storages):
            self._check_storage(local[0], first)
            configured = self._configured(first)
            configured, joined = configured.as_one_shard(local)
            return [ShardBinReader.of_shards(configured, joined, self._opening.tolerance)]
        return [self._one(path) for path in paths]

    def _one(self, path: Path | str) -> BinReader:
        if isinstance(path, str):
            return self._remote(path)
        if is_token_store(path):
            raise InvalidInputError(
                f"{path} is a token store; name a plan to read bins out of it, pack it now (packing_mode static), or "
                "materialize it first"
            )
        if (path / DATASET).exists():
            return self._dataset(open_dataset(path))
        storage = storage_of(path)
        if storage is not None:
            self._check_storage(path, storage)
            return ShardBinReader.of_shards(self._configured(storage), [path])
        inside = shards_inside(path)
        if inside:
            return self._directory(path, inside)
        if self._wanted is not None and self._wanted.is_flat:
            return ShardBinReader.of_shards(self._configured(self._wanted), [path])  # raises the reason why it is none
        is_empty = path.is_dir() and not any(path.iterdir())
        raise InvalidInputError(
            f"{path} is an empty directory; check the path"
            if is_empty
            else f"{path} is not packed data of a known storage ({', '.join(STORAGES.names())}); check the path"
        )

    def _remote(self, url: str) -> BinReader:
        """Open a dataset, a shard or a file in an object store."""
        from megatron_packed_sft.remote.node_cache import node_cache

        cache = node_cache(self._opening.cache_dir, self._opening.cache_size)
        if not has_dataset(url, cache):
            return self._one(local_copy(url, cache))
        return self._dataset(open_dataset(url, cache))

    def _dataset(self, dataset: DatasetDirectory) -> BinReader:
        self._check_storage(dataset.location, dataset.storage)
        return ShardBinReader.of_dataset(dataset, self._split)

    def _directory(self, path: Path, inside: Sequence[tuple[Path, Storage]]) -> BinReader:
        kinds = {storage.name: storage for _, storage in inside}
        if len(kinds) > 1:
            raise InvalidInputError(f"{path} mixes shards of {' and '.join(kinds)}; name the files of one of them")
        [storage] = kinds.values()
        self._check_storage(path, storage)
        shards = [shard for shard, _ in inside]
        if storage.is_flat:
            raise InvalidInputError(
                f"{path} holds token streams in directories of their own, such as {shards[0].name}; name those to "
                "train on"
            )
        return ShardBinReader.of_shards(self._configured(storage), shards, self._opening.tolerance, of_directory=True)

    def _configured(self, storage: Storage) -> Storage:
        if not storage.stream_options:
            return storage
        if self._stream.vocab_size is None and self._id_limit is not None:
            return storage.configured(replace(self._stream, vocab_size=self._id_limit()))
        return storage.configured(self._stream)

    def _check_storage(self, path: Path | str, found: Storage) -> None:
        if self._wanted is not None and self._wanted is not found:
            key = "packed_storage" if self._opening.spelling == "key" else "storage"
            raise InvalidInputError(
                f"{path} is {found.name}, but {key} asks for {self._wanted.name!r}; set {key} to {found.name}"
            )


def _refuse_stream_options(sources: Sequence[BinReader], options: StreamOptions) -> None:
    """Refuse options of token streams if there is no stream: they would be ignored without a word."""
    meaningful: set[str] = set()
    for one in sources:
        if isinstance(one, ShardBinReader):
            meaningful |= one.storage.stream_options
    options_of_streams = ("pack_sequences", "documents", "file_pattern", "dtype")
    given = {name: getattr(options, name) for name in options_of_streams if name not in meaningful}
    for name, value in given.items():
        if value:
            raise InvalidInputError(
                f"{options.spelled(name)} is {value!r}, but {sources[0].description} is not a token stream; leave it "
                "out, packed data knows its own sequences and dtype"
            )


def _expand(path: PathLike) -> list[Path | str]:
    if is_url(path):
        return [os.fspath(path)]
    location = indexed_path(local_path(path))
    if os.path.lexists(location):
        return [location]
    found: list[Path | str] = [Path(name) for name in sorted(glob.glob(str(location)))]
    if not found:
        raise InvalidInputError(f"{os.fspath(path)} does not exist and matches nothing; check the path")
    return found
