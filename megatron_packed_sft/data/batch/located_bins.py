"""Bins on their way into a batch: where they are, not what they hold.

    a batch of 3      bins 17 and 4 of shard A ─▶ batch indices 0 and 2     nothing is copied until the kernel
                      bin 9 of shard B         ─▶ batch index 1             fills the batch's arrays

`LocatedBins` names bins of one set of flat arrays: the maps of a memmap shard, the arrays of a legacy file, or samples
laid end to end. A batch is a list of them that fills each batch index once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.storage.bins import IntArray, as_int_array, cast_checked
from megatron_packed_sft.storage.loss_weights import NO_WEIGHTS, mask_and_weights
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.token_stream.reader import TokenStream

# The fields of `LocatedBins.table`: one small array instead of seven, because creating arrays dominates a small batch.
START = 0
LENGTH = 1
FIRST_SEQUENCE = 2
SEQUENCES_END = 3
BATCH_INDEX = 4
BIN = 5
IS_PADDING = 6
NUM_FIELDS = 7

# What the kernels find wrong with a bin; they return it with the bin's column in the table.
OK = 0
BAD_BIN_NUMBER = 1
BAD_LENGTH = 2
BAD_OFFSETS = 3
BAD_BATCH_INDEX = 4
BAD_STARTS = 5

_SAMPLE_FIELDS = ("input_ids", "seq_boundaries", "loss_mask")
_MAX_ID = 2**31

Numbers = Sequence[int] | IntArray
Flags = Sequence[bool] | npt.NDArray[np.bool_]


class LocatedBins(NamedTuple):
    """Bins of one set of flat arrays, and their indices in the batch.

    Bin i is [start, start + length) of `flat_ids` and `flat_mask`; its sequences begin at
    seq_starts[first_sequence:sequences_end], counted from the bin's own start.
    """

    flat_ids: IntArray
    flat_mask: npt.NDArray[np.uint8]
    seq_starts: npt.NDArray[np.uint32]
    table: npt.NDArray[np.int64]  # [NUM_FIELDS, number of bins]
    origin: str  # for messages
    flat_weights: npt.NDArray[np.float32] = NO_WEIGHTS  # as `flat_mask`; empty where every trained token counts 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many ids each bin holds."""
        lengths: npt.NDArray[np.int64] = self.table[LENGTH]
        return lengths


def locate_in_shard(
    shard: MemmapShard, bins: Numbers, batch_indices: Numbers | None = None, is_padding: Flags | None = None
) -> LocatedBins:
    """Locate bins of a memmap shard, without copying them.

    Args:
        shard: an open shard.
        bins: bin numbers, 0 <= number < len(shard).
        batch_indices: their indices in the batch; 0, 1, 2, ... if not given.
        is_padding: which of them are padding samples; none if not given.
    """
    from megatron_packed_sft.data.batch import collate_kernel

    arrays = shard.arrays
    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    table = np.empty((NUM_FIELDS, numbers.size), np.int64)
    code, column = collate_kernel.locate_bins(
        arrays.packed_len,
        arrays.seq_offsets,
        arrays.seq_starts.size,
        shard.pack_size,
        numbers,
        indices,
        padding,
        table,
    )
    if code == BAD_BIN_NUMBER:
        raise IndexError(f"{shard.path}: bin {numbers[column]} of {len(shard)}")
    if code != OK:
        name = layout.PACKED_LEN if code == BAD_LENGTH else layout.SEQ_OFFSETS
        raise ShardFileError(
            f"{shard.path / name} is damaged at bin {numbers[column]}; run `packed-sft validate` on the shard"
        )
    return LocatedBins(
        arrays.input_ids.reshape(-1),
        arrays.loss_mask.reshape(-1),
        arrays.seq_starts,
        table,
        str(shard.path),
        NO_WEIGHTS if arrays.loss_weights is None else arrays.loss_weights.reshape(-1),
    )


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
) -> LocatedBins:
    """Locate bins that lie end to end in flat arrays, such as those of a legacy file; nothing is copied.

    Args:
        flat_ids: the ids of all bins, `<u2` or `<i4`.
        flat_mask: their loss masks.
        bin_offsets: bin b is [bin_offsets[b], bin_offsets[b + 1]).
        seq_starts: the start of every sequence inside its bin.
        seq_offsets: the sequences of bin b are seq_starts[seq_offsets[b] : seq_offsets[b + 1]].
        bins, batch_indices, is_padding: as for `locate_in_shard`.
        origin: what to call the arrays in messages.
        flat_weights: how much each prediction counts; empty where the mask says it all.
    """
    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(bin_offsets) - 1:
        raise IndexError(f"{origin}: bins {numbers.tolist()} of {len(bin_offsets) - 1}")
    starts, first = bin_offsets[numbers], seq_offsets[numbers]
    lengths, end = bin_offsets[numbers + 1] - starts, seq_offsets[numbers + 1]
    table = np.array([starts, lengths, first, end, indices, numbers, padding], np.int64)
    return LocatedBins(
        _read_only(flat_ids), _read_only(flat_mask), _read_only(seq_starts), table, origin, _read_only(flat_weights)
    )


def locate_in_stream(
    stream: TokenStream, bins: Numbers, batch_indices: Numbers | None = None, is_padding: Flags | None = None
) -> LocatedBins:
    """Copy windows of a token stream out of their files, which may be many; a window is a bin.

    Args:
        stream: an open stream.
        bins: window numbers, 0 <= number < len(stream).
        batch_indices, is_padding: as for `locate_in_shard`.
    """
    numbers, indices, padding = _columns(bins, batch_indices, is_padding)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(stream):
        raise IndexError(f"{stream.path}: windows {numbers.tolist()} of {len(stream)}")
    gathered = stream.gather(numbers.tolist())
    width = stream.pack_size
    table = np.empty((NUM_FIELDS, numbers.size), np.int64)
    table[START] = np.arange(numbers.size) * width
    table[LENGTH] = gathered.lengths
    table[FIRST_SEQUENCE] = gathered.seq_offsets[:-1]
    table[SEQUENCES_END] = gathered.seq_offsets[1:]
    table[BATCH_INDEX], table[BIN], table[IS_PADDING] = indices, numbers, padding | gathered.is_empty
    # The last token of a document has no place in a batch, so the mask may be 1 there, too.
    mask = np.ones(numbers.size * width, np.uint8)
    return LocatedBins(
        _read_only(gathered.ids.reshape(-1)), _read_only(mask), _read_only(gathered.seq_starts), table, str(stream.path)
    )


def locate_in_samples(
    samples: Sequence[Mapping[str, Any]], batch_indices: Numbers | None = None, origin: str = "the batch"
) -> LocatedBins:
    """Lay samples end to end, as datasets return them one by one.

    A sample is {"input_ids", "seq_boundaries" (the starts and the length), "loss_mask"}; a loss mask of floats is one
    of weights. A padding sample also has "is_padding": True; its zero mask alone would not keep it out of the loss when
    `answer_only_loss` is off.

    Example:
        >>> located = locate_in_samples([{"input_ids": [5, 6], "seq_boundaries": [0, 2], "loss_mask": [1, 0]}])
        >>> located.flat_ids.tolist(), located.lengths.tolist()
        ([5, 6], [2])
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
    table = np.array([ends - lengths, lengths, first_sequence, sequences_end, indices, numbers, padding], np.int64)
    flat_ids, flat_mask, seq_starts = (
        _read_only(np.concatenate(arrays)) for arrays in zip(*(one[:3] for one in parts), strict=True)
    )
    weights = NO_WEIGHTS
    if any(one.weights is not None for one in parts):
        all_weights = [one.mask.astype(np.float32) if one.weights is None else one.weights for one in parts]
        weights = _read_only(np.concatenate(all_weights))
    return LocatedBins(flat_ids, flat_mask, seq_starts, table, origin, weights)


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
    name = f"{located.origin}: bin {located.table[BIN, column]}"
    if code == BAD_BATCH_INDEX:
        return InvalidInputError(
            f"{name} has batch index {located.table[BATCH_INDEX, column]}, which is taken or does not exist; "
            "give each bin an index of its own, from 0 to the batch size - 1"
        )
    what = {
        BAD_LENGTH: "its length is not that of its tokens",
        BAD_OFFSETS: "some of its sequences are missing",
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


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # For numba a read-only array is a type of its own; maps are read-only, so everything is: one compilation for all.
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
