"""How ranks share packed data: the multiple that sequences are padded to, and the bins of an optimizer step.

    context parallelism    each rank takes two slices of every sequence        2 x context
    sequence parallelism   tensor-parallel ranks share the rest of each slice  tensor x context
    fp8                    matrix multiplications take positions in blocks     16, or 32 for mxfp8

`prepare` pads to the least common multiple of these; training and Megatron-Bridge's provider compare it with what the
data records. Without context parallelism no sequence is cut, so it is enough that batches pad whole bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from megatron_packed_sft.errors import InvalidInputError

# What Transformer Engine's recipes need; the names are Megatron-Core's.
FP8_MULTIPLES: Final = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How the ranks that will train share a bin.

    Args:
        tensor: ranks that share each layer.
        context: ranks that share each sequence.
        sequence_parallel: tensor-parallel ranks also split the activations between their matrix multiplications.
        fp8: delayed, tensorwise, blockwise or mxfp8; null: no fp8.

    Example:
        >>> ParallelLayout(tensor=2, context=2, sequence_parallel=True).sequence_multiple
        4
        >>> ParallelLayout(tensor=8, context=2, sequence_parallel=True, fp8="mxfp8").sequence_multiple
        32
    """

    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    fp8: str | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "context"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.fp8 is not None and self.fp8 not in FP8_MULTIPLES:
            raise InvalidInputError(f"fp8 is {self.fp8!r}; choose from {', '.join(FP8_MULTIPLES)}, or null")

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this when the data is prepared."""
        return math.lcm(
            2 * self.context if self.context > 1 else 1,
            self.tensor * self.context if self.sequence_parallel and self.tensor > 1 else 1,
            FP8_MULTIPLES.get(self.fp8 or "", 1),
        )

    @property
    def bin_multiple(self) -> int:
        """Every bin is padded to a multiple of this in a batch, so that each rank's share of it fits fp8's blocks."""
        num_shares = self.context * (self.tensor if self.sequence_parallel else 1)
        return math.lcm(self.sequence_multiple, FP8_MULTIPLES.get(self.fp8 or "", 1) * num_shares)

    @property
    def override(self) -> str:
        """The argument that sets this layout on the command line of `packed-sft prepare`.

        Example:
            >>> ParallelLayout(tensor=2, context=4, sequence_parallel=True).override
            "'packing.for_parallel={tensor:2,context:4,sequence_parallel:true}'"
        """
        default = ParallelLayout()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        shown = ",".join(f"{name}:{'true' if value is True else value}" for name, value in given.items())
        return f"'packing.for_parallel={{{shown}}}'"

    def refuse_unpadded(self, parts: Iterable[tuple[str, int | None]]) -> None:
        """Refuse data whose sequences the ranks cannot share, and say how to prepare it.

        Args:
            parts: (path, the multiple it records or None) of every dataset.

        Example:
            >>> ParallelLayout(context=2).refuse_unpadded([("my_dataset", 8)])
        """
        if self.context == 1:
            return
        multiple = self.sequence_multiple
        for where, recorded in parts:
            if (recorded or 1) % multiple:
                raise InvalidInputError(
                    f"{where}: sequences are padded to a multiple of {recorded or 1}, but this layout's "
                    f"context-parallel ranks need a multiple of {multiple}; run the packed-sft prepare command that "
                    f"made the data again and add: --overwrite {self.override}"
                )


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """The batch to train with: every optimizer step reads `bins_per_step` bins, `sequences_per_step` on average."""

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
        packing_factor: mean sequences per bin (`stats().mean_items_per_bin`). When given, the global batch counts
            sequences, as before packing, and the nearest number of bins is taken. None counts bins.

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
                f"a global batch of {batch} bins is not a multiple of {ranks} ranks with {packed_micro_batch} bins "
                f"each; choose {nearest}"
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
