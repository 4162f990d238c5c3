"""Greedy with overflow=split: a sequence fills the rest of a bin and continues in the next one, in the data's order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_packed_sft.packing.accounting import Accounting
from megatron_packed_sft.packing.items import Chunks, Items
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.strategies.packing_problem import Bins, Int64
from megatron_packed_sft.support.drop_reasons import DropReason


def split_greedily(items: Items, options: PackOptions) -> tuple[Items, Bins, Int64]:
    """Cut sequences where bins end; return the chunks, the bins, and where the bins of each stretch start.

    `items` are whole sequences, filtered by length. A chunk is never shorter than `min_len`, unless it ends a sequence
    that is longer than a bin: such a tail is dropped and counted.
    """
    from megatron_packed_sft.packing.search.fit_kernel import cut_and_fill

    kept = np.arange(items.lengths.size, dtype=np.int32) if items.packed is None else items.packed
    lengths = items.lengths[kept]
    step = options.longest_item - options.stride
    most = 3 * kept.size + int(lengths.sum(dtype=np.int64)) // step + 8
    sequence, start, length, masked = (np.empty(most, np.int32) for _ in range(4))
    bin_offsets = np.empty(most + 1, np.int64)
    window = options.order_window or kept.size
    window_offsets = np.empty(-(-kept.size // window) + 1, np.int64)
    num_chunks, num_bins, num_lost = cut_and_fill(
        lengths,
        options.pack_size,
        options.measure == "inputs",
        options.pad_seq_to_mult,
        options.stride,
        options.min_len,
        1 << 40 if options.max_seqs_per_bin is None else int(options.max_seqs_per_bin),
        window,
        sequence,
        start,
        length,
        masked,
        bin_offsets,
        window_offsets,
    )
    chunks_of = np.bincount(sequence[:num_chunks], minlength=kept.size)
    packed_tokens = np.bincount(
        sequence[:num_chunks], weights=length[:num_chunks] - masked[:num_chunks], minlength=kept.size
    )
    is_split = (chunks_of > 1) | (packed_tokens < lengths)
    chunks = None
    if is_split.any():
        chunks = Chunks(
            sequence=kept[sequence[:num_chunks]],
            start=start[:num_chunks].copy(),
            masked_prefix=masked[:num_chunks].copy(),
        )
    accounting: Accounting = replace(
        items.accounting,
        num_oversized=0,
        num_split=int(is_split.sum()),
        num_chunks=int(chunks_of[is_split].sum()),
        num_overlap_tokens=int(masked[:num_chunks].sum(dtype=np.int64)),
    ).with_drop(DropReason.SHORT_TAIL, 0, int(num_lost))
    bins = Bins(bin_offsets=bin_offsets[: num_bins + 1].copy(), indices=np.arange(num_chunks, dtype=np.int32))
    if chunks is None:
        return replace(items, accounting=accounting), bins, window_offsets
    cut = Items(lengths=length[:num_chunks].copy(), packed=None, chunks=chunks, accounting=accounting)
    return cut, bins, window_offsets
