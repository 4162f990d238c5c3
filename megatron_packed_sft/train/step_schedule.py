"""Batch arithmetic with packed rows: what one optimizer step reads, and how many steps there are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.effective_batch import effective_batch
from megatron_packed_sft.train.config import ParallelConfig, StepConfig

_UNITS = ("bins", "sequences")


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """What a step is, and how many there are.

    Args:
        num_steps: optimizer steps of the whole run.
        num_microbatches: forward passes per rank and step: the gradient accumulation.
        bins_per_step: packed rows per step, over all ranks.
        num_bins: packed rows of the whole run: the length of the learning rate's schedule.
        warnings: what packing does to the batch that was asked for.
    """

    num_steps: int
    num_microbatches: int
    bins_per_step: int
    num_bins: int
    warnings: tuple[str, ...] = ()


def data_parallel_size(num_ranks: int, parallel: ParallelConfig) -> int:
    """Ranks that read different rows: what tensor and pipeline parallelism leave over.

    Example:
        >>> data_parallel_size(8, ParallelConfig(tensor=2))
        4
    """
    for name in ("tensor", "pipeline"):
        if getattr(parallel, name) < 1:
            raise InvalidInputError(f"parallel.{name} is {getattr(parallel, name)}; it must be at least 1")
    ranks_per_row = parallel.tensor * parallel.pipeline
    if num_ranks % ranks_per_row:
        raise InvalidInputError(
            f"{num_ranks} processes cannot be divided into parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline}; start a multiple of {ranks_per_row} (torchrun --nproc-per-node), or lower these"
        )
    return num_ranks // ranks_per_row


def schedule_steps(
    settings: StepConfig,
    *,
    num_bins: int,
    num_sequences: int | None,
    data_parallel_size: int,
    num_steps_done: int = 0,
    num_bins_done: int = 0,
) -> StepSchedule:
    """Turn the wanted global batch into micro batches and steps.

    Args:
        settings: what the user wants.
        num_bins: packed rows in the data: one epoch.
        num_sequences: conversations in them; None when nobody recorded it.
        data_parallel_size: ranks that read different rows.
        num_steps_done, num_bins_done: by the run that is resumed; its steps may have had another size.

    Example:
        >>> steps = StepConfig(global_batch_size=8)
        >>> plan = schedule_steps(steps, num_bins=100, num_sequences=None, data_parallel_size=2)
        >>> plan.num_microbatches, plan.num_steps
        (4, 13)
    """
    if settings.batch_unit not in _UNITS:
        raise InvalidInputError(f"train.batch_unit is {settings.batch_unit!r}; choose from {', '.join(_UNITS)}")
    if settings.micro_batch_size != 1:
        raise InvalidInputError(
            f"train.micro_batch_size is {settings.micro_batch_size}, but a packed row goes through the model as one "
            "long sequence (THD) with nothing beside it; set it to 1, and train.global_batch_size sets the rest"
        )
    if settings.steps is not None and settings.steps < 1:
        raise InvalidInputError(f"train.steps is {settings.steps}; give at least 1, or null to use train.epochs")
    if not 0 < settings.epochs < math.inf:
        raise InvalidInputError(f"train.epochs is {settings.epochs}; it must be above 0")
    counts_sequences = settings.batch_unit == "sequences"
    if counts_sequences and num_sequences is None:
        raise InvalidInputError(
            "train.batch_unit=sequences needs to know how many sequences there are, and the data did not record it; "
            "use train.batch_unit=bins, or write the shards again"
        )
    sequences_per_bin = None if num_sequences is None else num_sequences / num_bins
    try:
        batch = effective_batch(
            settings.global_batch_size,
            ranks=data_parallel_size,
            micro_batch=1,
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
        warnings=_warnings(settings, sequences_per_bin, batch.bins_per_step, num_bins),
    )


def _warnings(
    settings: StepConfig, sequences_per_bin: float | None, bins_per_step: int, num_bins: int
) -> tuple[str, ...]:
    found = []
    if sequences_per_bin is not None and settings.batch_unit == "bins" and sequences_per_bin >= 1.05:
        found.append(
            f"train.global_batch_size={settings.global_batch_size} counts packed rows: at {sequences_per_bin:.1f} "
            f"sequences a row, a step trains on about {bins_per_step * sequences_per_bin:,.0f} of them; to count "
            "sequences as before packing, set train.batch_unit=sequences"
        )
    if sequences_per_bin is not None and settings.batch_unit == "sequences":
        amount = bins_per_step * sequences_per_bin
        if abs(amount / settings.global_batch_size - 1) > 0.05:
            found.append(
                f"train.global_batch_size={settings.global_batch_size} sequences cannot be made of whole packed rows "
                f"on these ranks: a step of {bins_per_step} rows has about {amount:,.0f}; that many are trained on"
            )
    if bins_per_step > num_bins:
        found.append(
            f"a step takes {bins_per_step} packed rows and the data has {num_bins}: every step sees some rows more "
            "than once; choose a smaller train.global_batch_size"
        )
    return tuple(found)
