"""What the charts of a dataset's page draw: histograms, lines over the bins, and attention costs by step and rank."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.report.read_bins import BinLengths, Int64

SEED: Final = 0
_NUM_BUCKETS = 64
_NUM_POINTS = 400  # of a line; screens hardly show more


class StepShape(NamedTuple):
    """Bins per optimizer step, and the data-parallel ranks that take them in turn."""

    global_batch: int
    ranks: int

    @staticmethod
    def choose(num_bins: int, recorded: int | None, global_batch: int | None, ranks: int | None) -> StepShape:
        """Return the requested shape, otherwise the one that the data was packed for, otherwise a common one.

        Example:
            >>> StepShape.choose(10_000, None, None, None), StepShape.choose(9, 6, None, None)
            (StepShape(global_batch=64, ranks=8), StepShape(global_batch=6, ranks=2))
        """
        for name, value in (("--global-batch-size", global_batch), ("--ranks", ranks)):
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} is {value}; give a positive number")
        batch = global_batch or recorded
        if batch is None:
            batch = ranks * max(1, 64 // ranks) if ranks else _power_below(min(64, max(1, num_bins // 8)))
        if ranks is None:
            ranks = max(power for power in (1, 2, 4, 8) if batch % power == 0)
        if batch % ranks:
            lower = batch // ranks * ranks
            nearest = f"{lower} or {lower + ranks}" if lower else f"{ranks}"
            raise InvalidInputError(
                f"a global batch of {batch} bins cannot be shared by {ranks} ranks; choose --global-batch-size "
                f"{nearest}"
            )
        return StepShape(batch, ranks)


def histogram(values: npt.NDArray[Any], low: float, high: float, num_buckets: int = _NUM_BUCKETS) -> dict[str, Any]:
    """Return how many values are in each of some even buckets from `low` to `high`, which belongs to the last one.

    Example:
        >>> histogram(np.array([0, 1, 5, 8]), 0, 8, 2)
        {'edges': [0.0, 4.0, 8.0], 'counts': [2, 2]}
    """
    counts, edges = np.histogram(values, num_buckets, (low, high))
    return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


def length_histogram(lengths: Int64, pack_size: int) -> dict[str, Any]:
    """Return how many sequences have which length, in whole tokens, up to the pack size or the longest sequence."""
    width = max(1, -(-max(pack_size, int(lengths.max())) // _NUM_BUCKETS))
    num_buckets = -(-max(pack_size, int(lengths.max())) // width)
    # A bucket holds lengths from its edge + 1 to the next edge, so that the last one ends with the pack size.
    return histogram(lengths, 0.5, num_buckets * width + 0.5, num_buckets) | {
        "edges": [number * width for number in range(num_buckets + 1)]
    }


def fullness(lengths: BinLengths, pack_size: int) -> dict[str, Any]:
    """Return how full the bins are: a histogram, and a line over the stored order."""
    shares = lengths.bin_tokens / pack_size
    return {"histogram": histogram(shares, 0, 1, 50), "line": _line(shares)}


def attention(lengths: BinLengths, pack_size: int, shape: StepShape) -> dict[str, Any]:
    """Return attention costs: of bins, as a share of one sequence that fills the bin, and of steps and ranks."""
    costs = lengths.attention_costs
    share = costs / pack_size**2
    num_steps = len(costs) // shape.global_batch
    return {
        "histogram": histogram(share, 0, max(1.0, float(share.max())), 50),
        "mean_share": float(share.mean()),
        "costliest_bin": int(costs.argmax()),
        "costliest_share": float(share.max()),
        "global_batch": shape.global_batch,
        "ranks": shape.ranks,
        "num_steps": num_steps,
        "steps": _line(slowest_over_mean(costs, shape)) if num_steps else None,
        "step_costs": _line(_step_costs(costs, shape)) if num_steps else None,
    }


def slowest_over_mean(costs: Int64, shape: StepShape) -> npt.NDArray[np.float64]:
    """Return, for each whole step, the attention of the busiest rank over the mean of all ranks.

    Bins go to the ranks in turn, one at a time, as in the loader.

    Example:
        >>> slowest_over_mean(np.array([3, 1, 2, 2]), StepShape(global_batch=2, ranks=2)).tolist()
        [1.5, 1.0]
        >>> slowest_over_mean(np.array([3, 1, 1, 3]), StepShape(global_batch=4, ranks=2)).tolist()
        [1.0]
    """
    num_steps = len(costs) // shape.global_batch
    steps = costs[: num_steps * shape.global_batch].reshape(num_steps, shape.global_batch // shape.ranks, shape.ranks)
    by_rank = steps.sum(axis=1)
    slowest: npt.NDArray[np.float64] = by_rank.max(axis=1) / by_rank.mean(axis=1)
    return slowest


def balance(costs: Int64, shape: StepShape) -> dict[str, float]:
    """Return the mean and the worst step of `slowest_over_mean`."""
    ratios = slowest_over_mean(costs, shape)
    return {"mean": round(float(ratios.mean()), 4), "worst": round(float(ratios.max()), 4)}


def other_shapes(num_bins: int, chosen: StepShape) -> list[StepShape]:
    """Return common shapes of steps that the data has enough bins for."""
    shapes = [StepShape(ranks * per_rank, ranks) for ranks in (2, 8, 32, 128) for per_rank in (1, 4, 16)]
    return [one for one in shapes if one.global_batch <= num_bins and one != chosen]


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _step_costs(costs: Int64, shape: StepShape) -> npt.NDArray[np.float64]:
    """Return the attention of each whole step over that of the mean step."""
    num_steps = len(costs) // shape.global_batch
    steps = costs[: num_steps * shape.global_batch].reshape(num_steps, shape.global_batch).sum(axis=1)
    over_mean: npt.NDArray[np.float64] = steps / steps.mean()
    return over_mean


def _line(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return values in stored order: all, or the lowest, highest and mean of each group if there are too many."""
    edges = np.unique(np.linspace(0, len(values), min(len(values), _NUM_POINTS) + 1).astype(np.int64))
    starts = edges[:-1]
    return {
        "at": starts.tolist(),
        "lowest": _rounded(np.minimum.reduceat(values, starts)),
        "highest": _rounded(np.maximum.reduceat(values, starts)),
        "mean": _rounded(np.add.reduceat(values, starts) / np.diff(edges)),
    }


def _rounded(values: npt.NDArray[np.float64]) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
