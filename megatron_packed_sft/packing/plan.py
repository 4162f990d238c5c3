"""PackPlan: which sequences share a bin, in which order bins are read, and what happened to the rest.

    bin_offsets   int64 [num_bins + 1]     bin b = indices[bin_offsets[b] : bin_offsets[b + 1]]
    indices       int32 [num_packed]       numbers of items: sequences, or chunks of them where `chunks` is not None
    item_lengths  int32 [num_items]        tokens of every item, packed or not

Canonical order: indices ascend inside a bin, and bins are ordered by their smallest index. `order`, if there is one, is
the order in which bins are read; it never changes what is in a bin.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import Accounting, Chunks, sizes_of
from megatron_packed_sft.packing.strategies.packing_problem import Int32, Int64

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackPlan:
    """A packing of sequences into bins: a pure function of lengths, options and seed, the same everywhere.

    `pack` makes it, and `PackPlan.load` reads it. Its arrays are read-only.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> plan = pack([3, 1, 2, 2], pack_size=4)
        >>> [plan.bin(b).tolist() for b in range(plan.num_bins)]
        [[0, 1], [2, 3]]
    """

    bin_offsets: Int64
    indices: Int32
    item_lengths: Int32
    pack_size: int
    strategy: str
    method: str  # how the strategy found it, where it has several ways
    measure: str
    pad_seq_to_mult: int
    accounting: Accounting
    lower_bound: int  # no packing of the same items has fewer bins
    chunks: Chunks | None = None
    order: Int32 | None = None
    global_batch: int | None = None  # bins to a step, when `order` is grouped into steps
    held_back: Int32 | None = None  # items left out so that every step is whole

    def __post_init__(self) -> None:
        arrays: list[npt.NDArray[Any] | None] = [self.bin_offsets, self.indices, self.item_lengths]
        arrays += [self.order, self.held_back]
        if self.chunks is not None:
            arrays += [self.chunks.sequence, self.chunks.start, self.chunks.masked_prefix]
        for array in arrays:
            if array is not None:
                array.flags.writeable = False

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return self.bin_offsets.size - 1

    def __len__(self) -> int:
        return self.num_bins

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.num_bins:,} bins of {self.pack_size:,}, {self.indices.size:,} items, "
            f"strategy {self.strategy!r}, {self.fingerprint})"
        )

    def bin(self, number: int) -> Int32:
        """Return the items of a bin, by its canonical number."""
        if not 0 <= number < self.num_bins:
            raise InvalidInputError(f"bin {number} is not in a plan of {self.num_bins} bins")
        return self.indices[self.bin_offsets[number] : self.bin_offsets[number + 1]]

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the bins' content: equal for equal plans, on every machine."""
        parts: list[str | int | npt.NDArray[Any]] = ["pack plan 1", self.pack_size]
        parts += [self.bin_offsets, self.indices, self.item_lengths]
        if self.chunks is not None:
            parts += ["chunks", self.chunks.sequence, self.chunks.start, self.chunks.masked_prefix]
        return _fingerprint_of(*parts)

    @cached_property
    def order_fingerprint(self) -> str:
        """Checksum of the bins in the order they are read; `fingerprint` itself for the canonical order."""
        return self.fingerprint_of_bins(self.bin_order)

    def fingerprint_of_bins(self, bins: Int32) -> str:
        """Return the checksum of these bins in this order; it is `fingerprint` for all bins in canonical order."""
        if bins.size == self.num_bins and np.array_equal(bins, np.arange(self.num_bins)):
            return self.fingerprint
        return _fingerprint_of(self.fingerprint, np.ascontiguousarray(bins, np.int32))

    @property
    def bin_order(self) -> Int32:
        """The bins in the order they are read."""
        return np.arange(self.num_bins, dtype=np.int32) if self.order is None else self.order

    @cached_property
    def bin_tokens(self) -> Int64:
        """Stored tokens of each bin. With measure='inputs' this may exceed pack_size."""
        return self._sum_by_bin(self.item_lengths)

    @cached_property
    def bin_room(self) -> Int64:
        """The part of pack_size that each bin uses, in the plan's measure, with the padding of sequences."""
        return self._sum_by_bin(sizes_of(self.item_lengths, self.measure, self.pad_seq_to_mult))

    @cached_property
    def bin_squared_lengths(self) -> Int64:
        """Sum of squared lengths of each bin: its cost of attention."""
        return self._sum_by_bin(self.item_lengths.astype(np.int64) ** 2)

    def _sum_by_bin(self, values: Int32 | Int64) -> Int64:
        return np.add.reduceat(values[self.indices], self.bin_offsets[:-1], dtype=np.int64)

    def stats(self) -> PlanStats:
        """Return the plan in numbers: how full it is, what was dropped, how far it is from the lower bound."""
        return _stats(self)

    def aligned(self, world_size: int, drop_last: bool) -> AlignedPlan:
        """Return the bins, in reading order, made a multiple of `world_size`.

        `drop_last` drops the last bins; otherwise the first ones are repeated at the end. The counts, the bins and the
        fingerprints are logged.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([4, 4, 4], pack_size=4).aligned(world_size=2, drop_last=False).bins.tolist()
            [0, 1, 2, 0]
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidInputError(f"world_size must be a positive integer, not {world_size!r}")
        if self.num_bins == 0:
            raise InvalidInputError("the plan has no bins to share among ranks; check the lengths that were packed")
        aligned = _aligned(self, world_size, drop_last)
        aligned.log()
        return aligned

    def reordered(self, order: Int32, global_batch: int | None = None) -> PackPlan:
        """Return the same bins in another reading order."""
        order = np.array(order, np.int32)
        if order.shape != (self.num_bins,) or not np.array_equal(np.sort(order), np.arange(self.num_bins)):
            raise InvalidInputError(f"order must hold each of the {self.num_bins} bins once")
        return replace(self, order=order, global_batch=global_batch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to one .npz file, whole or not at all. NumPy alone can read it.

        Example:
            >>> import tempfile; from megatron_packed_sft.packing.packer import pack
            >>> path = tempfile.mkdtemp() + "/plan.npz"
            >>> pack([4, 4], pack_size=4).save(path)
            >>> PackPlan.load(path).num_bins
            2
        """
        from megatron_packed_sft.packing.plan_file import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PackPlan:
        """Read and check a plan written by `save`; see there for an example."""
        from megatron_packed_sft.packing.plan_file import load_plan

        return load_plan(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedPlan:
    """The bins that training reads: canonical numbers, in reading order, a multiple of world_size."""

    plan: PackPlan
    world_size: int
    drop_last: bool
    bins: Int32
    repeated_bins: Int32  # appended at the end, so that all ranks have the same number
    dropped_bins: Int32  # from the end; no rank reads them
    fingerprint: str

    @property
    def num_bins(self) -> int:
        """Number of bins, repeated ones included."""
        return self.bins.size

    def __len__(self) -> int:
        return self.num_bins

    def lines(self) -> list[str]:
        """Return what alignment did, one line each, for comparison between ranks and runs.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> aligned = pack([4, 4, 4], pack_size=4).aligned(world_size=2, drop_last=False)
            >>> aligned.lines()[1]
            'pad_needed=1 repeated_packs=[0]'
        """
        lines = [
            f"N_raw_packs={self.plan.num_bins} N_aligned_packs={self.num_bins} world_size={self.world_size} "
            f"drop_last={self.drop_last} raw_plan={self.plan.fingerprint} aligned_plan={self.fingerprint}"
        ]
        if self.repeated_bins.size:
            lines.append(f"pad_needed={self.repeated_bins.size} repeated_packs={self.repeated_bins.tolist()}")
        if self.dropped_bins.size:
            lines.append(f"dropped_packs={self.dropped_bins.tolist()}")
        return lines

    def log(self) -> None:
        """Log the same lines."""
        for line in self.lines():
            _logger.info("aligned plan: %s", line)


def _aligned(plan: PackPlan, world_size: int, drop_last: bool) -> AlignedPlan:
    order = plan.bin_order
    remainder = plan.num_bins % world_size
    nothing = np.empty(0, np.int32)
    if remainder == 0:
        bins, repeated, dropped = order, nothing, nothing
    elif drop_last:
        bins, repeated, dropped = order[:-remainder], nothing, order[-remainder:]
    else:
        # With more ranks than bins, the repetition itself wraps around.
        repeated = np.resize(order, world_size - remainder)
        bins, dropped = np.concatenate([order, repeated]), nothing
    bins.flags.writeable = False
    return AlignedPlan(
        plan=plan,
        world_size=world_size,
        drop_last=drop_last,
        bins=bins,
        repeated_bins=repeated,
        dropped_bins=dropped,
        fingerprint=plan.fingerprint_of_bins(bins),
    )


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """How full a plan is, what it costs, what it left out, and how far it is from the lower bound.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> stats = pack([3, 1, 2], pack_size=4).stats()
        >>> stats.num_bins, stats.utilization, stats.num_padding, stats.gap
        (2, 0.75, 2, 0.0)
    """

    num_bins: int
    num_items: int  # sequences, or chunks of them, in the bins
    utilization: float  # used positions / all positions
    num_padding: int  # unused positions
    mean_items_per_bin: float
    max_items_per_bin: int
    longest_item: int
    max_bin_tokens: int  # a shard's bins must be at least this wide to hold the plan
    mean_squared_lengths: float  # per bin: the cost of attention
    max_squared_lengths: int
    step_imbalance: float | None  # slowest bin of a step over its mean, averaged; None without steps
    lower_bound: int
    gap: float  # bins above the lower bound, as a share of it
    accounting: Accounting

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON and logs."""
        return asdict(self)


def _stats(plan: PackPlan) -> PlanStats:
    items_per_bin = np.diff(plan.bin_offsets)
    # A bin of one oversized sequence is as wide as that sequence.
    capacity = int(np.maximum(plan.bin_room, plan.pack_size).sum())
    used = plan.accounting.num_tokens_packed
    if plan.measure == "inputs":
        used -= plan.indices.size
    squared = plan.bin_squared_lengths
    return PlanStats(
        num_bins=plan.num_bins,
        num_items=plan.indices.size,
        utilization=used / capacity,
        num_padding=capacity - used,
        mean_items_per_bin=plan.indices.size / plan.num_bins,
        max_items_per_bin=int(items_per_bin.max()),
        longest_item=int(plan.item_lengths[plan.indices].max()),
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


def _fingerprint_of(*parts: str | int | npt.NDArray[Any]) -> str:
    """Return 32 hexadecimal digits, the same on every machine: xxh3_128 of the parts, each with its kind and length."""
    digest = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
            digest.update(f"{little.dtype.str}:{little.size};".encode())
            digest.update(little.view(np.uint8).data)
        else:
            text = str(part).encode()
            digest.update(f"{type(part).__name__}:{len(text)};".encode() + text)
    return digest.hexdigest()
