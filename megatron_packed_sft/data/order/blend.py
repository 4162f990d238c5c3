"""Blends: which source gives sample i of the stream, so that every prefix of it is mixed by the weights.

    weights 3 : 1 : 1    sample   0 1 2 3 4 | 5 6 7 8 9 | ...
                         source   0 0 1 0 2 | 0 0 1 0 2 | ...       3 : 1 : 1, repeated

The n-th sample of a source with share w may come once its share has begun, at i > (n - 1) / w, and must come when it
is complete, by i = ceil(n / w). Then the source's count is never a whole sample away from w * i. Among the sources
that may come, the one with the earliest deadline does. This always succeeds:
- Of a source, what may only come after sample a and must come by sample b is floor(w * b) - ceil(w * a) samples at
  most; over all sources that is never more than the b - a there is room for. Whenever no interval is overfull,
  serving the earliest deadline first meets every deadline.
- There is always a source that may come: if all were level with their shares or ahead of them after sample i came,
  i samples would have been given out before it did.

Weights are kept as integers, so nothing ever drifts; the pattern repeats after their sum. The counts of all sources
are the whole state. `BlendOrder` turns the choice of sources into indices for the samplers.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.data.order.state import BlendState
from megatron_packed_sft.errors import InvalidInputError

_MAX_TOTAL = 1 << 61  # lags and deadlines stay inside 64 bits
_RESOLUTION = 1 << 60  # of weights that have no such common denominator
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
    """How far one source of a blend is: its weight, realised share, samples taken and epochs."""

    weight: float
    share: float
    num_samples: int
    epochs: float


class Blend:
    """A deterministic mixture of sources: after i samples, each count is less than one sample off weight * i.

    Args:
        weights: one number per source, in any unit. Decimal fractions are taken as written: 0.1 is one tenth.
        sizes: samples in each source, to report epochs; an exhausted source starts over.

    Example:
        >>> blend = Blend([0.6, 0.2, 0.2], sizes=[100, 10, 10])
        >>> blend.choose(0, 10).sources.tolist()
        [0, 0, 1, 0, 2, 0, 0, 1, 0, 2]
        >>> blend.choose(0, 10).positions.tolist()
        [0, 1, 0, 2, 0, 3, 4, 1, 5, 1]
    """

    def __init__(self, weights: Sequence[Any], sizes: Sequence[int]) -> None:
        self.weights = whole_weights(weights)
        self.sizes = tuple(int(size) for size in sizes)
        if len(self.sizes) != len(self.weights):
            raise InvalidInputError(
                f"{len(self.weights)} weights for {len(self.sizes)} sources; give each source one weight"
            )
        for number, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
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
        total = sum(self.weights)
        return [
            SourceProgress(weight / total, count / position if position else 0.0, count, count / size if size else 0.0)
            for weight, count, size in zip(self.weights, self.counts(position), self.sizes, strict=True)
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
        same_weights = state.weights == self.weights
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
        weights = np.array(self.weights, np.int64)
        order_kernels.schedule(weights, sum(self.weights), lags, counts, first - start.position, *choice)
        end = BlendPoint(first + len(choice.sources), tuple(counts.tolist()))
        self._remember(end)
        return end.counts

    def _nearest_point(self, position: int) -> BlendPoint:
        points = self._points
        known = points[bisect.bisect_right(points, position, key=lambda point: point.position) - 1]
        # The pattern starts over after every sum of the weights, so the counts there are known.
        rounds = (position - self.origin.position) // sum(self.weights)
        begun = BlendPoint(
            self.origin.position + rounds * sum(self.weights),
            tuple(before + rounds * weight for before, weight in zip(self.origin.counts, self.weights, strict=True)),
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

    def _lags(self, point: BlendPoint, origin: BlendPoint) -> list[int]:
        total = sum(self.weights)
        lags = [
            weight * (point.position - origin.position) - total * (count - before)
            for weight, count, before in zip(self.weights, point.counts, origin.counts, strict=True)
        ]
        if any(abs(lag) >= total for lag in lags):
            raise InvalidInputError(
                f"the blend in the loader state has counts {list(point.counts)}, which weights {list(self.weights)} "
                f"do not give after {point.position} samples; restore the checkpoint it came from"
            )
        return lags


class BlendOrder:
    """The order of a blend, as indices into its sources laid end to end: an `Order` for the samplers.

    Args:
        blend: which source comes when.
        orders: the order of each source's own samples, with its own epochs.

    Example:
        >>> orders = [SampleOrder(4, seed=1, fingerprint="a"), SampleOrder(2, seed=1, fingerprint="b")]
        >>> order = BlendOrder(Blend([2, 1], sizes=[4, 2]), orders)
        >>> order.at(range(6)).tolist()
        [1, 0, 4, 2, 3, 5]
    """

    def __init__(self, blend: Blend, orders: Sequence[SampleOrder]) -> None:
        if blend.sizes != tuple(order.num_samples for order in orders):
            raise InvalidInputError(
                f"the blend has sizes {list(blend.sizes)} but the orders "
                f"{[order.num_samples for order in orders]}; give each source its own order"
            )
        if len({order.seed for order in orders}) != 1:
            raise InvalidInputError("the sources of a blend have different seeds; give all their orders the same seed")
        self.blend = blend
        self.orders = tuple(orders)
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

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """Return the index of the sample at each position of the stream, in the sources laid end to end.

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


def whole_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """Return weights as integers without a common divisor, in the same proportions.

    Weights whose common denominator is too large are rounded to 2^-60 of their sum: one sample in 10^18.

    Example:
        >>> whole_weights([0.1, 0.25, 2])
        (2, 5, 40)
    """
    exact = [_exact(number, weight) for number, weight in enumerate(weights)]
    total = sum(exact)
    if total == 0:
        raise InvalidInputError("the weights of a blend are all zero; give at least one source a positive weight")
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _MAX_TOTAL:
        whole = [max(1, round(weight * _RESOLUTION / total)) if weight else 0 for weight in exact]
    return tuple(whole)


def _exact(number: int, weight: Any) -> Fraction:
    try:
        # A float as text is what its owner wrote; its exact value has a denominator of 2^55 and no pattern.
        exact = weight if isinstance(weight, Fraction) else Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        raise InvalidInputError(f"weight {number} of the blend is {weight!r}; give a number of at least 0") from None
    if exact < 0:
        raise InvalidInputError(f"weight {number} of the blend is {weight!r}; give a number of at least 0")
    return exact
