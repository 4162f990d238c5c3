"""Checksums of arrays that are the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def fingerprint_of(*parts: str | int | npt.NDArray[Any]) -> str:
    """Return 32 hexadecimal digits: xxh3_128 of names, numbers and arrays, each with its kind and length.

    Example:
        >>> fingerprint_of("plan", 4, np.array([1, 2], np.int32))
        '92505c58b5698606ee7763bdcfe7132a'
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
            digest.update(f"{little.dtype.str}:{little.size};".encode())
            digest.update(little.view(np.uint8).data)
        else:
            text = str(part).encode()
            digest.update(f"{type(part).__name__}:{len(text)};".encode() + text)
    return digest.hexdigest()
