"""The order of samples: one keyed permutation per epoch, computed rather than stored.

    position in the stream   0 1 2 3 4 | 5 6 7 8 9 | 10 ...        endless
    epoch                        0     |     1     |  2
    sample (5 in the set)    3 4 1 2 0 | 1 2 4 0 3 |  ...          each epoch holds every sample once

The permutation is a swap-or-not shuffle (Hoang, Morris, Rogaway 2012). It works for any number of samples, needs no
table, and uses integers only. In each round a sample stays in place with probability one half, and two samples keep
their distance with probability one half; after 64 rounds either is left with probability 2^-64.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError

MAX_SAMPLES = 1 << 62
_NUM_ROUNDS = 64

Int64Array = npt.NDArray[np.int64]


class Order(Protocol):
    """An endless stream of samples with random access: what the samplers draw from."""

    @property
    def num_samples(self) -> int:
        """How many samples there are; indices are in 0..num_samples-1."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data behind the indices."""

    @property
    def seed(self) -> int | None:
        """The seed of the shuffle, or None for stored order."""

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """Return the sample at each position of the stream."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of one dataset's samples, a function of (seed, epoch, fingerprint); it costs nothing to create.

    Args:
        num_samples: samples in the dataset: one epoch.
        seed: each seed gives a different order.
        fingerprint: identifies the dataset; the same seed orders other data differently.
        shuffle: False keeps the stored order in every epoch; the seed is ignored.

    Example:
        >>> order = SampleOrder(5, seed=1, fingerprint="abc")
        >>> order.samples(0, 10).tolist()
        [3, 4, 1, 2, 0, 1, 2, 4, 0, 3]
    """

    num_samples: int
    seed: int | None = 1234
    fingerprint: str = ""
    shuffle: bool = True

    def __post_init__(self) -> None:
        num_samples = operator.index(self.num_samples)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise InvalidInputError(f"an order needs 1..2^62 samples, not {num_samples}; is the dataset empty?")
        object.__setattr__(self, "num_samples", num_samples)
        if self.shuffle and self.seed is None:
            raise InvalidInputError("a shuffled order needs a seed; give an integer, or set shuffle=False")
        object.__setattr__(self, "seed", operator.index(self.seed) if self.shuffle and self.seed is not None else None)

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """Return the sample at each position of the endless stream of epochs.

        Example:
            >>> SampleOrder(3, shuffle=False).at([0, 4, 2]).tolist()
            [0, 1, 2]
        """
        wanted = np.array(positions, np.int64, ndmin=1)
        if wanted.size == 0:
            return wanted
        first, last = int(wanted.min()), int(wanted.max())
        if first < 0:
            raise InvalidInputError(f"position {first} is before the start of the order; positions count from 0")
        first_epoch, last_epoch = first // self.num_samples, last // self.num_samples
        if first_epoch == last_epoch:  # the usual case: no division per position
            return self._shuffled(wanted - first_epoch * self.num_samples, first_epoch)
        epochs, samples = np.divmod(wanted, self.num_samples)
        by_epoch = np.argsort(epochs, axis=None, kind="stable")
        flat = samples.reshape(-1)
        for here in np.split(by_epoch, np.flatnonzero(np.diff(epochs.reshape(-1)[by_epoch])) + 1):
            flat[here] = self._shuffled(flat[here], int(epochs.flat[here[0]]))
        return samples

    def samples(self, first: int, count: int) -> Int64Array:
        """Return the samples at positions first..first+count-1.

        Example:
            >>> SampleOrder(3, shuffle=False).samples(2, 3).tolist()
            [2, 0, 1]
        """
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def __getitem__(self, position: int) -> int:
        """Return the sample at one position."""
        return int(self.at([operator.index(position)])[0])

    def _shuffled(self, offsets: Int64Array, epoch: int) -> Int64Array:
        """Return the samples at offsets inside an epoch; the array is overwritten."""
        if self.shuffle and self.num_samples > 1:
            from megatron_packed_sft.data.order import order_kernels

            sums, keys = _round_keys(self.num_samples, self.seed, self.fingerprint, epoch)
            order_kernels.swap_or_not(offsets.reshape(-1), self.num_samples, sums, keys)
        return offsets


@lru_cache(maxsize=64)  # two epochs of a few datasets; a kilobyte each
def _round_keys(
    num_samples: int, seed: int | None, fingerprint: str, epoch: int
) -> tuple[Int64Array, npt.NDArray[np.uint64]]:
    """Return the pair sum and the coin key of each round, straight out of a hash."""
    material = hashlib.shake_128(f"packed_sft order 1|{seed}|{epoch}|{fingerprint}".encode()).digest(16 * _NUM_ROUNDS)
    words = np.frombuffer(material, "<u8").astype(np.uint64).reshape(2, _NUM_ROUNDS)
    return (words[0] % np.uint64(num_samples)).astype(np.int64), words[1].copy()


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """An order that visits few shards at a time, for data that is larger than the cache it is read through.

        shards, in a new order every epoch    3 0 | 4 1 | 2        windows of two
        samples, shuffled inside a window     3 0 3 3 0 0 | ...

    Samples that are stored more than a window apart never meet in a batch, and inside an epoch a sample stays within
    its window. With one window over all shards it is a full shuffle.

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
