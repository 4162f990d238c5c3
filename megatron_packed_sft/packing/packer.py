"""`pack`: lengths in, a plan out.

lengths ─▶ items (filter, cut, count) ─▶ strategy (which sizes share a bin) ─▶ bins ─▶ order ─▶ PackPlan
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.bin_order import balanced, hold_back, shuffled, trained_tokens_by_bin
from megatron_packed_sft.packing.copies import Copies, copies_among, keep_apart
from megatron_packed_sft.packing.greedy_split import split_greedily
from megatron_packed_sft.packing.items import OVERFLOWS, Items, make_items, sizes_of
from megatron_packed_sft.packing.options import PackOptions, Steps, steps_from
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import Bins, Int64, PackingProblem, histogram_of
from megatron_packed_sft.packing.strategies.registry import CustomStrategy, GivenStrategy, run_strategy

_logger = logging.getLogger(__name__)


def pack(
    lengths: npt.ArrayLike,
    *,
    pack_size: int,
    strategy: str | CustomStrategy = PackOptions.strategy,
    overflow: str = PackOptions.overflow,
    stride: int = PackOptions.stride,
    min_len: int = PackOptions.min_len,
    max_len: int | None = None,
    max_seqs_per_bin: int | None = None,
    pad_seq_to_mult: int = PackOptions.pad_seq_to_mult,
    measure: str = PackOptions.measure,
    order_window: int | None = None,
    shuffle_output: bool = PackOptions.shuffle_output,
    steps: Steps | Mapping[str, Any] | None = None,
    whole_batches: bool = PackOptions.whole_batches,
    trained_tokens: npt.ArrayLike | None = None,
    copies_of: npt.ArrayLike | None = None,
    seed: int = PackOptions.seed,
    allow_code: bool = PackOptions.allow_code,
    work_limit: int = PackOptions.work_limit,
) -> PackPlan:
    """Pack sequences of these lengths into bins of `pack_size`.

    Every argument that is not listed here is a field of `PackOptions`, which documents them; docs/packing.md shows how
    they work together.

    Args:
        lengths: tokens of each sequence, 1 or more.
        strategy: a name, or a function of yours; see `register_strategy` for what it is given and returns.
        steps: {global_batch, balance}: group bins into steps of similar cost, and shuffle the steps.
        trained_tokens: trained tokens of each sequence, for balance='trained_tokens'.
        copies_of: one integer per sequence, equal for copies of one sequence. Copies do not share a bin as long as
            anything else fits; `accounting.num_copies_together` counts those that do. `greedy` only counts.

    Example:
        >>> plan = pack([700, 300, 600, 400], pack_size=1000)
        >>> [plan.bin(b).tolist() for b in range(plan.num_bins)]
        [[0, 1], [2, 3]]
    """
    grouping = steps_from(steps)
    if grouping is None and whole_batches:
        raise InvalidInputError("whole_batches needs to know the batch: pass steps={'global_batch': ...}")
    options = PackOptions(
        pack_size=pack_size,
        strategy=strategy if isinstance(strategy, str) else GivenStrategy.of(strategy),
        overflow=overflow,
        stride=stride,
        min_len=min_len,
        max_len=max_len,
        max_seqs_per_bin=max_seqs_per_bin,
        pad_seq_to_mult=pad_seq_to_mult,
        measure=measure,
        order_window=order_window,
        shuffle_output=shuffle_output,
        global_batch=None if grouping is None else grouping.global_batch,
        balance="none" if grouping is None else grouping.balance,
        whole_batches=whole_batches,
        seed=seed,
        allow_code=allow_code,
        work_limit=work_limit,
    )
    return pack_with(options, lengths, trained_tokens=trained_tokens, copies_of=copies_of)


def pack_with(
    options: PackOptions,
    lengths: npt.ArrayLike,
    *,
    trained_tokens: npt.ArrayLike | None = None,
    copies_of: npt.ArrayLike | None = None,
    prefix: str = "",
    overflows: tuple[str, ...] = OVERFLOWS,
) -> PackPlan:
    """Pack as `pack` does, with options that come from a configuration.

    Args:
        options: checked here.
        lengths: see `pack`.
        trained_tokens: see `pack`.
        copies_of: see `pack`.
        prefix: what comes before an option's name where the user wrote it, such as `packing.`, for messages.
        overflows: the choices that the user has for `overflow`.
    """
    options.check(prefix, overflows)
    if options.balance == "trained_tokens" and trained_tokens is None:
        raise InvalidInputError(
            f"{prefix}balance='trained_tokens' needs trained_tokens: pass the count for each sequence"
        )
    # NumPy's integers are welcome, but a fingerprint and a JSON header want plain ones.
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
    _check_left(items, prefix)
    found = None
    if fills_gaps:
        items, *found = split_greedily(items, options)
    problem = _problem(items, options)
    copies = None if copies_of is None else copies_among(copies_of, items)
    bins, window_offsets, num_together = _run(options, problem, copies, found)
    plan = PackPlan(
        bin_offsets=bins.bin_offsets,
        indices=bins.indices if items.packed is None else items.packed[bins.indices],
        item_lengths=items.lengths,
        pack_size=options.pack_size,
        strategy=str(options.strategy),
        method=bins.method,
        measure=options.measure,
        pad_seq_to_mult=options.pad_seq_to_mult,
        accounting=replace(items.accounting, num_copies_together=num_together),
        lower_bound=problem.lower_bound,
        chunks=items.chunks,
    )
    if options.whole_batches and options.global_batch is not None:
        plan, window_offsets = hold_back(plan, window_offsets, options.global_batch)
    plan = _ordered(plan, options, window_offsets, trained_tokens)
    _log(plan)
    return plan


def _check_left(items: Items, prefix: str) -> None:
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
        # An oversized sequence (overflow=single) counts as one that fills its bin: nothing joins it there.
        sizes = np.minimum(sizes, np.int32(options.pack_size))
        histogram = histogram_of(sizes, options.pack_size)
    return PackingProblem(
        sizes=sizes,
        histogram=histogram,
        capacity=options.pack_size,
        max_per_bin=1 << 40 if options.max_seqs_per_bin is None else int(options.max_seqs_per_bin),
        seed=options.seed,
        work_limit=int(options.work_limit),
    )


def _run(
    options: PackOptions, problem: PackingProblem, copies: Copies | None, found: list[Any] | None
) -> tuple[Bins, Int64, int]:
    """Pack everything, or stretch by stretch; bins that were found while sequences were cut are taken as they are.

    Returns the bins, where each stretch's bins start, and how many copies share a bin with another one.
    """
    if found is not None:
        bins, window_offsets = found
        has_copies = copies is not None and copies.group_of.max() >= 0
        num_together = keep_apart(bins, problem, copies, may_move=False)[1] if copies is not None and has_copies else 0
        return bins, window_offsets, num_together
    num_items = problem.sizes.size
    order_window = options.order_window
    if order_window is None or order_window >= num_items:
        bins, num_together = _run_stretch(options, problem, copies)
        return bins, np.array([0, bins.bin_offsets.size - 1]), num_together
    parts = []
    num_together = 0
    for start in range(0, num_items, order_window):
        sizes = problem.sizes[start : start + order_window]
        stretch = replace(problem, sizes=sizes, histogram=histogram_of(sizes, problem.capacity))
        inside = None if copies is None else copies.stretch(start, start + order_window)
        part, num_inside = _run_stretch(options, stretch, inside)
        parts.append((start, part))
        num_together += num_inside
    offsets = [part.bin_offsets[1:] + start for start, part in parts]
    bins = Bins(
        bin_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        indices=np.concatenate([part.indices + np.int32(start) for start, part in parts]),
        method=f"stretches of {order_window}",
    )
    return bins, np.cumsum([0, *(part.bin_offsets.size - 1 for _, part in parts)]), num_together


def _run_stretch(options: PackOptions, problem: PackingProblem, copies: Copies | None) -> tuple[Bins, int]:
    bins = run_strategy(options.strategy, problem)
    if copies is None or copies.group_of.max() < 0:
        return bins, 0
    # Greedy promises the data's order, which an exchange would break.
    return keep_apart(bins, problem, copies, may_move=options.strategy != "greedy")


def _ordered(
    plan: PackPlan, options: PackOptions, window_offsets: Int64, trained_tokens: npt.ArrayLike | None
) -> PackPlan:
    global_batch = None if options.global_batch is None else int(options.global_batch)
    if options.balance != "none" and global_batch is not None:
        costs = plan.bin_squared_lengths
        if options.balance == "trained_tokens":
            costs = trained_tokens_by_bin(plan, trained_tokens)
        return plan.reordered(balanced(costs, global_batch, options.seed), global_batch)
    if options.shuffle_output:
        return plan.reordered(shuffled(plan.num_bins, window_offsets, options.seed), global_batch)
    return replace(plan, global_batch=global_batch)


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
    if accounting.num_copies_together:
        _logger.info("%d copies share a bin with another copy of the same sequence", accounting.num_copies_together)
