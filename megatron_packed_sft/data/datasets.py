"""The packed datasets: one class does the work, four names say where the bins come from.

    index ─ order ─▶ bin of the source ─▶ {"input_ids", "seq_boundaries", "loss_mask"} ─ collate_fn ─▶ batch
                     └──────────── fetch_batch: many bins straight into one batch, nothing in between ───▶

Indices mean what they mean to Megatron's samplers: 0 <= i < len is the i-th sample of the (shuffled) order; a negative
index is a padding sample, the bin counted from the end with its loss mask all zero; i >= len is an IndexError.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.bin_readers import BinReader, PlanBinReader, sample_of
from megatron_packed_sft.data.made_with import eos_id_of, refuse_other_tokenizer
from megatron_packed_sft.data.options import BatchOptions, OpenOptions, Tolerance
from megatron_packed_sft.data.order.blend import BlendedSources, BlendOrder
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.shard_readers import ShardBinReader
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.figures import PackMetadata
from megatron_packed_sft.storage.interface import PackedShard
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.registry import not_a_shard, storage_named
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.tokens.store import TokenStore, open_token_store

if TYPE_CHECKING:
    from megatron_packed_sft.data.batch.contracts import CollateOptions
    from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 1024  # Megatron-Bridge's
_KEEPS_EOS_LOSS = ("mcore", "hf")  # contracts in which no token's loss depends on the padding id


class DatasetArguments(TypedDict, total=False):
    """The arguments that every packed dataset takes besides its data and its tokenizer."""

    max_seq_length: int | None
    max_num_samples: int | None
    seed: int
    order: Order | None
    contract: str | BatchOptions
    opening: OpenOptions


class PackedDataset:
    """Packed bins as samples and batches. Argument names are those of Megatron-Bridge's packed dataset.

    Args:
        source: where the bins come from.
        tokenizer: gives the EOS id that pads tokens and labels; an int will do. None takes the data's own padding id.
        max_seq_length: positions of a batch's bins; no bin may need more. None takes 1,024, or what the data needs.
        max_num_samples: length of the dataset; the bins are shuffled, epoch after epoch, until there are so many. None
            gives every bin once, in stored order.
        seed: of that shuffle.
        order: an order to use instead of that shuffle, such as that of a blend.
        contract: whose keys batches have, by name, or `BatchOptions`. Data with weights, and
            `loss="per_conversation"`, give batches whose loss mask is float32.
        opening: whether bins are verified when they are read, and which tokenizers are accepted.
    """

    blended: BlendedSources | None = None  # of a blend: its sources, from which an order of any length can be made

    def __init__(
        self,
        source: BinReader,
        tokenizer: Any = None,
        *,
        max_seq_length: int | None = None,
        max_num_samples: int | None = None,
        seed: int = 1234,
        order: Order | None = None,
        contract: str | BatchOptions = "mcore",
        opening: OpenOptions | None = None,
    ) -> None:
        opening = opening or OpenOptions()
        source.read_with(opening.reading)
        if max_num_samples is not None and max_num_samples < 1:
            raise InvalidInputError(
                f"max_num_samples is {max_num_samples}; give at least 1, or None for every bin once"
            )
        refuse_other_tokenizer(tokenizer, source.made_with(), opening.tolerance)
        self.source = source
        self.tokenizer = tokenizer
        self.max_seq_length = checked_length(source, max_seq_length, _DEFAULT_LENGTH, "max_seq_length")
        self._batch = BatchOptions.of(contract)
        if self._batch.contract == "hf" and source.figures.max_input_len is not None:
            # A window of a stream has one token more than it has predictions, and here all of them take a place.
            self.max_seq_length = max(self.max_seq_length, source.figures.pack_size)
        if order is None and max_num_samples is not None:
            order = SampleOrder(len(source), seed=seed, fingerprint=source.fingerprint)
        self._order = order
        self._num_samples = len(source) if max_num_samples is None else max_num_samples
        self._eos_id = self._padding_id()
        self._largest: Mapping[str, int] = {}
        if self._batch.pad_cu_seqlens:
            self._largest = PackMetadata.of(source.figures, source.description).collate_arguments()
        self._has_weights = source.figures.has_weights
        self._options: CollateOptions | None = None
        if self._has_weights or self._batch.loss != "per_token":
            _ = self.options  # not every contract takes these, and that should not wait for the first batch

    def _padding_id(self) -> int:
        if self.tokenizer is not None:
            return eos_id_of(self.tokenizer)
        pad_id = self.source.pad_id
        multiple = self._batch.pad_seq_to_mult or self.source.figures.pad_seq_to_mult or 1
        if pad_id is None and self._batch.contract in _KEEPS_EOS_LOSS and multiple == 1:
            return 0  # it only fills places that count nowhere
        if pad_id is None:
            raise InvalidInputError(
                f"{self.source.description} does not record a padding id; pass a tokenizer, or its EOS id as an integer"
            )
        return pad_id

    def __len__(self) -> int:
        return self._num_samples

    @property
    def fingerprint(self) -> str:
        """Identifies what index i means: the data, and the dataset's own order if it has one."""
        if self._order is None:
            return self.source.fingerprint
        blend = self._order.blend if isinstance(self._order, BlendOrder) else None
        weights = (
            () if blend is None else blend.weights if blend.annealing is None else (blend.weights, blend.annealing)
        )
        identity = (self.source.fingerprint, self._order.fingerprint, self._order.seed, self._num_samples, weights)
        return checksum(repr(identity).encode())

    @property
    def sampling_order(self) -> BlendOrder | None:
        """Of a blend: the order that a sampler should draw bins in, so that its state tells the realised mixture."""
        return self._order if isinstance(self._order, BlendOrder) else None

    def in_stored_order(self) -> PackedDataset:
        """Return the same bins, numbered as the source stores them; for samplers that bring their own order."""
        stored = copy.copy(self)
        stored._order, stored._num_samples = None, len(self.source)
        return stored

    def with_max_seq_length(self, length: int) -> PackedDataset:
        """Return the same bins, with batches of up to `length` positions."""
        resized = copy.copy(self)
        resized.max_seq_length = checked_length(self.source, length, length, "max_seq_length")
        resized._options = None
        return resized

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer that the data was made with; empty when it was not recorded."""
        return str((self.source.figures.tokenizer or {}).get("fingerprint", ""))

    @property
    def chat_template_fingerprint(self) -> str:
        """Of the chat template that the data was made with; empty when it was not recorded."""
        return self.source.figures.chat_template_fingerprint or ""

    @property
    def eos_id(self) -> int:
        """The id that pads tokens and labels."""
        return self._eos_id

    @property
    def options(self) -> CollateOptions:
        """How bins become batches."""
        if self._options is None:  # the first use imports torch, which opening a dataset should not wait for
            from megatron_packed_sft.data.batch.contracts import CONTRACTS, CollateOptions

            multiple = self._batch.pad_seq_to_mult or self.source.figures.pad_seq_to_mult or 1
            self._options = CollateOptions(
                **{**self._batch.values(), **self._largest, "pad_seq_to_mult": multiple},
                eos_id=self._eos_id,
                max_seq_length=self.max_seq_length,
                weighted=self._has_weights,
            )
            if not (self._options.return_cu_seqlen or CONTRACTS[self._options.contract].masks_sequences):
                logger.warning(
                    "the mask of contract %s, which comes with return_cu_seqlen=False, lets the sequences of a bin see "
                    "each other, as in Megatron-Bridge; leave return_cu_seqlen on, or use contract mcore",
                    self._options.contract,
                )
        return self._options

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return one packed bin: input_ids, seq_boundaries (starts and length) and loss_mask."""
        # In Python's integers, without `_locate`: arrays of one number would take half of the time.
        position = operator.index(index)
        is_padding = position < 0
        if is_padding:
            position += self._num_samples
        if not 0 <= position < self._num_samples:
            raise self._outside(index)
        if self._order is not None:
            position = int(self._order.at(np.array([position]))[0])
        return self._sample(position, is_padding)

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """Return many packed bins."""
        if self._order is None:
            return [self[index] for index in indices]
        bins, is_padding = self._locate(indices)
        return [self._sample(*one) for one in zip(bins.tolist(), is_padding.tolist(), strict=True)]

    def _sample(self, position: int, is_padding: bool) -> Mapping[str, Any]:
        return self._for_trainer(sample_of(self.source.bin(position), is_padding, weighted=self._has_weights))

    def _for_trainer(self, sample: dict[str, Any]) -> Mapping[str, Any]:
        # transformers' Trainer removes what is not an argument of the model from samples, but only from a plain dict.
        return MappingProxyType(sample) if self._batch.contract == "hf" else sample

    def collate_fn(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of samples that `__getitem__` returned."""
        from megatron_packed_sft.data.batch.collate import collate
        from megatron_packed_sft.data.batch.located_bins import locate_in_samples

        return collate([locate_in_samples(samples)], len(samples), self.options)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Make a batch of samples in one go: the compiled kernel reads the bins straight out of the shards."""
        from megatron_packed_sft.data.batch.collate import collate

        bins, is_padding = self._locate(indices)
        located = self.source.locate(bins, np.arange(len(bins)), is_padding)
        return collate(located, len(bins), self.options)

    @property
    def num_batches_advised(self) -> int | None:
        """How many batches ahead a loader should call `advise`; None for as many as usual."""
        parts = getattr(self.source, "sources", (self.source,))
        return max((getattr(one, "num_batches_advised", None) or 0 for one in parts), default=0) or None

    def advise(self, indices: Sequence[int]) -> None:
        """Announce samples that are needed soon, so that the operating system reads them ahead."""
        self.source.advise(self._locate(indices)[0])

    def write_pack_metadata(self, path: str | os.PathLike[str]) -> None:
        """Write the figures that Megatron-Bridge keeps in its metadata JSON, for tools that want the file."""
        metadata = PackMetadata.of(self.source.figures, self.source.description)
        local_path(path).write_bytes(metadata.to_bytes())

    def _locate(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return bins of the source, and which of them are padding samples; that is decided before any mapping."""
        wanted = np.asarray(indices, np.int64)
        is_padding = wanted < 0
        positions = np.where(is_padding, wanted + len(self), wanted)
        outside = (positions < 0) | (positions >= len(self))
        if outside.any():
            raise self._outside(int(wanted[np.argmax(outside)]))
        return (positions if self._order is None else self._order.at(positions)), is_padding

    def _outside(self, index: int) -> IndexError:
        return IndexError(f"sample {index} of {len(self)} ({self.source.description})")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} samples; {self.source.description})"


class GPTSFTPackedMemmapDataset(PackedDataset):
    """Bins of one memmap_v1 shard; see `PackedDataset` for the other arguments."""

    def __init__(
        self, file_path: str | os.PathLike[str], tokenizer: Any = None, **arguments: Unpack[DatasetArguments]
    ) -> None:
        super().__init__(_shards_of("memmap_v1", [file_path]), tokenizer, **arguments)

    @property
    def manifest(self) -> ShardManifest:
        """The shard's manifest; its fields can be read like those of manifest.json."""
        assert isinstance(self.source, ShardBinReader)
        return cast("MemmapShard", self.source.shard(0)).manifest


class GPTSFTPackedMultiShardDataset(PackedDataset):
    """Bins of several memmap_v1 shards, end to end; see `PackedDataset` for the other arguments.

    Args:
        shard_dirs: the shards; made with one tokenizer and one chat template, unless `opening` says otherwise.
        tokenizer: as in `PackedDataset`.
    """

    def __init__(
        self,
        shard_dirs: Sequence[str | os.PathLike[str]],
        tokenizer: Any = None,
        **arguments: Unpack[DatasetArguments],
    ) -> None:
        if not shard_dirs:
            raise InvalidInputError("shard_dirs is empty; name at least one shard")
        tolerance = arguments.get("opening", OpenOptions()).tolerance
        super().__init__(_shards_of("memmap_v1", shard_dirs, tolerance), tokenizer, **arguments)

    @property
    def shards(self) -> list[PackedShard]:
        """The shards, opened."""
        assert isinstance(self.source, ShardBinReader)
        return [self.source.shard(number) for number in range(len(self.source.entries))]

    @property
    def shard_offsets(self) -> npt.NDArray[np.int64]:
        """The first bin of each shard, and the number of all bins."""
        assert isinstance(self.source, ShardBinReader)
        return self.source.shard_offsets


class GPTSFTPackedDataset(PackedDataset):
    """Bins of one legacy .npy file; see `PackedDataset` for the other arguments."""

    def __init__(
        self, file_path: str | os.PathLike[str], tokenizer: Any = None, **arguments: Unpack[DatasetArguments]
    ) -> None:
        super().__init__(_shards_of("legacy", [file_path]), tokenizer, **arguments)


class GPTSFTPlannedDataset(PackedDataset):
    """Bins of a token store and a plan, put together when they are needed: no shards on disk."""

    def __init__(
        self,
        token_store: str | os.PathLike[str] | TokenStore,
        plan: str | os.PathLike[str] | PackPlan,
        tokenizer: Any = None,
        **arguments: Unpack[DatasetArguments],
    ) -> None:
        store = token_store if isinstance(token_store, TokenStore) else open_token_store(token_store)
        loaded = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
        pad_id = 0 if tokenizer is None else eos_id_of(tokenizer)
        super().__init__(PlanBinReader(store, loaded, pad_id=pad_id), tokenizer, **arguments)


def checked_length(source: BinReader, asked: int | None, default: int, argument: str) -> int:
    """Return the positions of a batch's bins; refuse now what would fail in the middle of training.

    Args:
        source: what is to be opened.
        asked: what the caller wants, or None for the default, or more if the data needs more.
        default: the least to take when nothing is asked.
        argument: what the caller calls it, for the message.
    """
    pack_size = source.figures.pack_size
    if asked is None:
        return max(default, source.figures.num_positions)
    # The last token of a sequence is a label only, so a bin of n tokens needs n - 1 positions at most. Only when even
    # that is too long is it worth looking at every bin.
    if asked < pack_size - 1 and (needed := source.longest_input()) > asked:
        raise InvalidInputError(
            f"{argument} is {asked}, but a bin of {source.description} needs {needed}; set {argument} to {pack_size}, "
            f"or pack the data for {asked}"
        )
    return asked


def dataset_over(
    kind: type[PackedDataset], source: BinReader, tokenizer: Any, **arguments: Unpack[DatasetArguments]
) -> PackedDataset:
    """Return a dataset of that class over a source that is open already."""
    dataset = kind.__new__(kind)
    PackedDataset.__init__(dataset, source, tokenizer, **arguments)
    return dataset


def _shards_of(
    storage: str, paths: Sequence[str | os.PathLike[str]], tolerance: Tolerance | None = None
) -> ShardBinReader:
    locations = [local_path(path) for path in paths]
    opened = storage_named(storage)
    for location in locations:
        if not opened.recognises(location):
            raise not_a_shard(location)
    return ShardBinReader.of_shards(opened, locations, tolerance or Tolerance())
