"""The dry run: encode the input, or evenly spread units of a large one, and keep nothing but counts and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.prepare.counts import Counts
from megatron_packed_sft.prepare.encode_stage import EncodeRequest, SliceRun, nothing_left
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
    every = 1 if request.limit is not None else max(1, -(-total // ENOUGH_BYTES))
    progress.expect(total // every)
    run = SliceRun(request, None, progress, every)
    run.run(executor)
    counts, lengths = run.counts, run.lengths
    if not lengths:
        raise nothing_left(counts)
    num_bytes = sum(one.num_bytes for one in counts.values())
    return Estimate(counts, lengths, run.num_units, looked_at=1.0 if every == 1 else num_bytes / total)
