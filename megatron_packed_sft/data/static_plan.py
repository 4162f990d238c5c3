"""The static plan: whole samples in packs, a multiple of the ranks, the same on every rank and in every epoch.

    lengths ─ oversized samples: a pack of their own, or left out ─▶ raw plan ─ repeat or drop packs ─▶ aligned plan

Indices ascend inside a pack and packs are ordered by their smallest index. The sampler shuffles packs, never the plan.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import longest_that_fits
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import AlignedPlan
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

OVERFLOWS = ("single", "drop", "error")
_NUM_INDICES_SHOWN = 20
_MEANT_FOR_THE_SAMPLER = ("shuffle_output", "steps", "whole_batches")


class StaticPlan(NamedTuple):
    """A plan for samples, and which of them are oversized."""

    aligned: AlignedPlan
    oversized: npt.NDArray[np.int64]  # indices of samples, ascending
    lines: list[str]  # what a person should know, for logs


def plan_statically(
    lengths: npt.NDArray[np.int64],
    *,
    pack_size: int,
    overflow: str = "single",
    full_is_oversized: bool = False,
    world_size: int = 1,
    drop_last: bool = False,
    **pack_arguments: Any,
) -> StaticPlan:
    """Plan packs of whole samples and log what was done.

    Args:
        lengths: of all samples.
        pack_size: what a pack of several samples holds at most.
        overflow: oversized samples are packs of their own (`single`), left out (`drop`) or an `error`.
        full_is_oversized: a sample that fills a pack exactly is oversized, too.
        world_size, drop_last: make the number of packs a multiple, by repeating the first or dropping the last ones.
        pack_arguments: other fields of `PackOptions`, such as strategy.

    Example:
        >>> plan = plan_statically(np.array([3, 9, 1]), pack_size=4)
        >>> plan.aligned.bins.tolist(), plan.oversized.tolist()
        ([0, 1], [1])
    """
    if overflow not in OVERFLOWS:
        raise InvalidInputError(
            f"overflow is {overflow!r}; samples are never cut, so it is 'single', 'drop' or 'error'"
        )
    for name in _MEANT_FOR_THE_SAMPLER:
        if pack_arguments.get(name):
            raise InvalidInputError(
                f"{name} changes the order of packs, and a static plan keeps that of the data; leave it out and let "
                "the sampler shuffle the packs"
            )
    longest = longest_that_fits(
        pack_size, pack_arguments.get("measure", "tokens"), pack_arguments.get("pad_seq_to_mult", 1)
    )
    limit = longest - 1 if full_is_oversized else longest
    oversized = np.flatnonzero(lengths > limit)
    if overflow == "drop" and len(oversized) == len(lengths):
        raise InvalidInputError(
            f"static packing produced no packs: all {plural(len(lengths), 'sample')} are oversized for packs of "
            f"{pack_size}, and oversized samples are left out; choose a larger length, or allow packs of a single "
            "long sample"
        )
    if overflow == "error" and full_is_oversized and len(oversized):
        raise InvalidInputError(f"{_described(oversized, lengths, pack_size, True)}; leave them out")
    if full_is_oversized and overflow == "drop":
        pack_arguments["max_len"] = min(limit, pack_arguments.get("max_len") or limit)
    plan = pack(lengths, PackOptions(pack_size=pack_size, overflow=overflow, **pack_arguments))
    lines = []
    if len(oversized):
        fate = "packed alone" if overflow == "single" else "left out"
        lines.append(f"{_described(oversized, lengths, pack_size, full_is_oversized)}: {fate}")
        logger.info("static plan: %s", lines[0])
    aligned = plan.aligned(world_size, drop_last)
    if not aligned.num_bins:
        raise InvalidInputError(
            f"drop_last leaves no packs: the plan has {plural(plan.num_bins, 'pack')} for {world_size} ranks; repeat "
            "packs instead (drop_last false), or start fewer ranks"
        )
    return StaticPlan(aligned, oversized, [*aligned.lines(), *lines])


def _described(
    oversized: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], pack_size: int, full_is_oversized: bool
) -> str:
    """Return how many samples are oversized, and which; not all of them if they are many."""
    indices = ", ".join(map(str, oversized[:_NUM_INDICES_SHOWN].tolist()))
    more = f", and {len(oversized) - _NUM_INDICES_SHOWN:,} more" if len(oversized) > _NUM_INDICES_SHOWN else ""
    rule = f"of length {pack_size} or more" if full_is_oversized else f"longer than a pack of {pack_size}"
    number = f"{len(oversized):,} of {plural(len(lengths), 'sample')}"
    return f"{number} {'is' if len(oversized) == 1 else 'are'} {rule} (index {indices}{more})"
