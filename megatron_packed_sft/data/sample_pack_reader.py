"""Static packs of encoded samples as bins: what a map-style dataset returns, joined when a batch needs it.

pack 7 ─▶ samples 12, 40, 41 of the dataset ─ joined ─▶ one bin of three sequences ─▶ the collate kernel
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import LocatedBins, locate_in_samples
from megatron_packed_sft.data.encoded_samples import (
    IS_PADDING,
    Sample,
    carried_fields,
    encoded_length,
    has_weights,
    joined,
    media_field,
)
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.data.readers.plans import figures_of_plan, longest_input_of_plan
from megatron_packed_sft.data.sample_packs import SamplePackDataset
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.read_options import ReadOptions

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class SamplePackReader:
    """Bins made of the packs of a `SamplePackDataset` whose samples are encoded; see `encoded_samples`.

    Read through `locate`, as text-only consumers do, a sample with an image is refused, because the batch would lose
    it; `StaticPackDataset` passes such fields on.
    """

    vocab_size = None
    pad_id = None

    def __init__(self, packs: SamplePackDataset, pad_id: int = 0) -> None:
        """`pad_id` aligns sequences, where the plan has a multiple for them."""
        self.packs = packs
        self._align_id = pad_id
        self.static_plan = packs.static_plan
        self.fingerprint = packs.fingerprint
        self.figures = figures_of_plan(
            packs.plan, packs.aligned.bins.astype(np.int64), has_weights=has_weights(packs.dataset[0])
        )
        self.description = f"static packs of {type(packs.dataset).__name__}, {packs.plan!r}"
        self._was_announced = False

    def made_with(self) -> list[MadeWith]:
        """Return nothing but the ids themselves: samples do not say what encoded them."""
        multiple = self.figures.pad_seq_to_mult
        return [MadeWith(self.description, None, None, lambda: None, len(self), self.bin, multiple)]

    def __len__(self) -> int:
        return len(self.packs)

    def samples(self, index: int) -> list[Any]:
        """Return the raw samples of a pack; each is as long as the plan says."""
        samples = self.packs[index]
        for number, sample in zip(self.packs.sample_numbers(index), samples, strict=True):
            planned = int(self.packs.plan.item_lengths[number])
            if (found := encoded_length(sample)) != planned:
                raise InvalidInputError(
                    f"sample {number} was planned with length {planned}, but has {found} input_ids; length_of must "
                    "count the positions that the model computes"
                )
        return samples

    def joined(self, samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Any]:
        """Return samples as one packed sample of the shape that the plan promised."""
        packed = joined(samples, names, pad_seq_to_mult=self.figures.pad_seq_to_mult or 1, pad_id=self._align_id)
        if packed["loss_mask"].dtype.kind == "f" and not self.figures.has_weights:
            raise InvalidInputError(
                f"a sample among {', '.join(names)} has a loss_mask of weights, and that of sample 0 has none; give "
                "every sample a loss_mask of floats, so that all batches are weighted"
            )
        return packed

    def names(self, index: int) -> list[str]:
        """Return what to call the samples of a pack in messages."""
        return [f"sample {number}" for number in self.packs.sample_numbers(index)]

    def bin(self, index: int) -> PackedBin:
        """Return one pack as a bin, without what else its samples carry."""
        packed = self.joined(self.samples(index), self.names(index))
        starts = np.array(packed["seq_boundaries"][:-1], np.uint32)
        return PackedBin(packed["input_ids"], packed["loss_mask"], starts)

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Join the packs now."""
        packed = []
        for index, padding in zip(bins.tolist(), is_padding.tolist(), strict=True):
            samples = self.samples(index)
            self._refuse_media(index, samples)
            packed.append(self.joined(samples, self.names(index)) | ({IS_PADDING: True} if padding else {}))
            if padding:
                packed[-1]["loss_mask"] = np.zeros_like(packed[-1]["loss_mask"])
        return [locate_in_samples(packed, positions, self.description)]

    def _refuse_media(self, index: int, samples: Sequence[Sample]) -> None:
        for name, sample in zip(self.names(index), samples, strict=True):
            if (field := media_field(sample)) is not None:
                raise InvalidInputError(
                    f"{name} has {field}, and this consumer reads text only; leave such samples out, or read them with "
                    "create_sft_dataset(..., packing_mode='static'), whose batches pass the field on"
                )
        others = carried_fields(samples)
        if others and not self._was_announced:
            self._was_announced = True
            logger.info("samples have %s, which text-only batches leave out", ", ".join(others))

    def longest_input(self) -> int:
        """Return how many positions the pack that needs most takes in a batch."""
        return longest_input_of_plan(self.packs.plan)

    def advise(self, bins: Numbers) -> None:
        """Nothing is announced: where samples lie is the dataset's own business."""

    def read_with(self, options: ReadOptions) -> None:
        """Nothing is chosen: how samples are read is the dataset's own business."""
