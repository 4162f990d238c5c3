"""The lots that wait, for window_kernel.py: a list in order of age, and per size a chain that starts with the oldest.

    lots     uint32 [num_lots + 1, 4]   next, previous, next of the same size, size; the last row is the list's two ends
    by_size  uint32 [capacity + 1, 2]   the oldest and the youngest waiting lot of each size

Everything is unsigned, like every index in a hot loop here (deal_kernel.py says why), and passed as plain arrays: a
tuple of arrays costs numba a reference count per access, which made this about twice as slow.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Bits, Scalar, add
from megatron_packed_sft.packing.search.deal_kernel import Uint32
from megatron_packed_sft.support.compiled import kernel

NONE = np.uint32(0xFFFFFFFF)

# Columns of `lots`.
NEXT = 0
PREVIOUS = 1
SAME = 2
SIZE = 3
# Columns of `by_size`.
OLDEST = 0
YOUNGEST = 1


@kernel
def load(lot: Scalar, size: Scalar, lots: Uint32, by_size: Uint32, words: Bits, summary: Bits) -> None:
    """Let a new lot wait behind all others."""
    end = np.uint32(lots.shape[0] - 1)
    last = lots[end, PREVIOUS]
    lots[last, NEXT] = lot
    lots[end, PREVIOUS] = lot
    lots[lot, PREVIOUS] = last
    lots[lot, NEXT] = end
    lots[lot, SAME] = NONE
    lots[lot, SIZE] = size
    if by_size[size, OLDEST] == NONE:
        by_size[size, OLDEST] = lot
        add(words, summary, np.int64(size))
    else:
        lots[by_size[size, YOUNGEST], SAME] = lot
    by_size[size, YOUNGEST] = lot


@kernel
def take(lot: Scalar, lots: Uint32, by_size: Uint32) -> None:
    """Remove the oldest waiting lot of its size from the lists."""
    after = lots[lot, NEXT]
    before = lots[lot, PREVIOUS]
    lots[before, NEXT] = after
    lots[after, PREVIOUS] = before
    by_size[lots[lot, SIZE], OLDEST] = lots[lot, SAME]


@kernel
def put_back(lot: Scalar, lots: Uint32, by_size: Uint32) -> None:
    """Undo `take`. Lots must come back in the reverse order of their going."""
    lots[lots[lot, NEXT], PREVIOUS] = lot
    lots[lots[lot, PREVIOUS], NEXT] = lot
    by_size[lots[lot, SIZE], OLDEST] = lot
