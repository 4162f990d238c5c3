"""What `packed-sft info --deep` adds: how lengths, fullness, trained share and sequences per bin are spread.

Indices are read whole; tokens of very large data are read from bins all over it, and how many is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.inspect.info.packed_data import bin_facts, total_of
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.inspect.report.lengths import bin_lengths
from megatron_packed_sft.inspect.report.reading import bins_to_read, read_tokens, spread
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.tokens.store import open_token_store

Facts = dict[str, Any]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]

_NUM_STEPS = 16
_FULLNESS = (0, 25, 50, 75, 80, 85, 90, 95, 97, 98, 99, 100)
_SHARES = tuple(range(0, 101, 10))
_MOST_SEQUENCES_READ = 200_000


def deep_facts(kind: str, path: Path, facts: Facts) -> Facts:
    """Return the facts that take reading the data."""
    if kind in ("dataset directory", "shard", "token stream", "directory of shards"):
        return _of_bins(path, facts)
    if kind == "token store":
        return {"histograms": {"all": _of_token_store(path)}}
    if kind == "plan":
        return {"histograms": {"all": _of_plan(path)}}
    return {"notes": [*facts.get("notes", ()), f"a {kind} holds no bins or sequences, so --deep adds nothing"]}


def histogram(values: Numbers, edges: Sequence[float]) -> Facts:
    """Return how many values are in each step; a step ends below the next edge, the last one with it.

    Example:
        >>> histogram(np.array([1, 2, 2, 9]), [0, 2, 4])
        {'edges': [0, 2, 4], 'counts': [1, 2], 'num_beyond': 1, 'is_whole': True}
    """
    counts, _ = np.histogram(values, np.asarray(edges, np.float64))
    beyond = int(np.count_nonzero(values > edges[-1])) + int(np.count_nonzero(values < edges[0]))
    return {
        "edges": list(edges),
        "counts": counts.tolist(),
        "num_beyond": beyond,
        "is_whole": values.dtype.kind in "iu",
    }


def whole_steps(largest: int, smallest: int = 1) -> list[int]:
    """Return edges of at most 16 equal steps of whole numbers, from the smallest to beyond the largest.

    Example:
        >>> whole_steps(4), whole_steps(100)[:3]
        ([1, 2, 3, 4, 5], [1, 8, 15])
    """
    step = max(1, -(-(largest + 1 - smallest) // _NUM_STEPS))
    return list(range(smallest, largest + 1 + step, step))


def _of_bins(path: Path, facts: Facts) -> Facts:
    data = open_data(path)
    found, counted = {}, {}
    notes = [note for note in facts.get("notes", ()) if "--deep" not in note]
    for split, reader in data.splits.items():
        lengths = bin_lengths(reader)
        bins = bins_to_read(lengths, np.empty(0, np.int64))
        read = read_tokens(reader, bins)
        if len(bins) < lengths.num_bins:
            notes.append(f"{split}: the trained share is that of {len(bins):,} of {lengths.num_bins:,} bins")
        pack_size = reader.figures.pack_size
        per_bin = lengths.sequences_per_bin
        counted[split] = bin_facts(vars(reader.figures))
        found[split] = {
            "sequence lengths": histogram(lengths.lengths, whole_steps(int(lengths.lengths.max()))),
            "fullness of bins, %": histogram(100 * lengths.bin_tokens / pack_size, _FULLNESS),
            "sequences per bin": histogram(per_bin, whole_steps(int(per_bin.max()))),
            "trained share of sequences, %": histogram(100 * read.num_trained / read.lengths, _SHARES),
        }
    more: Facts = {"histograms": found, "notes": notes}
    if "splits" not in facts:  # now that the bins are read, all of their numbers are known
        more["total"] = {**facts["total"], **total_of(list(counted.values()))}
    return more


def _of_token_store(path: Path) -> Facts:
    store = open_token_store(path)
    lengths = store.lengths
    chosen = spread(len(store), _MOST_SEQUENCES_READ)
    shares = np.array([float(store[number][1].mean()) for number in chosen.tolist()])
    return {
        "sequence lengths": histogram(lengths, whole_steps(int(lengths.max()))),
        "trained share of sequences, %": histogram(100 * shares, _SHARES),
    }


def _of_plan(path: Path) -> Facts:
    plan = PackPlan.load(path)
    items, per_bin = plan.item_lengths[plan.indices], np.diff(plan.bin_offsets)
    return {
        "sequence lengths": histogram(items.astype(np.int64), whole_steps(int(items.max()))),
        "fullness of bins, %": histogram(100 * plan.bin_tokens / plan.pack_size, _FULLNESS),
        "sequences per bin": histogram(per_bin, whole_steps(int(per_bin.max()))),
    }
