"""`create_sft_dataset`: one call opens packed data of any kind."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from megatron_packed_sft.data.datasets import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    GPTSFTPlannedDataset,
    PackedDataset,
    checked_length,
    dataset_over,
)
from megatron_packed_sft.data.made_with import Tolerance, eos_id_of, id_limit_of
from megatron_packed_sft.data.opened_bins import AUTO, STREAMED, OpenedBins, PathLike, Paths, Weights, open_bins
from megatron_packed_sft.data.order.sample_order import Order, ShardOrder
from megatron_packed_sft.data.packing_modes import MODES, PREPARED, STATIC
from megatron_packed_sft.data.readers.cache_room import shortage
from megatron_packed_sft.data.readers.interface import BinReader
from megatron_packed_sft.data.readers.plans import PlanBinReader
from megatron_packed_sft.data.readers.shards import ShardBinReader
from megatron_packed_sft.data.static_packs import create_static_dataset
from megatron_packed_sft.data.token_streams import TokenStreamDataset
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.legacy.reader import LegacyShard
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.support.imports import require_torch

logger = logging.getLogger(__name__)

__all__ = ["AUTO", "OpenedBins", "create_sft_dataset", "open_bins", "shard_order"]

_DEFAULT_SEQ_LENGTH = 2048  # Megatron-Bridge's
_CLASS_OF_ONE_SHARD: dict[type, type[PackedDataset]] = {
    MemmapShard: GPTSFTPackedMemmapDataset,
    LegacyShard: GPTSFTPackedDataset,
}


def create_sft_dataset(
    path: Paths | Any,
    tokenizer: Any = None,
    seq_length: int | None = None,
    *,
    split: str = "train",
    packed_storage: str = AUTO,
    plan: PathLike | PackPlan | None = None,
    weights: Weights | None = None,
    blend: Mapping[str, Any] | None = None,
    max_num_samples: int | None = None,
    seed: int = 1234,
    pack_sequences: bool = False,
    eos_id: int | None = None,
    file_pattern: str | None = None,
    dtype: str | None = None,
    documents: bool = False,
    allow_tokenizer_mismatch: bool = False,
    allow_template_mismatch: bool = False,
    cache_dir: PathLike | None = None,
    cache_size: str | int | None = None,
    shard_window: int | None = None,
    packing_mode: str = PREPARED,
    **arguments: Any,
) -> PackedDataset:
    """Open packed data as a dataset, or pack raw samples now.

    One memmap_v1 shard is a `GPTSFTPackedMemmapDataset`, several shards or a dataset directory are a
    `GPTSFTPackedMultiShardDataset`, a legacy file is a `GPTSFTPackedDataset`, a token store with a plan is a
    `GPTSFTPlannedDataset` and a token stream a `TokenStreamDataset`; anything else is a `PackedDataset`, the base of
    them all. With `packing_mode="static"` a token store or a map-style dataset of encoded samples is a
    `StaticPackDataset`.

    Args:
        path: a shard or file of any storage, a directory of shards, a dataset directory, a glob, a token store (with
            `plan`), a directory of flat .npy or .bin files (a token stream), PREFIX or PREFIX.idx of Megatron's indexed
            datasets, a list of these, or names for them: `{"chats": path, "web": path}`. With `packing_mode="static"`:
            a token store, or a map-style dataset of encoded samples.
        tokenizer: gives the EOS id; an int will do. None takes the data's own padding id.
        seq_length: positions of a batch's bins; no bin may need more. None takes 2,048, or what the data needs. Token
            streams are cut into windows of so many predictions.
        split: of dataset directories.
        packed_storage: `auto`, or the storage that the data must have: `memmap_v1`, `legacy`, `parquet`,
            `token_stream`, or a registered one.
        plan: a plan or its file; the path is a token store then.
        weights: one per path of a list, or by name: a blend in that proportion. Without weights or `blend`, the paths
            are laid end to end.
        blend: weights that change over the run, such as `{"start": {"chats": 1, "web": 0}, "end": {"chats": 1, "web":
            1}, "from": 0.8, "to": 1.0}`: the start weights up to that share of the run, the end weights from the other
            one on, and a straight line in between.
        max_num_samples: length of the dataset; see `PackedDataset`. Blends are shuffled by source; without it they have
            as many samples as all sources together. With `blend` it must be given: the samples of the whole run.
        seed: of the shuffle.
        pack_sequences, eos_id, file_pattern, dtype: of token streams, as in `TokenStreamDataset`; refused without one.
        documents: of Megatron's indexed datasets: a sample is a whole document. By default they are token streams.
        allow_tokenizer_mismatch: accept a tokenizer that did not make the data, and a list whose parts were made with
            different ones.
        allow_template_mismatch: accept a list whose parts were made with different chat templates.
        cache_dir, cache_size: of URLs such as s3://bucket/dataset: the node's cache that shards are fetched to, and how
            large it may become, such as 200GB; see `node_cache` for the defaults.
        shard_window: shuffle so many shards at a time, for data larger than its cache; see `ShardOrder`. The dataset
            has every bin once unless `max_num_samples` says otherwise.
        packing_mode: `prepared` opens bins that were packed before; `static` packs raw samples now, into packs of
            `seq_length`.
        arguments: further ones of `PackedDataset`, such as `contract`, `loss`, `verify` and `access`; for static packs
            also those of `create_static_dataset`, such as `dataloader_drop_last` and `length_of`.
    """
    require_torch("create_sft_dataset")
    if packing_mode != PREPARED or not _is_path(path):
        given = {"plan": plan, "weights": weights, "blend": blend, "eos_id": eos_id, "file_pattern": file_pattern}
        given |= {"dtype": dtype, "pack_sequences": pack_sequences or None, "documents": documents or None}
        given |= {"split": None if split == "train" else split}
        _refuse_for_static(path, packing_mode, given, packed_storage)
        arguments |= {"allow_tokenizer_mismatch": allow_tokenizer_mismatch}
        return create_static_dataset(
            path, tokenizer, seq_length, max_num_samples=max_num_samples, seed=seed, **arguments
        )
    source, blended = open_bins(
        path,
        split=split,
        packed_storage=packed_storage,
        plan=plan,
        weights=weights,
        blend=blend,
        seed=seed,
        pad_id=0 if tokenizer is None else eos_id_of(tokenizer),
        tolerance=Tolerance(tokenizer=allow_tokenizer_mismatch, template=allow_template_mismatch),
        cache_dir=cache_dir,
        cache_size=cache_size,
        stream=StreamOptions(
            seq_length=_DEFAULT_SEQ_LENGTH if seq_length is None else seq_length,
            pack_sequences=pack_sequences,
            eos_id=eos_id,
            tokenizer_eos_id=None if tokenizer is None else eos_id_of(tokenizer),
            file_pattern=file_pattern,
            dtype=dtype,
            documents=documents,
        ),
        id_limit=None if allow_tokenizer_mismatch else functools.partial(id_limit_of, tokenizer),
    )
    order: Order | None = None if blended is None else blended.order(max_num_samples)
    if shard_window is not None:
        if order is not None:
            raise InvalidInputError("shard_window and a blend were both given; a blend has an order of its own")
        order = shard_order(source, shard_window, seed)
    if order is not None and max_num_samples is None:
        max_num_samples = len(source)
    if max_num_samples is not None and (problem := shortage(source, shard_window)) is not None:
        logger.warning("%s", problem)
    length = checked_length(source, seq_length, _DEFAULT_SEQ_LENGTH, "seq_length")
    dataset = dataset_over(
        _class_over(source),
        source,
        tokenizer,
        max_seq_length=length,
        max_num_samples=max_num_samples,
        seed=seed,
        order=order,
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


def _is_path(path: Any) -> bool:
    """Return whether this is a path, or paths in a list or by name, rather than a dataset."""
    items = path.values() if isinstance(path, Mapping) else path if isinstance(path, list | tuple) else [path]
    return all(isinstance(item, str | os.PathLike) for item in items)


def _refuse_for_static(path: Any, packing_mode: str, given: dict[str, Any], packed_storage: str) -> None:
    if packing_mode not in MODES:
        raise InvalidInputError(
            f"packing_mode is {packing_mode!r}; choose from {', '.join(MODES)}: packs are planned before training, "
            "never while it runs"
        )
    if packing_mode != STATIC:
        raise InvalidInputError(
            f"a {type(path).__name__} is not a path; to pack its samples now, set packing_mode='static'"
        )
    if isinstance(path, list | tuple | Mapping) and path and _is_path(path):
        raise InvalidInputError("packing_mode='static' packs one token store or dataset, not a list of paths; name one")
    names = [name for name, value in given.items() if value is not None]
    names += ["packed_storage"] if packed_storage != AUTO else []
    if names:
        raise InvalidInputError(f"{names[0]} goes with prepared bins, and packing_mode='static' has none; leave it out")


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
    if isinstance(source.storage, STREAMED):
        return TokenStreamDataset if isinstance(source.shard(0), TokenStream) else PackedDataset
    if len(source.paths) == 1 and not source.of_directory:
        return _CLASS_OF_ONE_SHARD.get(type(source.shard(0)), PackedDataset)
    return GPTSFTPackedMultiShardDataset
