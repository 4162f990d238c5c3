"""A plan in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_packed_sft.packing.accounting import Accounting
from megatron_packed_sft.packing.plan import PackPlan


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """How full a plan is, what it costs, what it left out, and how far it is from the best possible.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> stats = pack([3, 1, 2], pack_size=4).stats()
        >>> stats.num_bins, stats.utilization, stats.num_padding, stats.gap
        (2, 0.75, 2, 0.0)
    """

    num_bins: int
    num_units: int  # sequences, or pieces of them, in the bins
    utilization: float  # used positions / all positions
    num_padding: int  # positions that hold nothing
    mean_units_per_bin: float
    max_units_per_bin: int
    longest_unit: int
    max_bin_tokens: int  # a shard's rows must be at least this wide to hold the plan
    mean_squared_lengths: float  # per bin: what attention costs
    max_squared_lengths: int
    step_imbalance: float | None  # slowest bin of a step over its mean, averaged; None without steps
    lower_bound: int
    gap: float  # bins above the lower bound, as a share of it
    accounting: Accounting

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON and logs.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([4], pack_size=4).stats().as_dict()["num_bins"]
            1
        """
        return asdict(self)


def stats_of(plan: PackPlan) -> PlanStats:
    """See `PackPlan.stats`."""
    units_per_bin = np.diff(plan.bin_offsets)
    # A bin of one oversized sequence is as wide as that sequence.
    capacity = int(np.maximum(plan.bin_room, plan.pack_size).sum())
    used = plan.accounting.num_tokens_packed
    if plan.measure == "inputs":
        used -= plan.indices.size
    squared = plan.bin_squared_lengths
    return PlanStats(
        num_bins=plan.num_bins,
        num_units=plan.indices.size,
        utilization=used / capacity,
        num_padding=capacity - used,
        mean_units_per_bin=plan.indices.size / plan.num_bins,
        max_units_per_bin=int(units_per_bin.max()),
        longest_unit=int(plan.unit_lengths[plan.indices].max()),
        max_bin_tokens=int(plan.bin_tokens.max()),
        mean_squared_lengths=int(squared.sum()) / plan.num_bins,
        max_squared_lengths=int(squared.max()),
        step_imbalance=_step_imbalance(plan),
        lower_bound=plan.lower_bound,
        gap=plan.num_bins / plan.lower_bound - 1,
        accounting=plan.accounting,
    )


def _step_imbalance(plan: PackPlan) -> float | None:
    if plan.global_batch is None or plan.num_bins < plan.global_batch:
        return None
    num_whole = plan.num_bins // plan.global_batch
    costs = plan.bin_squared_lengths[plan.bin_order[: num_whole * plan.global_batch]]
    steps = costs.reshape(num_whole, plan.global_batch)
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())
