"""Content checksums: the same bytes give the same text on every machine, whatever the block sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import xxhash

from megatron_packed_sft.errors import InvalidInputError


class Hasher(Protocol):
    """What hashlib and xxhash objects have in common."""

    def update(self, data: Any, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """The checksum so far, as lower-case hexadecimal text."""
        ...


DEFAULT_ALGORITHM = "xxh3_128"
_ALGORITHMS: dict[str, Callable[[], Hasher]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
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
    """The checksum of bytes that are in memory already.

    Example:
        >>> checksum(b"abc")
        '06b05ab6733a618578af5f94892f3950'
    """
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()
