"""Lengths in, units out: what is filtered, dropped, cut or split before anything is packed.

A unit is what a bin holds. Without cuts it is a sequence, and its number is the sequence's. With cuts (overflow
`truncate` or `split`) units are pieces, ordered by sequence and start, and `Chunks` tells what each of them is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.accounting import (
    ABOVE_MAX_LEN,
    BELOW_MIN_LEN,
    LONGER_THAN_PACK,
    SHORT_TAIL,
    TRUNCATED,
    Accounting,
)
from megatron_packed_sft.packing.strategies.problem import Int32, Int64

Overflow = Literal["error", "drop", "truncate", "split", "single"]
OVERFLOWS: tuple[str, ...] = get_args(Overflow)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Which piece of which sequence each unit is. Three int32 arrays, one entry per unit.

        sequence 7:  |------------|------------|-----|     pack_size 12, stride 3
        unit 7       [0 .......... 11]                     start 0,  masked_prefix 0
        unit 8                [9 .......... 20]            start 9,  masked_prefix 3
        unit 9                         [18 ... 26]         start 18, masked_prefix 3

    The first `masked_prefix` tokens of a unit were trained in the unit before: their train mask is 0 here.
    """

    sequence: Int32
    start: Int32
    masked_prefix: Int32


@dataclass(frozen=True, kw_only=True)
class Units:
    """What goes to the packer: the length of every unit, and which of them are packed (None = all)."""

    lengths: Int32
    packed: Int32 | None
    chunks: Chunks | None
    accounting: Accounting
    histogram: Int64 | None = None  # of the lengths, when it was counted on the way and all are packed


def make_units(
    lengths: npt.ArrayLike, *, limit: int, overflow: str, stride: int, min_len: int, max_len: int | None
) -> Units:
    """Check lengths, filter them, and treat those above `limit` as `overflow` says.

    Example:
        >>> units = make_units([5, 30], limit=12, overflow="split", stride=3, min_len=1, max_len=None)
        >>> units.lengths.tolist(), units.chunks.sequence.tolist(), units.chunks.start.tolist()
        ([5, 12, 12, 12], [0, 1, 1, 1], [0, 0, 9, 18])
    """
    checked, histogram, longest, shortest, num_tokens = _check(lengths, limit)
    accounting = Accounting(num_sequences=checked.size, num_tokens=num_tokens)
    if longest <= limit and shortest >= min_len and (max_len is None or longest <= max_len):
        return Units(lengths=checked, packed=None, chunks=None, accounting=accounting, histogram=histogram[: limit + 1])
    is_kept = checked >= min_len
    accounting = _drop(accounting, BELOW_MIN_LEN, checked, ~is_kept)
    if max_len is not None:
        is_above = is_kept & (checked > max_len)
        accounting = _drop(accounting, ABOVE_MAX_LEN, checked, is_above)
        is_kept &= ~is_above
    is_long = is_kept & (checked > limit)
    num_long = int(is_long.sum())
    if num_long and overflow == "error":
        raise InvalidInputError(_too_long(checked, is_long, limit, shortest))
    if num_long and overflow in ("truncate", "split"):
        return _cut(checked, is_kept, limit, stride if overflow == "split" else None, min_len, accounting)
    if overflow == "drop":
        accounting = _drop(accounting, LONGER_THAN_PACK, checked, is_long)
        is_kept &= ~is_long
    elif overflow == "single":
        accounting = replace(accounting, num_oversized=num_long)
    packed = None if is_kept.all() else np.flatnonzero(is_kept).astype(np.int32)
    return Units(lengths=checked, packed=packed, chunks=None, accounting=accounting)


def _check(lengths: npt.ArrayLike, limit: int) -> tuple[Int32, Int64, int, int, int]:
    """Return lengths as int32, their histogram, the longest, the shortest and the sum."""
    from megatron_packed_sft.packing.search.deal_kernel import check_and_count

    try:
        array = np.asarray(lengths)
    except ValueError:
        raise InvalidInputError("lengths must be one number per sequence, not nested lists") from None
    if array.ndim != 1:
        raise InvalidInputError(
            f"lengths must have one dimension, not shape {array.shape}; pass one length per sequence"
        )
    if array.size == 0:
        raise InvalidInputError("there is nothing to pack: lengths is empty; check what was read before packing")
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"lengths must be whole numbers, not {array.dtype}; pass an integer array")
    if array.size >= 2**31:
        raise InvalidInputError(f"a plan holds at most 2,147,483,647 sequences, not {array.size:,}; pack in parts")
    # Two types only, or the kernel is compiled for every one; a length beyond int64 turns negative, and is refused.
    kind = np.int32 if array.dtype == np.int32 else np.int64
    checked = np.empty(array.size, np.int32)
    histogram = np.zeros(limit + 2, np.int64)
    shortest, longest, total, first_bad = check_and_count(np.ascontiguousarray(array, kind), limit, checked, histogram)
    if first_bad >= 0:
        raise InvalidInputError(
            f"sequence {first_bad} has length {array[first_bad]}; lengths are from 1 to 2,147,483,647: "
            "leave out empty sequences before packing"
        )
    return checked, histogram, int(longest), int(shortest), int(total)


def _drop(accounting: Accounting, reason: str, lengths: Int32, chosen: npt.NDArray[np.bool_]) -> Accounting:
    return accounting.with_drop(reason, int(chosen.sum()), int(lengths[chosen].sum(dtype=np.int64)))


def _too_long(lengths: Int32, is_long: npt.NDArray[np.bool_], limit: int, shortest: int) -> str:
    first = int(np.argmax(is_long))
    remedy = "choose a larger pack_size, or overflow='drop', 'truncate', 'split' or 'single'"
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
) -> Units:
    """Make the table of pieces: the first `limit` tokens only (stride None), or all, overlapping by `stride`."""
    kept = np.flatnonzero(is_kept).astype(np.int32)
    whole = lengths[kept].astype(np.int64)
    is_long = whole > limit
    if stride is None:
        num_cut = int((whole[is_long] - limit).sum())
        accounting = replace(accounting, num_truncated=int(is_long.sum())).with_drop(TRUNCATED, 0, num_cut)
        zeros = np.zeros(kept.size, np.int32)
        chunks = Chunks(sequence=kept, start=zeros, masked_prefix=zeros)
        return Units(
            lengths=np.minimum(whole, limit).astype(np.int32), packed=None, chunks=chunks, accounting=accounting
        )
    step = limit - stride
    pieces = np.where(is_long, 1 + -(-(whole - limit) // step), 1)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * step
    length = np.minimum(np.repeat(whole, pieces) - start, limit)
    masked = np.where(number > 0, stride, 0)
    is_short = (number > 0) & (length < min_len)
    num_lost = int((length[is_short] - stride).sum())
    accounting = replace(
        accounting,
        num_split=int(is_long.sum()),
        num_chunks=int(np.repeat(is_long, pieces).sum() - is_short.sum()),
        num_overlap_tokens=int(masked[~is_short].sum()),
    ).with_drop(SHORT_TAIL, 0, num_lost)
    chunks = Chunks(
        sequence=np.repeat(kept, pieces)[~is_short],
        start=start[~is_short].astype(np.int32),
        masked_prefix=masked[~is_short].astype(np.int32),
    )
    return Units(lengths=length[~is_short].astype(np.int32), packed=None, chunks=chunks, accounting=accounting)
