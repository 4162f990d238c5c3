"""Static packs of raw samples: any map-style dataset, packed by a plan, with a fixed length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_packed_sft.data._sample_lengths import (
    SampleLength,
    check_unchanged,
    compute_lengths,
    measured,
    read_sample,
)
from megatron_packed_sft.data.static_plan import plan_statically
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.support.checksum import checksum


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
