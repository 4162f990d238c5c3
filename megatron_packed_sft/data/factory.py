"""`create_sft_dataset`: one call opens packed data of any kind."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_packed_sft.data.bin_readers import BinReader, PlanBinReader
from megatron_packed_sft.data.datasets import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    GPTSFTPlannedDataset,
    PackedDataset,
    checked_length,
    dataset_over,
)
from megatron_packed_sft.data.made_with import eos_id_of, id_limit_of
from megatron_packed_sft.data.opened_bins import PathLike, Paths, Weights, open_bins
from megatron_packed_sft.data.options import AUTO, MODES, PREPARED, BatchOptions, OpenOptions, StaticPacking
from megatron_packed_sft.data.order.sample_order import Order, ShardOrder
from megatron_packed_sft.data.shard_readers import ShardBinReader, shortage
from megatron_packed_sft.data.static_packs import create_static_dataset
from megatron_packed_sft.data.token_streams import TokenStreamDataset
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.imports import require_torch

logger = logging.getLogger(__name__)

_DEFAULT_SEQ_LENGTH = 2048  # Megatron-Bridge's
_CLASS_OF_ONE_SHARD: dict[str, type[PackedDataset]] = {
    "memmap_v1": GPTSFTPackedMemmapDataset,
    "legacy": GPTSFTPackedDataset,
}


def create_sft_dataset(
    path: Paths | Any,
    tokenizer: Any = None,
    seq_length: int | None = None,
    *,
    split: str = "train",
    plan: PathLike | PackPlan | None = None,
    weights: Weights | None = None,
    max_num_samples: int | None = None,
    seed: int = 1234,
    contract: str | BatchOptions = "mcore",
    stream: StreamOptions | None = None,
    opening: OpenOptions | None = None,
    packing_mode: str | StaticPacking = PREPARED,
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
        plan: a plan or its file; the path is a token store then.
        weights: one per path of a list, or by name: a blend in that proportion. `{"start": {"chats": 1, "web": 0},
            "end": {"chats": 1, "web": 1}, "from": 0.8, "to": 1.0}` changes them over the run: the start weights up to
            that share of the run, the end weights from the other one on, and a straight line in between. Without
            weights, the paths follow each other.
        max_num_samples: length of the dataset; see `PackedDataset`. Blends are shuffled by source; without it they have
            as many samples as all sources together. Weights that change need it: the samples of the whole run.
        seed: of the shuffle.
        contract: whose keys batches have: `mcore`, `bridge_0_6`, `bridge_main`, `hf`, or `BatchOptions` with details.
        stream: of token streams: where documents end, which files; refused if there is no stream.
        opening: how data is checked, verified, fetched to the node's cache, and shuffled shard by shard.
        packing_mode: `prepared` opens bins that were packed before; `static`, or `StaticPacking` with details, packs
            raw samples now, into packs of `seq_length`.
    """
    require_torch("create_sft_dataset")
    opening = opening or OpenOptions()
    if packing_mode != PREPARED or not _is_path(path):
        given = {"plan": plan, "weights": weights, "stream": stream, "split": None if split == "train" else split}
        packing = _checked_packing(path, packing_mode, given, opening)
        return create_static_dataset(
            path,
            tokenizer,
            seq_length,
            packing,
            max_num_samples=max_num_samples,
            seed=seed,
            contract=contract,
            opening=opening,
        )
    eos_id = None if tokenizer is None else eos_id_of(tokenizer)
    stream = stream or StreamOptions()
    stream = replace(stream, tokenizer_eos_id=eos_id, seq_length=seq_length or stream.seq_length)
    source, blended = open_bins(
        path,
        split=split,
        plan=plan,
        weights=weights,
        seed=seed,
        pad_id=eos_id or 0,
        stream=stream,
        opening=opening,
        id_limit=None if opening.allow_tokenizer_mismatch else functools.partial(id_limit_of, tokenizer),
    )
    order: Order | None = None if blended is None else blended.order(max_num_samples)
    if opening.shard_window is not None:
        if order is not None:
            raise InvalidInputError("shard_window and weights were both given; a blend has an order of its own")
        order = shard_order(source, opening.shard_window, seed)
    if max_num_samples is None and order is not None:
        max_num_samples = len(source)
    if max_num_samples is not None and opening.spelling == "argument":  # the recipe has notes of its own for this
        problem = shortage(source, opening.shard_window)
        if problem is not None:
            logger.warning("%s", problem)
    dataset = dataset_over(
        _class_over(source),
        source,
        tokenizer,
        max_seq_length=checked_length(source, seq_length, _DEFAULT_SEQ_LENGTH, "seq_length"),
        max_num_samples=max_num_samples,
        seed=seed,
        order=order,
        contract=contract,
        opening=opening,
    )
    dataset.blended = blended
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


def _checked_packing(
    path: Any, packing_mode: str | StaticPacking, given: Mapping[str, Any], opening: OpenOptions
) -> StaticPacking:
    """Return how raw samples are packed; refuse what goes with prepared bins."""
    if isinstance(packing_mode, str) and packing_mode not in MODES:
        raise InvalidInputError(
            f"packing_mode is {packing_mode!r}; choose from {', '.join(MODES)}: packs are planned before training, "
            "never while it runs"
        )
    if packing_mode == PREPARED:
        raise InvalidInputError(
            f"a {type(path).__name__} is not a path; to pack its samples now, set packing_mode='static'"
        )
    if isinstance(path, list | tuple | Mapping) and path and _is_path(path):
        raise InvalidInputError("packing_mode='static' packs one token store or dataset, not a list of paths; name one")
    names = [name for name, value in given.items() if value is not None]
    names += ["storage"] if opening.storage != AUTO else []
    names += ["shard_window"] if opening.shard_window is not None else []
    if names:
        raise InvalidInputError(f"{names[0]} goes with prepared bins, and packing_mode='static' has none; leave it out")
    return StaticPacking() if isinstance(packing_mode, str) else packing_mode


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
    if source.figures.max_input_len is not None:
        return TokenStreamDataset
    if len(source.paths) == 1 and not source.of_directory:
        return _CLASS_OF_ONE_SHARD.get(source.storage.name, PackedDataset)
    return GPTSFTPackedMultiShardDataset
