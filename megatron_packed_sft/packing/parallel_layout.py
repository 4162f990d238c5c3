"""To what multiple sequences must be padded so that ranks can share them: computed here, and nowhere else.

    context parallelism    each rank takes two slices of every sequence        2 x context
    sequence parallelism   tensor-parallel ranks share the rest of each slice  tensor x context
    fp8                    matrix multiplications take positions in blocks     16, or 32 for mxfp8

`prepare` pads to the least common multiple of these, and training and Megatron-Bridge's provider compare it with what
the data records. Without context parallelism no sequence is cut: it is enough that whole bins are padded, as batches
always are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from megatron_packed_sft.errors import InvalidInputError

# What the recipes of Transformer Engine need; the names are Megatron-Core's.
FP8_MULTIPLES: Final = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How the ranks that will train share a bin.

    Args:
        tensor: ranks that share each layer.
        context: ranks that share each sequence.
        sequence_parallel: tensor-parallel ranks also split the activations between their matrix multiplications.
        fp8: delayed, tensorwise, blockwise or mxfp8; null computes in a wider type.

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
        """What every sequence is padded to a multiple of, when the data is prepared."""
        return math.lcm(
            2 * self.context if self.context > 1 else 1,
            self.tensor * self.context if self.sequence_parallel and self.tensor > 1 else 1,
            FP8_MULTIPLES.get(self.fp8 or "", 1),
        )

    @property
    def bin_multiple(self) -> int:
        """What a whole bin is padded to a multiple of, in a batch: each rank's share of it is a multiple of fp8's."""
        num_shares = self.context * (self.tensor if self.sequence_parallel else 1)
        return math.lcm(self.sequence_multiple, FP8_MULTIPLES.get(self.fp8 or "", 1) * num_shares)

    @property
    def override(self) -> str:
        """What to add to the command line of `packed-sft prepare`.

        Example:
            >>> ParallelLayout(tensor=2, context=4, sequence_parallel=True).override
            "'packing.for_parallel={tensor:2,context:4,sequence_parallel:true}'"
        """
        default = ParallelLayout()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        shown = ",".join(f"{name}:{'true' if value is True else value}" for name, value in given.items())
        return f"'packing.for_parallel={{{shown}}}'"

    def refuse_unpadded(self, parts: Iterable[tuple[str, int | None]]) -> None:
        """Refuse data whose sequences the ranks cannot share, with the line that prepares it.

        Args:
            parts: (where it is, the multiple that it records or None) of all data.

        Example:
            >>> ParallelLayout(context=2).refuse_unpadded([("my_dataset", 8)])
        """
        if self.context == 1:
            return
        multiple = self.sequence_multiple
        for where, recorded in parts:
            if (recorded or 1) % multiple:
                raise InvalidInputError(
                    f"{where}: sequences are padded to a multiple of {recorded or 1}, but context-parallel ranks of "
                    f"this layout share sequences of a multiple of {multiple}; run the packed-sft prepare that made "
                    f"the data again, with the additional arguments --overwrite {self.override}"
                )
