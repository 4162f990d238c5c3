"""The order of a blend: the sources laid end to end, drawn from as the blend says, each in an order of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.order.blend import Blend, BlendChoice, SourceProgress
from megatron_packed_sft.data.order.blend_weights import AnnealedWeights, BlendSchedule
from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.errors import InvalidInputError

_LARGEST_GAP = 4096  # between positions that are still read in one go


class BlendOrder:
    """The order of a blend, as indices into its sources laid end to end: an `Order` for the samplers.

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
