"""Contracts: the keys each consumer expects in a batch, as thin adapters over the same arrays.

| contract      | consumer                             | boundaries                      | loss at EOS tokens |
|---------------|--------------------------------------|---------------------------------|--------------------|
| `bridge_0_6`  | Megatron-Bridge 0.6                  | cu_seqlens_q/kv, last repeated  | dropped            |
| `bridge_main` | Megatron-Bridge after 0.6            | as 0_6, and padding_mask        | kept               |
| `mcore`       | Megatron-Core, through your own step | as 0_6, and padding_mask        | kept               |
| `hf`          | transformers models and trainers     | cu_seq_lens_q/k, flattened      | kept               |

Each batch contains what keeps its sequences apart; docs/datasets.md says what happens to a consumer that ignores it.

The oracle for `bridge_0_6` is the released package: tests/oracle compares every key with `torch.equal`.

Weights and `loss="per_conversation"` make the loss mask float32 and add `loss_denominator`; only `mcore` and `hf` take
them. `hf` then has `weighted_labels` instead of `labels`, because a model would ignore the weights without a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.data.batch.model_helpers import refuse_old_transformers, visible_mask
from megatron_packed_sft.data.options import BatchOptions
from megatron_packed_sft.errors import InvalidInputError

Batch = dict[str, Any]
LOSSES = ("per_token", "per_conversation")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateOptions(BatchOptions):
    """How bins become a batch: the user's `BatchOptions`, and what only the dataset knows.

    Args:
        eos_id: the tokenizer's end-of-sequence id; it pads tokens and labels.
        max_seq_length: the most positions a bin may need; label-only last ids do not count (for `hf` they do).
        pad_seq_to_mult: as in `BatchOptions`, but a number.
        pad_each_bin: for `hf`: a batch [B, L] with one bin to each first index, padded on its own, instead of all bins
            end to end in one; boundaries still count through the whole batch.
        dataset_max_seqlen: the longest sequence of the dataset; `pad_cu_seqlens` needs this and the next two.
        max_samples_per_bin: the most sequences in one bin.
        min_packed_seqlen: the length of the shortest bin.
        weighted: the data has weights, so the loss mask holds them as float32, in every batch; see `loss_denominator`.
    """

    eos_id: int
    max_seq_length: int
    pad_seq_to_mult: int = 1
    pad_each_bin: bool = False
    dataset_max_seqlen: int | None = None
    max_samples_per_bin: int | None = None
    min_packed_seqlen: int | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise InvalidInputError(f"contract {self.contract!r} is unknown; choose from {', '.join(CONTRACTS)}")
        if not 0 <= self.eos_id < 2**31:
            raise InvalidInputError(f"eos_id is {self.eos_id}; it must be a token id, in 0..{2**31 - 1}")
        for name in ("max_seq_length", "pad_seq_length_to_mult", "pad_seq_to_mult"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} is {value}; it must be at least 1")
        if CONTRACTS[self.contract].flattened:
            refuse_old_transformers()
        if CONTRACTS[self.contract].flattened and (self.pad_cu_seqlens or not self.return_cu_seqlen):
            raise InvalidInputError(
                f"the {self.contract!r} contract needs the boundaries of a flattened batch; leave return_cu_seqlen on "
                "and pad_cu_seqlens off, or choose another contract"
            )
        if self.pad_each_bin and not CONTRACTS[self.contract].flattened:
            raise InvalidInputError(f"the {self.contract!r} contract pads each bin anyway; leave pad_each_bin out")
        self._check_loss()
        if self.pad_cu_seqlens:
            if not self.pad_to_max_length:
                raise InvalidInputError("pad_cu_seqlens needs batches of one shape; also set pad_to_max_length=True")
            for name in ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen"):
                if getattr(self, name) is None:
                    raise InvalidInputError(f"pad_cu_seqlens needs {name}; pass the number from the packing's metadata")

    def _check_loss(self) -> None:
        if self.loss not in LOSSES:
            raise InvalidInputError(f"loss is {self.loss!r}; choose from {', '.join(LOSSES)}")
        if self.weighted and not self.answer_only_loss:
            raise InvalidInputError(
                "answer_only_loss=False counts every token, but this data says how much each one counts; leave it out"
            )
        if self.has_float_mask and not CONTRACTS[self.contract].takes_weights:
            what, instead = f"loss={self.loss!r}", "set loss='per_token'"
            if self.weighted:
                what, instead = "data with weights", "prepare the data without weights"
            raise InvalidInputError(
                f"the {self.contract!r} contract cannot carry {what}, because Megatron-Bridge casts the sum of the "
                f"loss mask to an integer; choose contract='mcore' or 'hf', or {instead}"
            )

    @property
    def has_float_mask(self) -> bool:
        """Whether the loss mask holds weights; the same for every batch of a dataset."""
        return self.weighted or self.loss != LOSSES[0]

    @property
    def min_boundaries(self) -> int:
        """The fewest boundaries of a bin: 0, the ends of its sequences at their most, and the end of the padding."""
        return (self.max_samples_per_bin or 0) + 2 if self.pad_cu_seqlens else 0

    def padded_length(self, longest: int, limit: int) -> int:
        """Return the length of a padded bin (for `hf`: of the whole batch) for the longest content.

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


class CollatedBins(NamedTuple):
    """A batch as the kernel fills it: R rows of L positions and K boundaries each.

    R is B, one bin per row, or 1 for a flattened batch, whose bins are concatenated.
    """

    ids: npt.NDArray[Any]  # [3, R, L]: tokens, labels, position ids
    loss_mask: npt.NDArray[Any]  # [R, L]; in a flattened batch only filled with weights, at the labels' own positions
    boundaries: npt.NDArray[np.int32]  # [2, R, K]: with and without the padding that aligns sequences
    longest: npt.NDArray[np.int32]  # [B, 1]
    padding_mask: npt.NDArray[np.bool_]  # [R, L], or empty when the contract has none
    doc_ids: npt.NDArray[np.int32]  # [R, L], or empty when they were not asked for
    token_count: list[int]  # of each bin
    num_boundaries: list[int]  # how many of the K are each row's own; its last one is repeated
    denominators: npt.NDArray[np.float64]  # [B], or empty without weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What a consumer expects; `adapt` gives the kernel's arrays their names."""

    adapt: Callable[[Any, CollateOptions], Batch]
    keeps_eos_loss: bool  # where the token is EOS, when the stored mask decides
    keeps_all_eos_loss: bool = False  # the same, when the loss counts at every token
    has_padding_mask: bool = False
    masks_sequences: bool = False  # the dense mask keeps sequences apart
    flattened: bool = False  # all bins end to end instead of one padded row each
    takes_weights: bool = False
    fewest_positions: int = 0  # of a padded row: a model of Megatron-Core cannot run on none


def _bridge_0_6(bins: CollatedBins, options: CollateOptions) -> Batch:
    batch = _tokens_and_labels(bins)
    if options.return_cu_seqlen:
        return batch | _boundaries_q_kv(bins, options)
    return batch | {"attention_mask": _causal_mask(bins)}


def _bridge_main(bins: CollatedBins, options: CollateOptions) -> Batch:
    return _bridge_0_6(bins, options) | {"padding_mask": torch.from_numpy(bins.padding_mask)}


class MaskedByBoundaries(Batch):
    """A batch without an attention mask: a model that took None for one would let the sequences see each other."""

    def __missing__(self, key: str) -> Any:
        if key != "attention_mask":
            raise KeyError(key)
        raise InvalidInputError(
            "this batch has boundaries instead of an attention_mask, and without either the sequences of a bin see "
            "each other; pass packed_seq_params(batch) of megatron_packed_sft.megatron.forward_step to the model, or "
            "open the dataset with return_cu_seqlen=False to get a dense mask"
        )


def _mcore(bins: CollatedBins, options: CollateOptions) -> Batch:
    batch = _tokens_and_labels(bins) | {"padding_mask": torch.from_numpy(bins.padding_mask)}
    if options.has_float_mask:
        batch["loss_denominator"] = torch.from_numpy(bins.denominators)
    if options.return_cu_seqlen:
        batch = MaskedByBoundaries(batch | _boundaries_q_kv(bins, options))
        del batch["attention_mask"]
        return batch
    return batch | {"attention_mask": visible_mask(torch.from_numpy(bins.doc_ids)).logical_not_()}


def _hf(bins: CollatedBins, options: CollateOptions) -> Batch:
    batch = _hf_without_weights(bins)
    if options.has_float_mask:
        batch["weighted_labels"] = batch.pop("labels")
        batch["loss_mask"] = torch.from_numpy(bins.loss_mask)
        batch["loss_denominator"] = torch.from_numpy(bins.denominators)
    return batch


def _hf_without_weights(bins: CollatedBins) -> Batch:
    boundaries = torch.from_numpy(bins.boundaries[0, 0])
    longest = int(bins.longest.max())
    return {
        # With a cache, which is their default, models take the batch for one text, and its sequences see each other.
        "use_cache": False,
        "input_ids": torch.from_numpy(bins.ids[0]),
        "labels": torch.from_numpy(bins.ids[1]),
        "position_ids": torch.from_numpy(bins.ids[2]),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


CONTRACTS = {
    "bridge_0_6": Contract(adapt=_bridge_0_6, keeps_eos_loss=False),
    "bridge_main": Contract(adapt=_bridge_main, keeps_eos_loss=True, has_padding_mask=True),
    "mcore": Contract(
        adapt=_mcore,
        keeps_eos_loss=True,
        keeps_all_eos_loss=True,
        has_padding_mask=True,
        masks_sequences=True,
        takes_weights=True,
        fewest_positions=1,
    ),
    "hf": Contract(adapt=_hf, keeps_eos_loss=True, keeps_all_eos_loss=True, flattened=True, takes_weights=True),
}


def _tokens_and_labels(bins: CollatedBins) -> Batch:
    return {
        "tokens": torch.from_numpy(bins.ids[0]),
        "labels": torch.from_numpy(bins.ids[1]),
        "loss_mask": torch.from_numpy(bins.loss_mask),
        "position_ids": torch.from_numpy(bins.ids[2]),
        "token_count": bins.token_count,
    }


def _boundaries_q_kv(bins: CollatedBins, options: CollateOptions) -> Batch:
    aligned = options.pad_seq_to_mult > 1
    boundaries = torch.from_numpy(bins.boundaries[1 if aligned else 0])
    longest = _max_seqlen(bins, options)
    batch = {
        "attention_mask": None,
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if aligned:
        physical = torch.from_numpy(bins.boundaries[0])
        batch |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
    return batch


def _max_seqlen(bins: CollatedBins, options: CollateOptions) -> torch.Tensor:
    if not options.pad_cu_seqlens:
        return torch.from_numpy(bins.longest)
    assert options.dataset_max_seqlen is not None
    assert options.min_packed_seqlen is not None
    num_bins, length = bins.loss_mask.shape
    longest = max(options.dataset_max_seqlen, length - options.min_packed_seqlen)
    return torch.full((num_bins,), longest, dtype=torch.int32)


def _causal_mask(bins: CollatedBins) -> torch.Tensor:
    num_bins, length = bins.loss_mask.shape
    visible = torch.ones(length, length, dtype=torch.bool).tril_()
    return visible.logical_not_().expand(num_bins, 1, length, length)
