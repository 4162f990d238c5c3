"""The compiled round of the keyed permutation: integers only, so it is the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

_BLOCK = 256  # values that stay in the first-level cache while all rounds go over them


@kernel
def swap_or_not(
    values: npt.NDArray[np.int64],
    num_values: int,
    sums: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
) -> None:
    """Permute [0, num_values) in place: values[i] becomes the value that it is sent to.

    Round r pairs x with (sums[r] - x) mod num_values, and a coin that both of a pair see decides whether they swap.
    """
    for first in range(0, values.size, _BLOCK):
        block = values[first : first + _BLOCK]
        for r in range(keys.size):
            pair_sum, key = sums[r], keys[r]
            for i in range(block.size):
                value = block[i]
                partner = pair_sum - value
                # No branches here: half of them would be guessed wrong, and the loop would not be vectorised (12x).
                partner += (partner >> 63) & num_values
                # Two multiplications bring every bit of the larger value and of the key to the top bit: the coin.
                coin = np.uint64(max(value, partner)) ^ key
                coin = (coin ^ (coin >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                coin = (coin ^ (coin >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                block[i] = value + (partner - value) * np.int64(coin >> np.uint64(63))
