"""The packed datasets: one class does the work, four names say where the rows come from.

    index ─ order ─▶ row of the source ─▶ {"input_ids", "seq_boundaries", "loss_mask"} ─ collate_fn ─▶ batch
                     └──────────── fetch_batch: many rows straight into one batch, nothing in between ───▶

Index semantics, as Megatron's samplers use them: 0 <= i < len is the i-th sample of the (shuffled) order; a negative
index is a padding sample, the row counted from the end with its loss mask all zero; i >= len is an IndexError.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data._bridge_arguments import refuse_meaningless
from megatron_packed_sft.data._tokenizer_ids import check_tokenizer, eos_id_of
from megatron_packed_sft.data.bin_readers import BinReader, LegacyBinReader, PlanBinReader, ShardBinReader
from megatron_packed_sft.data.order.blend import BlendOrder
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.pack_metadata import PackMetadata
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.memmap_v1.reader import open_memmap_shard
from megatron_packed_sft.tokens.store import TokenStore, open_token_store

if TYPE_CHECKING:
    from megatron_packed_sft.data.batch.contracts import CollateOptions


class PackedDataset:
    """Packed rows as samples and batches. Argument names are those of Megatron-Bridge's packed dataset.

    Args:
        source: where the rows come from.
        tokenizer: gives the EOS id that pads tokens and labels; an int will do.
        max_seq_length: positions of a batch's rows; no row may need more.
        max_num_samples: length of the dataset; the rows are shuffled, epoch after epoch, up to this number. None
            gives every row once, in stored order.
        seed: of that shuffle.
        order: an order to use instead of that shuffle, such as that of a blend.
        contract: whose keys batches have: `mcore`, `bridge_0_3`, `bridge_0_5`, `bridge_0_6`, `bridge_main` or `hf`.
        pad_to_max_length, pad_seq_length_to_mult, ceil_to_power_2, return_cu_seqlen, pad_cu_seqlens, answer_only_loss,
            compact, return_doc_ids: as in `CollateOptions`.
        pad_seq_to_mult: what the data's sequences were padded to; by default what the data says, else 1.
        pack_metadata_file_path: Megatron-Bridge's metadata JSON for `pad_cu_seqlens`; else the data's own figures.
        allow_tokenizer_mismatch: accept a tokenizer with another fingerprint than the data's.
        bridge_arguments: further arguments of Megatron-Bridge's dataset classes; those that mean nothing for packed
            data are refused unless they have Bridge's default.

    Example:
        >>> dataset = PackedDataset(source, tokenizer=2, max_seq_length=4096)  # doctest: +SKIP
        >>> dataset.fetch_batch([0, 1, -1])["tokens"].shape  # doctest: +SKIP
        torch.Size([3, 4096])
    """

    def __init__(
        self,
        source: BinReader,
        tokenizer: Any,
        *,
        max_seq_length: int = 1024,
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
        allow_tokenizer_mismatch: bool = False,
        **bridge_arguments: Any,
    ) -> None:
        refuse_meaningless(bridge_arguments)
        if max_num_samples is not None and max_num_samples < 1:
            raise InvalidInputError(
                f"max_num_samples is {max_num_samples}; give at least 1, or None for every row once"
            )
        if not allow_tokenizer_mismatch:
            check_tokenizer(tokenizer, source.figures.tokenizer, source.description)
        self.source = source
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        if order is None and max_num_samples is not None:
            order = SampleOrder(len(source), seed=seed, fingerprint=source.fingerprint)
        self._order = order
        self._num_samples = len(source) if max_num_samples is None else max_num_samples
        metadata = None
        if pad_cu_seqlens:
            metadata = (
                PackMetadata.of(source)
                if pack_metadata_file_path is None
                else PackMetadata.load(pack_metadata_file_path)
            )
        self._collate_arguments: dict[str, Any] = {
            "contract": contract,
            "eos_id": eos_id_of(tokenizer),
            "max_seq_length": max_seq_length,
            "pad_to_max_length": pad_to_max_length,
            "pad_seq_length_to_mult": pad_seq_length_to_mult,
            "ceil_to_power_2": ceil_to_power_2,
            "return_cu_seqlen": return_cu_seqlen,
            "pad_cu_seqlens": pad_cu_seqlens,
            "pad_seq_to_mult": pad_seq_to_mult or source.figures.pad_seq_to_mult or 1,
            "answer_only_loss": answer_only_loss,
            "compact": compact,
            "return_doc_ids": return_doc_ids,
            **({} if metadata is None else metadata.collate_arguments()),
        }
        self._options: CollateOptions | None = None

    def __len__(self) -> int:
        return self._num_samples

    @property
    def fingerprint(self) -> str:
        """Identifies what index i means: the data, and the dataset's own order if it has one."""
        if self._order is None:
            return self.source.fingerprint
        weights = self._order.blend.weights if isinstance(self._order, BlendOrder) else ()
        identity = (self.source.fingerprint, self._order.fingerprint, self._order.seed, self._num_samples, weights)
        return checksum(repr(identity).encode())

    @property
    def sampling_order(self) -> BlendOrder | None:
        """Of a blend: the order that a sampler should draw rows in, so that its state tells the realised mixture."""
        return self._order if isinstance(self._order, BlendOrder) else None

    def in_stored_order(self) -> PackedDataset:
        """The same rows, numbered as they lie in the source; for samplers that bring an order of their own."""
        rows = copy.copy(self)
        rows._order, rows._num_samples = None, len(self.source)
        return rows

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
        """How rows become batches."""
        if self._options is None:  # the first use imports torch, which opening a dataset should not wait for
            from megatron_packed_sft.data.batch.contracts import CollateOptions

            self._options = CollateOptions(**self._collate_arguments)
        return self._options

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One packed row: input_ids, seq_boundaries (starts and length) and loss_mask."""
        rows, is_padding = self._locate([index])
        return _row_dict(self.source.row(int(rows[0])), bool(is_padding[0]))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Many packed rows."""
        rows, is_padding = self._locate(indices)
        return [
            _row_dict(self.source.row(row), padding)
            for row, padding in zip(rows.tolist(), is_padding.tolist(), strict=True)
        ]

    def collate_fn(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of rows that `__getitem__` returned."""
        from megatron_packed_sft.data.batch.collate import collate
        from megatron_packed_sft.data.batch.located_bins import locate_in_samples

        return collate([locate_in_samples(rows)], len(rows), self.options)

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Make a batch of samples in one go: the compiled kernel reads the rows where they lie.

        Example:
            >>> dataset.fetch_batch([0, 1, 2])  # doctest: +SKIP
        """
        from megatron_packed_sft.data.batch.collate import collate

        rows, is_padding = self._locate(indices)
        pieces = self.source.pieces(rows, np.arange(len(rows)), is_padding)
        return collate(pieces, len(rows), self.options)

    def advise(self, indices: Sequence[int]) -> None:
        """Announce samples that are needed soon, so that the kernel reads them ahead."""
        self.source.advise(self._locate(indices)[0])

    def write_pack_metadata(self, path: str | os.PathLike[str]) -> None:
        """Write the figures that Megatron-Bridge keeps in its metadata JSON, for tools that want the file."""
        Path(path).write_text(json.dumps([PackMetadata.of(self.source).to_json()], indent=2))

    def _locate(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Rows of the source, and which of them are padding samples; that is decided before any mapping."""
        wanted = np.asarray(indices, np.int64)
        is_padding = wanted < 0
        positions = np.where(is_padding, wanted + len(self), wanted)
        outside = (positions < 0) | (positions >= len(self))
        if outside.any():
            raise IndexError(f"sample {int(wanted[np.argmax(outside)])} of {len(self)} ({self.source.description})")
        return (positions if self._order is None else self._order.at(positions)), is_padding

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} samples; {self.source.description})"


class GPTSFTPackedMemmapDataset(PackedDataset):
    """Packed rows of one memmap_v1 shard; see `PackedDataset` for the arguments.

    Example:
        >>> GPTSFTPackedMemmapDataset("train/shard_000000", tokenizer, max_seq_length=4096)  # doctest: +SKIP
    """

    def __init__(self, file_path: str | os.PathLike[str], tokenizer: Any, **arguments: Any) -> None:
        super().__init__(ShardBinReader.of_shards([open_memmap_shard(file_path)]), tokenizer, **arguments)


class GPTSFTPackedMultiShardDataset(PackedDataset):
    """Packed rows of several memmap_v1 shards, end to end; see `PackedDataset` for the arguments.

    Example:
        >>> GPTSFTPackedMultiShardDataset(["shard_000000", "shard_000001"], tokenizer)  # doctest: +SKIP
    """

    def __init__(self, shard_dirs: Sequence[str | os.PathLike[str]], tokenizer: Any, **arguments: Any) -> None:
        if not shard_dirs:
            raise InvalidInputError("shard_dirs is empty; name at least one shard")
        super().__init__(
            ShardBinReader.of_shards([open_memmap_shard(path) for path in shard_dirs]), tokenizer, **arguments
        )


class GPTSFTPackedDataset(PackedDataset):
    """Packed rows of one legacy .npy file; see `PackedDataset` for the arguments.

    Example:
        >>> GPTSFTPackedDataset("training_4096.npy", tokenizer, max_seq_length=4096)  # doctest: +SKIP
    """

    def __init__(self, file_path: str | os.PathLike[str], tokenizer: Any, **arguments: Any) -> None:
        super().__init__(LegacyBinReader(file_path), tokenizer, **arguments)


class GPTSFTPlannedDataset(PackedDataset):
    """Packed rows of a token store and a plan, put together when they are needed: no shards on disk.

    Example:
        >>> GPTSFTPlannedDataset("store", "plan.npz", tokenizer, max_seq_length=4096)  # doctest: +SKIP
    """

    def __init__(
        self,
        token_store: str | os.PathLike[str] | TokenStore,
        plan: str | os.PathLike[str] | PackPlan,
        tokenizer: Any,
        **arguments: Any,
    ) -> None:
        store = token_store if isinstance(token_store, TokenStore) else open_token_store(token_store)
        loaded = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
        super().__init__(PlanBinReader(store, loaded, pad_id=eos_id_of(tokenizer)), tokenizer, **arguments)


def _row_dict(row: PackedBin, is_padding: bool) -> dict[str, Any]:
    result = {
        "input_ids": row.input_ids,
        "seq_boundaries": [*row.seq_start_id.tolist(), len(row.input_ids)],
        "loss_mask": np.zeros_like(row.loss_mask) if is_padding else row.loss_mask,
    }
    if is_padding:
        result["is_padding"] = True  # without it, answer_only_loss=False would count the padding sample's loss
    return result
