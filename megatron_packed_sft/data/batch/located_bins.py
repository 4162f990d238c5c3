"""Bins on their way into a batch: where they are, not what they hold.

    a batch of 3      bins 17 and 4 of shard A ─▶ batch indices 0 and 2     nothing is copied until the kernel
                      bin 9 of shard B         ─▶ batch index 1             fills the batch's arrays

`LocatedBins` names bins by the addresses of their tokens: in the maps of any number of shards, in the arrays of a
legacy file, or in concatenated samples. So one call of a kernel fills a batch, wherever its bins are. Compiled code
follows these addresses without checks, so sizes and offsets are checked here, before an address is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.storage.bins import (
    NO_WEIGHTS,
    GatheredBins,
    IntArray,
    as_int_array,
    cast_checked,
    mask_and_weights,
)
from megatron_packed_sft.storage.interface import PackedShard
from megatron_packed_sft.storage.memmap_v1.reader import CHECKSUMS_ADDRESS
from megatron_packed_sft.support.checksum import hash_function

# The fields of `LocatedBins.table`: one small array instead of many, because creating arrays dominates a small batch.
IDS = 0  # address of the bin's first id
MASK = 1  # address of its loss mask
WEIGHTS = 2  # address of its weights; 0: every trained token counts 1
STARTS = 3  # address of the starts of its sequences
LENGTH = 4
NUM_SEQUENCES = 5
BATCH_INDEX = 6
BIN = 7
IS_PADDING = 8
ID_BYTES = 9
ORIGIN = 10  # which of the origins
CHECKSUMS = 11  # address of its checksums; 0: it is not compared with any
VERIFIED = 12  # address of a byte that says whether that was done; 0: it is always done
OFFSET = 13  # its entry of seq_offsets, which its checksums cover
NUM_FIELDS = 14

# What the kernels find wrong with a bin; they return it with the bin's column in the table.
OK = 0
BAD_BIN_NUMBER = 1
BAD_LENGTH = 2
BAD_OFFSETS = 3
BAD_BATCH_INDEX = 4
BAD_STARTS = 5
BAD_CHECKSUM = 6

_SAMPLE_FIELDS = ("input_ids", "seq_boundaries", "loss_mask")
_MAX_ID = 2**31

Numbers = Sequence[int] | IntArray
Flags = Sequence[bool] | npt.NDArray[np.bool_]


class LocatedBins(NamedTuple):
    """Bins by their addresses, and their indices in the batch. Only the functions of this module make them."""

    table: npt.NDArray[np.int64]  # [NUM_FIELDS, number of bins]
    origins: Sequence[PackedShard | str]  # for messages
    keep: object  # owns the memory

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many ids each bin holds."""
        lengths: npt.NDArray[np.int64] = self.table[LENGTH]
        return lengths

    def origin(self, column: int) -> str:
        """Return where a bin is from."""
        origin = self.origins[int(self.table[ORIGIN, column])]
        return origin if isinstance(origin, str) else str(origin.path)


class BinsInArrays(NamedTuple):
    """Bins of flat arrays: bin i is [starts[i], starts[i] + lengths[i]) of the ids and of the mask.

    Its sequences begin at seq_starts[first_sequence[i]:sequences_end[i]], counted from the bin's own start.
    """

    starts: IntArray
    lengths: IntArray
    first_sequence: IntArray
    sequences_end: IntArray
    batch_indices: IntArray
    numbers: IntArray
    is_padding: npt.NDArray[Any]


def locate_in_shard(
    shard: PackedShard, bins: Numbers, batch_indices: Numbers | None = None, is_padding: Flags | None = None
) -> LocatedBins:
    """Locate bins of one memory-mapped shard; see `locate_in_shards`."""
    return locate_in_shards([shard], np.zeros(len(bins), np.int64), bins, batch_indices, is_padding)


def locate_in_shards(
    shards: Sequence[PackedShard],
    owners: Numbers,
    bins: Numbers,
    batch_indices: Numbers | None = None,
    is_padding: Flags | None = None,
) -> LocatedBins:
    """Locate bins of any number of memory-mapped shards without copying them; `collate` verifies those that are new.

    Args:
        shards: open shards, whose `mapped_bins` is not None.
        owners: for each bin, which of the shards holds it.
        bins: bin numbers, 0 <= number < len(shard).
        batch_indices: their indices in the batch; 0, 1, 2, ... if not given.
        is_padding: which of them are padding samples; none if not given.
    """
    from megatron_packed_sft.data.batch import collate_kernel

    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    table = np.empty((NUM_FIELDS, numbers.size), np.int64)
    table[IDS] = table[BIN] = numbers
    table[BATCH_INDEX], table[IS_PADDING], table[ORIGIN] = indices, padding, owners
    mapped = [shard.mapped_bins() for shard in shards]
    addresses = np.array([arrays.addresses for arrays in mapped if arrays is not None])
    if not hash_function():  # an xxhash that does not export its functions: bin by bin
        addresses[:, CHECKSUMS_ADDRESS] = 0
        for owner, number in zip(table[ORIGIN].tolist(), numbers.tolist(), strict=True):
            _ = shards[owner][number]
    code, column = collate_kernel.locate_bins(addresses, table)
    if code != OK:
        raise _refused(shards[int(table[ORIGIN, column])], int(numbers[column]), code)
    return LocatedBins(table, shards, mapped)


def _refused(shard: PackedShard, number: int, code: int) -> Exception:
    if code == BAD_BIN_NUMBER:
        return IndexError(f"{shard.path}: bin {number} of {len(shard)}")
    return shard.damaged_bin(number, "length" if code == BAD_LENGTH else "sequences")


def locate_in_arrays(
    flat_ids: IntArray,
    flat_mask: npt.NDArray[np.uint8],
    bin_offsets: npt.NDArray[np.int64],
    seq_starts: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.int64],
    bins: Numbers,
    batch_indices: Numbers | None = None,
    is_padding: Flags | None = None,
    origin: str = "the bins",
    flat_weights: npt.NDArray[np.float32] = NO_WEIGHTS,
    lengths: IntArray | None = None,
) -> LocatedBins:
    """Locate bins stored end to end in flat arrays, such as those of a legacy file, without copying them.

    Args:
        flat_ids: the ids of all bins, `<u2` or `<i4`.
        flat_mask: their loss masks.
        bin_offsets: bin b is [bin_offsets[b], bin_offsets[b + 1]).
        seq_starts: the start of every sequence inside its bin.
        seq_offsets: the sequences of bin b are seq_starts[seq_offsets[b] : seq_offsets[b + 1]].
        bins, batch_indices, is_padding: as for `locate_in_shards`.
        origin: what to call the arrays in messages.
        flat_weights: how much each prediction counts; empty where the mask says it all.
        lengths: of these bins, if they do not reach to the next one.
    """
    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(bin_offsets) - 1:
        raise IndexError(f"{origin}: bins {numbers.tolist()} of {len(bin_offsets) - 1}")
    starts, first = bin_offsets[numbers], seq_offsets[numbers]
    if lengths is None:
        lengths = bin_offsets[numbers + 1] - starts
    found = BinsInArrays(starts, lengths, first, seq_offsets[numbers + 1], indices, numbers, padding)
    return locate(found, flat_ids, flat_mask, seq_starts, origin, flat_weights)


def locate(
    found: BinsInArrays,
    flat_ids: IntArray,
    flat_mask: npt.NDArray[np.uint8],
    seq_starts: npt.NDArray[np.uint32],
    origin: str,
    flat_weights: npt.NDArray[np.float32] = NO_WEIGHTS,
) -> LocatedBins:
    """Turn positions in flat arrays into addresses; refuse a position outside its array."""
    # The kernel takes exactly these; arrays that have the dtype already are not copied.
    ids = np.ascontiguousarray(flat_ids, None if flat_ids.dtype == np.uint16 else np.int32)
    mask = np.ascontiguousarray(flat_mask, np.uint8)
    all_starts = np.ascontiguousarray(seq_starts, np.uint32)
    weights = np.ascontiguousarray(flat_weights, np.float32)
    num_ids, num_starts = min(ids.size, mask.size), all_starts.size
    if weights.size:
        num_ids = min(num_ids, weights.size)
    places = np.array(found, np.int64)
    table = np.empty((NUM_FIELDS, places.shape[1]), np.int64)
    starts, table[LENGTH], first, end, table[BATCH_INDEX], table[BIN], table[IS_PADDING] = places
    table[ORIGIN], table[ID_BYTES], table[CHECKSUMS] = 0, ids.itemsize, 0
    located = LocatedBins(table, (origin,), (ids, mask, all_starts, weights))
    # Python's integers do not overflow.
    for column, (start, length, first_start, end_start) in enumerate(places[:4].T.tolist()):
        if not 0 <= start < start + length <= num_ids:
            raise damaged_bin(located, column, BAD_LENGTH)
        if not 0 <= first_start < end_start <= num_starts or end_start - first_start > length:
            raise damaged_bin(located, column, BAD_OFFSETS)
    table[IDS] = ids.ctypes.data + starts * ids.itemsize
    table[MASK] = mask.ctypes.data + starts
    table[WEIGHTS] = weights.ctypes.data + starts * 4 if weights.size else 0
    table[STARTS] = all_starts.ctypes.data + first * 4
    table[NUM_SEQUENCES] = end - first
    return located


def locate_gathered(
    gathered: GatheredBins, bins: Numbers, batch_indices: Numbers, is_padding: Flags, origin: str
) -> LocatedBins:
    """Locate bins that a shard gathered into flat arrays; see `PackedShard.gather`.

    Args:
        gathered: the bins.
        bins: their numbers, for messages.
        batch_indices, is_padding: as for `locate_in_shards`.
        origin: what to call the shard in messages.
    """
    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    if gathered.is_empty is not None:
        padding = padding | gathered.is_empty
    places = (gathered.starts, gathered.lengths, gathered.first_sequence, gathered.sequences_end)
    found = BinsInArrays(*places, indices, numbers, padding)
    return locate(found, gathered.input_ids, gathered.loss_mask, gathered.seq_starts, origin, gathered.loss_weights)


def locate_in_samples(
    samples: Sequence[Mapping[str, Any]], batch_indices: Numbers | None = None, origin: str = "the batch"
) -> LocatedBins:
    """Concatenate samples as datasets return them, and locate their bins.

    A sample is {"input_ids", "seq_boundaries" (the starts and the length), "loss_mask"}; a loss mask of floats is one
    of weights. A padding sample also has "is_padding": True; its zero mask alone would not keep it out of the loss when
    `answer_only_loss` is off.

    Example:
        >>> located = locate_in_samples([{"input_ids": [5, 6], "seq_boundaries": [0, 2], "loss_mask": [1, 0]}])
        >>> located.lengths.tolist()
        [2]
    """
    if not samples:
        raise InvalidInputError(f"{origin} is empty; give at least one sample")
    parts = [_checked_sample(sample, f"sample {number} of {origin}") for number, sample in enumerate(samples)]
    is_padding = [bool(sample.get("is_padding", False)) for sample in samples]
    numbers, indices, padding = _columns(np.arange(len(samples)), batch_indices, is_padding)
    lengths = np.array([len(one.ids) for one in parts])
    num_sequences = np.array([len(one.starts) for one in parts])
    ends, sequences_end = lengths.cumsum(), num_sequences.cumsum()
    first_sequence = sequences_end - num_sequences
    found = BinsInArrays(ends - lengths, lengths, first_sequence, sequences_end, indices, numbers, padding)
    flat_ids, flat_mask, seq_starts = (
        np.concatenate(arrays) for arrays in zip(*(one[:3] for one in parts), strict=True)
    )
    weights = NO_WEIGHTS
    if any(one.weights is not None for one in parts):
        all_weights = [one.mask.astype(np.float32) if one.weights is None else one.weights for one in parts]
        weights = np.concatenate(all_weights)
    return locate(found, flat_ids, flat_mask, seq_starts, origin, weights)


class _Sample(NamedTuple):
    ids: IntArray
    mask: IntArray
    starts: IntArray
    weights: npt.NDArray[np.float32] | None


def _checked_sample(sample: Mapping[str, Any], name: str) -> _Sample:
    if missing := [field for field in _SAMPLE_FIELDS if field not in sample]:
        raise InvalidInputError(f"{name} has no {missing[0]}; a packed sample has {', '.join(_SAMPLE_FIELDS)}")
    ids = as_int_array(sample["input_ids"], f"input_ids of {name}")
    mask, weights = mask_and_weights(sample["loss_mask"], f"loss_mask of {name}")
    boundaries = as_int_array(sample["seq_boundaries"], f"seq_boundaries of {name}")
    if len(mask) != len(ids):
        raise InvalidInputError(f"{name} has {len(ids)} input_ids but {len(mask)} loss_mask values")
    if (
        len(boundaries) < 2
        or boundaries[0] != 0
        or boundaries[-1] != len(ids)
        or (boundaries[1:] <= boundaries[:-1]).any()
    ):
        raise InvalidInputError(
            f"seq_boundaries of {name} must rise from 0 to its {len(ids)} tokens; "
            f"they are {boundaries[:8].tolist()}{'...' if len(boundaries) > 8 else ''}"
        )
    if ids.dtype != np.uint16:
        ids = cast_checked(ids, np.int32, _MAX_ID, f"input_ids of {name}")
    mask = cast_checked(mask, np.uint8, 2, f"loss_mask of {name}")
    return _Sample(ids, mask, boundaries[:-1].astype(np.uint32), weights)


def damaged_bin(located: LocatedBins, column: int, code: int) -> PackedSFTError:
    """Return the error for a bin that a kernel refused."""
    if code == BAD_CHECKSUM:
        shard = located.origins[int(located.table[ORIGIN, column])]
        if not isinstance(shard, str):
            return shard.damaged_bin(int(located.table[BIN, column]), "checksum")
    name = f"{located.origin(column)}: bin {located.table[BIN, column]}"
    if code == BAD_BATCH_INDEX:
        return InvalidInputError(
            f"{name} has batch index {located.table[BATCH_INDEX, column]}, which is taken or does not exist; "
            "give each bin an index of its own, from 0 to the batch size - 1"
        )
    what = {
        BAD_LENGTH: "its length is not that of its tokens",
        BAD_OFFSETS: "some of its sequences are missing",
        BAD_CHECKSUM: "it does not match its checksum",
        BAD_STARTS: f"its sequence starts do not rise from 0 inside its {located.table[LENGTH, column]} tokens",
    }[code]
    return ShardFileError(f"{name} is damaged: {what}; run `packed-sft validate` on the shard")


def _columns(
    bins: Numbers, batch_indices: Numbers | None, is_padding: Flags | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    numbers = np.ascontiguousarray(bins, np.int64)
    num_bins = numbers.size
    indices = np.arange(num_bins) if batch_indices is None else np.ascontiguousarray(batch_indices, np.int64)
    padding = np.zeros(num_bins, np.bool_) if is_padding is None else np.ascontiguousarray(is_padding, np.bool_)
    if indices.size != num_bins or padding.size != num_bins:
        raise InvalidInputError(
            f"{num_bins} bins have {indices.size} batch indices and {padding.size} is_padding flags; "
            "give one of each for every bin"
        )
    return numbers, indices, padding
