"""The classic strategies: next fit (also with cuts), first fit and best fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_packed_sft.packing.items import Accounting, Chunks, Items
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.strategies.packing_problem import (
    Bins,
    Int64,
    PackingProblem,
    bins_from_numbers,
    bins_from_patterns,
)
from megatron_packed_sft.support.drop_reasons import DropReason


def pack_greedy(problem: PackingProblem) -> Bins:
    """Next fit: keep the order; a sequence that does not fit into the current bin opens the next one.

    Example:
        >>> sizes = np.array([3, 2, 1], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_greedy(problem).bin_offsets.tolist()
        [0, 1, 3]
    """
    from megatron_packed_sft.packing.search.sequence_kernel import next_fit

    bin_of = np.empty(problem.sizes.size, np.int32)
    num_bins = next_fit(problem.sizes, problem.capacity, problem.max_per_bin, bin_of)
    return bins_from_numbers(bin_of, num_bins)


def pack_first_fit(problem: PackingProblem) -> Bins:
    """First fit decreasing: the longest first, each into the earliest bin with room.

    Example:
        >>> sizes = np.array([1, 3, 2, 2], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_first_fit(problem).indices.tolist()
        [0, 1, 2, 3]
    """
    from megatron_packed_sft.packing.search.sequence_kernel import sort_decreasing

    order = np.empty(problem.sizes.size, np.int32)
    sort_decreasing(problem.sizes, problem.histogram, order)
    return _first_fit(problem, order)


def pack_first_fit_shuffle(problem: PackingProblem) -> Bins:
    """First fit over shuffled sequences, as in NeMo: bins are mixed and depend on the seed.

    Example:
        >>> sizes = np.array([4, 4], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_first_fit_shuffle(problem).indices.tolist()
        [0, 1]
    """
    from megatron_packed_sft.packing.search.sequence_kernel import shuffle_groups

    order = np.arange(problem.sizes.size, dtype=np.int32)
    shuffle_groups(order, np.array([0, order.size]), np.uint64(problem.seed))
    return _first_fit(problem, order)


def pack_best_fit(problem: PackingProblem) -> Bins:
    """Best fit decreasing: the longest first, each into the bin with the least room it fits into.

    Example:
        >>> sizes = np.array([1, 3, 2, 2], np.int32)
        >>> problem = PackingProblem(sizes=sizes, histogram=np.bincount(sizes, minlength=5), capacity=4)
        >>> pack_best_fit(problem).indices.tolist()
        [0, 1, 2, 3]
    """
    from megatron_packed_sft.packing.search.histogram_kernel import best_fit_decreasing

    patterns = best_fit_decreasing(problem.histogram, problem.capacity, problem.max_per_bin)
    return bins_from_patterns(problem, patterns)


def _first_fit(problem: PackingProblem, order: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Bins:
    from megatron_packed_sft.packing.search.sequence_kernel import first_fit

    bin_of = np.empty(problem.sizes.size, np.int32)
    num_bins = first_fit(problem.sizes, order, problem.capacity, problem.max_per_bin, bin_of)
    return bins_from_numbers(bin_of, num_bins)


def split_greedily(items: Items, options: PackOptions) -> tuple[Items, Bins, Int64]:
    """Next fit that cuts: a sequence fills the rest of a bin and continues in the next one, in the data's order.

    `items` are whole sequences, filtered by length. A chunk is never shorter than `min_len`; a shorter tail of a
    sequence is dropped and counted. Returns the chunks, the bins, and where the bins of each order window start.
    """
    from megatron_packed_sft.packing.search.sequence_kernel import cut_and_fill

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
