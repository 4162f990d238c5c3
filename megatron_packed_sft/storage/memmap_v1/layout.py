"""The bytes of a memmap_v1 shard: fixed file names, dtypes, shapes and .npy headers.

    shard_000000/
      input_ids.npy     <i4 or <u2  [num_bins, pack_size]   header of 4,096 bytes: bins start on page borders
      loss_mask.npy     |u1         [num_bins, pack_size]   header of 4,096 bytes
      packed_len.npy    <u4         [num_bins]
      seq_offsets.npy   <u4         [num_bins + 1]
      seq_starts.npy    <u4         [num_sequences]
      loss_weights.npy  <f4         [num_bins, pack_size]   only if a weight is neither 0 nor 1; header of 4,096 bytes
      bin_checksums.npy <u8         [num_bins, 3 or 4]      from version 1.1 on; header of 128 bytes
      manifest.json                                          written last

Names are never taken from a manifest, and headers are matched against one exact form, never evaluated.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.npy import (
    CHECKSUM_DTYPE,
    INDEX_DTYPE,
    MASK_DTYPE,
    PAGE,
    SMALL_HEADER,
    WEIGHT_DTYPE,
    ArraySpec,
)

FORMAT = "memmap_padded_v1"
VERSION = "1.1"  # with checksums of bins and perhaps weights: a reader that does not know these must refuse it
FIRST_VERSION = "1.0"
INPUT_IDS = "input_ids.npy"
LOSS_MASK = "loss_mask.npy"
PACKED_LEN = "packed_len.npy"
SEQ_OFFSETS = "seq_offsets.npy"
SEQ_STARTS = "seq_starts.npy"
LOSS_WEIGHTS = "loss_weights.npy"
BIN_CHECKSUMS = "bin_checksums.npy"
ARRAY_FILES = (INPUT_IDS, LOSS_MASK, PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS)  # of every shard
OPTIONAL_FILES = (LOSS_WEIGHTS, BIN_CHECKSUMS)
BIN_CHECKSUM_ALGORITHM = "xxh3_64"


def is_shard(path: Path) -> bool:
    """Return whether a directory has a manifest, or an array of a shard that is not complete."""
    return any(os.path.lexists(path / name) for name in (MANIFEST, *ARRAY_FILES, *OPTIONAL_FILES))


def shard_arrays(
    num_bins: int, pack_size: int, num_sequences: int, id_dtype: str
) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec, ArraySpec]:
    """Return the five array files of a shard, in the order of `ARRAY_FILES`.

    Example:
        >>> shard_arrays(2, 8, 3, "<u2")[0]
        ArraySpec(name='input_ids.npy', dtype='<u2', shape=(2, 8), header_size=4096)
    """
    return (
        ArraySpec(INPUT_IDS, id_dtype, (num_bins, pack_size), PAGE),
        ArraySpec(LOSS_MASK, MASK_DTYPE, (num_bins, pack_size), PAGE),
        ArraySpec(PACKED_LEN, INDEX_DTYPE, (num_bins,), SMALL_HEADER),
        ArraySpec(SEQ_OFFSETS, INDEX_DTYPE, (num_bins + 1,), SMALL_HEADER),
        ArraySpec(SEQ_STARTS, INDEX_DTYPE, (num_sequences,), SMALL_HEADER),
    )


def weights_array(num_bins: int, pack_size: int) -> ArraySpec:
    """Return the array file that a shard with weights has besides."""
    return ArraySpec(LOSS_WEIGHTS, WEIGHT_DTYPE, (num_bins, pack_size), PAGE)


def checksums_array(num_bins: int, *, has_weights: bool) -> ArraySpec:
    """Return the array file of the checksums of bins; see bin_checksums.py for its columns."""
    return ArraySpec(BIN_CHECKSUMS, CHECKSUM_DTYPE, (num_bins, 4 if has_weights else 3), SMALL_HEADER)
