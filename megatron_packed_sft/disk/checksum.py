"""Content checksums: the same bytes give the same text on every machine, whatever the block sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import xxhash

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import InvalidInputError


class Hasher(Protocol):
    """What hashlib and xxhash objects have in common."""

    def update(self, data: Any, /) -> None:
        """Take in more bytes."""

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
    """Return the checksum of a file, or of all files below a directory together with their names."""
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
