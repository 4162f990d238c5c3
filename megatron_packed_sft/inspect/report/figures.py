"""What charts and tables show: totals, histograms, attention costs by step and rank, and the strategies compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.inspect.report.read_bins import BinLengths
from megatron_packed_sft.packing.packer import balanced, pack
from megatron_packed_sft.packing.strategies.registry import known_strategies
from megatron_packed_sft.storage.bins import BinFigures

Int64 = npt.NDArray[np.int64]

_NUM_BUCKETS = 64
_NUM_POINTS = 400  # of a line; a screen has not many more
_MOST_REPACKED = 1_000_000  # sequences; more say the same and take minutes
_SEED = 0


class StepShape(NamedTuple):
    """How bins are shared out: bins per optimizer step, and the ranks that take them in turn."""

    global_batch: int
    ranks: int

    @staticmethod
    def choose(num_bins: int, recorded: int | None, global_batch: int | None, ranks: int | None) -> StepShape:
        """Return what was asked for; else what the data was packed for; else a usual shape that the data fills.

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


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def totals(figures: BinFigures, lengths: BinLengths) -> dict[str, Any]:
    """Return the numbers of a split; those that nobody recorded and that only tokens would tell are None."""
    tokens = lengths.bin_tokens
    capacity = lengths.num_bins * figures.pack_size
    num_tokens = int(tokens.sum())
    return {
        "num_bins": lengths.num_bins,
        "num_sequences": len(lengths.lengths),
        "num_tokens": num_tokens,
        "num_trained": figures.num_loss_tokens,
        "pack_size": figures.pack_size,
        "fullness": num_tokens / capacity,
        "num_padding": capacity - num_tokens,
        "mean_sequences": len(lengths.lengths) / lengths.num_bins,
        "most_sequences": int(lengths.sequences_per_bin.max()),
        "longest": int(lengths.lengths.max()),
        "shortest": int(lengths.lengths.min()),
        "median": float(np.median(lengths.lengths)),
        "emptiest_bin": int(tokens.argmin()),
        "emptiest": int(tokens.min()),
        "has_weights": figures.has_weights,
        "sum_weights": figures.sum_loss_weights,
        "vocab_size": figures.vocab_size,
        "pad_seq_to_mult": figures.pad_seq_to_mult,
    }


def histogram(values: npt.NDArray[Any], low: float, high: float, num_buckets: int = _NUM_BUCKETS) -> dict[str, Any]:
    """Return how many values are in each of some even buckets from `low` to `high`; the last one holds `high`, too.

    Example:
        >>> histogram(np.array([0, 1, 5, 8]), 0, 8, 2)
        {'edges': [0.0, 4.0, 8.0], 'counts': [2, 2]}
    """
    counts, edges = np.histogram(values, num_buckets, (low, high))
    return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


def length_histogram(lengths: Int64, pack_size: int) -> dict[str, Any]:
    """Return how many sequences have which length, in whole tokens, up to the pack size or beyond."""
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


def _line(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the values in stored order; the smallest and the mean of each stretch where they are too many to draw."""
    edges = np.unique(np.linspace(0, len(values), min(len(values), _NUM_POINTS) + 1).astype(np.int64))
    starts = edges[:-1]
    return {
        "at": starts.tolist(),
        "lowest": _rounded(np.minimum.reduceat(values, starts)),
        "highest": _rounded(np.maximum.reduceat(values, starts)),
        "mean": _rounded(np.add.reduceat(values, starts) / np.diff(edges)),
    }


def attention(lengths: BinLengths, pack_size: int, shape: StepShape) -> dict[str, Any]:
    """Return what attention costs: by bin, as a share of one sequence that fills it, and by step and rank."""
    costs = lengths.attention_costs
    share = costs / pack_size**2
    return {
        "histogram": histogram(share, 0, max(1.0, float(share.max())), 50),
        "mean_share": float(share.mean()),
        "costliest_bin": int(costs.argmax()),
        "costliest_share": float(share.max()),
        **_by_step(costs, shape),
    }


def _by_step(costs: Int64, shape: StepShape) -> dict[str, Any]:
    """Return the balance over ranks: step by step, in three orders of the bins, and for other shapes of steps."""
    num_steps = len(costs) // shape.global_batch
    mixed = np.random.default_rng(_SEED).permutation(len(costs))
    orders = {
        "stored order": costs,
        "shuffled": costs[mixed],
        "packing.balance=attention": costs[balanced(costs, shape.global_batch, _SEED)],
    }
    return {
        "global_batch": shape.global_batch,
        "ranks": shape.ranks,
        "num_steps": num_steps,
        "steps": _line(slowest_over_mean(costs, shape)) if num_steps else None,
        "step_costs": _line(_step_costs(costs, shape)) if num_steps else None,
        "orders": [{"order": name, **_balance(one, shape)} for name, one in orders.items()] if num_steps else [],
        "others": [
            {"global_batch": one.global_batch, "ranks": one.ranks, **_balance(costs, one)}
            for one in _other_shapes(len(costs), shape)
        ],
    }


def slowest_over_mean(costs: Int64, shape: StepShape) -> npt.NDArray[np.float64]:
    """Return, for each whole step, the attention of the rank that has most over the mean of all ranks.

    Bins go to the ranks in turn, one at a time, as the loader deals them out.

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


def _step_costs(costs: Int64, shape: StepShape) -> npt.NDArray[np.float64]:
    """Return the attention of each whole step over that of the mean step."""
    num_steps = len(costs) // shape.global_batch
    steps = costs[: num_steps * shape.global_batch].reshape(num_steps, shape.global_batch).sum(axis=1)
    over_mean: npt.NDArray[np.float64] = steps / steps.mean()
    return over_mean


def _balance(costs: Int64, shape: StepShape) -> dict[str, float]:
    ratios = slowest_over_mean(costs, shape)
    return {"mean": round(float(ratios.mean()), 4), "worst": round(float(ratios.max()), 4)}


def _other_shapes(num_bins: int, chosen: StepShape) -> list[StepShape]:
    shapes = [StepShape(ranks * per_rank, ranks) for ranks in (2, 8, 32, 128) for per_rank in (1, 4, 16)]
    return [one for one in shapes if one.global_batch <= num_bins and one != chosen]


def strategies(lengths: Int64, pack_size: int, max_seqs_per_bin: int | None = None) -> dict[str, Any]:
    """Pack the same sequences by every strategy.

    They come in a shuffled order: the stored one is that of a packing, which would flatter strategies that keep it.
    """
    order = np.random.default_rng(_SEED).permutation(len(lengths))[:_MOST_REPACKED]
    chosen = lengths[order]
    rows: list[dict[str, Any]] = []
    for name in known_strategies():
        try:
            plan = pack(chosen, pack_size=pack_size, strategy=name, max_seqs_per_bin=max_seqs_per_bin)
        except PackedSFTError as error:  # a plugin at fault is no reason to show nothing
            rows.append({"strategy": name, "error": str(error)})
            continue
        stats = plan.stats()
        rows.append(
            {
                "strategy": name,
                "num_bins": stats.num_bins,
                "fullness": stats.utilization,
                "above_bound": stats.num_bins - stats.lower_bound,
                "mean_sequences": stats.mean_items_per_bin,
                "mean_attention": stats.mean_squared_lengths / pack_size**2,
            }
        )
    rows.sort(key=lambda one: (one.get("num_bins", 1 << 62), one["strategy"]))
    return {"num_sequences": len(chosen), "of": len(lengths), "rows": rows}


def _rounded(values: npt.NDArray[np.float64] | Sequence[float]) -> list[float]:
    return [round(value, 5) for value in np.asarray(values).tolist()]
