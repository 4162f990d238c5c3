"""Static packs of raw samples: any map-style dataset, packed by a plan, with a fixed length."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.options import SampleLength
from megatron_packed_sft.data.sample_lengths import (
    check_unchanged,
    compute_lengths,
    measured,
    read_sample,
)
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import longest_that_fits
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import AlignedPlan, PackPlan
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.wording import plural


class SamplePackDataset:
    """Packs of whole samples: item i is the list of the raw samples of pack i, in plan order.

    The number of packs is fixed: the same on every rank and in every epoch. Samples are never cut. With
    `overflow="single"` a sample longer than the pack becomes a pack of its own; with `drop` it is left out and counted.
    The sampler decides the order of packs in an epoch.

    Args:
        dataset: map-style; samples are whatever it returns. Iterable ones, and those with `set_epoch`, are refused.
        length_of: the number of positions a sample takes.
        pack_size: positions of a pack.
        overflow: `single`, `drop` or `error`, for oversized samples: those longer than the pack. They are logged.
        full_is_oversized: a sample that fills a pack exactly is oversized, too.
        cache_path: a directory to cache the lengths in; ranks may share a new one.
        fingerprint: of whatever changes lengths; a cache needs one. By default the dataset's own `fingerprint`.
        progress: show a progress bar while lengths are computed.
        world_size, drop_last: make the number of packs a multiple of the ranks, by repeating the first packs or by
            dropping the last ones.
        check_lengths: compare every sample's length with the planned one when it is read.
        pack_arguments: further arguments of `pack`, such as strategy or seed; not those that change the packs' order.

    Example:
        >>> packs = SamplePackDataset([[1, 2], [3], [4, 5, 6]], len, pack_size=3)
        >>> len(packs), packs[0]
        (2, [[1, 2], [3]])
    """

    def __init__(
        self,
        dataset: Any,
        length_of: SampleLength,
        *,
        pack_size: int,
        overflow: str = "single",
        full_is_oversized: bool = False,
        cache_path: str | os.PathLike[str] | None = None,
        fingerprint: str | None = None,
        world_size: int = 1,
        drop_last: bool = False,
        check_lengths: bool = True,
        progress: bool = False,
        **pack_arguments: Any,
    ) -> None:
        lengths = compute_lengths(dataset, length_of, cache_path=cache_path, fingerprint=fingerprint, progress=progress)
        self.dataset = dataset
        self.static_plan = plan_statically(
            lengths,
            pack_size=pack_size,
            overflow=overflow,
            full_is_oversized=full_is_oversized,
            world_size=world_size,
            drop_last=drop_last,
            **pack_arguments,
        )
        self.aligned = self.static_plan.aligned
        self.plan: PackPlan = self.aligned.plan
        self._identity = fingerprint if fingerprint is not None else str(getattr(dataset, "fingerprint", ""))
        self._length_of = length_of if check_lengths else None

    def __len__(self) -> int:
        return len(self.aligned.bins)

    @property
    def fingerprint(self) -> str:
        """Identifies the plan, and so the lengths; it is part of a loader's state."""
        return checksum((self.aligned.fingerprint + self._identity).encode())

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        samples = []
        for number in self.sample_numbers(index):
            sample = read_sample(self.dataset, number)
            if self._length_of is not None:
                found = measured(sample, self._length_of, number)
                check_unchanged(number, int(self.plan.item_lengths[number]), found)
            samples.append(sample)
        return samples

    def sample_numbers(self, index: int) -> list[int]:
        """Return which samples pack `index` holds."""
        numbers: list[int] = self.plan.bin(int(self.aligned.bins[index])).tolist()
        return numbers

    def __getitems__(self, indices: Sequence[int]) -> list[list[Any]]:
        """Return many packs."""
        return [self[index] for index in indices]

    @staticmethod
    def collate_fn(packs: Sequence[list[Any]]) -> list[list[Any]]:
        """Return the packs as they are: samples may be anything. `create_sft_dataset` makes batches of encoded ones."""
        return list(packs)


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
