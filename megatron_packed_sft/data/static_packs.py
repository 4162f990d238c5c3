"""`packing_mode="static"`: raw samples in, a dataset of fixed packs out; the plan is made when the data is opened.

token store of whole sequences  ┐                                  ┌ dataset[i]  the samples of pack i, a list
map-style dataset of encoded    ├ lengths ─▶ static plan ─▶ packs ─┤ collate_fn  packs to a batch of any contract
samples, multimodal ones too    ┘                                  └ fetch_batch the same, by index
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from megatron_packed_sft.data.datasets import DatasetArguments, PackedDataset
from megatron_packed_sft.data.encoded_samples import (
    IS_PADDING,
    SamplePackReader,
    carried_fields,
    encoded_length,
    joined,
)
from megatron_packed_sft.data.made_with import eos_id_of
from megatron_packed_sft.data.options import StaticPacking
from megatron_packed_sft.data.readers.plans import PlanBinReader
from megatron_packed_sft.data.sample_packs import SamplePackDataset, StaticPlan, plan_statically, refuse_changing
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.dataset_directory import DATASET
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.tokens.store import TokenStore, open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

logger = logging.getLogger(__name__)

Source = SamplePackReader | PlanBinReader


def open_static_packs(
    data: Any, pack_size: int, packing: StaticPacking, *, pad_id: int = 0
) -> tuple[Source, StaticPlan]:
    """Return raw samples as packs, and the plan that made them.

    Args:
        data: a token store or its path, or a map-style dataset of encoded samples.
        pack_size: what a pack of several samples holds at most.
        packing: how to pack, and where lengths are kept.
        pad_id: aligns sequences, where `packing` asks for a multiple.
    """
    arguments: dict[str, Any] = {
        "pack_size": pack_size,
        "overflow": "single" if packing.packing_allow_single_long else "drop",
        "full_is_oversized": packing.packing_full_is_oversized,
        "world_size": packing.world_size,
        "drop_last": packing.dataloader_drop_last,
        "strategy": packing.strategy,
        "pad_seq_to_mult": packing.pad_seq_to_mult,
    }
    if isinstance(data, str | os.PathLike):
        data = _open_store(data)
    if isinstance(data, TokenStore):
        plan = plan_statically(data.lengths, **arguments)
        return PlanBinReader(data, plan.aligned.plan, pad_id, plan.aligned.bins), plan
    if isinstance(data, PackedDataset):
        raise InvalidInputError(
            f"{type(data).__name__} holds packed bins, and static packs are made of raw samples; use it as it is"
        )
    refuse_changing(data)
    identity = packing.fingerprint if packing.fingerprint is not None else getattr(data, "fingerprint", None)
    cache = None
    if packing.length_cache is not None:
        if not isinstance(identity, str):
            raise InvalidInputError(
                f"a length cache needs a fingerprint, and {type(data).__name__} has none; pass fingerprint= or set the "
                "dataset's own, a string that changes with the samples, their template and their settings"
            )
        cache = local_path(packing.length_cache, "length_cache") / checksum(identity.encode())
    packs = SamplePackDataset(
        data,
        packing.length_of or encoded_length,
        cache_path=cache,
        fingerprint=identity,
        progress=packing.progress,
        **arguments,
    )
    return SamplePackReader(packs, pad_id), packs.static_plan


class StaticPackDataset(PackedDataset):
    """Packs of raw samples with a fixed number: item i is the list of pack i's samples, each a mapping.

    `collate_fn` lays the samples of each pack end to end, without padding between them, with boundaries and positions
    that start over, in any contract of `PackedDataset`. What else the samples carry, such as pixel_values, is in the
    batch as a list with one entry per sample, in the order of the sequences; None where a sample has no such field.

    Args:
        source: what `open_static_packs` returned first.
        tokenizer: as in `PackedDataset`.
        static_plan: what it returned second.
        text_only: as in `StaticPacking`.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any = None,
        *,
        static_plan: StaticPlan,
        text_only: bool = False,
        **arguments: Unpack[DatasetArguments],
    ) -> None:
        super().__init__(source, tokenizer, **arguments)
        self.static_plan = static_plan
        self._text_only = text_only
        self._announced: set[str] = set()

    def __getitem__(self, index: int) -> list[Any]:  # type: ignore[override]
        """Return the samples of one pack, as the dataset has them; a negative index is a padding sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[list[Any]]:  # type: ignore[override]
        """Return the samples of many packs."""
        bins, is_padding = self._locate(indices)
        return [
            [{**sample, IS_PADDING: True} for sample in self._samples(index)] if padding else self._samples(index)
            for index, padding in zip(bins.tolist(), is_padding.tolist(), strict=True)
        ]

    def _samples(self, index: int) -> list[Any]:
        if isinstance(self.source, SamplePackReader):
            return self.source.samples(index)
        return _sequences_of(self.source.bin(index))

    def collate_fn(self, samples: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:  # type: ignore[override]
        """Make a batch of packs that `__getitem__` returned."""
        names = [[f"sample {k} of pack {n}" for k in range(len(pack))] for n, pack in enumerate(samples)]
        return self._joined_batch(samples, names)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Make a batch of packs in one go."""
        if self._text_only or not isinstance(self.source, SamplePackReader):
            return super().fetch_batch(indices)
        bins, _ = self._locate(indices)
        return self._joined_batch(self.__getitems__(indices), [self.source.names(index) for index in bins.tolist()])

    def _joined_batch(
        self, packs: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        join = self.source.joined if isinstance(self.source, SamplePackReader) else joined
        batch = super().collate_fn([join(pack, own) for pack, own in zip(packs, names, strict=True)])
        carried = carried_fields([sample for pack in packs for sample in pack])
        for name in carried:
            if name in batch:
                raise InvalidInputError(
                    f"samples have {name}, which the batch of contract {self.options.contract} makes itself; rename "
                    "the field, and it is passed on as a list"
                )
        if carried.keys() - self._announced:
            self._announced |= carried.keys()
            logger.info("batches pass %s on as lists, with one entry per sample", ", ".join(carried))
        batch.update(carried)
        return batch


def create_static_dataset(
    data: Any,
    tokenizer: Any = None,
    seq_length: int | None = None,
    packing: StaticPacking | None = None,
    **arguments: Unpack[DatasetArguments],
) -> StaticPackDataset:
    """Return raw samples as a dataset of static packs; `create_sft_dataset` calls this for `packing_mode="static"`.

    Args:
        data: as in `open_static_packs`.
        tokenizer: gives the EOS id; an int will do. A token store brings its own.
        seq_length: what a pack of several samples holds at most; a pack of a single long sample may be longer.
        packing: how to pack.

    Example:
        >>> chats = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
        >>> dataset = create_static_dataset(chats, 2, 8, contract="hf")
        >>> len(dataset), dataset.fetch_batch([0])["position_ids"].tolist()
        (1, [[0, 1, 2, 0, 1]])
    """
    packing = packing or StaticPacking()
    if seq_length is None:
        raise InvalidInputError("packing_mode='static' needs seq_length: what a pack of several samples holds at most")
    pad_id = 0 if tokenizer is None else eos_id_of(tokenizer)
    source, plan = open_static_packs(data, seq_length, packing, pad_id=pad_id)
    if len(plan.oversized) and not packing.packing_allow_single_long:
        logger.warning("%s", plan.lines[-1])
    arguments["max_seq_length"] = max(seq_length, source.figures.pack_size)
    return StaticPackDataset(source, tokenizer, static_plan=plan, text_only=packing.text_only, **arguments)


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a path, or a URL, holds bins that were packed before."""
    if is_url(path):
        return not is_token_store(path)  # opening it tells what else it is
    location = local_path(path)
    if is_token_store(location):
        return False
    return (location / DATASET).exists() or storage_of(location) is not None or bool(shards_inside(location))


def _open_store(path: str | os.PathLike[str]) -> TokenStore:
    if is_url(path):
        return open_token_store(path)
    location = local_path(path)
    if is_token_store(location):
        return open_token_store(location)
    if not location.exists():
        raise InvalidInputError(f"{os.fspath(path)} does not exist; check the path")
    inside = sorted(one.name for one in location.iterdir() if is_token_store(one)) if location.is_dir() else []
    if inside:
        raise InvalidInputError(f"{location} holds token stores; name one of them, such as {location / inside[-1]}")
    if is_packed(location):
        raise InvalidInputError(
            f"{location} holds bins already, and static packs are made of raw samples; leave packing_mode out, or name "
            "the token store that it was made from (OUTPUT.work/tokens/train of packed-sft prepare)"
        )
    raise InvalidInputError(
        f"{location} is not a token store, which is what static packs can be made of; packed-sft prepare "
        f"input={location} output=OUTPUT encodes chat files into one, OUTPUT.work/tokens/train; or pass a map-style "
        "dataset of encoded samples"
    )


def _sequences_of(packed: PackedBin) -> list[dict[str, Any]]:
    """Return the sequences of a bin as samples, in arrays of their own."""
    starts = packed.seq_start_id.astype(np.int64)[1:]
    parts = zip(np.split(packed.input_ids, starts), np.split(packed.loss_mask, starts), strict=True)
    return [{"input_ids": ids.copy(), "loss_mask": mask.copy()} for ids, mask in parts]
