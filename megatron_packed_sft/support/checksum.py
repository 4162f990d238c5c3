"""Content checksums: the same bytes give the same text on every machine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.atomic import os_errors


class Hasher(Protocol):
    """The common interface of hashlib and xxhash objects."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the checksum so far, as lower-case hexadecimal text."""
        ...


DEFAULT_ALGORITHM = "xxh3_128"
_ALGORITHMS: dict[str, Callable[[], Hasher]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_BLOCK = 1 << 20
DIGEST_LENGTHS = {"xxh3_128": 32, "sha256": 64}


def new_hasher(algorithm: str) -> Hasher:
    """Start a checksum.

    Example:
        >>> hasher = new_hasher("xxh3_128"); hasher.update(b"abc"); hasher.hexdigest()
        '06b05ab6733a618578af5f94892f3950'
    """
    if algorithm not in _ALGORITHMS:
        raise InvalidInputError(f"checksum algorithm {algorithm!r} is unknown; use one of {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[algorithm]()


def checksum(data: bytes, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """Return the checksum of bytes in memory.

    Example:
        >>> checksum(b"abc")
        '06b05ab6733a618578af5f94892f3950'
    """
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


def file_checksum(path: Path, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """Return the checksum of a file, or of the names and contents of all files below a directory."""
    if not path.is_dir():
        hasher = new_hasher(algorithm)
        with os_errors("read", path), open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                hasher.update(block)
        return hasher.hexdigest()
    names = sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, some in os.walk(path) for name in some
    )
    return checksum("".join(f"{name}\0{file_checksum(path / name, algorithm)}\n" for name in names).encode(), algorithm)


def stored_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    with os_errors("look at", path):
        if not path.is_dir():
            return path.stat().st_size
        return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, some in os.walk(path) for name in some)


# The first uses the machine's best vector instructions.
_SYMBOLS = ("XXH3_64bits_dispatch", "XXH3_64bits")


@functools.cache
def hash_function() -> int:
    """Return the address of XXH3_64bits(bytes, size) with seed 0, or 0 if xxhash does not export it."""
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return 0
    for symbol in _SYMBOLS:
        if hasattr(library, symbol):
            return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0
    return 0


def span_checksums(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the XXH3-64 of each span of bytes; the caller keeps the memory alive.

    Example:
        >>> data = np.frombuffer(b"abcabc", np.uint8)
        >>> first, second = span_checksums(data.ctypes.data + np.array([0, 3]), np.array([3, 3]))
        >>> first == second == xxhash.xxh3_64_intdigest(b"abc")
        np.True_
    """
    function = hash_function()
    if function:
        from megatron_packed_sft.support import memory_kernel

        checksums = np.empty(addresses.size, np.uint64)
        memory_kernel.hash_spans(function, addresses, sizes, checksums)
        return checksums
    found = (
        xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(address))
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True)
    )
    return np.fromiter(found, np.uint64, addresses.size)
