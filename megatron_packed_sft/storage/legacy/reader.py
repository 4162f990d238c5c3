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
from pathlib import Path

import numpy as np

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.flat_files import FlatBins, FlatShard
from megatron_packed_sft.storage.legacy import error_messages
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import local_path

MEMORY_MULTIPLE = 6
_MEMORY_SLACK = 1 << 20
_BYTES_PER_TOKEN = 5  # an int32 and a mask byte
_BYTES_PER_BIN = 20  # two offsets and a length
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4096
_HEADER_KEYS = {"descr", "fortran_order", "shape"}


class LegacyShard(FlatShard):
    """A packed `.npy` file, read into memory; its pickle is never executed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        location = local_path(path)
        super().__init__(location, _read(location))


def read_num_bins(path: Path) -> int:
    """Return how many bins the header of a file promises, without reading them."""
    with (
        os_errors("read", path),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
    ):
        return _read_header(path, file.read(_MAX_HEADER + 16), os.fstat(file.fileno()).st_size)[1]


def _read(path: Path) -> FlatBins:
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
            start, num_bins = _read_header(path, os.pread(fd, _MAX_HEADER + 16, 0), before.st_size)
            mapped = mmap.mmap(fd, before.st_size, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        bins = _parse(path, np.frombuffer(mapped, np.uint8), start, num_bins)
        with os_errors("read", path):
            after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise LegacyFormatError(f"{path} was changed while it was read; open it again when its writer is done")
        return bins
    finally:
        os.close(fd)


def _read_header(path: Path, begin: bytes, size: int) -> tuple[int, int]:
    """Return where the pickle begins and how many bins the header promises."""
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
            f"{path} holds values of type {header['descr']!r:.80}, not packed bins (object dtype '|O'); "
            "pass the .npy file of packed sequences"
        )
    shape = header["shape"]
    if not (isinstance(shape, tuple) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0):
        raise LegacyFormatError(f"{path} has shape {shape!r:.80}; packed bins are a one-dimensional array")
    if shape[0] == 0:
        raise LegacyFormatError(f"{path} holds no bins")
    if shape[0] * (_BYTES_PER_BIN + 4) > _budget(size):
        raise LegacyFormatError(f"{path}: its header promises {shape[0]} bins, more than its {size} bytes can hold")
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


def _parse(path: Path, data: ByteArray, start: int, num_bins: int) -> FlatBins:
    from megatron_packed_sft.storage.legacy import decode_kernel, pickle_kernel

    status = np.zeros(5, np.int64)
    tables = pickle_kernel.run_pickle(data, start, num_bins, _budget(data.size), status)
    if status[0]:
        raise error_messages.pickle_error(path, data, status)
    table_bytes = int(status[4])
    status[:] = 0
    num_tokens, num_sequences = decode_kernel.measure_bins(*tables, status)
    if status[0]:
        raise error_messages.bin_error(path, status)
    needed = num_tokens * _BYTES_PER_TOKEN + num_sequences * 4 + num_bins * _BYTES_PER_BIN
    if needed + table_bytes > _budget(data.size):
        raise LegacyFormatError(
            f"{path}: refused: its bins share their lists so often that they would take {needed:,} bytes, more than "
            f"{MEMORY_MULTIPLE} times the file; save it again with lists of its own for each bin; nothing was executed"
        )
    input_ids = np.empty(num_tokens, np.int32)
    loss_mask = np.empty(num_tokens, np.uint8)
    bin_offsets = np.empty(num_bins + 1, np.int64)
    seq_starts = np.empty(num_sequences, np.uint32)
    seq_offsets = np.empty(num_bins + 1, np.int64)
    decode_kernel.decode_bins(data, *tables, input_ids, loss_mask, bin_offsets, seq_starts, seq_offsets, status)
    if status[0]:
        raise error_messages.bin_error(path, status)
    return FlatBins(input_ids, loss_mask, bin_offsets, seq_starts, seq_offsets)
