"""Lengths in, items out: what is filtered, dropped, truncated or split before packing, and the count of all of it.

An item is what a bin holds. Usually it is a sequence, and its number is the sequence's. Where sequences are cut
(overflow `truncate` or `split`) items are chunks, ordered by sequence and start; `Chunks` says what each of them is.

How much room an item takes: the collator drops one token per item (labels are the inputs shifted by one), so L stored
tokens are L - 1 inputs.

    measure   counts                              an item of L tokens takes        with pad_seq_to_mult = m
    tokens    what a shard stores                 L                                ceil((L - 1) / m) * m + 1
    inputs    positions the model computes        L - 1                            ceil((L - 1) / m) * m
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.strategies.packing_problem import Int32, Int64
from megatron_packed_sft.support.drop_reasons import DropReason

Overflow = Literal["error", "drop", "truncate", "split", "single"]
OVERFLOWS: tuple[str, ...] = get_args(Overflow)
Measure = Literal["tokens", "inputs"]
MEASURES: tuple[str, ...] = get_args(Measure)

# Why packing drops something. TRUNCATED and SHORT_TAIL count tokens only: their sequences are packed.
REASONS = (
    DropReason.BELOW_MIN_LEN,
    DropReason.ABOVE_MAX_LEN,
    DropReason.LONGER_THAN_PACK,
    DropReason.TRUNCATED,
    DropReason.SHORT_TAIL,
    DropReason.HELD_BACK,
)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """What was packed, dropped and cut, and why. Sums are exact: in + overlap == packed + dropped.

    Example:
        >>> Accounting(num_sequences=3, num_tokens=30, dropped_sequences={"below_min_len": 1}).num_sequences_packed
        2
    """

    num_sequences: int
    num_tokens: int
    dropped_sequences: dict[str, int] = field(default_factory=dict)
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    num_truncated: int = 0
    num_split: int = 0
    num_chunks: int = 0  # chunks of the split sequences, dropped tails not counted
    num_overlap_tokens: int = 0  # tokens that are in two chunks
    num_oversized: int = 0  # sequences longer than the pack, in bins of their own (overflow=single)

    @property
    def num_sequences_packed(self) -> int:
        """Sequences of which at least one token is packed."""
        return self.num_sequences - sum(self.dropped_sequences.values())

    @property
    def num_tokens_packed(self) -> int:
        """Tokens in the bins; tokens of overlaps count twice."""
        return self.num_tokens + self.num_overlap_tokens - sum(self.dropped_tokens.values())

    def with_drop(self, reason: DropReason, num_sequences: int, num_tokens: int) -> Accounting:
        """Return a copy that counts one more drop; zeros are left out."""
        name = str(reason)
        sequences = {**self.dropped_sequences, name: num_sequences} if num_sequences else self.dropped_sequences
        tokens = {**self.dropped_tokens, name: num_tokens} if num_tokens else self.dropped_tokens
        return replace(self, dropped_sequences=sequences, dropped_tokens=tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and dictionaries, as stored with a plan."""
        return asdict(self)


def sizes_of(lengths: Int32, measure: str, pad_seq_to_mult: int) -> Int32:
    """Return the room that items of these lengths take. A single token has no input; it still takes one position.

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
    """Return the most tokens that an item may have to fit into a bin.

    Example:
        >>> longest_that_fits(8, "tokens", 1), longest_that_fits(8, "inputs", 1), longest_that_fits(8, "tokens", 4)
        (8, 9, 5)
    """
    inputs = pack_size - 1 if measure == "tokens" else pack_size
    return inputs // pad_seq_to_mult * pad_seq_to_mult + 1


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Which part of which sequence each item is. Three int32 arrays, one entry per item.

        sequence 7:  |------------|------------|-----|     pack_size 12, stride 3
        item 7       [0 .......... 11]                     start 0,  masked_prefix 0
        item 8                [9 .......... 20]            start 9,  masked_prefix 3
        item 9                         [18 ... 26]         start 18, masked_prefix 3

    The first `masked_prefix` tokens of an item are trained in the item before: their train mask is 0 here.
    """

    sequence: Int32
    start: Int32
    masked_prefix: Int32


@dataclass(frozen=True, kw_only=True)
class Items:
    """What goes to the packer: the length of every item, and which of them are packed (None = all)."""

    lengths: Int32
    packed: Int32 | None
    chunks: Chunks | None
    accounting: Accounting
    histogram: Int64 | None = None  # of the lengths; only if all items are packed


def make_items(
    lengths: npt.ArrayLike,
    *,
    limit: int,
    overflow: str,
    stride: int = 0,
    min_len: int = 1,
    max_len: int | None = None,
    remedy: str = "choose another overflow",
) -> Items:
    """Check lengths, filter them, and treat those above `limit` as `overflow` says.

    `remedy` ends the message about sequences that are too long; it names options as the user wrote them.

    Example:
        >>> items = make_items([5, 30], limit=12, overflow="split", stride=3)
        >>> items.lengths.tolist(), items.chunks.sequence.tolist(), items.chunks.start.tolist()
        ([5, 12, 12, 12], [0, 1, 1, 1], [0, 0, 9, 18])
    """
    checked, histogram, longest, shortest, num_tokens = _check(lengths, limit)
    accounting = Accounting(num_sequences=checked.size, num_tokens=num_tokens)
    if longest <= limit and shortest >= min_len and (max_len is None or longest <= max_len):
        return Items(lengths=checked, packed=None, chunks=None, accounting=accounting, histogram=histogram[: limit + 1])
    is_kept = checked >= min_len
    accounting = _drop(accounting, DropReason.BELOW_MIN_LEN, checked, ~is_kept)
    if max_len is not None:
        is_above = is_kept & (checked > max_len)
        accounting = _drop(accounting, DropReason.ABOVE_MAX_LEN, checked, is_above)
        is_kept &= ~is_above
    is_long = is_kept & (checked > limit)
    num_long = int(is_long.sum())
    if num_long and overflow == "error":
        raise InvalidInputError(_too_long(checked, is_long, limit, shortest, remedy))
    if num_long and overflow in ("truncate", "split"):
        return _cut(checked, is_kept, limit, stride if overflow == "split" else None, min_len, accounting)
    if overflow == "drop":
        accounting = _drop(accounting, DropReason.LONGER_THAN_PACK, checked, is_long)
        is_kept &= ~is_long
    elif overflow == "single":
        accounting = replace(accounting, num_oversized=num_long)
    packed = None if is_kept.all() else np.flatnonzero(is_kept).astype(np.int32)
    return Items(lengths=checked, packed=packed, chunks=None, accounting=accounting)


def _check(lengths: npt.ArrayLike, limit: int) -> tuple[Int32, Int64, int, int, int]:
    """Return lengths as int32, their histogram, the longest, the shortest and the sum."""
    from megatron_packed_sft.packing.search.sequence_kernel import check_and_count

    try:
        array = np.asarray(lengths)
    except ValueError:
        raise InvalidInputError("lengths must be one number per sequence, not nested lists") from None
    if array.ndim != 1:
        raise InvalidInputError(
            f"lengths must have one dimension, not shape {array.shape}; pass one length per sequence"
        )
    if array.size == 0:
        raise InvalidInputError("lengths is empty; pass at least one length")
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"lengths must be integers, not {array.dtype}")
    if array.size >= 2**31:
        raise InvalidInputError(f"a plan holds at most 2,147,483,647 sequences, not {array.size:,}; pack in parts")
    # Only two types, because the kernel is compiled for each; a length beyond int64 turns negative and is refused.
    kind = np.int32 if array.dtype == np.int32 else np.int64
    checked = np.empty(array.size, np.int32)
    histogram = np.zeros(limit + 2, np.int64)
    shortest, longest, total, first_bad = check_and_count(np.ascontiguousarray(array, kind), limit, checked, histogram)
    if first_bad >= 0:
        raise InvalidInputError(
            f"sequence {first_bad} has length {array[first_bad]}; lengths are 1 to 2,147,483,647: leave out empty "
            "sequences before packing"
        )
    return checked, histogram, int(longest), int(shortest), int(total)


def _drop(accounting: Accounting, reason: DropReason, lengths: Int32, chosen: npt.NDArray[np.bool_]) -> Accounting:
    return accounting.with_drop(reason, int(chosen.sum()), int(lengths[chosen].sum(dtype=np.int64)))


def _too_long(lengths: Int32, is_long: npt.NDArray[np.bool_], limit: int, shortest: int, remedy: str) -> str:
    first = int(np.argmax(is_long))
    if shortest > limit:
        return (
            f"no sequence fits: a bin holds sequences of at most {limit:,} tokens, and the shortest has {shortest:,}; "
            f"{remedy}"
        )
    return (
        f"{int(is_long.sum()):,} of {lengths.size:,} sequences are longer than the {limit:,} tokens that fit into a "
        f"bin (the first is sequence {first} with {lengths[first]:,}); {remedy}"
    )


def _cut(
    lengths: Int32,
    is_kept: npt.NDArray[np.bool_],
    limit: int,
    stride: int | None,
    min_len: int,
    accounting: Accounting,
) -> Items:
    """Cut long sequences: to their first `limit` tokens (stride None), or into chunks that overlap by `stride`."""
    kept = np.flatnonzero(is_kept).astype(np.int32)
    whole = lengths[kept].astype(np.int64)
    is_long = whole > limit
    if stride is None:
        num_cut = int((whole[is_long] - limit).sum())
        accounting = replace(accounting, num_truncated=int(is_long.sum())).with_drop(DropReason.TRUNCATED, 0, num_cut)
        zeros = np.zeros(kept.size, np.int32)
        chunks = Chunks(sequence=kept, start=zeros, masked_prefix=zeros)
        return Items(
            lengths=np.minimum(whole, limit).astype(np.int32), packed=None, chunks=chunks, accounting=accounting
        )
    step = limit - stride
    num_chunks = np.where(is_long, 1 + -(-(whole - limit) // step), 1)
    number = np.arange(num_chunks.sum()) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    start = number * step
    length = np.minimum(np.repeat(whole, num_chunks) - start, limit)
    masked = np.where(number > 0, stride, 0)
    is_short = (number > 0) & (length < min_len)
    num_lost = int((length[is_short] - stride).sum())
    accounting = replace(
        accounting,
        num_split=int(is_long.sum()),
        num_chunks=int(np.repeat(is_long, num_chunks).sum() - is_short.sum()),
        num_overlap_tokens=int(masked[~is_short].sum()),
    ).with_drop(DropReason.SHORT_TAIL, 0, num_lost)
    chunks = Chunks(
        sequence=np.repeat(kept, num_chunks)[~is_short],
        start=start[~is_short].astype(np.int32),
        masked_prefix=masked[~is_short].astype(np.int32),
    )
    return Items(lengths=length[~is_short].astype(np.int32), packed=None, chunks=chunks, accounting=accounting)
