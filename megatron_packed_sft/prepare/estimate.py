"""The dry run: encode the input, or evenly spread units of a large one, and keep nothing but counts and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.prepare.counts import Counts
from megatron_packed_sft.prepare.encode_stage import EncodeRequest, check_errors, unit_tasks
from megatron_packed_sft.prepare.encode_worker import encode_unit, start_encoder
from megatron_packed_sft.prepare.executor import Executor
from megatron_packed_sft.prepare.progress import Progress

ENOUGH_BYTES = 64 << 20  # of the input; more is sampled


@dataclass
class Estimate:
    """What a dry run found."""

    counts: dict[str, Counts]
    lengths: dict[str, npt.NDArray[np.int32]]
    num_units: int
    looked_at: float  # share of the input's bytes


def estimate(request: EncodeRequest, executor: Executor, progress: Progress) -> Estimate:
    """Count rows, drops and tokens, without writing anything."""
    total = sum(one.num_bytes for one in request.sources)
    every = max(1, -(-total // ENOUGH_BYTES))
    progress.expect(total // every)
    tasks = (task for task in unit_tasks(request.sources) if task.number % every == 0)
    results = {}
    seen = Counts()
    for result in executor.run(encode_unit, tasks, start_encoder, request.settings):
        results[result.number] = result
        progress.update(result.counts.num_bytes, rows=result.counts.num_rows)
        seen.add(result.counts)
        check_errors(seen, request.max_errors)
    counts = {one.source.name: Counts() for one in request.sources}
    lengths: dict[str, list[npt.NDArray[np.int32]]] = {}
    for _, result in sorted(results.items()):
        counts[result.source].add(result.counts)
        for split, found in result.lengths.items():
            lengths.setdefault(split, []).append(found)
    return Estimate(
        counts,
        {split: np.concatenate(found) for split, found in lengths.items()},
        num_units=len(results),
        looked_at=1.0 if every == 1 else seen.num_bytes / total,
    )
