"""PackPlan: which sequences share a bin, in which order bins are read, and what happened to the rest.

    bin_offsets   int64 [num_bins + 1]     bin b = indices[bin_offsets[b] : bin_offsets[b + 1]]
    indices       int32 [num_packed]       numbers of units: sequences, or their pieces when `chunks` is there
    unit_lengths  int32 [num_units]        tokens of every unit, packed or not

Canonical order: indices ascend inside a bin, bins are ordered by their smallest index. `order`, if there is one, says
in which order bins are read; it never changes what is in a bin.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.accounting import Accounting
from megatron_packed_sft.packing.fingerprint import fingerprint_of
from megatron_packed_sft.packing.items import Chunks
from megatron_packed_sft.packing.sizes import sizes_of
from megatron_packed_sft.packing.strategies.problem import Int32, Int64

if TYPE_CHECKING:
    from megatron_packed_sft.packing.alignment import AlignedPlan
    from megatron_packed_sft.packing.stats import PlanStats


@dataclass(frozen=True, kw_only=True, eq=False)
class PackPlan:
    """A packing of sequences into bins: a pure function of lengths, options and seed, the same everywhere.

    Made by `pack`, or read by `PackPlan.load`. Its arrays cannot be written to.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> plan = pack([3, 1, 2, 2], pack_size=4)
        >>> [plan.bin(b).tolist() for b in range(plan.num_bins)]
        [[0, 1], [2, 3]]
    """

    bin_offsets: Int64
    indices: Int32
    unit_lengths: Int32
    pack_size: int
    strategy: str
    method: str  # how the strategy found it, when it has more than one way
    measure: str
    pad_seq_to_mult: int
    accounting: Accounting
    lower_bound: int  # no packing of the same units has fewer bins
    chunks: Chunks | None = None
    order: Int32 | None = None
    global_batch: int | None = None  # bins to a step, when `order` is grouped into steps
    held_back: Int32 | None = None  # units left out so that every step is whole

    def __post_init__(self) -> None:
        arrays: list[npt.NDArray[Any] | None] = [self.bin_offsets, self.indices, self.unit_lengths]
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
            f"PackPlan({self.num_bins:,} bins of {self.pack_size:,}, {self.indices.size:,} units, "
            f"strategy {self.strategy!r}, {self.fingerprint})"
        )

    def bin(self, number: int) -> Int32:
        """Return the units of a bin, by its canonical number.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([3, 4, 1], pack_size=4).bin(0).tolist()
            [0, 2]
        """
        if not 0 <= number < self.num_bins:
            raise InvalidInputError(f"bin {number} is not in a plan of {self.num_bins} bins")
        return self.indices[self.bin_offsets[number] : self.bin_offsets[number + 1]]

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of what is in the bins: equal for equal plans, on every machine."""
        parts: list[str | int | npt.NDArray[Any]] = ["pack plan 1", self.pack_size]
        parts += [self.bin_offsets, self.indices, self.unit_lengths]
        if self.chunks is not None:
            parts += ["chunks", self.chunks.sequence, self.chunks.start, self.chunks.masked_prefix]
        return fingerprint_of(*parts)

    @cached_property
    def order_fingerprint(self) -> str:
        """Checksum of the bins in the order they are read; `fingerprint` itself for the canonical order."""
        return self.fingerprint_of_bins(self.bin_order)

    def fingerprint_of_bins(self, bins: Int32) -> str:
        """Checksum of these bins one after the other; `fingerprint` when they are all, in canonical order."""
        if bins.size == self.num_bins and np.array_equal(bins, np.arange(self.num_bins)):
            return self.fingerprint
        return fingerprint_of(self.fingerprint, np.ascontiguousarray(bins, np.int32))

    @property
    def bin_order(self) -> Int32:
        """The bins in the order they are read."""
        return np.arange(self.num_bins, dtype=np.int32) if self.order is None else self.order

    @cached_property
    def bin_tokens(self) -> Int64:
        """Stored tokens of each bin. With measure='inputs' this may exceed pack_size."""
        return self._sum_by_bin(self.unit_lengths)

    @cached_property
    def bin_room(self) -> Int64:
        """What each bin uses of pack_size, in the plan's measure, padding of sequences included."""
        return self._sum_by_bin(sizes_of(self.unit_lengths, self.measure, self.pad_seq_to_mult))

    @cached_property
    def bin_squared_lengths(self) -> Int64:
        """Sum of squared lengths of each bin: what attention costs there."""
        return self._sum_by_bin(self.unit_lengths.astype(np.int64) ** 2)

    def _sum_by_bin(self, values: Int32 | Int64) -> Int64:
        return np.add.reduceat(values[self.indices], self.bin_offsets[:-1], dtype=np.int64)

    def stats(self) -> PlanStats:
        """Return the plan in numbers: how full, how wasteful, what was dropped, how far from the bound.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([3, 1, 2, 2], pack_size=4).stats().utilization
            1.0
        """
        from megatron_packed_sft.packing.stats import stats_of

        return stats_of(self)

    def aligned(self, world_size: int, drop_last: bool) -> AlignedPlan:
        """Return the bins, in reading order, made a multiple of `world_size`.

        drop_last drops the last bins; otherwise the first ones are repeated at the end. Both, the counts and the
        fingerprints are logged.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([4, 4, 4], pack_size=4).aligned(world_size=2, drop_last=False).bins.tolist()
            [0, 1, 2, 0]
        """
        from megatron_packed_sft.packing.alignment import align

        return align(self, world_size, drop_last)

    def reordered(self, order: Int32, global_batch: int | None = None) -> PackPlan:
        """Return the same bins, read in another order.

        Example:
            >>> from megatron_packed_sft.packing.packer import pack
            >>> pack([4, 4], pack_size=4).reordered(np.array([1, 0])).order.tolist()
            [1, 0]
        """
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
