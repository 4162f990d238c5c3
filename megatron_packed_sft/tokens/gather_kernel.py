"""The compiled loops of the token store: verify sequences, and copy them into bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import inner_kernel, kernel
from megatron_packed_sft.support.memory_kernel import hash_bytes, prefetch

# Sequences are scattered, and processors prefetch inside one only. With explicit prefetches of the next sequences, bins
# are filled in two thirds of the time.
_SEQUENCES_AHEAD = 3
_TOKENS_AHEAD = 1024
_CACHE_LINE = 64
_COMPARED_AT_ONCE = 8  # sequences: a few thousand tokens

OK = 0
BAD_OFFSETS = 1  # outside the part
BAD_LENGTH = 2  # the sequence is shorter or longer than the plan expects
BAD_CHECKSUM = 3


@inner_kernel
def _find_unsound(
    function: int,
    addresses: npt.NDArray[np.int64],
    id_bytes: int,
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
    verified: npt.NDArray[np.uint8],
    is_always: bool,
    sequences: npt.NDArray[np.int64],
    first: int,
    stop: int,
) -> int:
    """Compare sequences[first:stop] as `find_unsound` does.

    Asking an array for its address takes longer than a hash, so `addresses` has those of ids, train, weights (0: none)
    and of itself, followed by room for four numbers to hash.
    """
    ids, train, weights, numbers = addresses[0], addresses[1], addresses[2], addresses[3] + 32
    for k in range(first, stop):
        sequence = sequences[k]
        if verified[sequence] != 0 and not is_always:
            continue
        start = begins[sequence]
        length = ends[sequence] - start
        addresses[4] = length
        addresses[5] = hash_bytes(function, ids + start * id_bytes, length * id_bytes)
        addresses[6] = hash_bytes(function, train + start, length)
        num_bytes = 24
        if weights != 0:
            addresses[7] = hash_bytes(function, weights + start * 4, length * 4)
            num_bytes = 32
        if np.uint32(hash_bytes(function, numbers, num_bytes)) != checksums[sequence]:
            return k
        verified[sequence] = 1
    return -1


@inner_kernel
def _addresses(
    ids: npt.NDArray[Any], train: npt.NDArray[np.uint8], weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Return what `_find_unsound` works with."""
    addresses = np.zeros(8, np.int64)
    addresses[0], addresses[1], addresses[3] = ids.ctypes.data, train.ctypes.data, addresses.ctypes.data
    if weights.size > 0:
        addresses[2] = weights.ctypes.data
    return addresses


@kernel
def find_unsound(
    function: int,
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.float32],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
    verified: npt.NDArray[np.uint8],
    is_always: bool,
    sequences: npt.NDArray[np.int64],
) -> int:
    """Compare sequences with their checksums (see part.py); return the place of the first one that differs, or -1.

    Args:
        function: the address of XXH3_64bits.
        ids, train, weights: of the part; `weights` is empty for a part without.
        begins, ends: where its sequences are, inside these arrays.
        checksums: of its sequences.
        verified: which of them were compared before; a byte each, so that threads may set it concurrently.
        is_always: also compare sequences that were compared before.
        sequences: numbers of the sequences to compare; they must be inside the arrays.
    """
    found = _addresses(ids, train, weights)
    size = ids.itemsize
    return _find_unsound(
        function, found, size, begins, ends, checksums, verified, is_always, sequences, 0, sequences.size
    )


@kernel
def fill_bins(
    function: int,
    ids: npt.NDArray[Any],
    train: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.float32],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
    verified: npt.NDArray[np.uint8],
    is_always: bool,
    sequences: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    overlaps: npt.NDArray[np.int64],
    are_whole: bool,
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> tuple[int, int]:
    """Copy items into bins, align their masks with the next token, and compare new sequences with their checksums.

    Item i is [starts[i], starts[i] + lengths[i]) of its sequence and goes to position positions[i] of bin bins[i]. Its
    first overlaps[i] tokens are trained in another chunk of the same sequence, so they are not trained here. Returns
    what is wrong (OK if nothing), and at which of the sequences.

    Args:
        function, ids, train, weights, checksums, verified, is_always: as for `find_unsound`; without checksums nothing
            is compared.
        begins, ends: where the sequences of the part are, inside its arrays.
        sequences: numbers of the sequences to copy.
        items: the item of each of them.
        starts, lengths, overlaps, bins, positions: of all items.
        are_whole: an item is all of its sequence.
        out_ids, out_mask: the bins.
    """
    addresses, id_bytes = _addresses(ids, train, weights), ids.itemsize
    all_checksums, all_verified = checksums.ctypes.data, verified.ctypes.data
    num_compared = 0
    for k in range(sequences.size):
        sequence, item = sequences[k], items[k]
        if k + _SEQUENCES_AHEAD < sequences.size:
            coming, coming_item = sequences[k + _SEQUENCES_AHEAD], items[k + _SEQUENCES_AHEAD]
            prefetch(all_checksums + coming * 4)
            prefetch(all_verified + coming)
            start = begins[coming] + starts[coming_item]
            num_tokens = min(lengths[coming_item], _TOKENS_AHEAD)
            for j in range(0, num_tokens * id_bytes, _CACHE_LINE):
                prefetch(addresses[0] + start * id_bytes + j)
            for j in range(0, num_tokens, _CACHE_LINE):
                prefetch(addresses[1] + start + j)
        begin, end = begins[sequence], ends[sequence]
        if begin < 0 or end <= begin or end > ids.size:
            return BAD_OFFSETS, k
        start, length, number, position = begin + starts[item], lengths[item], bins[item], positions[item]
        if start < begin or length < 1 or start + length > end or (are_whole and start + length < end):
            return BAD_LENGTH, k
        # On slices, indices start at 0 and need no test for negative ones, so the loops become vector copies.
        from_ids, to_ids = ids[start : start + length], out_ids[number, position : position + length]
        from_train, to_mask = train[start + 1 : start + length], out_mask[number, position : position + length]
        for j in range(length):
            to_ids[j] = from_ids[j]
        for j in range(length - 1):
            to_mask[j] = from_train[j]
        to_mask[length - 1] = 0
        for j in range(min(overlaps[item] - 1, length)):  # token j + 1 is the one that position j predicts
            to_mask[j] = 0
        # A few at a time, after they were copied: then they are hashed from the processor's cache.
        if checksums.size > 0 and (k + 1 - num_compared == _COMPARED_AT_ONCE or k + 1 == sequences.size):
            unsound = _find_unsound(
                function,
                addresses,
                id_bytes,
                begins,
                ends,
                checksums,
                verified,
                is_always,
                sequences,
                num_compared,
                k + 1,
            )
            if unsound >= 0:
                return BAD_CHECKSUM, unsound
            num_compared = k + 1
    return OK, 0


@kernel
def fill_weights(
    weights: npt.NDArray[np.float32],
    begins: npt.NDArray[np.int64],
    sequences: npt.NDArray[np.int64],
    items: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    mask: npt.NDArray[np.uint8],
    out_weights: npt.NDArray[np.float32],
) -> None:
    """Copy the weights of the items that `fill_bins` has placed, aligned with the next token as their mask is.

    A weight counts where the mask is 1, so overlaps of chunks are not weighted twice. `weights` is empty for a part
    whose trained tokens all count 1.
    """
    for k in range(sequences.size):
        item = items[k]
        start, length = begins[sequences[k]] + starts[item], lengths[item]
        number, position = bins[item], positions[item]
        item_mask, to_weights = mask[number, position : position + length], out_weights[number, position:]
        for j in range(length - 1):
            to_weights[j] = item_mask[j]
        if weights.size > 0:
            from_weights = weights[start + 1 : start + length]
            for j in range(length - 1):
                to_weights[j] *= from_weights[j]


@kernel
def fill_gaps(
    bins: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    pad_id: int,
    out_ids: npt.NDArray[Any],
    out_mask: npt.NDArray[np.uint8],
) -> None:
    """Write padding into [positions[k], ends[k]) of bin bins[k]."""
    for k in range(bins.size):
        for j in range(positions[k], ends[k]):
            out_ids[bins[k], j] = pad_id
            out_mask[bins[k], j] = 0
