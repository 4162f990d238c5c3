"""In which order bins are read: shuffled, or grouped into steps of even cost. What is in a bin never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.strategies.problem import Int32, Int64

Balance = Literal["none", "attention", "trained_tokens"]
BALANCES: tuple[str, ...] = get_args(Balance)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How bins become optimizer steps: `global_batch` bins each, alike in cost.

    balance: `none` takes bins as they come; `attention` puts bins with like sums of squared lengths into one step, so
    that no rank waits for the others; `trained_tokens` bins with like numbers of trained tokens, so that averaging
    the ranks' losses weighs every token the same.

    Example:
        >>> Steps(global_batch=8, balance="attention")
        Steps(global_batch=8, balance='attention')
    """

    global_batch: int
    balance: str = "none"

    def __post_init__(self) -> None:
        is_count = isinstance(self.global_batch, int | np.integer) and not isinstance(self.global_batch, bool)
        if not is_count or self.global_batch < 1:
            raise InvalidInputError(f"steps.global_batch must be a whole number from 1 on, not {self.global_batch!r}")
        if self.balance not in BALANCES:
            raise InvalidInputError(f"steps.balance {self.balance!r} is unknown; choose from {', '.join(BALANCES)}")


def steps_from(given: Steps | Mapping[str, Any] | None) -> Steps | None:
    """Accept what a config file gives: {global_batch: 8, balance: attention}.

    Example:
        >>> steps_from({"global_batch": 8}).balance
        'none'
    """
    if given is None or isinstance(given, Steps):
        return given
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"steps must be a mapping with global_batch and balance, not {given!r}")
    unknown = set(given) - {"global_batch", "balance"}
    if unknown or "global_batch" not in given:
        raise InvalidInputError(f"steps needs global_batch and may have balance; it has {', '.join(sorted(given))}")
    return Steps(**given)


def shuffled(num_bins: int, group_offsets: Int64, seed: int) -> Int32:
    """Return 0..num_bins-1 with each group shuffled in itself.

    Example:
        >>> sorted(shuffled(4, np.array([0, 4]), seed=7).tolist())
        [0, 1, 2, 3]
    """
    from megatron_packed_sft.packing.search.order_kernel import shuffle_groups

    order = np.arange(num_bins, dtype=np.int32)
    shuffle_groups(order, np.asarray(group_offsets, np.int64), np.uint64(seed))
    return order


def balanced(costs: npt.NDArray[np.int64], steps: Steps, seed: int) -> Int32:
    """Sort bins by cost, cut them into steps, and shuffle the steps; a short step comes last.

    Inside a step bins stay sorted: with gradient accumulation, the bins that run at the same time are then the most
    alike. Bins of equal cost are shuffled, so that steps do not follow the data.

    Example:
        >>> order = balanced(np.array([1, 9, 2, 8]), Steps(global_batch=2, balance="attention"), seed=0)
        >>> sorted(map(sorted, order.reshape(2, 2).tolist()))
        [[0, 2], [1, 3]]
    """
    num_bins = costs.size
    order = shuffled(num_bins, np.array([0, num_bins]), seed)
    order = order[np.argsort(-costs[order], kind="stable")]
    num_whole = num_bins // steps.global_batch
    whole = order[: num_whole * steps.global_batch].reshape(num_whole, steps.global_batch)
    # Another seed than above: the same one would undo part of the mixing when a step is a single bin.
    turns = shuffled(num_whole, np.array([0, num_whole]), seed ^ 0x5DEECE66D)
    return np.concatenate([whole[turns].ravel(), order[num_whole * steps.global_batch :]]).astype(np.int32)
