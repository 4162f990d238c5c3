"""Indexed datasets of Megatron, written byte by byte: without megatron.core, and broken ones if need be."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"


def index_bytes(
    lengths: list[int],
    edges: list[int],
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    code: int = 8,
    num_sequences: int | None = None,
    num_edges: int | None = None,
    places: list[int] | None = None,
) -> bytes:
    """An index of uint16 tokens as megatron-core writes it, or as it would never do."""
    offsets: Any = np.concatenate(([0], np.cumsum(lengths)))[:-1] * 2 if places is None else places
    counts = (len(lengths) if num_sequences is None else num_sequences, len(edges) if num_edges is None else num_edges)
    header = struct.pack("<9sQBQQ", magic, version, code, *counts)
    arrays = np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(edges, "<i8")
    return header + b"".join(array.tobytes() for array in arrays)


def write_indexed(prefix: Path, tokens: npt.NDArray[np.uint16], num_documents: int = 7) -> Path:
    """Write tokens as so many documents of about the same length."""
    lengths = [len(part) for part in np.array_split(tokens, num_documents)]
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index_bytes(lengths, list(range(num_documents + 1))))
    prefix.with_name(f"{prefix.name}.bin").write_bytes(tokens.astype("<u2").tobytes())
    return prefix
