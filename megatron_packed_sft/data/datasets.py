"""The packed datasets: one class does the work, four names say where the bins come from.

    index ─ order ─▶ bin of the source ─▶ {"input_ids", "seq_boundaries", "loss_mask"} ─ collate_fn ─▶ batch
                     └──────────── fetch_batch: many bins straight into one batch, nothing in between ───▶

Index semantics, as Megatron's samplers use them: 0 <= i < len is the i-th sample of the (shuffled) order; a negative
index is a padding sample, the bin counted from the end with its loss mask all zero; i >= len is an IndexError.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.made_with import Tolerance, eos_id_of, refuse_other_tokenizer
from megatron_packed_sft.data.order.blend import BlendOrder
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.readers.interface import BinReader, sample_of
from megatron_packed_sft.data.readers.plans import PlanBinReader
from megatron_packed_sft.data.readers.shards import ShardBinReader
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.interface import PackedShard
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.pack_metadata import PackMetadata
from megatron_packed_sft.storage.read_options import FIRST_READ, MMAP, ReadOptions
from megatron_packed_sft.storage.registry import not_a_shard, storage_named
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.tokens.store import TokenStore, open_token_store

if TYPE_CHECKING:
    from megatron_packed_sft.data.batch.contracts import CollateOptions

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 1024  # Megatron-Bridge's


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
        contract: whose keys batches have: `mcore`, `bridge_0_6`, `bridge_main` or `hf`.
        pad_to_max_length, pad_seq_length_to_mult, ceil_to_power_2, return_cu_seqlen, pad_cu_seqlens: as in
            `CollateOptions`.
        answer_only_loss, compact, return_doc_ids: as in `CollateOptions`.
        pad_seq_to_mult: what the data's sequences were padded to; by default what the data says, else 1.
        pack_metadata_file_path: Megatron-Bridge's metadata JSON for `pad_cu_seqlens`; else the data's own figures.
        loss: `per_token`, or `per_conversation`: every conversation counts the same. Data with weights, and
            `per_conversation`, give batches whose loss mask is float32; see `CollateOptions`.
        allow_tokenizer_mismatch: accept a tokenizer with another fingerprint than the data's, or too small a
            vocabulary.
        verify: when a bin of a memmap_v1 shard is compared with its checksum: at its `first_read` by this process,
            `always` or `never`.
        access: `mmap` maps files; `pread` reads each bin into memory, which is slower, but makes an error of a file
            that is cut while it is in use, where a map ends the process.
        bridge_arguments: further arguments of Megatron-Bridge's dataset classes; those that mean nothing for packed
            data are refused unless they have Bridge's default.
    """

    def __init__(
        self,
        source: BinReader,
        tokenizer: Any = None,
        *,
        max_seq_length: int | None = None,
        max_num_samples: int | None = None,
        seed: int = 1234,
        order: Order | None = None,
        contract: str = "mcore",
        pad_to_max_length: bool = False,
        pad_seq_length_to_mult: int | None = None,
        ceil_to_power_2: bool = False,
        return_cu_seqlen: bool = True,
        pad_cu_seqlens: bool = False,
        pad_seq_to_mult: int | None = None,
        pack_metadata_file_path: str | os.PathLike[str] | None = None,
        answer_only_loss: bool = True,
        compact: bool = False,
        return_doc_ids: bool = False,
        loss: str = "per_token",
        allow_tokenizer_mismatch: bool = False,
        verify: str = FIRST_READ,
        access: str = MMAP,
        **bridge_arguments: Any,
    ) -> None:
        refuse_meaningless(bridge_arguments)
        source.read_with(ReadOptions(verify, access))
        if max_num_samples is not None and max_num_samples < 1:
            raise InvalidInputError(
                f"max_num_samples is {max_num_samples}; give at least 1, or None for every bin once"
            )
        refuse_other_tokenizer(tokenizer, source.made_with(), Tolerance(tokenizer=allow_tokenizer_mismatch))
        self.source = source
        self.tokenizer = tokenizer
        self.max_seq_length = checked_length(source, max_seq_length, _DEFAULT_LENGTH, "max_seq_length")
        if contract == "hf" and source.figures.max_input_len is not None:
            # Windows of a stream have one token more than predictions, and here all of them take a place.
            self.max_seq_length = max(self.max_seq_length, source.figures.pack_size)
        if order is None and max_num_samples is not None:
            order = SampleOrder(len(source), seed=seed, fingerprint=source.fingerprint)
        self._order = order
        self._num_samples = len(source) if max_num_samples is None else max_num_samples
        metadata = None
        if pad_cu_seqlens:
            metadata = (
                PackMetadata.of(source.figures, source.description)
                if pack_metadata_file_path is None
                else PackMetadata.load(pack_metadata_file_path)
            )
        self._collate_arguments: dict[str, Any] = {
            "contract": contract,
            "eos_id": self._padding_id(contract),
            "max_seq_length": self.max_seq_length,
            "pad_to_max_length": pad_to_max_length,
            "pad_seq_length_to_mult": pad_seq_length_to_mult,
            "ceil_to_power_2": ceil_to_power_2,
            "return_cu_seqlen": return_cu_seqlen,
            "pad_cu_seqlens": pad_cu_seqlens,
            "pad_seq_to_mult": pad_seq_to_mult or source.figures.pad_seq_to_mult or 1,
            "answer_only_loss": answer_only_loss,
            "compact": compact,
            "return_doc_ids": return_doc_ids,
            "weighted": source.figures.has_weights,
            "loss": loss,
            **({} if metadata is None else metadata.collate_arguments()),
        }
        self._is_for_trainer = contract == "hf"
        self._has_weights = source.figures.has_weights
        self._options: CollateOptions | None = None
        if source.figures.has_weights or loss != "per_token":
            _ = self.options  # not every contract takes these, and that should not wait for the first batch

    def _padding_id(self, contract: str) -> int:
        if self.tokenizer is not None:
            return eos_id_of(self.tokenizer)
        pad_id = self.source.pad_id
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
        """Return the same bins, numbered as they lie in the source; for samplers that bring their own order."""
        stored = copy.copy(self)
        stored._order, stored._num_samples = None, len(self.source)
        return stored

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer that the data was made with; empty when it was not recorded."""
        return str((self.source.figures.tokenizer or {}).get("fingerprint", ""))

    @property
    def chat_template_fingerprint(self) -> str:
        """Of the chat template that the data was made with; empty when it was not recorded."""
        return self.source.figures.chat_template_fingerprint or ""

    @property
    def options(self) -> CollateOptions:
        """How bins become batches."""
        if self._options is None:  # the first use imports torch, which opening a dataset should not wait for
            from megatron_packed_sft.data.batch.contracts import CONTRACTS, CollateOptions

            self._options = CollateOptions(**self._collate_arguments)
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
        sample = sample_of(self.source.bin(position), is_padding, weighted=self._has_weights)
        # transformers' Trainer removes what is not an argument of the model from samples, but only from a plain dict.
        return MappingProxyType(sample) if self._is_for_trainer else sample

    def collate_fn(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of samples that `__getitem__` returned."""
        from megatron_packed_sft.data.batch.collate import collate
        from megatron_packed_sft.data.batch.located_bins import locate_in_samples

        return collate([locate_in_samples(samples)], len(samples), self.options)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Make a batch of samples in one go: the compiled kernel reads the bins where they lie."""
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
        """Announce samples that are needed soon, so that the kernel reads them ahead."""
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
    """Bins of one memmap_v1 shard; see `PackedDataset` for the arguments."""

    def __init__(self, file_path: str | os.PathLike[str], tokenizer: Any = None, **arguments: Any) -> None:
        super().__init__(_shards_of("memmap_v1", [file_path]), tokenizer, **arguments)

    @property
    def manifest(self) -> ShardManifest:
        """The shard's manifest; its fields can be read like those of manifest.json."""
        assert isinstance(self.source, ShardBinReader)
        shard = self.source.shard(0)
        assert isinstance(shard, MemmapShard)
        return shard.manifest


class GPTSFTPackedMultiShardDataset(PackedDataset):
    """Bins of several shards of one storage, end to end; see `PackedDataset` for the other arguments.

    Args:
        shard_dirs: the shards.
        tokenizer: as in `PackedDataset`.
        allow_tokenizer_mismatch: also accept shards made with different tokenizers.
        allow_template_mismatch: accept shards made with different chat templates.
        arguments: further ones of `PackedDataset`.
    """

    def __init__(
        self,
        shard_dirs: Sequence[str | os.PathLike[str]],
        tokenizer: Any = None,
        *,
        allow_tokenizer_mismatch: bool = False,
        allow_template_mismatch: bool = False,
        **arguments: Any,
    ) -> None:
        if not shard_dirs:
            raise InvalidInputError("shard_dirs is empty; name at least one shard")
        tolerance = Tolerance(tokenizer=allow_tokenizer_mismatch, template=allow_template_mismatch)
        source = _shards_of("memmap_v1", shard_dirs, tolerance)
        super().__init__(source, tokenizer, allow_tokenizer_mismatch=allow_tokenizer_mismatch, **arguments)

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
    """Bins of one legacy .npy file; see `PackedDataset` for the arguments."""

    def __init__(self, file_path: str | os.PathLike[str], tokenizer: Any = None, **arguments: Any) -> None:
        super().__init__(_shards_of("legacy", [file_path]), tokenizer, **arguments)


class GPTSFTPlannedDataset(PackedDataset):
    """Bins of a token store and a plan, put together when they are needed: no shards on disk."""

    def __init__(
        self,
        token_store: str | os.PathLike[str] | TokenStore,
        plan: str | os.PathLike[str] | PackPlan,
        tokenizer: Any = None,
        **arguments: Any,
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


def dataset_over(kind: type[PackedDataset], source: BinReader, tokenizer: Any, **arguments: Any) -> PackedDataset:
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


# Arguments of Megatron-Bridge's dataset classes that mean nothing once data is packed are refused, never ignored.
_TOKENIZED = "the data is already tokenized"
_PACKED = "the data is already packed"
# Name -> (values that Bridge passes by default and that change nothing, why another one cannot be honoured).
_MEANINGLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_seq_length": ((1,), _PACKED),
    "add_bos": ((False,), _TOKENIZED),
    "add_eos": ((True,), _TOKENIZED),
    "add_sep": ((False,), _TOKENIZED),
    "sep_id": ((None,), _TOKENIZED),
    "label_key": (("answer", "output"), _TOKENIZED),
    "truncation_field": (("text", "input"), _TOKENIZED),
    "truncation_method": (("right",), _TOKENIZED),
    "prompt_template": ((None, "{input} {output}"), _TOKENIZED),
    "special_tokens": ((None,), _TOKENIZED),
    "chat": ((False, True), _TOKENIZED),
    "use_hf_tokenizer_chat_template": ((False, True), _TOKENIZED),
    "tool_schemas": ((None,), _TOKENIZED),
    "virtual_tokens": ((0,), _PACKED),
    "tokens_to_generate": ((0,), "packed data has no prompt to continue"),
    "is_test": ((False,), "packed data has no prompt to continue"),
    "output_original_text": ((False,), "packed data has no text"),
    "index_mapping_dir": ((None,), "the order is computed, not stored"),
    "global_sample_mapping": ((False,), "the order is computed, not stored"),
    "memmap_workers": ((None, 2), "shards need no index"),
    "hf_dataset": ((False,), _PACKED),
    "get_attention_mask_from_fusion": ((True,), "boundaries replace the mask; set return_cu_seqlen=False to get one"),
}


def refuse_meaningless(arguments: Mapping[str, Any]) -> None:
    """Raise for unknown arguments, and for those of Bridge that mean nothing here unless they have its default."""
    for name, value in arguments.items():
        if name not in _MEANINGLESS:
            raise InvalidInputError(f"{name} is not an argument of a packed dataset; check the spelling")
        defaults, reason = _MEANINGLESS[name]
        if not any(value is default or (type(value) is type(default) and value == default) for default in defaults):
            raise InvalidInputError(
                f"{name}={value!r} has no meaning for packed data: {reason}; leave it out, or prepare the data with it"
            )
