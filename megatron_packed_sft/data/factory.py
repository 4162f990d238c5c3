"""`create_sft_dataset`: one call opens packed data of any kind."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.data._tokenizer_ids import eos_id_of, id_limit_of
from megatron_packed_sft.data.bin_readers import BinReader, JoinedBinReader, PlanBinReader, ShardBinReader
from megatron_packed_sft.data.datasets import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    GPTSFTPlannedDataset,
    PackedDataset,
    checked_length,
    dataset_over,
)
from megatron_packed_sft.data.made_with import Tolerance, refuse_mixed
from megatron_packed_sft.data.order.blend import Blend, BlendOrder
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.order.shard_order import ShardOrder
from megatron_packed_sft.data.token_streams import TokenStreamDataset, document_end
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.dataset_directory import DATASET, has_dataset, open_dataset
from megatron_packed_sft.storage.interface import Storage
from megatron_packed_sft.storage.legacy.reader import LegacyShard
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.registry import STORAGES, shards_inside, storage_named, storage_of
from megatron_packed_sft.storage.remote_shard import local_copy
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.storage.token_stream.storage import TokenStreamStorage
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.tokens.store import open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

AUTO = "auto"
_DEFAULT_SEQ_LENGTH = 2048  # Megatron-Bridge's
_CLASS_OF_ONE_SHARD: dict[type, type[PackedDataset]] = {
    MemmapShard: GPTSFTPackedMemmapDataset,
    LegacyShard: GPTSFTPackedDataset,
}


def create_sft_dataset(
    path: PathLike | Sequence[PathLike],
    tokenizer: Any = None,
    seq_length: int | None = None,
    *,
    split: str = "train",
    packed_storage: str = AUTO,
    plan: PathLike | PackPlan | None = None,
    weights: Sequence[float] | None = None,
    max_num_samples: int | None = None,
    seed: int = 1234,
    pack_sequences: bool = False,
    eos_id: int | None = None,
    file_pattern: str | None = None,
    dtype: str | None = None,
    allow_tokenizer_mismatch: bool = False,
    allow_template_mismatch: bool = False,
    cache_dir: PathLike | None = None,
    cache_size: str | int | None = None,
    shard_window: int | None = None,
    **arguments: Any,
) -> PackedDataset:
    """Open packed data as a dataset.

    One memmap_v1 shard is a `GPTSFTPackedMemmapDataset`, several shards or a dataset directory are a
    `GPTSFTPackedMultiShardDataset`, a legacy file is a `GPTSFTPackedDataset`, a token store with a plan is a
    `GPTSFTPlannedDataset` and a token stream a `TokenStreamDataset`; anything else is a `PackedDataset`, the base of
    them all.

    Args:
        path: a shard or file of any storage, a directory of shards, a dataset directory, a glob, a token store (with
            `plan`), a directory of flat .npy or .bin files (a token stream), or a list of these.
        tokenizer: gives the EOS id; an int will do. None takes the data's own padding id.
        seq_length: positions of a batch's bins; no bin may need more. None takes 2,048, or what the data needs. Token
            streams are cut into windows of so many predictions.
        split: of dataset directories.
        packed_storage: `auto`, or the storage that the data must have: `memmap_v1`, `legacy`, `parquet`,
            `token_stream`, or a registered one.
        plan: a plan or its file; the path is a token store then.
        weights: one per path of a list: a blend in that proportion. Without weights the list is laid end to end.
        max_num_samples: length of the dataset; see `PackedDataset`. Blends are shuffled by source; without it they have
            as many samples as all sources together.
        seed: of the shuffle.
        pack_sequences, eos_id, file_pattern, dtype: of token streams, as in `TokenStreamDataset`; refused without one.
        allow_tokenizer_mismatch: accept a tokenizer that did not make the data, and a list whose parts were made with
            different ones.
        allow_template_mismatch: accept a list whose parts were made with different chat templates.
        cache_dir, cache_size: of URLs such as s3://bucket/dataset: the node's cache that shards are fetched to, and how
            large it may become, such as 200GB; see `node_cache` for the defaults.
        shard_window: shuffle so many shards at a time, for data larger than its cache; see `ShardOrder`. The dataset has
            every bin once unless `max_num_samples` says otherwise.
        arguments: further ones of `PackedDataset`, such as `contract` and `loss`.
    """
    source, order = open_bins(
        path,
        split=split,
        packed_storage=packed_storage,
        plan=plan,
        weights=weights,
        seed=seed,
        pad_id=0 if tokenizer is None else eos_id_of(tokenizer),
        tolerance=Tolerance(tokenizer=allow_tokenizer_mismatch, template=allow_template_mismatch),
        cache_dir=cache_dir,
        cache_size=cache_size,
        stream=StreamOptions(
            seq_length=_DEFAULT_SEQ_LENGTH if seq_length is None else seq_length,
            pack_sequences=pack_sequences,
            eos_id=document_end(tokenizer, eos_id),
            file_pattern=file_pattern,
            dtype=dtype,
            vocab_size=None if allow_tokenizer_mismatch else id_limit_of(tokenizer),
        ),
    )
    ordered: Order | None = order
    if shard_window is not None:
        if order is not None:
            raise InvalidInputError("shard_window and weights were both given; a blend has an order of its own")
        ordered = shard_order(source, shard_window, seed)
    if ordered is not None and max_num_samples is None:
        max_num_samples = len(source)
    length = checked_length(source, seq_length, _DEFAULT_SEQ_LENGTH, "seq_length")
    dataset = dataset_over(
        _class_over(source),
        source,
        tokenizer,
        max_seq_length=length,
        max_num_samples=max_num_samples,
        seed=seed,
        order=ordered,
        allow_tokenizer_mismatch=allow_tokenizer_mismatch,
        **arguments,
    )
    logger.info(
        "%s: %s bins of up to %s tokens, %s samples",
        source.description,
        f"{len(source):,}",
        f"{source.figures.pack_size:,}",
        f"{len(dataset):,}",
    )
    return dataset


class OpenedBins(NamedTuple):
    """Bins that are open but not yet a dataset: their figures are known, and for a blend the order to draw them in."""

    source: BinReader
    order: BlendOrder | None


def open_bins(
    path: PathLike | Sequence[PathLike],
    *,
    split: str = "train",
    packed_storage: str = AUTO,
    plan: PathLike | PackPlan | None = None,
    weights: Sequence[float] | None = None,
    seed: int = 1234,
    pad_id: int = 0,
    tolerance: Tolerance | None = None,
    stream: StreamOptions | None = None,
    cache_dir: PathLike | None = None,
    cache_size: str | int | None = None,
) -> OpenedBins:
    """Open packed data without a tokenizer or a length, for callers that choose these by the data's own figures.

    Args:
        path, split, packed_storage, plan, weights, seed: as in `create_sft_dataset`.
        pad_id: fills the gaps between the sequences of a plan's bins.
        tolerance: whether the parts of a list may be made with different tokenizers or templates; by default not.
        stream: how to read the token streams among the paths.
        cache_dir, cache_size: where shards of URLs are fetched to.
    """
    opening = _Opening(split, tolerance or Tolerance(), stream or StreamOptions(), cache_dir, cache_size)
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    wanted = None if packed_storage == AUTO else storage_named(packed_storage)
    paths = [found for item in given for found in _expand(item)]
    if weights is not None and len(weights) != len(paths):
        raise InvalidInputError(f"{len(weights)} weights were given for {len(paths)} paths; give one each")
    if plan is not None:
        if len(paths) != 1 or wanted is not None:
            raise InvalidInputError("plan goes with the path of one token store; leave packed_storage at 'auto'")
        loaded = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
        sources: list[BinReader] = [PlanBinReader(open_token_store(paths[0]), loaded, pad_id=pad_id)]
    elif weights is None:
        sources = opening.end_to_end(paths, wanted)
    else:
        sources = [opening.one(path, wanted) for path in paths]
    _refuse_stream_options(sources, opening.stream)
    source = sources[0] if len(sources) == 1 else JoinedBinReader(sources)
    if len(sources) > 1:
        refuse_mixed(source.made_with(), opening.tolerance)
    order = None
    if weights is not None:
        blend = Blend(weights, [len(one) for one in sources])
        order = BlendOrder(blend, [SampleOrder(len(one), seed=seed, fingerprint=one.fingerprint) for one in sources])
    return OpenedBins(source, order)


def shard_order(source: BinReader, window: int, seed: int) -> ShardOrder:
    """Return an order that visits a window of shards at a time; the source must be shards of one storage."""
    if not isinstance(source, ShardBinReader):
        raise InvalidInputError(f"shard_window needs shards, and {source.description} is something else; leave it out")
    sizes = tuple(entry.num_bins for entry in source.entries)
    # The window is in the fingerprint, so that a state of another order is refused.
    return ShardOrder(sizes, window, seed, f"{source.fingerprint}|window {window}")


def _class_over(source: BinReader) -> type[PackedDataset]:
    """Return the class that users expect for a source."""
    if isinstance(source, PlanBinReader):
        return GPTSFTPlannedDataset
    if not isinstance(source, ShardBinReader):
        return PackedDataset
    if isinstance(source.storage, TokenStreamStorage):
        return TokenStreamDataset
    if len(source.paths) == 1 and not source.of_directory:
        return _CLASS_OF_ONE_SHARD.get(type(source.shard(0)), PackedDataset)
    return GPTSFTPackedMultiShardDataset


class _Opening(NamedTuple):
    """How paths are opened."""

    split: str
    tolerance: Tolerance
    stream: StreamOptions
    cache_dir: PathLike | None
    cache_size: str | int | None

    def end_to_end(self, paths: Sequence[Path | str], wanted: Storage | None) -> list[BinReader]:
        """Open paths that are laid end to end: as one source if all of them are shards of one storage."""
        if any(isinstance(path, str) for path in paths):
            return [self.one(path, wanted) for path in paths]
        return self._end_to_end([Path(path) for path in paths], wanted)

    def _end_to_end(self, paths: Sequence[Path], wanted: Storage | None) -> list[BinReader]:
        storages = [storage_of(path) for path in paths]
        first = storages[0]
        if len(paths) > 1 and first is not None and all(one is first for one in storages):
            _check_wanted(paths[0], first, wanted)
            return [ShardBinReader.of_shards(self._configured(first), paths, self.tolerance)]
        return [self.one(path, wanted) for path in paths]

    def remote(self, url: str, wanted: Storage | None) -> BinReader:
        """Open a dataset, a shard or a file in an object store."""
        from megatron_packed_sft.remote.node_cache import node_cache

        cache = node_cache(self.cache_dir, self.cache_size)
        if not has_dataset(url, cache):
            return self.one(local_copy(url, cache), wanted)
        dataset = open_dataset(url, cache)
        _check_wanted(url, dataset.storage, wanted)
        return ShardBinReader.of_dataset(dataset, self.split)

    def one(self, path: Path | str, wanted: Storage | None) -> BinReader:
        """Open one path, or a URL."""
        if isinstance(path, str):
            return self.remote(path, wanted)
        if is_token_store(path):
            raise InvalidInputError(
                f"{path} is a token store; name a plan to read bins out of it, or materialize it first"
            )
        if (path / DATASET).exists():
            dataset = open_dataset(path)
            _check_wanted(path, dataset.storage, wanted)
            return ShardBinReader.of_dataset(dataset, self.split)
        storage = storage_of(path)
        if storage is not None:
            _check_wanted(path, storage, wanted)
            return ShardBinReader.of_shards(self._configured(storage), [path])
        inside = shards_inside(path)
        if not inside and isinstance(wanted, TokenStreamStorage):
            return ShardBinReader.of_shards(self._configured(wanted), [path])  # or it says why it is none
        if not inside:
            is_empty = path.is_dir() and not any(path.iterdir())
            raise InvalidInputError(
                f"{path} is an empty directory; check the path"
                if is_empty
                else f"{path} is not packed data of a known storage ({', '.join(STORAGES.names())}); check the path"
            )
        return self._directory(path, inside, wanted)

    def _directory(self, path: Path, inside: Sequence[tuple[Path, Storage]], wanted: Storage | None) -> BinReader:
        kinds = {storage.name: storage for _, storage in inside}
        if len(kinds) > 1:
            raise InvalidInputError(f"{path} mixes shards of {' and '.join(kinds)}; name the files of one of them")
        [storage] = kinds.values()
        _check_wanted(path, storage, wanted)
        shards = [shard for shard, _ in inside]
        if isinstance(storage, TokenStreamStorage):
            raise InvalidInputError(
                f"{path} holds token streams in directories of their own, such as {shards[0].name}; name those to "
                "train on"
            )
        return ShardBinReader.of_shards(storage, shards, self.tolerance, of_directory=True)

    def _configured(self, storage: Storage) -> Storage:
        return TokenStreamStorage(self.stream) if isinstance(storage, TokenStreamStorage) else storage


def _refuse_stream_options(sources: Sequence[BinReader], options: StreamOptions) -> None:
    """Refuse what is said about token streams where there is none: it would be ignored in silence."""
    if any(isinstance(one, ShardBinReader) and isinstance(one.storage, TokenStreamStorage) for one in sources):
        return
    given = {name: getattr(options, name) for name in ("pack_sequences", "file_pattern", "dtype")}
    for name, value in given.items():
        if value:
            raise InvalidInputError(
                f"{name} is {value!r}, but {sources[0].description} is no token stream; leave {name} out, packed data "
                "knows its own sequences and dtype"
            )


def _check_wanted(path: Path | str, found: Storage, wanted: Storage | None) -> None:
    if wanted is not None and wanted is not found:
        raise InvalidInputError(
            f"{path} is {found.name}, but packed_storage asks for {wanted.name!r}; set packed_storage to {found.name}"
        )


def _expand(path: PathLike) -> list[Path] | list[str]:
    if is_url(path):
        return [os.fspath(path)]
    location = local_path(path)
    if os.path.lexists(location):
        return [location]
    found = [Path(name) for name in sorted(glob.glob(str(location)))]
    if not found:
        raise InvalidInputError(f"{os.fspath(path)} does not exist and matches nothing; check the path")
    return found
