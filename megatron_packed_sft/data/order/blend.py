"""Blends: which source gives sample i of the stream, so that every prefix of it is mixed by the weights.

    weights 3 : 1 : 1    sample   0 1 2 3 4 | 5 6 7 8 9 | ...
                         source   0 0 1 0 2 | 0 0 1 0 2 | ...       3 : 1 : 1, repeated

Let due(i) be a source's share of the first i samples: its weight times i, or, if weights change over the run, their sum
over these samples. The n-th sample of the source may come once its share has begun, at the first i with due(i) > n - 1,
and must come when it is complete, by the first i with due(i) >= n. Then the source's count is never a whole sample away
from due(i). Among the sources that may come, the one with the earliest deadline does. This always succeeds, for any
due(i) that never falls, if those of all sources add up to i:
- Of a source, what may only come after sample a and must come by sample b is floor(due(b)) - ceil(due(a)) samples at
  most; over all sources that is never more than the b - a there is room for. Whenever no interval is overfull,
  serving the earliest deadline first meets every deadline.
- There is always a source that may come: if all were level with their shares or ahead of them after sample i came,
  i samples would have been given out before it did.

Weights are kept as integers, so nothing ever drifts; while they are constant, the pattern repeats after their sum. The
counts of all sources are the whole state. `BlendOrder` turns the choice of sources into indices for the samplers.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.order.blend_weights import AnnealedWeights, BlendSchedule, WeightStages, whole_weights
from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.data.order.state import BlendState
from megatron_packed_sft.errors import InvalidInputError

_MAX_POINTS = 256
_LARGEST_GAP = 4096  # between positions that are still read in one go


class BlendPoint(NamedTuple):
    """Samples taken from each source by the first `position` samples."""

    position: int
    counts: tuple[int, ...]


class BlendChoice(NamedTuple):
    """Where samples of the stream come from: the source, and the position in that source's own stream."""

    sources: npt.NDArray[np.int32]
    positions: Int64Array


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far one source of a blend is: its weight now, realised share of all samples, samples taken and epochs."""

    weight: float
    share: float
    num_samples: int
    epochs: float


class Blend:
    """A deterministic mixture of sources: after i samples, each count is less than one sample off what is due then.

    Args:
        weights: one number per source, in any unit. Decimal fractions are taken as written: 0.1 is one tenth. Or
            `AnnealedWeights`, which change over the run.
        sizes: samples in each source, to report epochs; an exhausted source starts over.

    Example:
        >>> blend = Blend([0.6, 0.2, 0.2], sizes=[100, 10, 10])
        >>> blend.choose(0, 10).sources.tolist()
        [0, 0, 1, 0, 2, 0, 0, 1, 0, 2]
        >>> blend.choose(0, 10).positions.tolist()
        [0, 1, 0, 2, 0, 3, 4, 1, 5, 1]
        >>> Blend(AnnealedWeights((1, 0), (1, 1), first=4, last=6), [9, 9]).choose(0, 10).sources.tolist()
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]
    """

    def __init__(self, weights: Sequence[Any] | AnnealedWeights, sizes: Sequence[int]) -> None:
        self.annealing = weights if isinstance(weights, AnnealedWeights) else None
        self.weights = weights.start if isinstance(weights, AnnealedWeights) else whole_weights(weights)
        self.stages = WeightStages.constant(self.weights) if self.annealing is None else self.annealing.stages()
        self.sizes = tuple(int(size) for size in sizes)
        if len(self.sizes) != len(self.weights):
            raise InvalidInputError(
                f"{len(self.weights)} weights for {len(self.sizes)} sources; give each source one weight"
            )
        for number, (size, weight) in enumerate(zip(self.sizes, map(max, *self._edges()), strict=True)):
            if size < 0 or (size == 0 and weight):
                raise InvalidInputError(
                    f"source {number} has {size} samples but a positive weight; give it data or weight 0"
                )
        self.origin = BlendPoint(0, (0,) * len(self.weights))
        # Points of the stream whose counts are known, ascending. Replaced as a whole and never changed, so threads
        # may share a blend without a lock: the worst that a race can do is to forget a point.
        self._points: tuple[BlendPoint, ...] = (self.origin,)

    def choose(self, first: int, count: int) -> BlendChoice:
        """Return the source, and the position inside it, of samples first..first+count-1 of the stream.

        The time depends on the distance to the nearest known point before `first`: the end of the last call, a loaded
        state, or the start of the pattern.

        Example:
            >>> Blend([1, 1], sizes=[5, 5]).choose(1_000_000_000_000, 3).positions.tolist()
            [500000000000, 500000000000, 500000000001]
        """
        choice = BlendChoice(np.empty(count, np.int32), np.empty(count, np.int64))
        self._run(first, choice)
        return choice

    def counts(self, position: int) -> tuple[int, ...]:
        """Return how many of the first `position` samples each source gave.

        Example:
            >>> Blend([0.5, 0.25, 0.25], sizes=[9, 9, 9]).counts(8)
            (4, 2, 2)
        """
        return self._run(position, BlendChoice(np.empty(0, np.int32), np.empty(0, np.int64)))

    def progress(self, position: int) -> list[SourceProgress]:
        """Return the weight, realised share, count and epochs of each source after `position` samples.

        Example:
            >>> Blend([0.5, 0.5], sizes=[10, 40]).progress(100)[0]
            SourceProgress(weight=0.5, share=0.5, num_samples=50, epochs=5.0)
        """
        total, weights = self.stages.total, self.stages.weights[self.stages.stage_at(position)]
        return [
            SourceProgress(weight / total, count / position if position else 0.0, count, count / size if size else 0.0)
            for weight, count, size in zip(weights, self.counts(position), self.sizes, strict=True)
        ]

    def state(self, position: int) -> BlendState:
        """Return what `load_state` needs to resume after `position` samples without replaying them.

        Example:
            >>> Blend([1, 2], sizes=[10, 10]).state(6).counts
            (2, 4)
        """
        progress = self.progress(position)
        return BlendState(
            weights=self.weights,
            counts=tuple(source.num_samples for source in progress),
            shares=tuple(source.share for source in progress),
            epochs=tuple(source.epochs for source in progress),
            origin_position=self.origin.position,
            origin_counts=self.origin.counts,
            annealing=self.annealing,
        )

    def load_state(self, position: int, state: BlendState) -> None:
        """Resume after `position` samples; if the weights have changed since, the new ones hold from there.

        Every source resumes where it was: nothing is skipped, and nothing repeats before its epoch is over.

        Example:
            >>> state = Blend([1, 1], sizes=[10, 10]).state(6)
            >>> blend = Blend([1, 3], sizes=[10, 10])
            >>> blend.load_state(6, state)
            >>> blend.counts(10)
            (4, 6)
        """
        point = BlendPoint(position, state.counts)
        same_weights = (state.weights, state.annealing) == (self.weights, self.annealing)
        origin = BlendPoint(state.origin_position, state.origin_counts) if same_weights else point
        for known in (origin, point):
            fits = len(known.counts) == len(self.weights) and sum(known.counts) == known.position <= position
            if not fits:
                raise InvalidInputError(
                    f"the blend in the loader state has counts {list(known.counts)}, which are not {known.position} "
                    f"samples of {len(self.weights)} sources; restore the checkpoint it came from"
                )
        self._lags(point, origin)  # refuses counts that these weights cannot have given
        self.origin = origin
        self._points = (origin, point) if origin != point else (origin,)

    def _run(self, first: int, choice: BlendChoice) -> tuple[int, ...]:
        """Fill `choice` from sample `first` of the stream; return the counts after it."""
        from megatron_packed_sft.data.order import order_kernels

        if first < self.origin.position:
            raise InvalidInputError(
                f"sample {first} is before {self.origin.position}, where the blend's weights were changed; "
                "read it with the blend that was used then"
            )
        start = self._nearest_point(first)
        lags, counts = np.array(self._lags(start, self.origin), np.int64), np.array(start.counts, np.int64)
        weights, ends = self.stages.arrays
        stage = self.stages.stage_at(start.position)
        order_kernels.schedule(
            weights[stage:],
            self.stages.total,
            lags,
            counts,
            first - start.position,
            *choice,
            ends[stage:] - start.position,
        )
        end = BlendPoint(first + len(choice.sources), tuple(counts.tolist()))
        self._remember(end)
        return end.counts

    def _nearest_point(self, position: int) -> BlendPoint:
        points = self._points
        known = points[bisect.bisect_right(points, position, key=lambda point: point.position) - 1]
        # The pattern starts over after every sum of the weights, so the counts there are known; until they change.
        stage = self.stages.stage_at(self.origin.position)
        weights, end = self.stages.weights[stage], int(self.stages.arrays[1][stage])
        divisor = math.gcd(*weights)
        period = self.stages.total // divisor
        rounds = (min(position, end) - self.origin.position) // period
        begun = BlendPoint(
            self.origin.position + rounds * period,
            tuple(
                before + rounds * weight // divisor for before, weight in zip(self.origin.counts, weights, strict=True)
            ),
        )
        return max(known, begun, key=lambda point: point.position)

    def _remember(self, point: BlendPoint) -> None:
        points = self._points
        where = bisect.bisect_left(points, point.position, key=lambda known: known.position)
        if where < len(points) and points[where].position == point.position:
            return
        points = (*points[:where], point, *points[where:])
        if len(points) > _MAX_POINTS:  # every other one; the origin and the latest stay
            points = (*points[:-1:2], points[-1])
        self._points = points

    def _edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first and the last weights; in between, none is zero that is not zero in both."""
        return self.stages.weights[0], self.stages.weights[-1]

    def _lags(self, point: BlendPoint, origin: BlendPoint) -> list[int]:
        total = self.stages.total
        due, due_before = self.stages.due(point.position), self.stages.due(origin.position)
        lags = [
            now - before - total * (count - count_before)
            for now, before, count, count_before in zip(due, due_before, point.counts, origin.counts, strict=True)
        ]
        if any(abs(lag) >= total for lag in lags):
            raise InvalidInputError(
                f"the blend in the loader state has counts {list(point.counts)}, which {self._described()} do "
                f"not give after {point.position} samples; restore the checkpoint it came from"
            )
        return lags

    def _described(self) -> str:
        return f"weights {list(self.weights)}{f' moving {self.annealing}' if self.annealing else ''}"


class BlendOrder:
    """The order of a blend, as indices into its concatenated sources: an `Order` for the samplers.

    Args:
        blend: which source comes when.
        orders: the order of each source's own samples, with its own epochs.
        names: of the sources, for reports; by default their numbers.

    Example:
        >>> orders = [SampleOrder(4, seed=1, fingerprint="a"), SampleOrder(2, seed=1, fingerprint="b")]
        >>> order = BlendOrder(Blend([2, 1], sizes=[4, 2]), orders)
        >>> order.at(range(6)).tolist()
        [1, 0, 4, 2, 3, 5]
    """

    def __init__(self, blend: Blend, orders: Sequence[SampleOrder], names: Sequence[str] = ()) -> None:
        if blend.sizes != tuple(order.num_samples for order in orders):
            raise InvalidInputError(
                f"the blend has sizes {list(blend.sizes)} but the orders "
                f"{[order.num_samples for order in orders]}; give each source its own order"
            )
        if len({order.seed for order in orders}) != 1:
            raise InvalidInputError("the sources of a blend have different seeds; give all their orders the same seed")
        self.blend = blend
        self.orders = tuple(orders)
        self.names = tuple(names) or tuple(map(str, range(len(orders))))
        self._starts = np.concatenate(([0], np.cumsum(blend.sizes))).astype(np.int64)

    @property
    def num_samples(self) -> int:
        """The samples of all sources together."""
        return int(self._starts[-1])

    @property
    def seed(self) -> int | None:
        """The seed of every source's shuffle; None for stored order."""
        return self.orders[0].seed

    @property
    def fingerprint(self) -> str:
        """Identifies the sources, in order; the weights are compared separately."""
        names = json.dumps([order.fingerprint for order in self.orders])
        return hashlib.blake2b(names.encode(), digest_size=16).hexdigest()

    def progress(self, position: int) -> dict[str, SourceProgress]:
        """Return how far each source is after `position` samples of the stream, by name.

        Example:
            >>> order = BlendOrder(Blend([3, 1], [5, 5]), [SampleOrder(5)] * 2, names=["chats", "web"])
            >>> order.progress(8)["web"]
            SourceProgress(weight=0.25, share=0.25, num_samples=2, epochs=0.4)
        """
        return dict(zip(self.names, self.blend.progress(position), strict=True))

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """Return the index of the sample at each position of the stream, in the concatenated sources.

        Example:
            >>> order = BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5, shuffle=False)] * 2)
            >>> order.at([0, 1, 2, 3]).tolist()
            [0, 5, 1, 6]
        """
        sources, inside = self.locate(positions)
        return inside + self._starts[sources]

    def locate(self, positions: npt.ArrayLike) -> BlendChoice:
        """Return the source, and the sample inside it, at each position of the stream.

        Example:
            >>> order = BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5, shuffle=False)] * 2)
            >>> [array.tolist() for array in order.locate([2, 3])]
            [[0, 1], [1, 1]]
        """
        wanted = np.array(positions, np.int64, ndmin=1)
        found = BlendChoice(np.empty(wanted.shape, np.int32), np.empty(wanted.shape, np.int64))
        ascending = np.argsort(wanted, axis=None, kind="stable")
        gaps = np.flatnonzero(np.diff(wanted.flat[ascending]) > _LARGEST_GAP) + 1
        for run in np.split(ascending, gaps) if wanted.size else ():
            here = wanted.flat[run]
            choice = self.blend.choose(int(here[0]), int(here[-1] - here[0]) + 1)
            found.sources.flat[run] = choice.sources[here - here[0]]
            found.positions.flat[run] = choice.positions[here - here[0]]
        for number, order in enumerate(self.orders):
            of_source = found.sources == number
            found.positions[of_source] = order.at(found.positions[of_source])
        return found


@dataclass(frozen=True)
class BlendedSources:
    """The sources of a blend; its order is known once the length of the run is.

    Args:
        orders: the order of each source's own samples.
        weights: one per source, or how they change over the run.
        names: of the sources, for reports.
    """

    orders: tuple[SampleOrder, ...]
    weights: tuple[int, ...] | BlendSchedule
    names: tuple[str, ...]

    def order(self, num_samples: int | None) -> BlendOrder:
        """Return the order of a run of so many samples; None will do for weights that do not change.

        Example:
            >>> BlendedSources((SampleOrder(5),) * 2, (3, 1), ("chats", "web")).order(None).blend.counts(8)
            (6, 2)
        """
        weights: tuple[int, ...] | AnnealedWeights
        if not isinstance(self.weights, BlendSchedule):
            weights = self.weights
        elif num_samples is None:
            raise InvalidInputError(
                "a blend whose weights change over the run needs the run's length; set max_num_samples to the samples "
                "of the whole run: steps times global batch size"
            )
        else:
            weights = self.weights.over(num_samples)
        return BlendOrder(Blend(weights, [order.num_samples for order in self.orders]), self.orders, self.names)
