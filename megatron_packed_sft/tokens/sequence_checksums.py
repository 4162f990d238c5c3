"""The checksum of a single sequence, so that it can be verified when it is read: checksums.npy of a part.

    numbers   length, XXH3 of its bytes in ids.npy, in train.npy and, in a part with weights, in weights.npy
    checksum  the lower 32 bits of the XXH3 of these numbers, each as <u8

XXH3 is XXH3-64 with seed 0. A checksum covers what a sequence is and not where it lies: if an offset is wrong, the
sequence between the offsets is another one, and so is its checksum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.support.checksum import span_checksums

Checksums = npt.NDArray[np.uint32]
Spans = npt.NDArray[np.int64]
Arrays = tuple[npt.NDArray[Any], npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]


def checksums_of_sequences(arrays: Arrays, starts: Spans, lengths: Spans, *, compiled: bool = True) -> Checksums:
    """Return the checksums of sequences in flat arrays.

    Args:
        arrays: ids, train and weights of a part, as they lie in the files.
        starts, lengths: of the sequences in these arrays.
        compiled: in compiled code, which takes a moment to load; else one by one.
    """
    if not compiled:
        ids, train, weights = arrays
        spans = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        found = (checksum_of_sequence(ids[s], train[s], None if weights is None else weights[s]) for s in spans)
        return np.fromiter(found, np.uint32, len(spans))
    given = [array for array in arrays if array is not None]
    numbers = np.empty((len(starts), 1 + len(given)), "<u8")
    numbers[:, 0] = lengths
    for column, array in enumerate(given, start=1):
        numbers[:, column] = span_checksums(array.ctypes.data + starts * array.itemsize, lengths * array.itemsize)
    places = numbers.ctypes.data + np.arange(len(starts)) * numbers.strides[0]
    return span_checksums(places, np.full(len(starts), numbers.strides[0])).astype(np.uint32)


def checksum_of_sequence(
    ids: npt.NDArray[Any], train: npt.NDArray[np.uint8], weights: npt.NDArray[np.float32] | None = None
) -> int:
    """Return the checksum of one sequence, without compiled code: for the first one that somebody looks at.

    Example:
        >>> f"{checksum_of_sequence(np.array([5, 6], '<i4'), np.array([0, 1], 'u1')):08x}"
        '926ea36b'
    """
    given = [array for array in (ids, train, weights) if array is not None]
    numbers = np.array([len(ids), *(xxhash.xxh3_64_intdigest(array.data) for array in given)], "<u8")
    return xxhash.xxh3_64_intdigest(numbers.data) & 0xFFFFFFFF
