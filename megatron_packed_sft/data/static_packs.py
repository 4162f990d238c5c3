"""`packing_mode="static"`: raw samples in, a dataset of fixed packs out; the plan is made when the data is opened.

token store of whole sequences  ┐                                  ┌ dataset[i]  the samples of pack i, a list
map-style dataset of encoded    ├ lengths ─▶ static plan ─▶ packs ─┤ collate_fn  packs to a batch of any contract
samples, multimodal ones too    ┘                                  └ fetch_batch the same, by index

An encoded sample is what a Hugging Face tokenizer or processor returns for one text, plus what is trained: `labels`,
`train_mask` or `loss_mask` (see `join_samples`). All its other fields go into the batch as lists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import LocatedBins, locate_in_samples
from megatron_packed_sft.data.bin_readers import Flags, Numbers, PlanBinReader, figures_of_plan, longest_input_of_plan
from megatron_packed_sft.data.datasets import DatasetArguments, PackedDataset
from megatron_packed_sft.data.made_with import MadeWith, eos_id_of
from megatron_packed_sft.data.options import StaticPacking
from megatron_packed_sft.data.sample_packs import SamplePackDataset, StaticPlan, plan_statically, refuse_changing
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import IntArray, PackedBin, as_int_array, cast_checked, mask_and_weights
from megatron_packed_sft.storage.dataset_directory import DATASET
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.tokens.store import TokenStore, open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

logger = logging.getLogger(__name__)

IGNORED_LABEL: Final = -100
TRAINED_FIELDS: Final = ("labels", "train_mask", "loss_mask")
IS_PADDING: Final = "is_padding"
_OWN_FIELDS: Final = frozenset(("input_ids", "attention_mask", IS_PADDING, *TRAINED_FIELDS))
_MEDIA: Final = ("pixel_values", "image", "video", "audio", "input_features", "patch")

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


def join_samples(
    samples: Sequence[Sample], names: Sequence[str], *, pad_seq_to_mult: int = 1, pad_id: int = 0
) -> dict[str, Any]:
    """Return a pack's samples as one packed sample: `input_ids`, `seq_boundaries` and `loss_mask`.

        labels       the ids where they are trained, -100 elsewhere, at the tokens' own positions
        train_mask   1 where a token is trained, at its own position
        loss_mask    1 where the prediction made at a position counts; floats are weights

    Args:
        samples: the samples of one pack, each with at least one of these three fields.
        names: what to call each sample in messages.
        pad_seq_to_mult: pad every sequence to this multiple of inputs.
        pad_id: the padding id.

    Example:
        >>> pack = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "train_mask": [0, 1]}]
        >>> packed = join_samples(pack, ["first", "second"])
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
    """Return all fields that collate does not use, each as a list with one entry per sample (None if it is missing).

    Example:
        >>> carried_fields([{"input_ids": [5], "pixel_values": "an array"}, {"input_ids": [6]}])
        {'pixel_values': ['an array', None]}
    """
    names = dict.fromkeys(name for sample in samples for name in sample if name not in _OWN_FIELDS)
    return {name: [sample.get(name) for sample in samples] for name in names}


def media_field(sample: Sample) -> str | None:
    """Return the name of a field that holds an image, a video or audio, or None.

    Example:
        >>> media_field({"input_ids": [5], "image_grid_thw": [[1, 2, 2]]})
        'image_grid_thw'
    """
    return next((name for name in sample if isinstance(name, str) and name.startswith(_MEDIA)), None)


def has_weights(sample: Any) -> bool:
    """Return whether a sample's loss mask holds weights: floating-point numbers."""
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
            f"{name} has padding (its attention_mask has zeros); encode samples without it, because packs need none"
        )
    return ids, masks[-1]  # a loss_mask may hold weights, which the others cannot


def _loss_mask(values: Any, field: str, ids: IntArray, name: str) -> npt.NDArray[Any]:
    what = f"{field} of {name}"
    if field == "loss_mask":
        mask, weights = mask_and_weights(values, what)
        _check_length(mask, ids, what)
        if mask[-1]:
            raise InvalidInputError(
                f"{what} counts a prediction at the last position, which predicts nothing; pass a mask of the trained "
                "tokens themselves as train_mask"
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
    """The packs of a `SamplePackDataset` of encoded samples, read as bins.

    `locate`, which text-only consumers call, refuses a sample with an image, because the batch would lose it;
    `StaticPackDataset` passes such fields on.
    """

    vocab_size = None
    pad_id = None

    def __init__(self, packs: SamplePackDataset, pad_id: int = 0) -> None:
        """Pad sequences with `pad_id` if the plan aligns them to a multiple."""
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
        """Return the bins without a tokenizer or template: samples do not record what encoded them."""
        multiple = self.figures.pad_seq_to_mult
        return [MadeWith(self.description, None, None, lambda: None, len(self), self.bin, multiple)]

    def __len__(self) -> int:
        return len(self.packs)

    def samples(self, index: int) -> list[Any]:
        """Return the raw samples of a pack; refuse one whose length is not the planned one."""
        samples = self.packs[index]
        for number, sample in zip(self.packs.sample_numbers(index), samples, strict=True):
            planned = int(self.packs.plan.item_lengths[number])
            if (found := encoded_length(sample)) != planned:
                raise InvalidInputError(
                    f"sample {number} was planned with length {planned}, but has {found} input_ids; length_of must "
                    "count the positions that the model computes"
                )
        return samples

    def join(self, samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Any]:
        """Return samples as one packed sample, aligned as the plan says."""
        packed = join_samples(samples, names, pad_seq_to_mult=self.figures.pad_seq_to_mult or 1, pad_id=self._align_id)
        if packed["loss_mask"].dtype.kind == "f" and not self.figures.has_weights:
            raise InvalidInputError(
                f"a sample among {', '.join(names)} has a loss_mask of weights, and that of sample 0 has none; give "
                "every sample a loss_mask of floats, so that all batches are weighted"
            )
        return packed

    def names(self, index: int) -> list[str]:
        """Return the names of a pack's samples for messages."""
        return [f"sample {number}" for number in self.packs.sample_numbers(index)]

    def bin(self, index: int) -> PackedBin:
        """Return one pack as a bin, without the other fields of its samples."""
        packed = self.join(self.samples(index), self.names(index))
        starts = np.array(packed["seq_boundaries"][:-1], np.uint32)
        return PackedBin(packed["input_ids"], packed["loss_mask"], starts)

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Join the samples of each pack, and return where the bins are in memory."""
        packed = []
        for index, padding in zip(bins.tolist(), is_padding.tolist(), strict=True):
            samples = self.samples(index)
            self._refuse_media(index, samples)
            packed.append(self.join(samples, self.names(index)) | ({IS_PADDING: True} if padding else {}))
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
        """Return how many positions the longest pack takes in a batch."""
        return longest_input_of_plan(self.packs.plan)

    def advise(self, bins: Numbers) -> None:
        """Do nothing: only the dataset knows where its samples are stored."""

    def read_with(self, options: ReadOptions) -> None:
        """Do nothing: the dataset reads its own samples."""


Source = SamplePackReader | PlanBinReader


def open_static_packs(
    data: Any, pack_size: int, packing: StaticPacking, *, pad_id: int = 0
) -> tuple[Source, StaticPlan]:
    """Return raw samples as packs, and the plan that made them.

    Args:
        data: a token store or its path, or a map-style dataset of encoded samples.
        pack_size: the most tokens in a pack of several samples.
        packing: how to pack, and where to cache lengths.
        pad_id: the padding id, used if `packing` aligns sequences to a multiple.
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
    """Fixed packs of raw samples: item i is the list of pack i's samples, each a mapping.

    `collate_fn` lays the samples of each pack end to end, without padding between them, with boundaries and positions
    that start over, in any contract of `PackedDataset`. Other fields of the samples, such as pixel_values, are lists in
    the batch with one entry per sample, in the order of the sequences; None for a sample without the field.

    Args:
        source: the packs, from `open_static_packs`.
        tokenizer: as in `PackedDataset`.
        static_plan: their plan, from the same call.
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
        """Return the raw samples of one pack; a negative index is a padding sample."""
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
        return self._collate_packs(samples, names)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the batch of some packs by their indices."""
        if self._text_only or not isinstance(self.source, SamplePackReader):
            return super().fetch_batch(indices)
        bins, _ = self._locate(indices)
        return self._collate_packs(self.__getitems__(indices), [self.source.names(index) for index in bins.tolist()])

    def _collate_packs(
        self, packs: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        join = self.source.join if isinstance(self.source, SamplePackReader) else join_samples
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
        tokenizer: a tokenizer or an EOS id; a token store has its own.
        seq_length: the most tokens in a pack of several samples; a pack of a single long sample may be longer.
        packing: how to pack.

    Example:
        >>> chats = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
        >>> dataset = create_static_dataset(chats, 2, 8, contract="hf")
        >>> len(dataset), dataset.fetch_batch([0])["position_ids"].tolist()
        (1, [[0, 1, 2, 0, 1]])
    """
    packing = packing or StaticPacking()
    if seq_length is None:
        raise InvalidInputError(
            "packing_mode='static' needs seq_length, the most tokens in a pack of several samples; pass it"
        )
    pad_id = 0 if tokenizer is None else eos_id_of(tokenizer)
    source, plan = open_static_packs(data, seq_length, packing, pad_id=pad_id)
    if len(plan.oversized) and not packing.packing_allow_single_long:
        logger.warning("%s", plan.lines[-1])
    arguments["max_seq_length"] = max(seq_length, source.figures.pack_size)
    return StaticPackDataset(source, tokenizer, static_plan=plan, text_only=packing.text_only, **arguments)


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or a URL holds packed bins."""
    if is_url(path):
        return not is_token_store(path)  # opening it reports anything else
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
            f"{location} holds packed bins, and static packs are made of raw samples; leave packing_mode out, or name "
            "the token store it was made from (OUTPUT.work/tokens/train of packed-sft prepare)"
        )
    raise InvalidInputError(
        f"{location} is not a token store, and static packs can only be made of one; packed-sft prepare "
        f"input={location} output=OUTPUT encodes chat files into one, OUTPUT.work/tokens/train; or pass a map-style "
        "dataset of encoded samples"
    )


def _sequences_of(packed: PackedBin) -> list[dict[str, Any]]:
    """Return the sequences of a bin as samples with their own arrays."""
    starts = packed.seq_start_id.astype(np.int64)[1:]
    parts = zip(np.split(packed.input_ids, starts), np.split(packed.loss_mask, starts), strict=True)
    return [{"input_ids": ids.copy(), "loss_mask": mask.copy()} for ids, mask in parts]
