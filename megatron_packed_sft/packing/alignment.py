"""Making the number of bins a multiple of the number of ranks, deterministically."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.problem import Int32

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedPlan:
    """What training consumes: `bins` are canonical bin numbers of `plan`, in reading order, a multiple of world_size.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> aligned = pack([4, 4, 4], pack_size=4).aligned(world_size=2, drop_last=True)
        >>> aligned.bins.tolist(), aligned.dropped_bins.tolist()
        ([0, 1], [2])
    """

    plan: PackPlan
    world_size: int
    drop_last: bool
    bins: Int32
    repeated_bins: Int32  # appended again at the end, so that all ranks have as many
    dropped_bins: Int32  # the last ones, which no rank reads
    fingerprint: str

    @property
    def num_bins(self) -> int:
        """Number of bins, repeated ones included."""
        return self.bins.size

    def __len__(self) -> int:
        return self.num_bins


def align(plan: PackPlan, world_size: int, drop_last: bool) -> AlignedPlan:
    """See `PackPlan.aligned`."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidInputError(f"world_size must be a whole number from 1 on, not {world_size!r}")
    if plan.num_bins == 0:
        raise InvalidInputError("the plan has no bins, so there is nothing to share among ranks; check what was packed")
    order = plan.bin_order
    remainder = plan.num_bins % world_size
    nothing = np.empty(0, np.int32)
    if remainder == 0:
        bins, repeated, dropped = order, nothing, nothing
    elif drop_last:
        bins, repeated, dropped = order[:-remainder], nothing, order[-remainder:]
    else:
        # More ranks than bins: the repetition itself goes around.
        repeated = np.resize(order, world_size - remainder)
        bins, dropped = np.concatenate([order, repeated]), nothing
    bins.flags.writeable = False
    fingerprint = plan.fingerprint_of_bins(bins)
    _logger.info(
        "aligned plan: num_raw_bins=%d num_aligned_bins=%d world_size=%d drop_last=%s "
        "raw_fingerprint=%s aligned_fingerprint=%s",
        plan.num_bins,
        bins.size,
        world_size,
        drop_last,
        plan.fingerprint,
        fingerprint,
    )
    if repeated.size:
        _logger.info("aligned plan: pad_needed=%d repeated_bins=%s", repeated.size, repeated.tolist())
    if dropped.size:
        _logger.info("aligned plan: dropped_bins=%s", dropped.tolist())
    return AlignedPlan(
        plan=plan,
        world_size=world_size,
        drop_last=drop_last,
        bins=bins,
        repeated_bins=repeated,
        dropped_bins=dropped,
        fingerprint=fingerprint,
    )
