"""`pack`: lengths in, a plan out.

lengths ─▶ units (filter, cut, count) ─▶ strategy (which sizes share a bin) ─▶ bins ─▶ order ─▶ PackPlan
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.bin_order import Steps, balanced, shuffled, steps_from
from megatron_packed_sft.packing.items import OVERFLOWS, Units, make_units
from megatron_packed_sft.packing.options import check_choices, check_combinations, check_counts
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.sizes import MEASURES, longest_that_fits, sizes_of
from megatron_packed_sft.packing.strategies.problem import Bins, Int64, Problem, histogram_of
from megatron_packed_sft.packing.strategies.registry import check_strategy, run_strategy
from megatron_packed_sft.packing.whole_batches import hold_back, trained_tokens_by_bin

_logger = logging.getLogger(__name__)

DEFAULT_STRATEGY = "optimal"
# Elementary steps of search that `optimal` and `window` may take: some tenths of a second at the most.
DEFAULT_WORK_LIMIT = 100_000_000


def pack(
    lengths: npt.ArrayLike,
    *,
    pack_size: int,
    strategy: str = DEFAULT_STRATEGY,
    overflow: str = "error",
    stride: int = 0,
    min_len: int = 1,
    max_len: int | None = None,
    max_seqs_per_bin: int | None = None,
    pad_seq_to_mult: int = 1,
    measure: str = "tokens",
    order_window: int | None = None,
    shuffle_output: bool = False,
    steps: Steps | Mapping[str, Any] | None = None,
    whole_batches: bool = False,
    trained_tokens: npt.ArrayLike | None = None,
    seed: int = 0,
    work_limit: int = DEFAULT_WORK_LIMIT,
) -> PackPlan:
    """Pack sequences of these lengths into bins of `pack_size`.

    Args:
        lengths: tokens of each sequence, 1 or more.
        pack_size: what a bin holds, in `measure`.
        strategy: one of `known_strategies()`. docs/packing.md compares them.
        overflow: what happens to a sequence longer than a bin: `error`; `drop` it; `truncate` it; `split` it into
            pieces that overlap by `stride` tokens (which are trained once); `single` gives it a bin of its own.
        min_len: shorter sequences, and shorter last pieces of split ones, are dropped and counted.
        max_len: longer sequences are dropped and counted, before `overflow` looks at the rest.
        max_seqs_per_bin: at most so many sequences (or pieces) to a bin.
        pad_seq_to_mult: each sequence takes its inputs rounded up to a multiple (context parallelism).
        measure: `tokens` (what shards store) or `inputs` (what the model computes: one token less per sequence).
        order_window: no bin mixes sequences of different stretches of so many, so bins stay near the data's order.
        shuffle_output: read bins in shuffled order (inside a stretch, with `order_window`).
        steps: {global_batch, balance}: group bins into steps of like cost, and shuffle the steps.
        whole_batches: hold back the emptiest bins, so that no step is short. They are counted and named.
        trained_tokens: trained tokens of each sequence, for balance='trained_tokens'.
        seed: of everything that is shuffled.
        work_limit: steps of search after which `optimal` and `window` are content with what they have.

    Example:
        >>> plan = pack([700, 300, 600, 400], pack_size=1000)
        >>> [plan.bin(b).tolist() for b in range(plan.num_bins)]
        [[0, 1], [2, 3]]
    """
    check_strategy(strategy)
    grouping = steps_from(steps)
    check_choices(overflow=(overflow, OVERFLOWS), measure=(measure, MEASURES))
    check_counts(pack_size=pack_size, min_len=min_len, pad_seq_to_mult=pad_seq_to_mult)
    check_counts(max_len=max_len, max_seqs_per_bin=max_seqs_per_bin, order_window=order_window, optional=True)
    check_counts(stride=stride, seed=seed, work_limit=work_limit, least=0)
    # NumPy's integers are welcome, but a fingerprint and a JSON header want plain ones.
    pack_size, pad_seq_to_mult, seed = int(pack_size), int(pad_seq_to_mult), int(seed)
    limit = longest_that_fits(pack_size, measure, pad_seq_to_mult)
    check_combinations(
        limit=limit,
        pack_size=pack_size,
        stride=stride,
        min_len=min_len,
        max_len=max_len,
        seed=seed,
        steps=grouping,
        order_window=order_window,
        whole_batches=whole_batches,
        has_trained_tokens=trained_tokens is not None,
    )
    units = make_units(lengths, limit=limit, overflow=overflow, stride=stride, min_len=min_len, max_len=max_len)
    problem = _problem(units, pack_size, measure, pad_seq_to_mult, max_seqs_per_bin, seed, work_limit)
    bins, window_offsets = _run(strategy, problem, order_window)
    plan = PackPlan(
        bin_offsets=bins.bin_offsets,
        indices=bins.indices if units.packed is None else units.packed[bins.indices],
        unit_lengths=units.lengths,
        pack_size=pack_size,
        strategy=strategy,
        method=bins.method,
        measure=measure,
        pad_seq_to_mult=pad_seq_to_mult,
        accounting=units.accounting,
        lower_bound=problem.lower_bound,
        chunks=units.chunks,
    )
    if whole_batches and grouping is not None:
        plan, window_offsets = hold_back(plan, window_offsets, grouping.global_batch)
    plan = _ordered(plan, grouping, shuffle_output, window_offsets, trained_tokens, seed)
    _log(plan)
    return plan


def _problem(
    units: Units,
    pack_size: int,
    measure: str,
    pad_seq_to_mult: int,
    max_seqs_per_bin: int | None,
    seed: int,
    work_limit: int,
) -> Problem:
    lengths = units.lengths if units.packed is None else units.lengths[units.packed]
    if lengths.size == 0:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in units.accounting.dropped_sequences.items())
        raise InvalidInputError(
            f"no sequence is left to pack: all {units.accounting.num_sequences:,} were dropped ({reasons}); "
            "relax min_len, max_len or overflow, or choose a larger pack_size"
        )
    sizes = sizes_of(lengths, measure, pad_seq_to_mult)
    histogram = units.histogram
    if histogram is None or sizes is not units.lengths:
        # An oversized sequence (overflow=single) counts as one that fills its bin: nothing joins it there.
        sizes = np.minimum(sizes, np.int32(pack_size))
        histogram = histogram_of(sizes, pack_size)
    return Problem(
        sizes=sizes,
        histogram=histogram,
        capacity=pack_size,
        max_per_bin=1 << 40 if max_seqs_per_bin is None else int(max_seqs_per_bin),
        seed=seed,
        work_limit=int(work_limit),
    )


def _run(strategy: str, problem: Problem, order_window: int | None) -> tuple[Bins, Int64]:
    """Pack everything, or stretch by stretch; also return where each stretch's bins start."""
    num_sequences = problem.sizes.size
    if order_window is None or order_window >= num_sequences:
        bins = run_strategy(strategy, problem)
        return bins, np.array([0, bins.bin_offsets.size - 1])
    parts = []
    for start in range(0, num_sequences, order_window):
        sizes = problem.sizes[start : start + order_window]
        part = run_strategy(strategy, replace(problem, sizes=sizes, histogram=histogram_of(sizes, problem.capacity)))
        parts.append((start, part))
    offsets = [part.bin_offsets[1:] + start for start, part in parts]
    bins = Bins(
        bin_offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        indices=np.concatenate([part.indices + np.int32(start) for start, part in parts]),
        method=f"stretches of {order_window}",
    )
    return bins, np.cumsum([0, *(part.bin_offsets.size - 1 for _, part in parts)])


def _ordered(
    plan: PackPlan,
    steps: Steps | None,
    shuffle_output: bool,
    window_offsets: Int64,
    trained_tokens: npt.ArrayLike | None,
    seed: int,
) -> PackPlan:
    if steps is not None and steps.balance != "none":
        costs = plan.bin_squared_lengths
        if steps.balance == "trained_tokens":
            costs = trained_tokens_by_bin(plan, trained_tokens)
        return plan.reordered(balanced(costs, steps, seed), int(steps.global_batch))
    global_batch = None if steps is None else int(steps.global_batch)
    if shuffle_output:
        return plan.reordered(shuffled(plan.num_bins, window_offsets, seed), global_batch)
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
            "dropped sequences %s, dropped tokens %s; truncated %d, split %d into %d pieces, oversized bins %d",
            accounting.dropped_sequences,
            accounting.dropped_tokens,
            accounting.num_truncated,
            accounting.num_split,
            accounting.num_chunks,
            accounting.num_oversized,
        )
