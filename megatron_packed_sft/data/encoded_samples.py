"""Encoded samples: ids and trained tokens go to the collate kernel, all other fields into the batch as lists.

    {"input_ids", "labels" | "train_mask" | "loss_mask", "pixel_values", ...}
        └── joined: one packed bin, a sequence per sample ──▶ collate        └── carried: lists in the batch

A sample is what a Hugging Face tokenizer or processor returns for one text, with labels:

    labels       the ids where they are trained, -100 elsewhere, at the tokens' own positions
    train_mask   1 where a token is trained, at its own position
    loss_mask    1 where the prediction made at a position counts; floats are weights
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import LocatedBins, locate_in_samples
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.data.readers.plans import figures_of_plan, longest_input_of_plan
from megatron_packed_sft.data.sample_packs import SamplePackDataset
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import IntArray, PackedBin, as_int_array, cast_checked, mask_and_weights
from megatron_packed_sft.storage.interface import ReadOptions

logger = logging.getLogger(__name__)

IGNORED_LABEL: Final = -100
TRAINED_FIELDS: Final = ("labels", "train_mask", "loss_mask")
IS_PADDING: Final = "is_padding"
_OWN_FIELDS: Final = frozenset(("input_ids", "attention_mask", IS_PADDING, *TRAINED_FIELDS))
_MEDIA: Final = ("pixel_values", "image", "video", "audio", "input_features", "patch")

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Sample = Mapping[str, Any]


def encoded_length(sample: Any) -> int:
    """Return how many positions an encoded sample takes: the number of its `input_ids`.

    Example:
        >>> encoded_length({"input_ids": [5, 6, 7]})
        3
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        what = f"it has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise InvalidInputError(
            f"an encoded sample is a mapping with input_ids, and this one is not ({what}); encode the samples, or pass "
            "length_of"
        )
    shape = np.shape(sample["input_ids"])
    if len(shape) != 1:
        raise InvalidInputError(
            f"input_ids have shape {tuple(shape)}, and a sample is one sequence; take [0] of what a tokenizer or "
            "processor returns with return_tensors"
        )
    return int(shape[0])


def joined(
    samples: Sequence[Sample], names: Sequence[str], *, pad_seq_to_mult: int = 1, pad_id: int = 0
) -> dict[str, Any]:
    """Return a pack's samples as one packed sample: `input_ids`, `seq_boundaries` and `loss_mask`.

    Args:
        samples: of one pack.
        names: what to call each in messages.
        pad_seq_to_mult: align every sequence to this multiple of inputs, with `pad_id`.
        pad_id: what to align with.

    Example:
        >>> pack = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "train_mask": [0, 1]}]
        >>> packed = joined(pack, ["first", "second"])
        >>> packed["input_ids"].tolist(), packed["seq_boundaries"], packed["loss_mask"].tolist()
        ([5, 6, 7, 8, 9], [0, 3, 5], [1, 1, 0, 1, 0])
    """
    ids, masks, lengths = [], [], []
    for sample, name in zip(samples, names, strict=True):
        own, mask = _ids_and_mask(sample, name)
        if pad_seq_to_mult > 1:
            num_padding = -(len(own) - 1) % pad_seq_to_mult
            own, mask = np.pad(own, (0, num_padding), constant_values=pad_id), np.pad(mask, (0, num_padding))
        ids.append(own)
        masks.append(mask)
        lengths.append(len(own))
    result: dict[str, Any] = {
        "input_ids": np.concatenate(ids),
        "seq_boundaries": [0, *np.cumsum(lengths).tolist()],
        "loss_mask": np.concatenate(masks),
    }
    if any(sample.get(IS_PADDING, False) for sample in samples):
        result["loss_mask"] = np.zeros_like(result["loss_mask"])
        result[IS_PADDING] = True
    return result


def carried_fields(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return every other field as a list with one entry per sample, None for a sample without it.

    Example:
        >>> carried_fields([{"input_ids": [5], "pixel_values": "an array"}, {"input_ids": [6]}])
        {'pixel_values': ['an array', None]}
    """
    names = dict.fromkeys(name for sample in samples for name in sample if name not in _OWN_FIELDS)
    return {name: [sample.get(name) for sample in samples] for name in names}


def media_field(sample: Sample) -> str | None:
    """Return the name of a field that holds an image, a video or a sound, if there is one.

    Example:
        >>> media_field({"input_ids": [5], "image_grid_thw": [[1, 2, 2]]})
        'image_grid_thw'
    """
    return next((name for name in sample if isinstance(name, str) and name.startswith(_MEDIA)), None)


def has_weights(sample: Any) -> bool:
    """Return whether a sample's loss mask is one of weights: floating-point numbers."""
    if not isinstance(sample, Mapping) or "loss_mask" not in sample:
        return False
    return np.asarray(sample["loss_mask"]).dtype.kind == "f"


def _ids_and_mask(sample: Sample, name: str) -> tuple[IntArray, npt.NDArray[Any]]:
    """Return the ids and the next-token aligned loss mask of one sample."""
    ids = cast_checked(as_int_array(sample["input_ids"], what := f"input_ids of {name}"), np.int32, 2**31, what)
    given = [field for field in TRAINED_FIELDS if field in sample]
    if not given:
        raise InvalidInputError(
            f"{name} has none of {', '.join(TRAINED_FIELDS)}, so it is unknown which of its tokens are trained; labels "
            f"are the ids where they are trained and {IGNORED_LABEL} elsewhere"
        )
    masks = [_loss_mask(sample[field], field, ids, name) for field in given]
    for field, mask in zip(given[1:], masks[1:], strict=True):
        if not np.array_equal(mask > 0, masks[0] > 0):
            raise InvalidInputError(f"{name}: {given[0]} and {field} train different tokens; leave one of them out")
    attention = sample.get("attention_mask")
    if attention is not None and not np.asarray(attention).all():
        raise InvalidInputError(
            f"{name} has padding (attention_mask is 0 somewhere); encode samples without padding: a pack needs none"
        )
    return ids, masks[-1]  # a loss_mask may hold weights, which the others cannot


def _loss_mask(values: Any, field: str, ids: IntArray, name: str) -> npt.NDArray[Any]:
    what = f"{field} of {name}"
    if field == "loss_mask":
        mask, weights = mask_and_weights(values, what)
        _check_length(mask, ids, what)
        if mask[-1]:
            raise InvalidInputError(
                f"{what} counts a prediction at the last position, where nothing follows; a mask of the trained tokens "
                "themselves is called train_mask"
            )
        return mask if weights is None else weights
    given = as_int_array(values, what)
    _check_length(given, ids, what)
    is_trained = given != 0 if field == "train_mask" else given != IGNORED_LABEL
    if field == "labels" and (wrong := np.flatnonzero(is_trained & (given != ids))).size:
        place = int(wrong[0])
        raise InvalidInputError(
            f"{what} is {int(given[place])} at position {place}, where the id is {int(ids[place])}; labels are the ids "
            f"at their own positions, not shifted, and {IGNORED_LABEL} where nothing is trained"
        )
    return np.append(is_trained[1:], False).astype(np.uint8)


def _check_length(mask: npt.NDArray[Any], ids: IntArray, what: str) -> None:
    if len(mask) != len(ids):
        raise InvalidInputError(f"{what} has {len(mask)} values for {len(ids)} input_ids; give one for each")


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
        """Return only the ids: samples do not record what encoded them."""
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
        """Do nothing: only the dataset knows where its samples are stored."""

    def read_with(self, options: ReadOptions) -> None:
        """Do nothing: the dataset reads its samples its own way."""
