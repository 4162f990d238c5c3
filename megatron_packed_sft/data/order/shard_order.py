"""Shuffling that visits few shards at a time, for data that is larger than the cache it is read through.

    shards, in a new order every epoch    3 0 | 4 1 | 2        windows of two
    samples, shuffled inside a window     3 0 3 3 0 0 | ...

Samples that are stored more than a window apart never meet in a batch, and the distance that a sample can travel inside
an epoch is that of its window. With one window over all shards it is a full shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """An order of samples by shards: shards are shuffled, and the samples of `window` shards at a time.

    Args:
        shard_sizes: the samples of each shard, in stored order.
        window: how many shards are mixed.
        seed: each seed gives a different order.
        fingerprint: identifies the dataset; the same seed orders other data differently.

    Example:
        >>> order = ShardOrder((2, 2, 2), window=1, seed=1)
        >>> order.at(range(6)).tolist()
        [4, 5, 1, 0, 2, 3]
    """

    shard_sizes: tuple[int, ...]
    window: int
    seed: int = 1234
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidInputError(f"shard_window is {self.window}; it must be at least 1")

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return sum(self.shard_sizes)

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """Return the sample at each position of the endless stream of epochs."""
        wanted = np.array(positions, np.int64, ndmin=1)
        if wanted.size and int(wanted.min()) < 0:
            raise InvalidInputError(f"position {int(wanted.min())} is before the start of the order; count from 0")
        epochs, inside = np.divmod(wanted, self.num_samples)
        found = np.empty_like(wanted)
        for epoch in np.unique(epochs).tolist():
            shards, starts, window_starts = _layout(self, epoch)
            windows = np.searchsorted(window_starts, inside, side="right") - 1
            for window in np.unique(windows[epochs == epoch]).tolist():
                here = (epochs == epoch) & (windows == window)
                first, last = int(window_starts[window]), int(window_starts[window + 1])
                mixed = SampleOrder(last - first, self.seed, f"{self.fingerprint}|window {window}")
                offsets = first + mixed.at(inside[here] - first + epoch * (last - first))
                places = np.searchsorted(starts, offsets, side="right") - 1
                found[here] = shards[places] + offsets - starts[places]
        return found


@lru_cache(maxsize=16)
def _layout(order: ShardOrder, epoch: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return of an epoch's shards, in turn: their first samples, where they start in the epoch; and the windows."""
    count = len(order.shard_sizes)
    turn = SampleOrder(count, order.seed, f"{order.fingerprint}|shards").samples(epoch * count, count)
    sizes = np.asarray(order.shard_sizes, np.int64)
    firsts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    starts = np.concatenate([[0], np.cumsum(sizes[turn])])
    window_starts = np.append(starts[:-1][:: order.window], starts[-1])
    return firsts[turn], starts[:-1], window_starts
