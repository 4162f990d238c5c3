"""Who reads the batch, and what they expect in it: each consumer's keys, as a thin adapter over the same buffers.

| contract      | reader                               | boundaries                      | loss at EOS tokens |
|---------------|--------------------------------------|---------------------------------|--------------------|
| `bridge_0_3`  | Megatron-Bridge 0.3 and 0.4          | cu_seqlens, -1 behind the last  | dropped            |
| `bridge_0_5`  | Megatron-Bridge 0.5                  | as 0_3; attention_mask is None  | dropped            |
| `bridge_0_6`  | Megatron-Bridge 0.6                  | cu_seqlens_q/kv, last repeated  | dropped            |
| `bridge_main` | Megatron-Bridge after 0.6            | as 0_6, and padding_mask        | kept               |
| `mcore`       | Megatron-Core, through your own step | as 0_6, and padding_mask        | kept               |
| `hf`          | transformers models and trainers     | cu_seq_lens_q/k of one long row | kept               |

The released packages are the oracle for the first three: tests/oracle compares every key with `torch.equal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.data.batch.attention_masks import visible_mask
from megatron_packed_sft.errors import InvalidInputError

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateOptions:
    """How rows become a batch. Names and meaning are those of Megatron-Bridge's packed dataset.

    Args:
        contract: whose keys the batch has: one of `CONTRACTS`.
        eos_id: the tokenizer's end-of-sequence id; it pads tokens and labels.
        max_seq_length: no row may be longer, its label-only last ids not counted (the `hf` contract counts them).
        pad_to_max_length: every row gets `max_seq_length` positions; else the longest row of the batch decides.
        pad_seq_length_to_mult: the longest row's length is rounded up to a multiple; None is 16, and 1 for `hf`, which
            needs no padding. `hf` pads the whole batch, by one sequence at its end.
        ceil_to_power_2: it is rounded up to a power of two instead.
        return_cu_seqlen: give the sequences' boundaries; else a dense mask [B, 1, L, L], True where a key is hidden.
            Bridge's mask hides only the future, so its sequences see each other; that of `mcore` hides them, too.
        pad_cu_seqlens: the boundaries get the same shape in every batch, for CUDA graphs. Needs `pad_to_max_length`
            and the next three numbers.
        dataset_max_seqlen: the longest sequence of the dataset.
        max_samples_per_bin: the most sequences in one row.
        min_packed_seqlen: the shortest row.
        pad_seq_to_mult: what the data's sequences were padded to with EOS, for context parallelism. Above 1 the
            boundaries with and without that padding are given.
        answer_only_loss: the loss counts where the stored mask says so; else at every token.
        compact: ids and positions as int32 and the loss mask as uint8, to be cast on the device; see `widen`.
        return_doc_ids: also give `doc_ids`, int32: the number of the sequence of each position; see masks.py.

    Example:
        >>> CollateOptions(contract="mcore", eos_id=2, max_seq_length=4096).pad_to_max_length
        False
    """

    contract: str
    eos_id: int
    max_seq_length: int
    pad_to_max_length: bool = False
    pad_seq_length_to_mult: int | None = None
    ceil_to_power_2: bool = False
    return_cu_seqlen: bool = True
    pad_cu_seqlens: bool = False
    dataset_max_seqlen: int | None = None
    max_samples_per_bin: int | None = None
    min_packed_seqlen: int | None = None
    pad_seq_to_mult: int = 1
    answer_only_loss: bool = True
    compact: bool = False
    return_doc_ids: bool = False

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise InvalidInputError(f"contract {self.contract!r} is unknown; choose from {', '.join(CONTRACTS)}")
        if not 0 <= self.eos_id < 2**31:
            raise InvalidInputError(f"eos_id is {self.eos_id}; it must be a token id, in 0..{2**31 - 1}")
        for name in ("max_seq_length", "pad_seq_length_to_mult", "pad_seq_to_mult"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} is {value}; it must be at least 1")
        if CONTRACTS[self.contract].flattened and (self.pad_cu_seqlens or not self.return_cu_seqlen):
            raise InvalidInputError(
                f"the {self.contract!r} contract gives the boundaries of one long row; leave return_cu_seqlen on "
                "and pad_cu_seqlens off, or choose another contract"
            )
        if self.pad_cu_seqlens:
            if not self.pad_to_max_length:
                raise InvalidInputError("pad_cu_seqlens fixes the batch's shape; set pad_to_max_length=True with it")
            for name in ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen"):
                if getattr(self, name) is None:
                    raise InvalidInputError(f"pad_cu_seqlens needs {name}; pass the number from the packing's metadata")

    @property
    def min_boundaries(self) -> int:
        """The least number of boundaries a row gets: 0, the ends of the most sequences there are, and the padding's."""
        return (self.max_samples_per_bin or 0) + 2 if self.pad_cu_seqlens else 0

    def padded_length(self, longest: int, limit: int) -> int:
        """The length of a padded row (for `hf`: of the whole batch) whose longest content is given.

        Example:
            >>> CollateOptions(contract="mcore", eos_id=2, max_seq_length=4096).padded_length(100, 4096)
            112
        """
        if self.pad_to_max_length:
            return limit
        if self.ceil_to_power_2:
            return min(limit, 1 << (longest - 1).bit_length() if longest else 0)
        multiple = self.pad_seq_length_to_mult or (1 if CONTRACTS[self.contract].flattened else 16)
        return min(limit, -(-longest // multiple) * multiple)


class PaddedBins(NamedTuple):
    """What the kernel made of a batch: B rows of L positions, and K boundaries for each."""

    ids: npt.NDArray[Any]  # [3, B, L]: tokens, labels, position ids
    loss_mask: npt.NDArray[Any]  # [B, L]
    boundaries: npt.NDArray[np.int32]  # [2, B, K]: with and without the padding that aligns sequences
    longest: npt.NDArray[np.int32]  # [B, 1]
    padding_mask: npt.NDArray[np.bool_]  # [B, L], or empty when the contract has none
    doc_ids: npt.NDArray[np.int32]  # [B, L], or empty when nobody asked for them
    token_count: list[int]
    num_boundaries: list[int]  # how many of the K are each row's own; its last one is repeated


class FlattenedBins(NamedTuple):
    """What the kernel made of a batch of one long row of T positions."""

    ids: npt.NDArray[Any]  # [3, 1, T]: input ids, labels, position ids
    boundaries: npt.NDArray[np.int32]
    doc_ids: npt.NDArray[np.int32]  # [1, T], or empty when nobody asked for them


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What a consumer expects; `adapt` gives the kernel's result its names."""

    adapt: Callable[[Any, CollateOptions], Batch]
    keeps_eos_loss: bool  # where the token is EOS, when the stored mask decides
    keeps_all_eos_loss: bool = False  # the same, when the loss counts at every token
    has_padding_mask: bool = False
    masks_sequences: bool = False  # the dense mask keeps sequences apart
    flattened: bool = False


def _bridge_0_3(rows: PaddedBins, options: CollateOptions) -> Batch:
    batch = _tokens_and_labels(rows)
    if not options.return_cu_seqlen:
        return batch | {"attention_mask": _causal_mask(rows)}
    counts = [max(count, options.min_boundaries) for count in rows.num_boundaries]
    batch |= {
        "attention_mask": torch.from_numpy(np.ones(len(counts), np.int64)),
        "cu_seqlens": _open_ended(rows.boundaries[0], counts),
        "cu_seqlens_argmin": torch.from_numpy(np.array(counts)[:, None]),
        "max_seqlen": _max_seqlen(rows, options),
    }
    if options.pad_seq_to_mult > 1:  # pad_cu_seqlens does not reach these there
        counts = rows.num_boundaries
        batch["cu_seqlens_unpadded"] = _open_ended(rows.boundaries[1], counts)
        batch["cu_seqlens_unpadded_argmin"] = torch.from_numpy(np.array(counts)[:, None])
    return batch


def _bridge_0_5(rows: PaddedBins, options: CollateOptions) -> Batch:
    batch = _bridge_0_3(rows, options)
    return batch | {"attention_mask": None} if options.return_cu_seqlen else batch


def _bridge_0_6(rows: PaddedBins, options: CollateOptions) -> Batch:
    batch = _tokens_and_labels(rows)
    if options.return_cu_seqlen:
        return batch | _boundaries_q_kv(rows, options)
    return batch | {"attention_mask": _causal_mask(rows)}


def _bridge_main(rows: PaddedBins, options: CollateOptions) -> Batch:
    return _bridge_0_6(rows, options) | {"padding_mask": torch.from_numpy(rows.padding_mask)}


def _mcore(rows: PaddedBins, options: CollateOptions) -> Batch:
    batch = _tokens_and_labels(rows) | {"padding_mask": torch.from_numpy(rows.padding_mask)}
    if options.return_cu_seqlen:
        return batch | _boundaries_q_kv(rows, options)
    return batch | {"attention_mask": visible_mask(torch.from_numpy(rows.doc_ids)).logical_not_()}


def _hf(rows: FlattenedBins, options: CollateOptions) -> Batch:
    boundaries = torch.from_numpy(rows.boundaries)
    longest = int(np.diff(rows.boundaries).max())
    return {
        "input_ids": torch.from_numpy(rows.ids[0]),
        "labels": torch.from_numpy(rows.ids[1]),
        "position_ids": torch.from_numpy(rows.ids[2]),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


CONTRACTS = {
    "bridge_0_3": Contract(adapt=_bridge_0_3, keeps_eos_loss=False),
    "bridge_0_5": Contract(adapt=_bridge_0_5, keeps_eos_loss=False),
    "bridge_0_6": Contract(adapt=_bridge_0_6, keeps_eos_loss=False),
    "bridge_main": Contract(adapt=_bridge_main, keeps_eos_loss=True, has_padding_mask=True),
    "mcore": Contract(
        adapt=_mcore, keeps_eos_loss=True, keeps_all_eos_loss=True, has_padding_mask=True, masks_sequences=True
    ),
    "hf": Contract(adapt=_hf, keeps_eos_loss=True, keeps_all_eos_loss=True, flattened=True),
}


def _tokens_and_labels(rows: PaddedBins) -> Batch:
    return {
        "tokens": torch.from_numpy(rows.ids[0]),
        "labels": torch.from_numpy(rows.ids[1]),
        "loss_mask": torch.from_numpy(rows.loss_mask),
        "position_ids": torch.from_numpy(rows.ids[2]),
        "token_count": rows.token_count,
    }


def _boundaries_q_kv(rows: PaddedBins, options: CollateOptions) -> Batch:
    aligned = options.pad_seq_to_mult > 1
    boundaries = torch.from_numpy(rows.boundaries[1 if aligned else 0])
    longest = _max_seqlen(rows, options)
    batch = {
        "attention_mask": None,
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if aligned:
        physical = torch.from_numpy(rows.boundaries[0])
        batch |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
    return batch


def _max_seqlen(rows: PaddedBins, options: CollateOptions) -> torch.Tensor:
    if not options.pad_cu_seqlens:
        return torch.from_numpy(rows.longest)
    assert options.dataset_max_seqlen is not None
    assert options.min_packed_seqlen is not None
    num_rows, length = rows.loss_mask.shape
    longest = max(options.dataset_max_seqlen, length - options.min_packed_seqlen)
    return torch.full((num_rows,), longest, dtype=torch.int32)


def _open_ended(boundaries: npt.NDArray[np.int32], counts: list[int]) -> torch.Tensor:
    """Only the first `counts` boundaries of each row, and at least one -1 behind them."""
    result = np.full((len(counts), max(counts) + 1), -1, np.int32)
    for row, count in enumerate(counts):
        result[row, :count] = boundaries[row, :count]
    return torch.from_numpy(result)


def _causal_mask(rows: PaddedBins) -> torch.Tensor:
    num_rows, length = rows.loss_mask.shape
    visible = torch.ones(length, length, dtype=torch.bool).tril_()
    return visible.logical_not_().expand(num_rows, 1, length, length)
