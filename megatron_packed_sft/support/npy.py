"""Array files on disk: dtypes, .npy headers written one way and matched against one exact form, never evaluated."""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

import numpy as np

from megatron_packed_sft.errors import ShardFileError

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
