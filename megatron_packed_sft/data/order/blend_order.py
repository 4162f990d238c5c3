"""The order of a blend: which sample of which source comes at each position of the blended stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.order.blend import Blend, BlendChoice
from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.errors import InvalidInputError

_LARGEST_GAP = 4096  # between positions that are still read in one go


class BlendOrder:
    """The order of a blend's samples as indices into its sources laid end to end; an `Order` for the samplers.

    Args:
        blend: which source comes when.
        orders: the order of each source's own samples; each has its own epochs.

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
                f"{[order.num_samples for order in orders]}; give each source its order"
            )
        if len({order.seed for order in orders}) != 1:
            raise InvalidInputError("the sources of a blend have different seeds; give their orders one seed")
        self.blend = blend
        self.orders = tuple(orders)
        self._starts = np.concatenate(([0], np.cumsum(blend.sizes))).astype(np.int64)

    @property
    def num_samples(self) -> int:
        """Samples of all sources together."""
        return int(self._starts[-1])

    @property
    def seed(self) -> int | None:
        """Of every source's shuffle; None for stored order."""
        return self.orders[0].seed

    @property
    def fingerprint(self) -> str:
        """Identifies the sources, in order; the weights are compared by themselves."""
        names = json.dumps([order.fingerprint for order in self.orders])
        return hashlib.blake2b(names.encode(), digest_size=16).hexdigest()

    def at(self, positions: npt.ArrayLike) -> Int64Array:
        """The index of the sample at each position of the blended stream, in the sources laid end to end.

        Example:
            >>> order = BlendOrder(Blend([1, 1], [5, 5]), [SampleOrder(5, shuffle=False)] * 2)
            >>> order.at([0, 1, 2, 3]).tolist()
            [0, 5, 1, 6]
        """
        sources, inside = self.locate(positions)
        return inside + self._starts[sources]

    def locate(self, positions: npt.ArrayLike) -> BlendChoice:
        """The source and the sample inside it at each position of the blended stream.

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
