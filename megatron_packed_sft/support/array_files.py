"""Array files: .npy headers in one exact form, and writers that checksum what they write.

A file is either preallocated and filled in any order, or it grows at the end.
"""

from __future__ import annotations

import errno
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.support.atomic import os_errors, preallocate, write_at
from megatron_packed_sft.support.checksum import Hasher, new_hasher
from megatron_packed_sft.support.json_document import FileRecord

SMALL_ID_DTYPE = "<u2"
ID_DTYPE = "<i4"
MASK_DTYPE = "|u1"
INDEX_DTYPE = "<u4"
WEIGHT_DTYPE = "<f4"
CHECKSUM_DTYPE = "<u8"
ID_LIMITS = {SMALL_ID_DTYPE: 1 << 16, ID_DTYPE: 1 << 31}
INDEX_LIMIT = 1 << 32

PAGE = 4096
SMALL_HEADER = 128
MAX_HEADER = 1 << 16

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=][A-Za-z][0-9]{1,4})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}, ?)*(?:[0-9]{1,19})?)\), \} *\n"
)


class ArraySpec(NamedTuple):
    """What one array file of a shard must be."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    header_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array itself, without the header."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class NpyHeader(NamedTuple):
    """What a .npy file says of itself."""

    dtype: str
    shape: tuple[int, ...]
    data_offset: int


def id_dtype_for(vocab_size: int | None) -> str:
    """The smallest dtype that holds every id of the vocabulary.

    Example:
        >>> id_dtype_for(32_000), id_dtype_for(128_256)
        ('<u2', '<i4')
    """
    return SMALL_ID_DTYPE if vocab_size is not None and vocab_size <= ID_LIMITS[SMALL_ID_DTYPE] else ID_DTYPE


def npy_header(spec: ArraySpec) -> bytes:
    """The .npy 1.0 header of an array, padded with spaces to `spec.header_size` bytes.

    Example:
        >>> len(npy_header(ArraySpec("x.npy", "<u4", (3,), 128)))
        128
    """
    shape = ", ".join(str(length) for length in spec.shape) + ("," if len(spec.shape) == 1 else "")
    text = f"{{'descr': '{spec.dtype}', 'fortran_order': False, 'shape': ({shape}), }}".encode("ascii")
    prefix = _MAGIC + bytes([1, 0]) + struct.pack("<H", spec.header_size - 10)
    return prefix + text.ljust(spec.header_size - 11) + b"\n"


def parse_npy_header(start: bytes, file: str) -> NpyHeader:
    """Read the header at the start of a .npy file.

    Args:
        start: the file's first bytes, up to `MAX_HEADER` of them.
        file: its path, for the message.

    Example:
        >>> parse_npy_header(npy_header(ArraySpec("x.npy", "<u4", (3,), 128)), "x.npy")
        NpyHeader(dtype='<u4', shape=(3,), data_offset=128)
    """
    if len(start) < 10 or start[:6] != _MAGIC:
        raise ShardFileError(f"{file} is not a .npy file; restore it from the original shard")
    major = start[6]
    if major == 1:
        data_offset = 10 + int(struct.unpack_from("<H", start, 8)[0])
        text = start[10:data_offset]
    elif major in (2, 3) and len(start) >= 12:
        data_offset = 12 + int(struct.unpack_from("<I", start, 8)[0])
        text = start[12:data_offset]
    else:
        raise ShardFileError(f"{file} has .npy version {major}, not 1, 2 or 3; restore it from the original shard")
    match = _HEADER.fullmatch(text) if data_offset <= len(start) else None
    if match is None:
        raise ShardFileError(f"{file} has a damaged .npy header; restore it from the original shard")
    if match[2] == b"True":
        raise ShardFileError(f"{file} is in Fortran order, a shard's arrays are in C order; write the shard again")
    shape = tuple(int(length) for length in match[3].replace(b" ", b"").split(b",") if length)
    return NpyHeader(match[1].decode("ascii"), shape, data_offset)


_READ_BACK = 1 << 20


class ArrayFileWriter:
    """Writes one .npy file.

    Rows that arrive in order are checksummed from memory; only what arrived out of order is read back at the end.
    Writing goes through pwrite and not through a map: memory stays constant and a full disk is an error, not SIGBUS.

    Example:
        >>> import tempfile, numpy as np
        >>> path = Path(tempfile.mkdtemp()) / "x.npy"
        >>> writer = ArrayFileWriter(path, ArraySpec("x.npy", "<u4", (3,), 128), "xxh3_128")
        >>> writer.write(0, np.array([1, 2, 3], "<u4"))
        >>> writer.finish().bytes, np.load(path).tolist()
        (140, [1, 2, 3])
    """

    def __init__(self, path: Path, spec: ArraySpec, algorithm: str) -> None:
        self.path = path
        self.spec = spec
        self._size = spec.header_size + spec.nbytes
        self._row_bytes = spec.nbytes // spec.shape[0]
        self._hasher = new_hasher(algorithm)
        self._hashed = spec.header_size
        header = npy_header(spec)
        with os_errors("write", path, self._size):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                preallocate(self._fd, self._size)
                write_at(self._fd, header, 0)
            except BaseException:
                self.close()
                raise
        self._hasher.update(header)

    def write(self, first_row: int, rows: npt.NDArray[Any]) -> None:
        """Write consecutive rows; they are C-contiguous, of the file's dtype, and inside its shape."""
        data = rows.reshape(-1).view(np.uint8).data
        offset = self.spec.header_size + first_row * self._row_bytes
        with os_errors("write", self.path, self._size):
            write_at(self._fd, data, offset)
        if offset == self._hashed:
            self._hasher.update(data)
            self._hashed += len(data)

    def read(self, first_row: int, num_rows: int) -> npt.NDArray[Any]:
        """Read back consecutive rows that were written."""
        offset = self.spec.header_size + first_row * self._row_bytes
        with os_errors("read", self.path):
            data = _read_at(self._fd, num_rows * self._row_bytes, offset)
        return np.frombuffer(data, self.spec.dtype).reshape(num_rows, *self.spec.shape[1:])

    def finish(self) -> FileRecord:
        """Complete the checksum, make the file durable and close it."""
        with os_errors("write", self.path, self._size):
            _hash_back(self._fd, self._hasher, self._hashed, self._size)
            os.fsync(self._fd)
        self.close()
        return FileRecord(self._size, self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file as it is; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class GrowingArrayFile:
    """Writes a one-dimensional .npy file whose length is known only at the end.

    The header comes last, so the checksum is taken from the page cache when the file is complete.

    Example:
        >>> import tempfile, numpy as np
        >>> path = Path(tempfile.mkdtemp()) / "x.npy"
        >>> writer = GrowingArrayFile(path, "<u4", "xxh3_128")
        >>> writer.append(np.array([1, 2], "<u4")); writer.append(np.array([3], "<u4"))
        >>> writer.finish().bytes, np.load(path).tolist()
        (140, [1, 2, 3])
    """

    def __init__(self, path: Path, dtype: str, algorithm: str) -> None:
        self.path = path
        self._dtype = dtype
        self._hasher = new_hasher(algorithm)
        self._size = SMALL_HEADER
        with os_errors("write", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write more values; they are C-contiguous and of the file's dtype."""
        data = values.reshape(-1).view(np.uint8).data
        with os_errors("write", self.path, self._size + len(data)):
            write_at(self._fd, data, self._size)
        self._size += len(data)

    def written(self) -> Iterator[npt.NDArray[Any]]:
        """Read back what was appended so far, in blocks."""
        place = SMALL_HEADER
        while place < self._size:
            with os_errors("read", self.path):
                block = _read_at(self._fd, min(_READ_BACK, self._size - place), place)
            yield np.frombuffer(block, self._dtype)
            place += len(block)

    def mapped(self) -> npt.NDArray[Any]:
        """Return what was appended so far as a read-only map."""
        count = (self._size - SMALL_HEADER) // np.dtype(self._dtype).itemsize
        with os_errors("map", self.path, self._size):
            return np.memmap(self.path, self._dtype, "r", SMALL_HEADER, (count,))

    def clear(self) -> None:
        """Begin again: what is appended from now on replaces what was appended so far, and is at least as much."""
        self._size = SMALL_HEADER

    def finish(self) -> FileRecord:
        """Write the header, take the checksum, make the file durable and close it."""
        count = (self._size - SMALL_HEADER) // np.dtype(self._dtype).itemsize
        with os_errors("write", self.path, self._size):
            write_at(self._fd, npy_header(ArraySpec(self.path.name, self._dtype, (count,), SMALL_HEADER)), 0)
            _hash_back(self._fd, self._hasher, 0, self._size)
            os.fsync(self._fd)
        self.close()
        return FileRecord(self._size, self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file as it is; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _hash_back(fd: int, hasher: Hasher, start: int, end: int) -> None:
    while start < end:
        block = _read_at(fd, min(_READ_BACK, end - start), start)
        hasher.update(block)
        start += len(block)


def _read_at(fd: int, size: int, place: int) -> bytes:
    """Read exactly `size` bytes of what was written."""
    data = os.pread(fd, size, place)
    while len(data) < size:
        more = os.pread(fd, size - len(data), place + len(data))
        if not more:
            raise OSError(errno.EIO, "the file is shorter than what was written")
        data += more
    return data


class AppendedFile:
    """Writes one file without a header, such as a shard of token ids.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tokens.bin"
        >>> file = AppendedFile(path, "xxh3_128")
        >>> file.append(np.array([1, 2], "<u2")); file.append(np.array([3], "<u2"))
        >>> file.finish().bytes, np.fromfile(path, "<u2").tolist()
        (6, [1, 2, 3])
    """

    def __init__(self, path: Path, algorithm: str) -> None:
        self.path = path
        self.size = 0
        self._hasher = new_hasher(algorithm)
        with os_errors("write", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write more values, in the dtype that they have."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        with os_errors("write", self.path, self.size + len(data)):
            write_at(self._fd, data, self.size)
        self._hasher.update(data)
        self.size += len(data)

    def finish(self) -> FileRecord:
        """Make the file durable, close it and return its size and checksum."""
        with os_errors("write", self.path, self.size):
            os.fsync(self._fd)
        self.close()
        return FileRecord(self.size, self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file as it is; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
