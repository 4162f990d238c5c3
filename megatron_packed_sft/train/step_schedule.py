"""Batch arithmetic with packed bins: what one optimizer step reads, and how many steps there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.parallel_layout import EffectiveBatch, effective_batch
from megatron_packed_sft.train.config import ParallelConfig, StepConfig


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The size of a step, and the number of steps.

    Args:
        num_steps: optimizer steps of the whole run.
        num_microbatches: forward passes per rank and step: the gradient accumulation.
        bins_per_step: bins per step, over all ranks.
        num_bins: bins of the whole run: the length of the learning-rate schedule.
        notes: lines for the user about how packing changes the requested batch.
    """

    num_steps: int
    num_microbatches: int
    bins_per_step: int
    num_bins: int
    notes: tuple[str, ...] = ()


def data_parallel_size(num_ranks: int, parallel: ParallelConfig) -> int:
    """Return the number of ranks that read different bins.

    Example:
        >>> data_parallel_size(8, ParallelConfig(tensor=2))
        4
    """
    ranks_per_bin = parallel.tensor * parallel.pipeline * parallel.context
    if num_ranks % ranks_per_bin:
        context = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
        raise InvalidInputError(
            f"{num_ranks} processes cannot be divided into parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline}{context}; start a multiple of {ranks_per_bin} (torchrun "
            "--nproc-per-node), or lower these"
        )
    return num_ranks // ranks_per_bin


def schedule_steps(
    settings: StepConfig,
    *,
    num_bins: int,
    num_sequences: int | None,
    data_parallel_size: int,
    num_steps_done: int = 0,
    num_bins_done: int = 0,
) -> StepSchedule:
    """Turn the requested batch into forward passes and steps.

    Args:
        settings: of the user, checked by `check_config`.
        num_bins: bins in the data: one epoch.
        num_sequences: sequences in them; None when it was not recorded.
        data_parallel_size: ranks that read different bins.
        num_steps_done, num_bins_done: by the run that is resumed, whose steps may have had another size.

    Example:
        >>> steps = StepConfig(global_batch_size=8)
        >>> schedule = schedule_steps(steps, num_bins=100, num_sequences=None, data_parallel_size=2)
        >>> schedule.num_microbatches, schedule.num_steps
        (4, 13)
    """
    counts_sequences = settings.batch_unit == "sequences"
    if counts_sequences and num_sequences is None:
        raise InvalidInputError(
            "train.batch_unit=sequences needs the number of sequences, which was not recorded with the data; use "
            "train.batch_unit=bins, or write the data again"
        )
    sequences_per_bin = None if num_sequences is None else num_sequences / num_bins
    try:
        batch = effective_batch(
            settings.global_batch_size,
            ranks=data_parallel_size,
            micro_batch=1,
            gradient_accumulation=settings.gradient_accumulation or 1,
            packing_factor=sequences_per_bin if counts_sequences else None,
        )
    except InvalidInputError as error:
        raise InvalidInputError(f"train.global_batch_size={settings.global_batch_size}: {error}") from None
    if settings.steps is not None:
        num_steps_left = settings.steps - num_steps_done
    else:
        num_steps_left = math.ceil((settings.epochs * num_bins - num_bins_done) / batch.bins_per_step)
    num_steps_left = max(num_steps_left, 0)
    return StepSchedule(
        num_steps=num_steps_done + num_steps_left,
        num_microbatches=batch.gradient_accumulation,
        bins_per_step=batch.bins_per_step,
        num_bins=num_bins_done + num_steps_left * batch.bins_per_step,
        notes=tuple(_notes(settings, batch, sequences_per_bin, num_bins, data_parallel_size)),
    )


def _notes(
    settings: StepConfig, batch: EffectiveBatch, sequences_per_bin: float | None, num_bins: int, ranks: int
) -> Iterator[str]:
    bins_per_step = batch.bins_per_step
    requested = settings.global_batch_size
    if requested is None:
        requested = (settings.gradient_accumulation or 1) * ranks
    if settings.batch_unit == "bins" and sequences_per_bin is not None and sequences_per_bin >= 1.05:
        yield (
            f"warning: the global batch of {requested} counts bins: at {sequences_per_bin:.1f} sequences per bin, a "
            f"step trains on about {bins_per_step * sequences_per_bin:,.0f} sequences; to count sequences as before "
            "packing, set train.batch_unit=sequences"
        )
    if settings.batch_unit == "sequences" and abs(batch.sequences_per_step / requested - 1) > 0.05:
        yield (
            f"warning: {requested} sequences cannot be made of whole bins on these ranks: a step of {bins_per_step} "
            f"bins trains on about {batch.sequences_per_step:,.0f} sequences"
        )
    if bins_per_step > num_bins:
        yield (
            f"warning: a step takes {bins_per_step} bins and the data has {num_bins}, so every step sees some bins "
            "more than once; choose a smaller train.global_batch_size"
        )
