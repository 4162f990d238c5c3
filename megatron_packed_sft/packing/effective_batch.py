"""Gradient accumulation that keeps the batch the user asked for, when packing changes what a batch is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed_sft.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """What to train with: every optimizer step reads `bins_per_step` bins.

    `sequences_per_step` is what that amounts to in conversations, on average.
    """

    micro_batch: int
    gradient_accumulation: int
    bins_per_step: int
    sequences_per_step: float


def effective_batch(
    wanted: int | None = None,
    *,
    ranks: int,
    micro_batch: int,
    gradient_accumulation: int = 1,
    packed_micro_batch: int = 1,
    packing_factor: float | None = None,
) -> EffectiveBatch:
    """Return the gradient accumulation that keeps the global batch when packing sets the micro batch.

    Args:
        wanted: the global batch. None keeps the batch before packing: micro_batch * gradient_accumulation * ranks.
        ranks: data-parallel ranks.
        micro_batch: what the user configured per rank.
        gradient_accumulation: what the user configured.
        packed_micro_batch: bins per rank and micro step with packing; trainers force 1.
        packing_factor: mean sequences per bin (`stats().mean_units_per_bin`). When given, the global batch counts
            sequences as before packing, and the nearest number of bins is taken. None counts packed bins.

    Example:
        >>> effective_batch(64, ranks=8, micro_batch=4).gradient_accumulation
        8
        >>> effective_batch(ranks=8, micro_batch=4, gradient_accumulation=2).bins_per_step
        64
    """
    for name, value in {
        "wanted": wanted,
        "ranks": ranks,
        "micro_batch": micro_batch,
        "gradient_accumulation": gradient_accumulation,
        "packed_micro_batch": packed_micro_batch,
    }.items():
        if value is None and name == "wanted":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInputError(f"{name} must be a positive integer, not {value!r}")
    if packing_factor is not None and not packing_factor >= 1:
        raise InvalidInputError(f"packing_factor must be at least 1 sequence per bin, not {packing_factor!r}")
    batch = micro_batch * gradient_accumulation * ranks if wanted is None else wanted
    per_micro_step = packed_micro_batch * ranks
    if packing_factor is None:
        if batch % per_micro_step:
            lower = batch // per_micro_step * per_micro_step
            nearest = f"{lower} or {lower + per_micro_step}" if lower else f"{per_micro_step}"
            raise InvalidInputError(
                f"a global batch of {batch} bins cannot be made of {ranks} ranks with {packed_micro_batch} bins each; "
                f"choose {nearest}"
            )
        accumulation = batch // per_micro_step
    else:
        accumulation = max(1, int(batch / packing_factor / per_micro_step + 0.5))
    bins_per_step = accumulation * per_micro_step
    return EffectiveBatch(
        micro_batch=packed_micro_batch,
        gradient_accumulation=accumulation,
        bins_per_step=bins_per_step,
        sequences_per_step=bins_per_step * (packing_factor or 1.0),
    )
