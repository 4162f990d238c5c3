"""What goes into a shard and comes out of it: a packed bin, a block of many bins, and the rules that both obey.

    bin 0   input_ids     11  12  13 14 15 | 21 22 23 |  0  0     the padding at the end is not part of the bin
            loss_mask      0   1   1  1  0 |  1  1  0 |  0  0     next-token aligned: 0 at each sequence's last token
            loss_weights   0 0.5 0.5  2  0 |  1  1  0 |  0  0     only if a weight is neither 0 nor 1
            starts         0                  5                   packed_len 8

Weights say how much each prediction counts: they are finite, and above 0 exactly where the mask is 1. A block holds
both arrays, as a shard does; a single bin has one loss mask, which is float32 if it holds weights.

A block is the padded form of consecutive bins: exactly the bytes of the shard's large arrays, plus the lengths and the
CSR of starts. Writers take blocks and readers return them, so whole shards move without a Python loop per bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.support.array_files import INDEX_DTYPE, WEIGHT_DTYPE

IntArray = npt.NDArray[np.integer[Any]]

NO_WEIGHTS = np.empty(0, np.float32)  # for kernels, where every trained token counts 1
NO_WEIGHTS.flags.writeable = False  # like a map; numba would compile again for a writable array


class PackedBin(NamedTuple):
    """One packed bin without its padding; `loss_mask` is uint8, or float32 in a shard with weights."""

    input_ids: IntArray
    loss_mask: npt.NDArray[Any]
    seq_start_id: npt.NDArray[np.uint32]

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences in the bin."""
        return len(self.seq_start_id)


@dataclass(frozen=True, slots=True, eq=False)
class BinBlock:
    """Consecutive bins in padded form; see the drawing at the top of this module.

    `seq_offsets` has one entry more than there are bins. It may be a slice of a larger CSR: the starts of bin i are
    `seq_starts[seq_offsets[i] - seq_offsets[0] : seq_offsets[i + 1] - seq_offsets[0]]`.

    Example:
        >>> import numpy as np
        >>> block = BinBlock(
        ...     input_ids=np.array([[5, 6, 7, 0]], np.int32), loss_mask=np.array([[1, 1, 0, 0]], np.uint8),
        ...     packed_len=np.array([3], np.uint32), seq_offsets=np.array([0, 1], np.uint32),
        ...     seq_starts=np.array([0], np.uint32))
        >>> block[0].input_ids.tolist()
        [5, 6, 7]
    """

    input_ids: IntArray
    loss_mask: npt.NDArray[np.uint8]
    packed_len: npt.NDArray[np.uint32]
    seq_offsets: npt.NDArray[np.uint32]
    seq_starts: npt.NDArray[np.uint32]
    loss_weights: npt.NDArray[np.float32] | None = None  # None: 1 where the mask is

    def __len__(self) -> int:
        return len(self.packed_len)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of a block of {len(self)}")
        length = int(self.packed_len[index])
        first = int(self.seq_offsets[index]) - int(self.seq_offsets[0])
        last = int(self.seq_offsets[index + 1]) - int(self.seq_offsets[0])
        mask = self.loss_mask if self.loss_weights is None else self.loss_weights
        return PackedBin(self.input_ids[index, :length], mask[index, :length], self.seq_starts[first:last])


class GatheredBins(NamedTuple):
    """Some bins in flat arrays: bin i is [starts[i], starts[i] + lengths[i]) of the ids and of the mask.

    Its sequences begin at seq_starts[first_sequence[i] : sequences_end[i]], counted from the bin's own start. The
    arrays may hold other bins, too.
    """

    input_ids: IntArray
    loss_mask: npt.NDArray[np.uint8]
    seq_starts: npt.NDArray[np.uint32]
    starts: IntArray
    lengths: IntArray
    first_sequence: IntArray
    sequences_end: IntArray
    loss_weights: npt.NDArray[np.float32] = NO_WEIGHTS
    is_empty: npt.NDArray[np.bool_] | None = None  # bins in which no token is trained, whatever the mask says


def block_of(bins: Sequence[PackedBin], width: int, pad_id: int = 0) -> BinBlock:
    """Return bins in padded form, in arrays of their own.

    Example:
        >>> bins = [PackedBin(np.array([5, 6]), np.array([1, 0]), np.array([0]))]
        >>> block_of(bins, width=4, pad_id=9).input_ids.tolist()
        [[5, 6, 9, 9]]
    """
    for index, one in enumerate(bins):
        if not len(one.input_ids) == len(one.loss_mask) <= width:
            raise ShardError(
                f"bin {index} of a block has {len(one.input_ids)} ids and {len(one.loss_mask)} mask values, and room "
                f"for {width}; its storage is at fault"
            )
    input_ids = np.full((len(bins), width), pad_id, np.int32)
    loss_mask = np.zeros((len(bins), width), np.uint8)
    loss_weights = None
    for index, (ids, mask_or_weights, _) in enumerate(bins):
        mask, weights = mask_and_weights(mask_or_weights, f"loss_mask of bin {index} of a block")
        input_ids[index, : len(ids)] = ids
        loss_mask[index, : len(mask)] = mask
        if weights is not None and loss_weights is None:
            loss_weights = loss_mask.astype(WEIGHT_DTYPE)
        if loss_weights is not None:
            loss_weights[index, : len(mask)] = mask if weights is None else weights
    counts = [len(one.seq_start_id) for one in bins]
    return BinBlock(
        input_ids,
        loss_mask,
        np.array([len(one.input_ids) for one in bins], INDEX_DTYPE),
        np.concatenate(([0], np.cumsum(counts))).astype(INDEX_DTYPE),
        np.concatenate([np.asarray(one.seq_start_id, INDEX_DTYPE) for one in bins]),
        loss_weights,
    )


def gather(bins: Sequence[PackedBin], where: str) -> GatheredBins:
    """Copy single bins into flat arrays; values that the arrays cannot hold are an error.

    Example:
        >>> bins = [PackedBin(np.array([5, 6]), np.array([1, 0]), np.array([0]))] * 2
        >>> gather(bins, "the bins").starts.tolist()
        [0, 2]
    """
    parts = [mask_and_weights(one.loss_mask, f"{where}: loss_mask") for one in bins]
    lengths = np.array([len(one.input_ids) for one in bins])
    counts = np.array([len(one.seq_start_id) for one in bins])
    for one, (mask, _) in zip(bins, parts, strict=True):
        if len(mask) != len(one.input_ids):
            raise ShardError(
                f"{where}: a bin has {len(one.input_ids)} ids and {len(mask)} mask values; its storage is at fault"
            )
    weights = NO_WEIGHTS
    if any(found is not None for _, found in parts):
        weights = np.concatenate([mask.astype(WEIGHT_DTYPE) if found is None else found for mask, found in parts])
    return GatheredBins(
        cast_checked(np.concatenate([one.input_ids for one in bins]), "<i4", 2**31, f"{where}: input_ids"),
        cast_checked(np.concatenate([mask for mask, _ in parts]), "|u1", 2, f"{where}: loss_mask"),
        cast_checked(np.concatenate([one.seq_start_id for one in bins]), "<u4", 2**32, f"{where}: seq_start_id"),
        lengths.cumsum() - lengths,
        lengths,
        counts.cumsum() - counts,
        counts.cumsum(),
        weights,
    )


def clear_sequence_ends(block: BinBlock) -> int:
    """Set the loss mask to 0 at the last token of every sequence, in place; return how many were not 0."""
    if not block.loss_mask.flags.writeable:
        return 0  # a view of a memmap_v1 shard, whose writer refuses such masks
    from megatron_packed_sft.storage import bin_kernel

    num_cleared = int(
        bin_kernel.clear_sequence_ends(block.loss_mask, block.packed_len, block.seq_offsets, block.seq_starts)
    )
    if num_cleared and block.loss_weights is not None:
        block.loss_weights[block.loss_mask == 0] = 0
    return num_cleared


class BlockTotals(NamedTuple):
    """What a block adds to the figures of its shard."""

    num_tokens: int
    num_loss_tokens: int
    max_seqs_per_bin: int
    max_seq_len: int
    min_packed_len: int

    def plus(self, other: BlockTotals) -> BlockTotals:
        """Return the totals of both."""
        return BlockTotals(
            self.num_tokens + other.num_tokens,
            self.num_loss_tokens + other.num_loss_tokens,
            max(self.max_seqs_per_bin, other.max_seqs_per_bin),
            max(self.max_seq_len, other.max_seq_len),
            min(self.min_packed_len, other.min_packed_len),
        )


class Violation(NamedTuple):
    """The first broken invariant of one bin, as a message."""

    bin: int
    field: str
    message: str


def find_violations(block: BinBlock, *, vocab_size: int, pad_id: int | None) -> tuple[list[Violation], BlockTotals]:
    """Check every invariant of every bin; return at most one violation per bin, and the totals of the sound bins.

    Weights are checked by `find_weight_violations`.

    Args:
        block: the bins, with ids as `<u2` or `<i4`, mask as `|u1` and indices as `<u4`.
        vocab_size: ids must be below it.
        pad_id: the value every padding cell must hold, or None when it is not known.
    """
    from megatron_packed_sft.storage import bin_kernel

    num_bins, width = block.input_ids.shape
    codes = np.zeros(num_bins, np.uint8)
    positions = np.zeros(num_bins, np.int64)
    totals = np.zeros(bin_kernel.NUM_TOTALS, np.int64)
    totals[bin_kernel.MIN_PACKED_LENGTH] = width
    num_bad = bin_kernel.check_bins(
        _read_only(block.input_ids.view(f"<u{block.input_ids.dtype.itemsize}")),
        _read_only(block.loss_mask),
        _read_only(block.packed_len),
        _read_only(block.seq_offsets),
        _read_only(block.seq_starts),
        np.uint64(vocab_size),
        np.int64(-1 if pad_id is None else pad_id),
        codes,
        positions,
        totals,
    )
    violations = []
    if num_bad:
        for index in np.flatnonzero(codes).tolist():
            violations.append(
                _describe(block, index, int(codes[index]), int(positions[index]), width, vocab_size, pad_id)
            )
    return violations, BlockTotals(*totals.tolist())


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view like those of maps: numba compiles a kernel again for a writable array."""
    view = array.view()
    view.flags.writeable = False
    return view


def _describe(
    block: BinBlock, index: int, code: int, position: int, width: int, vocab_size: int, pad_id: int | None
) -> Violation:
    from megatron_packed_sft.storage import bin_kernel

    length = int(block.packed_len[index])
    ids, mask = block.input_ids[index], block.loss_mask[index]
    if code == bin_kernel.MASK_NOT_BINARY:
        position = _first(mask > 1)
    elif code == bin_kernel.ID_OUT_OF_RANGE:
        position = _first((ids < 0) | (ids >= vocab_size))
    elif code == bin_kernel.DIRTY_MASK_PADDING:
        position = length + _first(mask[length:] != 0)
    elif code == bin_kernel.DIRTY_ID_PADDING:
        position = length + _first(ids[length:] != pad_id)
    if code == bin_kernel.BAD_LENGTH:
        return Violation(index, "packed_len", f"is {position}, not in 1..{width}")
    if code == bin_kernel.BAD_OFFSETS:
        return Violation(index, "seq_offsets", f"give it {position} sequences, or point outside seq_starts")
    if code == bin_kernel.FIRST_START_NOT_ZERO:
        return Violation(index, "seq_starts", f"begin with {position}, not 0")
    if code == bin_kernel.STARTS_NOT_INCREASING:
        return Violation(index, "seq_starts", f"do not increase at entry {position}")
    if code == bin_kernel.START_BEYOND_LENGTH:
        return Violation(index, "seq_starts", f"entry {position} is not below its length {length}")
    if code == bin_kernel.MASK_NOT_BINARY:
        return Violation(
            index, "loss_mask", f"is {int(block.loss_mask[index, position])} at position {position}, not 0 or 1"
        )
    if code == bin_kernel.MASK_AT_SEQUENCE_END:
        return Violation(
            index,
            "loss_mask",
            f"is 1 at position {position}, the last token of a sequence, which predicts nothing: "
            "the mask must be next-token aligned",
        )
    if code == bin_kernel.ID_OUT_OF_RANGE:
        value = int(block.input_ids[index, position])
        return Violation(index, "input_ids", f"is {value} at position {position}, not in 0..{vocab_size - 1}")
    if code == bin_kernel.DIRTY_MASK_PADDING:
        return Violation(index, "loss_mask", f"is not 0 in the padding, at position {position}")
    value = int(block.input_ids[index, position])
    return Violation(index, "input_ids", f"is {value} in the padding, at position {position}, not pad_id {pad_id}")


def _first(is_wrong: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(is_wrong))


def find_weight_violations(block: BinBlock) -> tuple[list[Violation], npt.NDArray[np.float64]]:
    """Check the weights of bins that have no other violation; return at most one per bin, and each bin's sum."""
    from megatron_packed_sft.storage import bin_kernel

    assert block.loss_weights is not None
    positions = np.zeros(len(block), np.int64)
    sums = np.zeros(len(block), np.float64)
    violations = []
    if bin_kernel.check_weights(block.loss_mask, block.loss_weights, positions, sums):
        for index in np.flatnonzero(positions >= 0).tolist():
            place = int(positions[index])
            weight, mask = float(block.loss_weights[index, place]), int(block.loss_mask[index, place])
            message = f"is {weight:g} at position {place}, where loss_mask is {mask}; it is finite, and above 0 exactly"
            violations.append(Violation(index, "loss_weights", f"{message} where the mask is 1"))
    return violations, sums


def as_int_array(values: Any, name: str, ndim: int = 1) -> IntArray:
    """Return `values` as an integer array of `ndim` dimensions; anything else is an error.

    Example:
        >>> as_int_array([1, 2], "input_ids").tolist()
        [1, 2]
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{name} is not an array of integers ({error}); pass a list or a NumPy array") from None
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.ndim == ndim and array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)  # NumPy gives an empty list a float dtype
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"{name} has shape {array.shape} and type {array.dtype}; it must be a {ndim}-dimensional array of integers"
        )
    return array


def cast_checked(array: IntArray, dtype: npt.DTypeLike, limit: int, name: str) -> npt.NDArray[Any]:
    """Return `array` as a C-contiguous array of `dtype`; values outside 0..limit-1 are an error, never wrapped.

    Example:
        >>> import numpy as np
        >>> cast_checked(np.array([1, 300]), "<u2", 65536, "input_ids").dtype.str
        '<u2'
    """
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limit:
            value = low if low < 0 else high
            where = np.unravel_index(int(np.argmax(array == value)), array.shape)
            place = ", ".join(str(int(index)) for index in where)
            raise InvalidInputError(f"{name} is {value} at position {place}, not in 0..{limit - 1}")
    return np.ascontiguousarray(array, dtype=dtype)


def mask_and_weights(values: Any, name: str, ndim: int = 1) -> tuple[IntArray, npt.NDArray[np.float32] | None]:
    """Split a loss mask into 0/1 and weights; weights are None if the mask is of integers, or all of them 0 or 1.

    Example:
        >>> mask, weights = mask_and_weights([0, 0.5, 1], "loss_mask")
        >>> mask.tolist(), weights.tolist()
        ([0, 1, 1], [0.0, 0.5, 1.0])
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        return as_int_array(values, name, ndim), None  # raises the error
    if array.dtype.kind != "f" or array.size == 0:
        return as_int_array(array if array.size else values, name, ndim), None
    weights = as_weights(array, name, ndim)
    mask = (weights > 0).astype(np.uint8)
    return mask, None if np.array_equal(weights, mask) else weights


def as_weights(values: Any, name: str, ndim: int = 1) -> npt.NDArray[np.float32]:
    """Return `values` as a C-contiguous float32 array of `ndim` dimensions; they are finite and at least 0.

    Example:
        >>> as_weights([0, 0.5, 2], "weights").tolist()
        [0.0, 0.5, 2.0]
    """
    try:
        array = np.asarray(values)
        with np.errstate(over="ignore"):  # too large a value becomes infinite, and is refused below
            weights = np.ascontiguousarray(array, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{name} is not an array of numbers ({error}); pass a list or a NumPy array") from None
    if weights.ndim != ndim:
        raise InvalidInputError(f"{name} has shape {weights.shape}; it must be a {ndim}-dimensional array of numbers")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)) | ((weights == 0) & (array != 0)))
    if bad.size:
        value = array.reshape(-1)[bad[0]]
        raise InvalidInputError(
            f"{name} is {value} at position {int(bad[0])}; a weight is 0, or a positive number that a float32 holds"
        )
    return weights


def cannot_keep(what: str, storage: str) -> InvalidInputError:
    """Return the error for weights that are to be written to a storage without weights."""
    return InvalidInputError(
        f"{what} has loss weights other than 0 and 1, and {storage} keeps only 0 and 1; use memmap_v1, or prepare "
        "the data without weights"
    )


def masks_would_be_lost(what: str, num_untrained: int, num_predictions: int) -> InvalidInputError:
    """Return the error for loss masks that are to be written to a storage without masks."""
    return InvalidInputError(
        f"{what}: {num_untrained:,} of {num_predictions:,} predictions are not trained, and megatron_indexed keeps no "
        "loss masks, so they would be trained; add --drop-masks (drop_masks=True) to accept that"
    )
