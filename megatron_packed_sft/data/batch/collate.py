"""Rows become a batch: lengths first, then one call of the compiled kernel per piece, then the consumer's names.

    pieces ─ measure ─▶ B, L, K ─ allocate ─▶ buffers ─ fill_padded / fill_flattened ─▶ buffers ─ contract ─▶ dict

tokens = ids[s:e-1], labels = ids[s+1:e], loss_mask = mask[s:e-1] and positions 0..e-s-2 for each sequence [s, e) of a
row; then padding. The kernel releases the interpreter lock, so a prefetch thread costs the training step nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.data.batch.contracts import CONTRACTS, Batch, CollateOptions, FlattenedBins, PaddedBins
from megatron_packed_sft.data.batch.located_bins import (
    BAD_LENGTH,
    BAD_OFFSETS,
    BAD_POSITION,
    LENGTH,
    OK,
    POSITION,
    ROW,
    SEQ_FIRST,
    SEQ_LAST,
    LocatedBins,
    damaged_bin,
)
from megatron_packed_sft.errors import InvalidInputError

Pieces = Sequence[LocatedBins]

_NO_MASK = np.empty((0, 0), np.bool_)
_NO_DOC_IDS = np.empty((0, 0), np.int32)
_WIDE_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "input_ids")


class BatchBuffers:
    """Memory that batches are made in again and again: a batch is valid until the next one is made in it.

    A loader that hands out batches ahead of their use keeps as many of these as batches are alive.

    Args:
        pin_memory: page-locked memory, so that copies to a CUDA device overlap with its work.

    Example:
        >>> buffers = BatchBuffers()
        >>> batch = collate(pieces, 8, options, buffers)  # doctest: +SKIP
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self._bytes: dict[str, npt.NDArray[np.uint8]] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The buffer `name` in this shape; its content is what was left there.

        Example:
            >>> BatchBuffers().take("ids", (3, 8, 4096), np.int32).shape
            (3, 8, 4096)
        """
        array = self._arrays.get(name)
        if array is None or array.shape != shape or array.dtype != dtype:
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            memory = self._bytes.get(name)
            if memory is None or memory.size < num_bytes:
                memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pin_memory).numpy()
                self._bytes[name] = memory
            array = memory[:num_bytes].view(dtype).reshape(shape)
            self._arrays[name] = array
        return array


class _FreshMemory:
    """The same without reuse: every batch owns its memory."""

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Memory that nobody else has."""
        return np.empty(shape, dtype)


_FRESH = _FreshMemory()
_Memory = BatchBuffers | _FreshMemory


def collate(pieces: Pieces, batch_size: int, options: CollateOptions, buffers: BatchBuffers | None = None) -> Batch:
    """Make a batch of rows; see contracts.py for what is in it.

    Args:
        pieces: rows and their places in the batch; each of the `batch_size` places exactly once.
        batch_size: B.
        options: lengths, padding and the consumer's contract.
        buffers: memory to make the batch in; None gives every batch memory of its own.

    Example:
        >>> from megatron_packed_sft.data.batch.located_bins import locate_in_samples
        >>> row = {"input_ids": [5, 6, 7, 8, 9], "seq_boundaries": [0, 3, 5], "loss_mask": [0, 1, 0, 1, 0]}
        >>> options = CollateOptions(contract="mcore", eos_id=2, max_seq_length=16, pad_seq_length_to_mult=4)
        >>> batch = collate([locate_in_samples([row])], 1, options)
        >>> batch["tokens"].tolist(), batch["labels"].tolist()
        ([[5, 6, 8, 2]], [[6, 7, 9, 2]])
        >>> batch["loss_mask"].tolist(), batch["cu_seqlens_q"].tolist()
        ([[0, 1, 1, 0]], [[0, 2, 3, 4]])
    """
    memory = _FRESH if buffers is None else buffers
    token_count, num_sequences = _measure(pieces, batch_size)
    contract = CONTRACTS[options.contract]
    fill = _flattened if contract.flattened else _padded
    rows = fill(pieces, token_count, num_sequences, options, memory)
    batch = contract.adapt(rows, options)
    if options.return_doc_ids:
        batch["doc_ids"] = torch.from_numpy(rows.doc_ids)
    return batch


def widen(batch: Batch) -> Batch:
    """A `compact` batch with the int64 values that models expect; call it where the batch is, on the device.

    Example:
        >>> widen({"tokens": torch.tensor([[5]], dtype=torch.int32)})["tokens"].dtype
        torch.int64
    """
    return {key: value.to(torch.int64) if key in _WIDE_KEYS else value for key, value in batch.items()}


def _measure(pieces: Pieces, batch_size: int) -> tuple[list[int], list[int]]:
    """How many tokens (ids that predict another one) and sequences each row has, by its place in the batch."""
    # Lists: for the few numbers of a batch they are quicker than arrays, and their integers do not overflow.
    token_count, num_sequences = [0] * batch_size, [0] * batch_size
    for piece in pieces:
        num_ids, num_starts = min(piece.flat_ids.size, piece.flat_mask.size), piece.seq_starts.size
        for index, (start, length, first, last, position, _, _) in enumerate(piece.rows.T.tolist()):
            if not 0 <= position < batch_size or num_sequences[position]:
                raise damaged_bin(piece, index, BAD_POSITION)
            if not 0 <= start < start + length <= num_ids:
                raise damaged_bin(piece, index, BAD_LENGTH)
            if not 0 <= first < last <= num_starts or last - first > length:
                raise damaged_bin(piece, index, BAD_OFFSETS)
            token_count[position] = length - last + first
            num_sequences[position] = last - first
    if batch_size < 1 or 0 in num_sequences:
        num_rows = sum(piece.rows.shape[1] for piece in pieces)
        raise InvalidInputError(f"{num_rows} rows were given for a batch of {batch_size}; give one for each place")
    return token_count, num_sequences


def _padded(
    pieces: Pieces,
    token_count: list[int],
    num_sequences: list[int],
    options: CollateOptions,
    memory: _Memory,
) -> PaddedBins:
    from megatron_packed_sft.data.batch import collate_kernel

    contract = CONTRACTS[options.contract]
    longest = max(token_count)
    if longest > options.max_seq_length:
        raise _overlong(pieces, token_count.index(longest), longest, options)
    num_rows, length = len(token_count), options.padded_length(longest, options.max_seq_length)
    num_boundaries = [1 + count + (tokens < length) for count, tokens in zip(num_sequences, token_count, strict=True)]
    width = max(options.min_boundaries, *num_boundaries)

    # Buffers are NumPy's, and torch only wraps the results: half the cost of slicing tensors.
    if options.compact:
        ids = memory.take("ids", (3, num_rows, length), np.int32)
        loss_mask = memory.take("loss_mask", (num_rows, length), np.uint8)
    else:  # one allocation for all four
        whole = memory.take("ids", (4, num_rows, length), np.int64)
        ids, loss_mask = whole[:3], whole[3]
    boundaries = memory.take("boundaries", (2, num_rows, width), np.int32)
    longest_of_row = memory.take("longest", (num_rows, 1), np.int32)
    padding_mask, doc_ids = _NO_MASK, _NO_DOC_IDS
    if contract.has_padding_mask:
        padding_mask = memory.take("padding_mask", (num_rows, length), np.bool_)
    if options.return_doc_ids or (contract.masks_sequences and not options.return_cu_seqlen):
        doc_ids = memory.take("doc_ids", (num_rows, length), np.int32)
    keeps_eos_loss = contract.keeps_eos_loss if options.answer_only_loss else contract.keeps_all_eos_loss
    for piece in pieces:
        code, index = collate_kernel.fill_padded(
            piece.flat_ids,
            piece.flat_mask,
            piece.seq_starts,
            piece.rows,
            ids,
            loss_mask,
            boundaries,
            longest_of_row,
            padding_mask,
            doc_ids,
            options.eos_id,
            keeps_eos_loss,
            not options.answer_only_loss,
            options.pad_seq_to_mult > 1,
        )
        if code != OK:
            raise damaged_bin(piece, index, code)
    return PaddedBins(ids, loss_mask, boundaries, longest_of_row, padding_mask, doc_ids, token_count, num_boundaries)


def _flattened(
    pieces: Pieces,
    token_count: list[int],
    num_sequences: list[int],
    options: CollateOptions,
    memory: _Memory,
) -> FlattenedBins:
    from megatron_packed_sft.data.batch import collate_kernel

    lengths = [tokens + count for tokens, count in zip(token_count, num_sequences, strict=True)]
    longest_row = max(lengths)
    if longest_row > options.max_seq_length:
        raise _overlong(pieces, lengths.index(longest_row), longest_row, options)
    row_offsets = np.cumsum([0, *lengths])
    seq_offsets = np.cumsum([0, *num_sequences])
    num_ids, num_documents = int(row_offsets[-1]), int(seq_offsets[-1])
    total = options.padded_length(num_ids, options.max_seq_length * len(lengths))
    has_padding = total > num_ids

    ids = memory.take("ids", (3, total), np.int32 if options.compact else np.int64)
    boundaries = memory.take("boundaries", (num_documents + 1 + has_padding,), np.int32)
    doc_ids = memory.take("doc_ids", (1, total), np.int32) if options.return_doc_ids else _NO_DOC_IDS
    boundaries[0] = 0
    if has_padding:
        boundaries[-1] = total
        ids[0, num_ids:] = options.eos_id
        ids[1, num_ids:] = collate_kernel.IGNORED_LABEL
        ids[2, num_ids:] = np.arange(total - num_ids)
        doc_ids[:, num_ids:] = num_documents
    for piece in pieces:
        code, index = collate_kernel.fill_flattened(
            piece.flat_ids,
            piece.flat_mask,
            piece.seq_starts,
            piece.rows,
            row_offsets[:-1],
            seq_offsets[:-1],
            ids,
            boundaries,
            doc_ids.reshape(-1),
            options.eos_id,
            not options.answer_only_loss,
            options.pad_seq_to_mult > 1,
        )
        if code != OK:
            raise damaged_bin(piece, index, code)
    return FlattenedBins(ids[:, None], boundaries, doc_ids)


def _overlong(pieces: Pieces, position: int, num_tokens: int, options: CollateOptions) -> InvalidInputError:
    piece, index = next(
        (piece, index)
        for piece in pieces
        for index, place in enumerate(piece.rows[POSITION].tolist())
        if place == position
    )
    row = piece.rows[ROW, index]
    length = piece.rows[LENGTH, index]
    num_sequences = piece.rows[SEQ_LAST, index] - piece.rows[SEQ_FIRST, index]
    return InvalidInputError(
        f"{piece.source}: row {row} ({length} ids in {num_sequences} sequences) needs {num_tokens} positions, more "
        f"than max_seq_length {options.max_seq_length}; set max_seq_length to at least {num_tokens}, or pack the data "
        "again with a smaller pack size"
    )
