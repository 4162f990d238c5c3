"""How much room a sequence takes, and the longest one that fits.

The collator drops one token per sequence (labels are the inputs shifted by one), so L stored tokens are L - 1 inputs:

    measure   counts                              a sequence of L tokens takes     with pad_seq_to_mult = m
    tokens    what a shard stores                 L                                ceil((L - 1) / m) * m + 1
    inputs    positions the model computes        L - 1                            ceil((L - 1) / m) * m
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from megatron_packed_sft.packing.strategies.problem import Int32

Measure = Literal["tokens", "inputs"]
MEASURES: tuple[str, ...] = get_args(Measure)


def sizes_of(lengths: Int32, measure: str, pad_seq_to_mult: int) -> Int32:
    """Return the room each sequence takes. A single token has no input; it still takes one position.

    Example:
        >>> lengths = np.array([5, 6], np.int32)
        >>> sizes_of(lengths, "tokens", 4).tolist(), sizes_of(lengths, "inputs", 1).tolist()
        ([5, 9], [4, 5])
    """
    if measure == "tokens" and pad_seq_to_mult == 1:
        return lengths
    inputs = lengths - 1
    if pad_seq_to_mult > 1:
        inputs = -(-inputs // pad_seq_to_mult) * pad_seq_to_mult
    return np.asarray(inputs + 1 if measure == "tokens" else np.maximum(inputs, 1), np.int32)


def longest_that_fits(pack_size: int, measure: str, pad_seq_to_mult: int) -> int:
    """Return the most tokens a sequence may have to fit into a bin.

    Example:
        >>> longest_that_fits(8, "tokens", 1), longest_that_fits(8, "inputs", 1), longest_that_fits(8, "tokens", 4)
        (8, 9, 5)
    """
    inputs = pack_size - 1 if measure == "tokens" else pack_size
    return inputs // pad_seq_to_mult * pad_seq_to_mult + 1
