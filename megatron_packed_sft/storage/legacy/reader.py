r"""Megatron-Bridge's and NeMo's packed `.npy` files, read without ever running the pickle inside.

    \x93NUMPY 1 0 {'descr': '|O', 'fortran_order': False, 'shape': (2000,), }      the header, parsed as a literal
    \x80\x04 ... ndarray of dicts {input_ids, loss_mask, seq_start_id} ... .       the pickle, run by pickle_kernel.py

The file is mapped, read once and closed; what stays are five flat arrays, about 5 bytes per token. While it is read,
memory beyond the map stays below MEMORY_MULTIPLE times the file's size (plus 1 MiB), whatever the bytes say.
"""

from __future__ import annotations

import ast
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import InvalidInputError, LegacyFormatError
from megatron_packed_sft.storage.bins import BinBlock, PackedBin
from megatron_packed_sft.storage.legacy import error_messages as sentences
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray

Scalar = TypeVar("Scalar", bound=np.generic)

MEMORY_MULTIPLE = 6
_MEMORY_SLACK = 1 << 20
_BYTES_PER_TOKEN = 5  # an int32 and a mask byte
_BYTES_PER_ROW = 20  # two offsets and a length
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4096
_HEADER_KEYS = {"descr", "fortran_order", "shape"}


class FlatRows(NamedTuple):
    """What a file holds, flat: row r is [bin_offsets[r], bin_offsets[r + 1]) of the first two arrays."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    bin_offsets: LongArray
    seq_starts: npt.NDArray[np.uint32]
    seq_offsets: LongArray
    largest_id: int
    longest_row: int
    num_masks_at_sequence_end: int


class LegacyShard:
    """A packed `.npy` file, in memory; its pickle is never executed. Arrays that come out are read-only.

    Bridge writes a loss mask of 1 at the last token of sequences that are not chats, where nothing is predicted. The
    mask is kept as it is; `num_masks_at_sequence_end` counts these places, and `convert` clears them.

    Example:
        >>> shard = LegacyShard("training_4096.npy")  # doctest: +SKIP
        >>> shard[0].input_ids, shard.num_tokens  # doctest: +SKIP
        (array([ 101, 7592, ...], dtype=int32), 8192000)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._rows = _read(self.path)
        self.packed_len = _read_only(np.diff(self._rows.bin_offsets).astype(np.uint32))

    def __len__(self) -> int:
        return len(self.packed_len)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of {self.path}, which has {len(self)}")
        rows = self._rows
        first, last = rows.bin_offsets[index : index + 2].tolist()
        first_start, last_start = rows.seq_offsets[index : index + 2].tolist()
        return PackedBin(
            _read_only(rows.input_ids[first:last]),
            _read_only(rows.loss_mask[first:last]),
            _read_only(rows.seq_starts[first_start:last_start]),
        )

    def __iter__(self) -> Iterator[PackedBin]:
        return (self[index] for index in range(len(self)))

    @property
    def flat(self) -> FlatRows:
        """All rows end to end, as they are held in memory."""
        return self._rows

    @property
    def pack_size(self) -> int:
        """The length of the longest row."""
        return self._rows.longest_row

    @property
    def num_sequences(self) -> int:
        """How many sequences all rows hold together."""
        return len(self._rows.seq_starts)

    @property
    def num_tokens(self) -> int:
        """How many tokens all rows hold together."""
        return len(self._rows.input_ids)

    @property
    def vocab_bound(self) -> int:
        """The largest token id plus one: the smallest vocabulary that these rows fit."""
        return self._rows.largest_id + 1

    @property
    def num_masks_at_sequence_end(self) -> int:
        """How many sequences have a loss mask of 1 at their last token, where nothing is predicted."""
        return self._rows.num_masks_at_sequence_end

    def block(
        self,
        start: int,
        stop: int,
        width: int | None = None,
        pad_id: int = 0,
    ) -> BinBlock:
        """Return the rows start..stop-1 in padded form, `width` (default: `pack_size`) wide, in arrays of their own.

        Example:
            >>> shard.block(0, 1024, width=4096, pad_id=2).input_ids.shape  # doctest: +SKIP
            (1024, 4096)
        """
        from megatron_packed_sft.storage import bin_kernel

        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"bins {start}:{stop} of {self.path}, which has {len(self)}")
        if not 0 <= pad_id < 2**31:
            raise InvalidInputError(f"pad_id is {pad_id}; it must be a token id in 0..{2**31 - 1}")
        width = self.pack_size if width is None else width
        lengths = self.packed_len[start:stop]
        if len(lengths) and int(lengths.max()) > width:
            row = start + int(np.argmax(lengths > width))
            raise InvalidInputError(
                f"{self.path}: row {row} has {self.packed_len[row]} tokens, more than the width {width}; "
                f"use a width of at least {self.pack_size}"
            )
        rows = self._rows
        bins = rows.bin_offsets[start : stop + 1]
        sequences = rows.seq_offsets[start : stop + 1]
        input_ids = np.empty((stop - start, width), np.int32)
        loss_mask = np.empty((stop - start, width), np.uint8)
        bin_kernel.pad_bins(
            rows.input_ids[bins[0] : bins[-1]],
            rows.loss_mask[bins[0] : bins[-1]],
            bins,
            np.int64(pad_id),
            input_ids,
            loss_mask,
        )
        seq_offsets = (sequences - sequences[0]).astype(np.uint32)
        return BinBlock(
            input_ids=input_ids,
            loss_mask=loss_mask,
            packed_len=lengths,
            seq_offsets=seq_offsets,
            seq_starts=rows.seq_starts[sequences[0] : sequences[-1]],
        )


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view


def _read(path: Path) -> FlatRows:
    with os_errors("open", path):
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError:
            raise LegacyFormatError(f"{str(path)!r} is not a path; check it for odd characters") from None
    try:
        with os_errors("read", path):
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise LegacyFormatError(f"{path} is not a file; pass a packed .npy file")
            start, num_rows = _read_header(path, os.pread(fd, _MAX_HEADER + 16, 0), before.st_size)
            mapped = mmap.mmap(fd, before.st_size, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        rows = _parse(path, np.frombuffer(mapped, np.uint8), start, num_rows)
        with os_errors("read", path):
            after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise LegacyFormatError(f"{path} was changed while it was read; open it again when its writer is done")
        return rows
    finally:
        os.close(fd)


def _read_header(path: Path, begin: bytes, size: int) -> tuple[int, int]:
    """Return where the pickle begins and how many rows the header promises."""
    if begin[:6] != _MAGIC or len(begin) < 12:
        raise LegacyFormatError(f"{path} is not an .npy file: it does not begin with the bytes that NumPy writes")
    version = (begin[6], begin[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise LegacyFormatError(f"{path} has .npy version {version[0]}.{version[1]}; 1.0 to 3.0 are known")
    start = 10 if version == (1, 0) else 12
    length = int.from_bytes(begin[8:start], "little")
    if length > _MAX_HEADER:
        raise LegacyFormatError(f"{path}: its .npy header has {length} bytes, more than the {_MAX_HEADER} allowed")
    if start + length > size:
        raise LegacyFormatError(f"{path}: the file ends inside its .npy header; copy it again from its source")
    header = _parse_header(path, begin[start : start + length])
    if header["descr"] != "|O":
        raise LegacyFormatError(
            f"{path} holds values of type {header['descr']!r:.80}, not packed rows (object dtype '|O'); "
            "pass the .npy file of packed sequences"
        )
    shape = header["shape"]
    if not (isinstance(shape, tuple) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0):
        raise LegacyFormatError(f"{path} has shape {shape!r:.80}; packed rows are a one-dimensional array")
    if shape[0] == 0:
        raise LegacyFormatError(f"{path} holds no rows")
    if shape[0] * (_BYTES_PER_ROW + 4) > _budget(size):
        raise LegacyFormatError(f"{path}: its header promises {shape[0]} rows, more than its {size} bytes can hold")
    return start + length, shape[0]


def _parse_header(path: Path, text: bytes) -> dict[str, object]:
    try:
        # Python warns of unknown escapes in literals; no header has any.
        header = None if b"\\" in text else ast.literal_eval(text.decode("utf-8"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        header = None
    if not isinstance(header, dict) or set(header) != _HEADER_KEYS:
        raise LegacyFormatError(f"{path}: its .npy header is damaged: {text[:80]!a}")
    return header


def _budget(size: int) -> int:
    return MEMORY_MULTIPLE * size + _MEMORY_SLACK


def _parse(path: Path, data: ByteArray, start: int, num_rows: int) -> FlatRows:
    from megatron_packed_sft.storage.legacy import decode_kernel, pickle_kernel

    status = np.zeros(5, np.int64)
    tables = pickle_kernel.run_pickle(data, start, num_rows, _budget(data.size), status)
    if status[0]:
        raise sentences.pickle_error(path, data, status)
    table_bytes = int(status[4])
    status[:] = 0
    num_tokens, num_sequences = decode_kernel.measure_rows(*tables, status)
    if status[0]:
        raise sentences.row_error(path, status)
    needed = num_tokens * _BYTES_PER_TOKEN + num_sequences * 4 + num_rows * _BYTES_PER_ROW
    if needed + table_bytes > _budget(data.size):
        raise LegacyFormatError(
            f"{path}: refused: its rows share their lists so often that they would take {needed:,} bytes, more than "
            f"{MEMORY_MULTIPLE} times the file; save it again with lists of its own for each row; nothing was executed"
        )
    input_ids = np.empty(num_tokens, np.int32)
    loss_mask = np.empty(num_tokens, np.uint8)
    bin_offsets = np.empty(num_rows + 1, np.int64)
    seq_starts = np.empty(num_sequences, np.uint32)
    seq_offsets = np.empty(num_rows + 1, np.int64)
    totals = decode_kernel.decode_rows(
        data, *tables, input_ids, loss_mask, bin_offsets, seq_starts, seq_offsets, status
    )
    if status[0]:
        raise sentences.row_error(path, status)
    return FlatRows(input_ids, loss_mask, bin_offsets, seq_starts, seq_offsets, *totals)
