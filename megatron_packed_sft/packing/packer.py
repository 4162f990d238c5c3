"""`pack`: lengths in, a plan out.

lengths ─▶ items (filter, cut, count) ─▶ strategy (which sizes share a bin) ─▶ bins ─▶ reading order ─▶ PackPlan

The reading order is shuffled, or grouped into steps of even cost. It never changes what is in a bin.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import OVERFLOWS, Items, make_items, sizes_of
from megatron_packed_sft.packing.options import PackOptions, Steps, steps_from
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.fit import split_greedily
from megatron_packed_sft.packing.strategies.packing_problem import Bins, Int32, Int64, PackingProblem, histogram_of
from megatron_packed_sft.packing.strategies.registry import CustomStrategy, GivenStrategy, run_strategy
from megatron_packed_sft.support.drop_reasons import DropReason

_logger = logging.getLogger(__name__)


def pack(
    lengths: npt.ArrayLike,
    options: PackOptions | None = None,
    *,
    pack_size: int | None = None,
    strategy: str | CustomStrategy | None = None,
    overflow: str | None = None,
    stride: int | None = None,
    max_seqs_per_bin: int | None = None,
    pad_seq_to_mult: int | None = None,
    shuffle_output: bool | None = None,
    steps: Steps | Mapping[str, Any] | None = None,
    trained_tokens: npt.ArrayLike | None = None,
    seed: int | None = None,
) -> PackPlan:
    """Pack sequences of these lengths into bins of `pack_size`.

    Args:
        lengths: tokens of each sequence, 1 or more.
        options: all options as one object; keywords replace its fields. `PackOptions` documents every field, and
            docs/packing.md shows how they work together.
        strategy: a name, or a function of yours; see `register_strategy` for its arguments and its result.
        steps: {global_batch, balance, whole_batches}: group bins into steps of similar cost, and shuffle the steps.
        trained_tokens: trained tokens of each sequence, for balance='trained_tokens'.
        pack_size, overflow, stride, max_seqs_per_bin, pad_seq_to_mult, shuffle_output, seed: as in `PackOptions`.

    Example:
        >>> plan = pack([700, 300, 600, 400], pack_size=1000)
        >>> [plan.bin(b).tolist() for b in range(plan.num_bins)]
        [[0, 1], [2, 3]]
    """
    if options is None and pack_size is None:
        raise InvalidInputError("pack_size is missing; pass pack_size=4096, or options=PackOptions(pack_size=4096)")
    given: dict[str, Any] = {
        "pack_size": pack_size,
        "strategy": strategy,
        "overflow": overflow,
        "stride": stride,
        "max_seqs_per_bin": max_seqs_per_bin,
        "pad_seq_to_mult": pad_seq_to_mult,
        "shuffle_output": shuffle_output,
        "seed": seed,
    }
    if steps is not None:
        given |= vars(steps_from(steps))
    options = replace(options or PackOptions(), **{name: value for name, value in given.items() if value is not None})
    if not isinstance(options.strategy, str):
        options = replace(options, strategy=GivenStrategy.of(options.strategy))
    return pack_with(options, lengths, trained_tokens=trained_tokens)


def pack_with(
    options: PackOptions,
    lengths: npt.ArrayLike,
    *,
    trained_tokens: npt.ArrayLike | None = None,
    prefix: str = "",
    overflows: tuple[str, ...] = OVERFLOWS,
) -> PackPlan:
    """Pack as `pack` does, with options from a configuration file.

    Args:
        options: checked here.
        lengths, trained_tokens: see `pack`.
        prefix: the configuration group of the options, such as `packing.`, for messages.
        overflows: the choices that the user has for `overflow`.
    """
    options.check(prefix, overflows)
    if options.balance == "trained_tokens" and trained_tokens is None:
        raise InvalidInputError(
            f"{prefix}balance='trained_tokens' needs trained_tokens: pass the count for each sequence"
        )
    # NumPy integers are accepted, but fingerprints and JSON headers need plain ones.
    options = replace(
        options,
        pack_size=int(options.pack_size),
        pad_seq_to_mult=int(options.pad_seq_to_mult),
        seed=int(options.seed),
    )
    others = [f"{overflow!r}" for overflow in overflows if overflow != "error"]
    fills_gaps = options.strategy == "greedy" and options.overflow == "split"
    items = make_items(
        lengths,
        limit=options.longest_item,
        overflow="single" if fills_gaps else options.overflow,
        stride=options.stride,
        min_len=options.min_len,
        max_len=options.max_len,
        remedy=f"choose a larger {prefix}pack_size, or {prefix}overflow={', '.join(others[:-1])} or {others[-1]}",
    )
    _refuse_empty(items, prefix)
    if fills_gaps:
        items, bins, window_offsets = split_greedily(items, options)
        problem = _problem(items, options)
    else:
        problem = _problem(items, options)
        bins, window_offsets = _pack_windows(options, problem)
    plan = PackPlan(
        bin_offsets=bins.bin_offsets,
        indices=bins.indices if items.packed is None else items.packed[bins.indices],
        item_lengths=items.lengths,
        pack_size=options.pack_size,
        strategy=str(options.strategy),
        method=bins.method,
        measure=options.measure,
        pad_seq_to_mult=options.pad_seq_to_mult,
        accounting=items.accounting,
        lower_bound=problem.lower_bound,
        chunks=items.chunks,
    )
    if options.whole_batches and options.global_batch is not None:
        plan, window_offsets = _hold_back(plan, window_offsets, options.global_batch)
    plan = _ordered(plan, options, window_offsets, trained_tokens)
    _log(plan)
    return plan


def _refuse_empty(items: Items, prefix: str) -> None:
    if items.packed is not None and items.packed.size == 0:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in items.accounting.dropped_sequences.items())
        raise InvalidInputError(
            f"no sequence is left to pack: all {items.accounting.num_sequences:,} were dropped ({reasons}); relax "
            f"{prefix}min_len, {prefix}max_len or {prefix}overflow, or choose a larger {prefix}pack_size"
        )


def _problem(items: Items, options: PackOptions) -> PackingProblem:
    lengths = items.lengths if items.packed is None else items.lengths[items.packed]
    sizes = sizes_of(lengths, options.measure, options.pad_seq_to_mult)
    histogram = items.histogram
    if histogram is None or sizes is not items.lengths:
        # An oversized sequence (overflow=single) counts as one that fills its bin, so nothing joins it there.
        sizes = np.minimum(sizes, np.int32(options.pack_size))
        histogram = histogram_of(sizes, options.pack_size)
    return PackingProblem(
        sizes=sizes,
        histogram=histogram,
        capacity=options.pack_size,
        max_per_bin=1 << 40 if options.max_seqs_per_bin is None else int(options.max_seqs_per_bin),
        seed=options.seed,
    )


def _pack_windows(options: PackOptions, problem: PackingProblem) -> tuple[Bins, Int64]:
    """Pack everything at once, or each `order_window` on its own; return the bins, and where each window's bins start.

    The last offset is the number of bins.
    """
    num_items = problem.sizes.size
    window = options.order_window
    if window is None or window >= num_items:
        bins = run_strategy(options.strategy, problem)
        return bins, np.array([0, bins.bin_offsets.size - 1])
    starts = range(0, num_items, window)
    parts = []
    for start in starts:
        sizes = problem.sizes[start : start + window]
        inside = replace(problem, sizes=sizes, histogram=histogram_of(sizes, problem.capacity))
        parts.append(run_strategy(options.strategy, inside))
    offsets = [part.bin_offsets[1:] + start for start, part in zip(starts, parts, strict=True)]
    bins = Bins(
        bin_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        indices=np.concatenate([part.indices + np.int32(start) for start, part in zip(starts, parts, strict=True)]),
        method=f"windows of {window}",
    )
    return bins, np.cumsum([0, *(part.bin_offsets.size - 1 for part in parts)])


def _ordered(
    plan: PackPlan, options: PackOptions, window_offsets: Int64, trained_tokens: npt.ArrayLike | None
) -> PackPlan:
    global_batch = None if options.global_batch is None else int(options.global_batch)
    if options.balance != "none" and global_batch is not None:
        costs = plan.bin_squared_lengths
        if options.balance == "trained_tokens":
            costs = _trained_tokens_by_bin(plan, trained_tokens)
        return plan.reordered(balanced(costs, global_batch, options.seed), global_batch)
    if options.shuffle_output:
        return plan.reordered(_shuffled(plan.num_bins, window_offsets, options.seed), global_batch)
    return replace(plan, global_batch=global_batch)


def _shuffled(num_bins: int, group_offsets: Int64, seed: int) -> Int32:
    """Return 0..num_bins-1, each group shuffled separately."""
    from megatron_packed_sft.packing.search.sequence_kernel import shuffle_groups

    order = np.arange(num_bins, dtype=np.int32)
    shuffle_groups(order, np.asarray(group_offsets, np.int64), np.uint64(seed))
    return order


def balanced(costs: Int64, global_batch: int, seed: int) -> Int32:
    """Sort bins by cost, cut them into steps, and shuffle the steps; a short step comes last.

    Inside a step bins stay sorted: with gradient accumulation, the bins that run at the same time are then the most
    alike. Bins of equal cost are shuffled, so that steps do not follow the data.

    Example:
        >>> order = balanced(np.array([1, 9, 2, 8]), global_batch=2, seed=0)
        >>> sorted(map(sorted, order.reshape(2, 2).tolist()))
        [[0, 2], [1, 3]]
    """
    num_bins = costs.size
    order = _shuffled(num_bins, np.array([0, num_bins]), seed)
    order = order[np.argsort(-costs[order], kind="stable")]
    num_whole = num_bins // global_batch
    whole = order[: num_whole * global_batch].reshape(num_whole, global_batch)
    # Another seed than above: the same one would undo part of the mixing when a step is a single bin.
    turns = _shuffled(num_whole, np.array([0, num_whole]), seed ^ 0x5DEECE66D)
    return np.concatenate([whole[turns].ravel(), order[num_whole * global_batch :]]).astype(np.int32)


def _hold_back(plan: PackPlan, window_offsets: Int64, global_batch: int) -> tuple[PackPlan, Int64]:
    """Leave out the emptiest bins, so that every step is whole.

    `window_offsets` are positions among all bins; they are returned as positions among the bins that stay.
    """
    remainder = plan.num_bins % global_batch
    if plan.num_bins < global_batch:
        raise InvalidInputError(
            f"whole_batches would hold back everything: {plan.num_bins} bins are fewer than a global batch of "
            f"{global_batch}; lower global_batch or turn whole_batches off"
        )
    is_out = np.zeros(plan.num_bins, np.bool_)
    is_out[np.argsort(plan.bin_room, kind="stable")[:remainder]] = True
    items_per_bin = np.diff(plan.bin_offsets)
    is_item_out = np.repeat(is_out, items_per_bin)
    held_back = np.sort(plan.indices[is_item_out])
    indices = plan.indices[~is_item_out]
    num_sequences = held_back.size
    if plan.chunks is not None:
        # A sequence is dropped only when all of its chunks are.
        num_sequences = np.setdiff1d(plan.chunks.sequence[held_back], plan.chunks.sequence[indices]).size
    num_tokens = int(plan.item_lengths[held_back].sum(dtype=np.int64))
    left = replace(
        plan,
        bin_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(items_per_bin[~is_out])]),
        indices=indices,
        accounting=plan.accounting.with_drop(DropReason.HELD_BACK, num_sequences, num_tokens),
        held_back=held_back,
    )
    num_left_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_out)])
    return left, num_left_before[window_offsets]


def _trained_tokens_by_bin(plan: PackPlan, trained_tokens: npt.ArrayLike | None) -> Int64:
    """Add up the trained tokens of each bin. A chunk counts in proportion to its new tokens.

    Example:
        >>> _trained_tokens_by_bin(pack([3, 1, 4], pack_size=4), [1, 1, 2]).tolist()
        [2, 2]
    """
    per_sequence = np.asarray(trained_tokens)
    num_sequences = plan.accounting.num_sequences
    if per_sequence.shape != (num_sequences,) or per_sequence.dtype.kind not in "iu" or per_sequence.min() < 0:
        raise InvalidInputError(
            f"trained_tokens must hold one count >= 0 for each of the {num_sequences} sequences, "
            f"not {per_sequence.dtype} with shape {per_sequence.shape}"
        )
    per_item = per_sequence.astype(np.int64)
    if plan.chunks is not None:
        new_tokens = (plan.item_lengths - plan.chunks.masked_prefix).astype(np.int64)
        whole = np.zeros(num_sequences, np.int64)
        np.add.at(whole, plan.chunks.sequence, new_tokens)
        per_item = per_item[plan.chunks.sequence] * new_tokens // whole[plan.chunks.sequence]
    return np.add.reduceat(per_item[plan.indices], plan.bin_offsets[:-1])


def _log(plan: PackPlan) -> None:
    accounting = plan.accounting
    method = f" ({plan.method})" if plan.method else ""
    _logger.info(
        "packed %d of %d sequences into %d bins of %d by %s%s; lower bound %d",
        accounting.num_sequences_packed,
        accounting.num_sequences,
        plan.num_bins,
        plan.pack_size,
        plan.strategy,
        method,
        plan.lower_bound,
    )
    if accounting.dropped_tokens or accounting.num_split or accounting.num_oversized:
        _logger.info(
            "dropped sequences %s, dropped tokens %s; truncated %d, split %d into %d chunks, oversized bins %d",
            accounting.dropped_sequences,
            accounting.dropped_tokens,
            accounting.num_truncated,
            accounting.num_split,
            accounting.num_chunks,
            accounting.num_oversized,
        )
