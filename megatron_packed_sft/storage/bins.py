"""What goes into a shard and comes out of it: one packed bin, a block of many, the rules both obey, and the figures.

    bin 0   input_ids   11 12 13 14 15 | 21 22 23 |  0  0     the padding at the end is not part of the bin
            loss_mask    0  1  1  1  0 |  1  1  0 |  0  0     next-token aligned: 0 at each sequence's last token
            starts       0               5                    packed_len 8

A loss mask of float32 is one of weights: how much the prediction counts, 0 where the mask would be 0. A block keeps
both, `loss_mask` and `loss_weights`, as a shard does; a single bin has one of them, `loss_mask`.

A block is the padded form of several consecutive bins: exactly the bytes of the shard's two large arrays, plus the
lengths and the CSR of starts. Writers take blocks and readers return them, so whole shards move without a Python loop
per bin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError

IntArray = npt.NDArray[np.integer[Any]]


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


# How the figures of several shards become those of all: what adds up, and the largest or smallest of all.
TOTALS = ("num_bins", "num_sequences", "num_tokens", "num_loss_tokens")
EXTREMES: dict[str, Callable[..., int]] = {
    "pack_size": max,
    "max_seqs_per_bin": max,
    "max_seq_len": max,
    "min_packed_len": min,
    "pad_seq_to_mult": max,
}
SUM_OF_WEIGHTS = "sum_loss_weights"
PROVENANCE_KEYS = ("tokenizer", "chat_template_fingerprint", "plan_fingerprint", "pad_seq_to_mult")


@dataclass(frozen=True, kw_only=True)
class BinFigures:
    """What is known of all bins of a shard, a split or a dataset; None where it was not recorded."""

    num_bins: int
    pack_size: int
    num_sequences: int | None = None
    num_tokens: int | None = None
    num_loss_tokens: int | None = None
    max_seqs_per_bin: int | None = None
    max_seq_len: int | None = None
    min_packed_len: int | None = None
    pad_seq_to_mult: int | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None
    has_weights: bool = False
    sum_loss_weights: float | None = None  # with weights
    max_input_len: int | None = None  # positions that a bin needs at most, where that is known to be below pack_size

    @property
    def num_positions(self) -> int:
        """Positions that any bin takes in a batch at most: its last token is a label only, so often fewer."""
        return self.pack_size if self.max_input_len is None else self.max_input_len

    @classmethod
    def of(cls, shard: Any) -> Self:
        """Return a shard's own figures if it has some, else count over its bins."""
        own = getattr(shard, "figures", None)
        if isinstance(own, cls):
            return own
        return cls._counted(shard, shard.pack_size)

    @classmethod
    def _counted(cls, bins: Iterable[PackedBin], pack_size: int) -> Self:
        num_bins = num_sequences = num_tokens = num_loss_tokens = max_seqs_per_bin = max_seq_len = 0
        min_packed_len = pack_size
        has_weights, weights = False, []
        for one in bins:
            length = len(one.input_ids)
            num_bins += 1
            num_sequences += one.num_sequences
            num_tokens += length
            num_loss_tokens += int(np.count_nonzero(one.loss_mask))
            has_weights |= one.loss_mask.dtype.kind == "f"
            weights.append(float(np.sum(one.loss_mask, dtype=np.float64)))
            max_seqs_per_bin = max(max_seqs_per_bin, one.num_sequences)
            max_seq_len = max(max_seq_len, int(np.diff([*one.seq_start_id.tolist(), length]).max()))
            min_packed_len = min(min_packed_len, length)
        return cls(
            num_bins=num_bins,
            pack_size=pack_size,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            max_seqs_per_bin=max_seqs_per_bin,
            max_seq_len=max_seq_len,
            min_packed_len=min_packed_len,
            has_weights=has_weights,
            sum_loss_weights=math.fsum(weights) if has_weights else None,
        )

    @classmethod
    def over(cls, parts: Sequence[BinFigures]) -> Self:
        """Return the figures of several parts together; what one of them did not record is unknown.

        Example:
            >>> parts = [BinFigures(num_bins=2, pack_size=8, num_tokens=9), BinFigures(num_bins=1, pack_size=4)]
            >>> both = BinFigures.over(parts)
            >>> both.num_bins, both.pack_size, both.num_tokens
            (3, 8, None)
        """

        def reduced(name: str, reduce: Callable[..., Any]) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if None in values else reduce(values)

        def common(values: Sequence[Any]) -> Any:
            return values[0] if all(value == values[0] for value in values) else None

        reductions: dict[str, Callable[..., Any]] = {**dict.fromkeys(TOTALS, sum), **EXTREMES, "vocab_size": max}
        reductions |= dict.fromkeys(("pad_id", "tokenizer", "chat_template_fingerprint"), common)
        together = cls(**{name: reduced(name, reduce) for name, reduce in reductions.items()})
        if any(part.max_input_len is not None for part in parts):
            together = replace(together, max_input_len=max(part.num_positions for part in parts))
        if not any(part.has_weights for part in parts):
            return together
        sums = [part.sum_loss_weights if part.has_weights else part.num_loss_tokens for part in parts]
        known = [one for one in sums if one is not None]
        total = math.fsum(known) if len(known) == len(sums) else None
        return replace(together, has_weights=True, sum_loss_weights=total)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def numbers(self) -> dict[str, int | float]:
        """Return the known totals and extremes by name."""
        values = {name: getattr(self, name) for name in (*TOTALS, *EXTREMES, SUM_OF_WEIGHTS)}
        return {name: value for name, value in values.items() if value is not None}


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

    Weights have a check of their own: `loss_weights.find_weight_violations`.

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
    """Return a view as maps are: for numba a writable array is a type of its own, to be compiled again."""
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


def as_int_array(values: Any, name: str, ndim: int = 1) -> IntArray:
    """Return `values` as an integer array of `ndim` dimensions, or say in one sentence why that cannot be.

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
