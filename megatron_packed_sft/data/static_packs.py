"""`packing_mode="static"`: raw samples in, a dataset of fixed packs out; the plan is made when the data is opened.

token store of whole sequences  ┐                                  ┌ dataset[i]  the samples of pack i, a list
map-style dataset of encoded    ├ lengths ─▶ static plan ─▶ packs ─┤ collate_fn  packs to a batch of any contract
samples, multimodal ones too    ┘                                  └ fetch_batch the same, by index
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.encoded_samples import (
    IS_PADDING,
    SamplePackReader,
    carried_fields,
    encoded_length,
    joined,
)
from megatron_packed_sft.data.made_with import eos_id_of
from megatron_packed_sft.data.readers.plans import PlanBinReader
from megatron_packed_sft.data.sample_lengths import SampleLength, refuse_changing
from megatron_packed_sft.data.sample_packs import SamplePackDataset, StaticPlan, plan_statically
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


@dataclass(frozen=True, kw_only=True)
class StaticPacking:
    """How raw samples are packed when they are opened.

    Args:
        pack_size: what a pack of several samples holds at most.
        drop_last: drop the last packs so that their number is a multiple of `world_size`; else repeat the first ones.
        allow_single_long: an oversized sample is a pack of its own; else it is left out.
        full_is_oversized: a sample that fills a pack exactly is oversized, too.
        world_size: data-parallel ranks.
        pad_seq_to_mult: let every sequence take a multiple of this many inputs, for context parallelism.
        strategy: of `pack`.
    """

    pack_size: int
    drop_last: bool = False
    allow_single_long: bool = True
    full_is_oversized: bool = False
    world_size: int = 1
    pad_seq_to_mult: int = 1
    strategy: str = "optimal"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `plan_statically`."""
        given = {name: value for name, value in vars(self).items() if name != "allow_single_long"}
        return {**given, "overflow": "single" if self.allow_single_long else "drop"}


def open_static_packs(
    data: Any,
    packing: StaticPacking,
    *,
    pad_id: int = 0,
    length_of: SampleLength | None = None,
    length_cache: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    progress: bool = False,
) -> tuple[Source, StaticPlan]:
    """Open raw samples as packs.

    Args:
        data: a token store or its path, or a map-style dataset of encoded samples.
        packing: how to pack.
        pad_id: aligns sequences, where `packing` asks for a multiple.
        length_of: the positions a sample takes; by default the number of its input_ids.
        length_cache: a directory for the lengths of datasets, each under its fingerprint; ranks may share a new one.
        fingerprint: of the dataset and whatever changes its samples; by default the dataset's own `fingerprint`.
        progress: show a progress bar while lengths are computed.
    """
    if isinstance(data, str | os.PathLike):
        data = _open_store(data)
    if isinstance(data, TokenStore):
        plan = plan_statically(data.lengths, **packing.arguments())
        return PlanBinReader(data, plan.aligned.plan, pad_id, plan.aligned.bins), plan
    if isinstance(data, PackedDataset):
        raise InvalidInputError(
            f"{type(data).__name__} holds packed bins, and static packs are made of raw samples; use it as it is"
        )
    refuse_changing(data)
    identity = fingerprint if fingerprint is not None else getattr(data, "fingerprint", None)
    cache = None
    if length_cache is not None:
        if not isinstance(identity, str):
            raise InvalidInputError(
                f"a length cache needs a fingerprint, and {type(data).__name__} has none; pass fingerprint= or set the "
                "dataset's own, a string that changes with the samples, their template and their settings"
            )
        cache = local_path(length_cache, "length_cache") / checksum(identity.encode())
    packs = SamplePackDataset(
        data,
        length_of or encoded_length,
        cache_path=cache,
        fingerprint=identity,
        progress=progress,
        **packing.arguments(),
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
        arguments: further ones of `PackedDataset`.
    """

    def __init__(self, source: Source, tokenizer: Any = None, *, static_plan: StaticPlan, **arguments: Any) -> None:
        super().__init__(source, tokenizer, **arguments)
        self.static_plan = static_plan
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
        return self._batch(samples, names)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Make a batch of packs in one go."""
        if not isinstance(self.source, SamplePackReader):
            return super().fetch_batch(indices)
        bins, _ = self._locate(indices)
        return self._batch(self.__getitems__(indices), [self.source.names(index) for index in bins.tolist()])

    def _batch(self, packs: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[Sequence[str]]) -> dict[str, Any]:
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
    *,
    dataloader_drop_last: bool = False,
    packing_allow_single_long: bool = True,
    packing_full_is_oversized: bool = False,
    world_size: int = 1,
    strategy: str = "optimal",
    pad_seq_to_mult: int = 1,
    length_of: SampleLength | None = None,
    length_cache: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    progress: bool = False,
    **arguments: Any,
) -> StaticPackDataset:
    """Open raw samples as a dataset of static packs; `create_sft_dataset` calls this for `packing_mode="static"`.

    Args:
        data, length_of, length_cache, fingerprint, progress: as in `open_static_packs`.
        tokenizer: gives the EOS id; an int will do. A token store brings its own.
        seq_length: what a pack of several samples holds at most; a pack of a single long sample may be longer.
        dataloader_drop_last, packing_allow_single_long, packing_full_is_oversized, world_size, strategy,
            pad_seq_to_mult: as in `StaticPacking`.
        arguments: further ones of `PackedDataset`.

    Example:
        >>> chats = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
        >>> dataset = create_static_dataset(chats, 2, 8, contract="hf")
        >>> len(dataset), dataset.fetch_batch([0])["position_ids"].tolist()
        (1, [[0, 1, 2, 0, 1]])
    """
    if "packing_length" in arguments:
        raise InvalidInputError("packing_length is not an argument: the length of packs is seq_length; set that")
    if seq_length is None:
        raise InvalidInputError("packing_mode='static' needs seq_length: what a pack of several samples holds at most")
    packing = StaticPacking(
        pack_size=seq_length,
        drop_last=dataloader_drop_last,
        allow_single_long=packing_allow_single_long,
        full_is_oversized=packing_full_is_oversized,
        world_size=world_size,
        pad_seq_to_mult=pad_seq_to_mult,
        strategy=strategy,
    )
    source, plan = open_static_packs(
        data,
        packing,
        pad_id=0 if tokenizer is None else eos_id_of(tokenizer),
        length_of=length_of,
        length_cache=length_cache,
        fingerprint=fingerprint,
        progress=progress,
    )
    if len(plan.oversized) and not packing_allow_single_long:
        logger.warning("%s", plan.lines[-1])
    length = max(seq_length, source.figures.pack_size)
    return StaticPackDataset(source, tokenizer, static_plan=plan, max_seq_length=length, **arguments)


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a path, or a URL, holds bins that were packed before."""
    if is_url(path):
        return not is_token_store(path)  # whoever opens it says what else it is
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
