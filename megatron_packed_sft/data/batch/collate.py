"""Bins become a batch: measure first, then one call of the compiled kernel, then the consumer's names.

    located bins ─ measure ─▶ B, L, K ─ allocate ─▶ arrays ─ fill (kernel) ─▶ arrays ─ contract ─▶ dict

For each sequence [s, e) of a bin: tokens = ids[s:e-1], labels = ids[s+1:e], loss_mask = mask[s:e-1] and positions
0..e-s-2; then padding. The kernel releases the GIL, so a prefetch thread costs the training step nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.data.batch import collate_kernel
from megatron_packed_sft.data.batch.contracts import CONTRACTS, LOSSES, Batch, CollatedBins, CollateOptions
from megatron_packed_sft.data.batch.located_bins import (
    BAD_BATCH_INDEX,
    BATCH_INDEX,
    BIN,
    LENGTH,
    NUM_SEQUENCES,
    OK,
    WEIGHTS,
    LocatedBins,
    damaged_bin,
)
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.checksum import hash_function

_NO_OFFSETS = np.empty((2, 0), np.int64)
_NO_PADDING_MASK = np.empty((0, 0), np.bool_)
_NO_DOC_IDS = np.empty((0, 0), np.int32)
_NO_DENOMINATORS = np.empty(0, np.float64)
_PER_POSITION = {"input_ids", "labels", "weighted_labels", "loss_mask", "position_ids", "doc_ids"}
_WIDE_KEYS = ("tokens", "labels", "weighted_labels", "loss_mask", "position_ids", "input_ids")


def collate(bins: Sequence[LocatedBins], batch_size: int, options: CollateOptions) -> Batch:
    """Make a batch of bins; see contracts.py for its keys.

    Args:
        bins: bins and their indices in the batch: each of 0..batch_size-1 exactly once.
        batch_size: B.
        options: lengths, padding and the consumer's contract.

    Example:
        >>> from megatron_packed_sft.data.batch.located_bins import locate_in_samples
        >>> sample = {"input_ids": [5, 6, 7, 8, 9], "seq_boundaries": [0, 3, 5], "loss_mask": [0, 1, 0, 1, 0]}
        >>> options = CollateOptions(contract="mcore", eos_id=2, max_seq_length=16, pad_seq_length_to_mult=4)
        >>> batch = collate([locate_in_samples([sample])], 1, options)
        >>> batch["tokens"].tolist(), batch["labels"].tolist()
        ([[5, 6, 8, 2]], [[6, 7, 9, 2]])
        >>> batch["loss_mask"].tolist(), batch["cu_seqlens_q"].tolist()
        ([[0, 1, 1, 0]], [[0, 2, 3, 4]])
    """
    token_count, num_sequences = _measure(bins, batch_size)
    if not options.weighted:
        _refuse_weights(bins)
    contract = CONTRACTS[options.contract]
    measure_shape = _flattened_shape if contract.flattened else _padded_shape
    filled = _fill(bins, measure_shape(bins, token_count, num_sequences, options), token_count, options)
    batch = contract.adapt(filled, options)
    if options.return_doc_ids:
        batch["doc_ids"] = torch.from_numpy(filled.doc_ids)
    if options.pad_each_bin:  # the bins are concatenated, all of one length
        for key in _PER_POSITION & batch.keys():
            batch[key] = batch[key].view(batch_size, -1)
        if options.return_doc_ids:  # counted from 0 in each bin, as in other padded batches
            batch["doc_ids"] = batch["doc_ids"] - batch["doc_ids"][:, :1]
    return batch


def widen(batch: Batch) -> Batch:
    """Cast a `compact` batch to the int64 values that models expect; best after copying it to the device.

    A loss mask of weights stays float32.

    Example:
        >>> widen({"tokens": torch.tensor([[5]], dtype=torch.int32)})["tokens"].dtype
        torch.int64
    """
    return {
        key: value.to(torch.int64) if key in _WIDE_KEYS and not value.is_floating_point() else value
        for key, value in batch.items()
    }


class _Shape(NamedTuple):
    """The shape of a batch's arrays, and for a flattened batch where each bin begins in them."""

    num_rows: int
    length: int
    num_boundaries: list[int]  # of each row
    offsets: npt.NDArray[np.int64] = _NO_OFFSETS  # [2, B + 1]: of tokens and of boundaries


def _measure(bins: Sequence[LocatedBins], batch_size: int) -> tuple[list[int], list[int]]:
    """Return how many tokens (ids that predict another one) and sequences each bin of the batch has."""
    # Lists: for the few numbers of a batch they are quicker than arrays, and their integers do not overflow.
    token_count, num_sequences = [0] * batch_size, [0] * batch_size
    for located in bins:
        lengths, counts, indices = located.table[LENGTH : BATCH_INDEX + 1].tolist()  # with the one in between
        for column, index in enumerate(indices):
            if not 0 <= index < batch_size or num_sequences[index]:
                raise damaged_bin(located, column, BAD_BATCH_INDEX)
            token_count[index] = lengths[column] - counts[column]
            num_sequences[index] = counts[column]
    if batch_size < 1 or 0 in num_sequences:
        num_bins = sum(located.table.shape[1] for located in bins)
        raise InvalidInputError(f"a batch of {batch_size} got {num_bins} bins; give one for each batch index")
    return token_count, num_sequences


def _refuse_weights(bins: Sequence[LocatedBins]) -> None:
    for located in bins:
        if located.table[WEIGHTS].any():
            column = int(located.table[WEIGHTS].argmax())
            raise InvalidInputError(
                f"{located.origin(column)} has weights of the loss, which this batch would lose; set weighted=True, or "
                "open the data with create_sft_dataset"
            )


def _padded_shape(
    bins: Sequence[LocatedBins], token_count: list[int], num_sequences: list[int], options: CollateOptions
) -> _Shape:
    longest = max(token_count)
    if longest > options.max_seq_length:
        raise _overlong(bins, token_count.index(longest), longest, options)
    fewest = CONTRACTS[options.contract].fewest_positions  # bins of single ids predict nothing, and are all padding
    length = options.padded_length(max(longest, fewest), options.max_seq_length)
    num_boundaries = [1 + count + (tokens < length) for count, tokens in zip(num_sequences, token_count, strict=True)]
    return _Shape(len(token_count), length, num_boundaries)


def _flattened_shape(
    bins: Sequence[LocatedBins], token_count: list[int], num_sequences: list[int], options: CollateOptions
) -> _Shape:
    lengths = [tokens + count for tokens, count in zip(token_count, num_sequences, strict=True)]
    longest = max(lengths)
    if longest > options.max_seq_length:
        raise _overlong(bins, lengths.index(longest), longest, options)
    if options.pad_each_bin:
        length = options.padded_length(longest, options.max_seq_length)
        boundary_offsets = [
            0,
            *accumulate(count + (n < length) for n, count in zip(lengths, num_sequences, strict=True)),
        ]
        token_offsets = [index * length for index in range(len(lengths) + 1)]
        return _Shape(1, token_offsets[-1], [boundary_offsets[-1] + 1], np.array([token_offsets, boundary_offsets]))
    num_ids = sum(lengths)
    length = options.padded_length(num_ids, options.max_seq_length * len(lengths))
    token_offsets, boundary_offsets = [0, *accumulate(lengths)], [0, *accumulate(num_sequences)]
    token_offsets[-1] = length  # the last bin takes the padding
    boundary_offsets[-1] += length > num_ids
    return _Shape(1, length, [boundary_offsets[-1] + 1], np.array([token_offsets, boundary_offsets]))


def _fill(bins: Sequence[LocatedBins], shape: _Shape, token_count: list[int], options: CollateOptions) -> CollatedBins:
    contract = CONTRACTS[options.contract]
    num_rows, length = shape.num_rows, shape.length
    # NumPy allocates, and torch only wraps the results: half the cost of slicing tensors.
    ids: npt.NDArray[np.integer]
    loss_mask: npt.NDArray[Any]
    denominators = _NO_DENOMINATORS
    if options.has_float_mask:
        ids = np.empty((3, num_rows, length), np.int32 if options.compact else np.int64)
        loss_mask = np.empty((num_rows, length), np.float32)
        denominators = np.empty(len(token_count), np.float64)
    elif options.compact:
        ids, loss_mask = np.empty((3, num_rows, length), np.int32), np.empty((num_rows, length), np.uint8)
    else:  # one allocation for all four
        whole = np.empty((4, num_rows, length), np.int64)
        ids, loss_mask = whole[:3], whole[3]
    boundaries = np.empty((2, num_rows, max(options.min_boundaries, *shape.num_boundaries)), np.int32)
    longest = np.empty((len(token_count), 1), np.int32)
    padding_mask, doc_ids = _NO_PADDING_MASK, _NO_DOC_IDS
    if contract.has_padding_mask:
        padding_mask = np.empty((num_rows, length), np.bool_)
    if options.return_doc_ids or (contract.masks_sequences and not options.return_cu_seqlen):
        doc_ids = np.empty((num_rows, length), np.int32)
    keeps_eos_loss = contract.keeps_eos_loss if options.answer_only_loss else contract.keeps_all_eos_loss
    code, column = collate_kernel.fill(
        hash_function(),
        bins[0].table if len(bins) == 1 else np.concatenate([located.table for located in bins], axis=1),
        shape.offsets,
        ids,
        loss_mask,
        denominators,
        boundaries,
        longest,
        padding_mask,
        doc_ids,
        options.eos_id,
        keeps_eos_loss,
        not options.answer_only_loss,
        options.pad_seq_to_mult > 1,
        options.loss != LOSSES[0],
    )
    if code != OK:
        raise damaged_bin(*_located_at(bins, column), code)
    return CollatedBins(
        ids, loss_mask, boundaries, longest, padding_mask, doc_ids, token_count, shape.num_boundaries, denominators
    )


def _located_at(bins: Sequence[LocatedBins], column: int) -> tuple[LocatedBins, int]:
    """Return the bins that hold a column of all tables side by side, and its place there."""
    for located in bins:
        if column < located.table.shape[1]:
            return located, column
        column -= located.table.shape[1]
    raise IndexError(column)


def _overlong(
    bins: Sequence[LocatedBins], batch_index: int, num_positions: int, options: CollateOptions
) -> InvalidInputError:
    located, column = next(
        (located, column)
        for located in bins
        for column, index in enumerate(located.table[BATCH_INDEX].tolist())
        if index == batch_index
    )
    fields = located.table[:, column].tolist()
    num_sequences = fields[NUM_SEQUENCES]
    return InvalidInputError(
        f"{located.origin(column)}: bin {fields[BIN]} ({fields[LENGTH]} ids in {num_sequences} sequences) needs "
        f"{num_positions} positions, more than max_seq_length {options.max_seq_length}; set max_seq_length to at least "
        f"{num_positions}, or pack the data again with a smaller pack size"
    )
