"""Rows on their way into a batch: where they lie, not what they say.

    a batch of 3      piece 0: rows 17 and 4 of shard A ─▶ places 0 and 2     nothing is copied until the kernel
                      piece 1: row 9 of shard B         ─▶ place 1            fills the batch's buffers

A piece names rows of one flat source: the maps of a memmap shard, the arrays of a legacy file, or row dicts laid end
to end. A batch is a list of pieces that fill each of its places once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.storage.bins import IntArray, as_int_array, cast_checked
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard

# The lines of `LocatedBins.rows`: one small array instead of seven, because making arrays is what a small batch costs.
START = 0
LENGTH = 1
SEQ_FIRST = 2
SEQ_LAST = 3
POSITION = 4
ROW = 5
IS_PADDING = 6
NUM_LINES = 7

# What the kernels find wrong with a row, with the place of the row in the piece.
OK = 0
BAD_ROW_NUMBER = 1
BAD_LENGTH = 2
BAD_OFFSETS = 3
BAD_POSITION = 4
BAD_STARTS = 5

_SEQUENCE_FIELDS = ("input_ids", "seq_boundaries", "loss_mask")
_MAX_ID = 2**31

Numbers = Sequence[int] | IntArray
Flags = Sequence[bool] | npt.NDArray[np.bool_]


class LocatedBins(NamedTuple):
    """Rows of one flat source and their places in the batch.

    Row i is [starts[i], starts[i] + lengths[i]) of `flat_ids` and `flat_mask`; its sequences begin at
    seq_starts[seq_first[i] : seq_last[i]], counted from the row's own start.

    Example:
        >>> piece = locate_in_samples([{"input_ids": [5, 6, 7], "seq_boundaries": [0, 1, 3], "loss_mask": [0, 1, 0]}])
        >>> piece.lengths.tolist(), (piece.seq_last - piece.seq_first).tolist()
        ([3], [2])
    """

    flat_ids: IntArray
    flat_mask: npt.NDArray[np.uint8]
    seq_starts: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.int64]  # [NUM_LINES, number of rows]
    source: str  # for messages

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each row begins in the flat arrays."""
        return self._line(START)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many ids each row holds."""
        return self._line(LENGTH)

    @property
    def seq_first(self) -> npt.NDArray[np.int64]:
        """The first of each row's sequences in `seq_starts`."""
        return self._line(SEQ_FIRST)

    @property
    def seq_last(self) -> npt.NDArray[np.int64]:
        """One past the last of each row's sequences in `seq_starts`."""
        return self._line(SEQ_LAST)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Each row's place in the batch."""
        return self._line(POSITION)

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Which rows only fill up the batch: their loss never counts."""
        return self._line(IS_PADDING).astype(np.bool_)

    def _line(self, number: int) -> npt.NDArray[np.int64]:
        line: npt.NDArray[np.int64] = self.rows[number]
        return line


def locate_in_shard(
    shard: MemmapShard, rows: Numbers, positions: Numbers | None = None, is_padding: Flags | None = None
) -> LocatedBins:
    """Rows of a memmap shard, without copying them.

    Args:
        shard: an open shard.
        rows: bin numbers, 0 <= row < len(shard).
        positions: their places in the batch; 0, 1, 2, ... if not given.
        is_padding: which of them are padding samples; none if not given.

    Example:
        >>> locate_in_shard(shard, [17, 4], positions=[0, 2])  # doctest: +SKIP
    """
    from megatron_packed_sft.data.batch import collate_kernel

    arrays = shard.arrays
    numbers, places, padding = _columns(rows, positions, is_padding)
    table = np.empty((NUM_LINES, numbers.size), np.int64)
    code, index = collate_kernel.locate_bins(
        arrays.packed_len,
        arrays.seq_offsets,
        arrays.seq_starts.size,
        shard.pack_size,
        numbers,
        places,
        padding,
        table,
    )
    if code == BAD_ROW_NUMBER:
        raise IndexError(f"{shard.path}: bin {numbers[index]} of {len(shard)}")
    if code != OK:
        name = layout.PACKED_LEN if code == BAD_LENGTH else layout.SEQ_OFFSETS
        raise ShardFileError(
            f"{shard.path / name} is damaged at bin {numbers[index]}; run `packed-sft validate` on the shard"
        )
    return LocatedBins(
        arrays.input_ids.reshape(-1), arrays.loss_mask.reshape(-1), arrays.seq_starts, table, str(shard.path)
    )


def locate_in_arrays(
    flat_ids: IntArray,
    flat_mask: npt.NDArray[np.uint8],
    row_offsets: npt.NDArray[np.int64],
    seq_starts: npt.NDArray[np.uint32],
    seq_offsets: npt.NDArray[np.int64],
    rows: Numbers,
    positions: Numbers | None = None,
    is_padding: Flags | None = None,
    source: str = "the rows",
) -> LocatedBins:
    """Rows that lie end to end in flat arrays, as a legacy file's do after it was read; nothing is copied.

    Args:
        flat_ids: the ids of all rows, `<u2` or `<i4`.
        flat_mask: their loss masks.
        row_offsets: row r is [row_offsets[r], row_offsets[r + 1]).
        seq_starts: the start of every sequence inside its row.
        seq_offsets: the sequences of row r are seq_starts[seq_offsets[r] : seq_offsets[r + 1]].
        rows, positions, is_padding: as for `locate_in_shard`.
        source: what to call the source in messages.

    Example:
        >>> import numpy as np
        >>> ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([1, 0, 1, 0], np.uint8)
        >>> locate_in_arrays(ids, mask, np.array([0, 2, 4]), np.zeros(2, np.uint32), np.arange(3), [1]).starts.tolist()
        [2]
    """
    numbers, places, padding = _columns(rows, positions, is_padding)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(row_offsets) - 1:
        raise IndexError(f"{source}: rows {numbers.tolist()} of {len(row_offsets) - 1}")
    starts, seq_first = row_offsets[numbers], seq_offsets[numbers]
    lengths, seq_last = row_offsets[numbers + 1] - starts, seq_offsets[numbers + 1]
    table = np.array([starts, lengths, seq_first, seq_last, places, numbers, padding], np.int64)
    return LocatedBins(_read_only(flat_ids), _read_only(flat_mask), _read_only(seq_starts), table, source)


def locate_in_samples(
    rows: Sequence[Mapping[str, Any]], positions: Numbers | None = None, source: str = "the batch"
) -> LocatedBins:
    """Row dicts, as datasets return them one by one, laid end to end.

    A row is {"input_ids", "seq_boundaries" (the starts and the length), "loss_mask"}. A padding sample also says
    "is_padding": True; its zero mask alone would not keep it out of the loss when `answer_only_loss` is off.

    Example:
        >>> piece = locate_in_samples([{"input_ids": [5, 6], "seq_boundaries": [0, 2], "loss_mask": [1, 0]}])
        >>> piece.flat_ids.tolist()
        [5, 6]
    """
    ids, masks, starts = [], [], []
    for number, row in enumerate(rows):
        place = f"row {number} of {source}"
        if missing := [name for name in _SEQUENCE_FIELDS if name not in row]:
            raise InvalidInputError(f"{place} has no {missing[0]}; a packed row has {', '.join(_SEQUENCE_FIELDS)}")
        row_ids = as_int_array(row["input_ids"], f"input_ids of {place}")
        mask = as_int_array(row["loss_mask"], f"loss_mask of {place}")
        boundaries = as_int_array(row["seq_boundaries"], f"seq_boundaries of {place}")
        if len(mask) != len(row_ids):
            raise InvalidInputError(f"{place} has {len(row_ids)} input_ids and {len(mask)} loss_mask values")
        if (
            len(boundaries) < 2
            or boundaries[0] != 0
            or boundaries[-1] != len(row_ids)
            or (boundaries[1:] <= boundaries[:-1]).any()
        ):
            raise InvalidInputError(
                f"seq_boundaries of {place} must rise from 0 to its {len(row_ids)} tokens; "
                f"they are {boundaries[:8].tolist()}{'...' if len(boundaries) > 8 else ''}"
            )
        dtype = np.uint16 if row_ids.dtype == np.uint16 else np.int32
        ids.append(row_ids if dtype == np.uint16 else cast_checked(row_ids, dtype, _MAX_ID, f"input_ids of {place}"))
        masks.append(cast_checked(mask, np.uint8, 2, f"loss_mask of {place}"))
        starts.append(boundaries[:-1].astype(np.uint32))
    if not rows:
        raise InvalidInputError(f"{source} is empty; a piece needs at least one row")
    is_padding = [bool(row.get("is_padding", False)) for row in rows]
    numbers, places, padding = _columns(np.arange(len(rows)), positions, is_padding)
    lengths = np.array([len(one) for one in ids])
    num_sequences = np.array([len(one) for one in starts])
    ends, seq_last = lengths.cumsum(), num_sequences.cumsum()
    table = np.array([ends - lengths, lengths, seq_last - num_sequences, seq_last, places, numbers, padding], np.int64)
    flat_ids, flat_mask, seq_starts = (_read_only(np.concatenate(arrays)) for arrays in (ids, masks, starts))
    return LocatedBins(flat_ids, flat_mask, seq_starts, table, source)


def damaged_bin(piece: LocatedBins, index: int, code: int) -> PackedSFTError:
    """The error for a row that a kernel refused.

    Example:
        >>> raise damaged_bin(piece, 3, BAD_STARTS)  # doctest: +SKIP
    """
    place = f"{piece.source}: row {piece.rows[ROW, index]}"
    if code == BAD_POSITION:
        return InvalidInputError(
            f"{place} is given place {piece.rows[POSITION, index]} of the batch, which is taken or does not exist; "
            "give each row a place of its own, from 0 to the batch size - 1"
        )
    what = {
        BAD_LENGTH: "its length is not that of its tokens",
        BAD_OFFSETS: "its sequences are not all there",
        BAD_STARTS: f"its sequence starts do not rise from 0 inside its {piece.rows[LENGTH, index]} tokens",
    }[code]
    return ShardFileError(f"{place} is damaged: {what}; run `packed-sft validate` on the shard")


def _columns(
    rows: Numbers, positions: Numbers | None, is_padding: Flags | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    numbers = np.ascontiguousarray(rows, np.int64)
    num_rows = numbers.size
    places = np.arange(num_rows) if positions is None else np.ascontiguousarray(positions, np.int64)
    padding = np.zeros(num_rows, np.bool_) if is_padding is None else np.ascontiguousarray(is_padding, np.bool_)
    if places.size != num_rows or padding.size != num_rows:
        raise InvalidInputError(
            f"{num_rows} rows have {places.size} positions and {padding.size} is_padding flags; give one for each row"
        )
    return numbers, places, padding


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # For numba a read-only array is a type of its own; maps are read-only, so everything is: one compilation for all.
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
