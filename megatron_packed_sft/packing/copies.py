"""Copies of a sequence, from weights above 1: told apart, and kept out of each other's bins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import Items
from megatron_packed_sft.packing.strategies.packing_problem import (
    Bins,
    Int32,
    Int64,
    PackingProblem,
    bins_from_numbers,
    histogram_of,
)

# Elementary steps to spend on items for which nothing is found; each costs a few walks over all items.
_MOST_STEPS = 200_000_000


class Copies(NamedTuple):
    """Of each item that is packed: the group of copies it belongs to (-1: it has no copy), and its sequence."""

    group_of: Int32
    sequence_of: Int32

    def stretch(self, start: int, end: int) -> Copies:
        """Return the copies among some neighbouring items."""
        return Copies(_numbered(self.group_of[start:end]), self.sequence_of[start:end])


def copies_among(copies_of: npt.ArrayLike, items: Items) -> Copies | None:
    """Check what the caller says about copies; None when no packed sequence has a copy."""
    given = np.asarray(copies_of)
    num_sequences = items.accounting.num_sequences
    if given.shape != (num_sequences,) or given.dtype.kind not in "iu":
        raise InvalidInputError(
            f"copies_of must hold one integer for each of the {num_sequences} sequences, equal for copies, "
            f"not {given.dtype} with shape {given.shape}"
        )
    group_of = _numbered(given.astype(np.int64))
    if group_of.max() < 0:
        return None
    if items.chunks is not None:
        return Copies(group_of[items.chunks.sequence], items.chunks.sequence)
    if items.packed is not None:
        return Copies(_numbered(group_of[items.packed]), items.packed)
    return Copies(group_of, np.arange(num_sequences, dtype=np.int32))


def _numbered(ids: npt.NDArray[np.int32] | Int64) -> Int32:
    """Number the ids that occur more than once 0, 1, 2, ...; -1 for those that do not, and for -1 itself."""
    low = int(ids.min())
    if int(ids.max()) - low <= 4 * ids.size + 1024:
        places = ids - low
    else:
        places = np.unique(ids, return_inverse=True)[1].reshape(-1)
        low = 0
    is_repeated = np.bincount(places) > 1
    if low == -1 and ids.dtype == np.int32:
        is_repeated[0] = False  # our own mark for "has no copy"
    numbers = np.where(is_repeated, np.cumsum(is_repeated) - 1, -1).astype(np.int32)
    return numbers[places]


def keep_apart(bins: Bins, problem: PackingProblem, copies: Copies, may_move: bool) -> tuple[Bins, int]:
    """Exchange items until no bin holds two copies; return the bins, and how many copies still share one.

    The number of bins stays. Without `may_move` nothing is exchanged, only counted.
    """
    from megatron_packed_sft.packing.search.copies_kernel import count_together, part_copies

    num_bins = bins.bin_offsets.size - 1
    group_offsets, members = _by_value(copies.group_of, int(copies.group_of.max()) + 1)
    bin_of = np.empty(problem.sizes.size, np.int32)
    items_per_bin = np.diff(bins.bin_offsets)
    bin_of[bins.indices] = np.repeat(np.arange(num_bins, dtype=np.int32), items_per_bin)
    seen, owner = np.empty(num_bins, np.int64), np.empty(num_bins, np.int32)
    together = count_together(bin_of, copies.sequence_of, group_offsets, members, seen, owner)
    if not together or not may_move:
        return bins, int(together)
    size_offsets, by_size = _by_value(problem.sizes, problem.capacity + 1)
    used = np.add.reduceat(problem.sizes[bins.indices], bins.bin_offsets[:-1], dtype=np.int64)
    part_copies(
        bin_of,
        problem.sizes,
        copies.group_of,
        copies.sequence_of,
        group_offsets,
        members,
        size_offsets,
        by_size,
        problem.capacity - used,
        items_per_bin,
        problem.max_per_bin,
        max(16, _MOST_STEPS // (8 * problem.sizes.size)),
    )
    together = count_together(bin_of, copies.sequence_of, group_offsets, members, seen, owner)
    return bins_from_numbers(bin_of, num_bins, bins.method), int(together)


def _by_value(values: Int32, num_values: int) -> tuple[Int64, Int32]:
    """List the positions of each value 0, 1, 2, ... in ascending order, and where each list starts; -1 is left out."""
    from megatron_packed_sft.packing.search.fit_kernel import sort_by_value

    chosen = values if values.min() >= 0 else values[values >= 0]
    counts = histogram_of(chosen, num_values - 1)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    positions = np.empty(chosen.size, np.int32)
    sort_by_value(values, offsets.copy(), positions)
    return offsets, positions
