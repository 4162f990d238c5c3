"""The .idx file of an indexed dataset: read it, and check it for consistency and against its .bin."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.storage.token_stream.files import FlatFile
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.truncated_files import truncated_file

INDEX: Final = ".idx"
TOKENS: Final = ".bin"
MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, number of document edges
_VERSION: Final = 1
_DTYPES: Final = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LENGTH, _PLACE, _EDGE, _MODE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8"), np.dtype("|i1")


@dataclass(frozen=True)
class DocumentIndex:
    """The checked content of an .idx file.

    Args:
        path: the .idx file.
        tokens: the .bin file.
        document_offsets: the first token of each non-empty document, and the total number of tokens.
        num_sequences: the number of sequences in all documents.
        num_empty: the number of empty documents, which are left out.
    """

    path: Path
    tokens: FlatFile
    document_offsets: npt.NDArray[np.int64]
    num_sequences: int
    num_empty: int


class _Arrays(NamedTuple):
    lengths: npt.NDArray[np.int32]
    places: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]


def indexed_path(path: Path) -> Path:
    """Return the .idx file for a prefix or a .bin file; any other path is returned unchanged.

    Example:
        >>> import tempfile; home = Path(tempfile.mkdtemp())
        >>> _ = (home / "web.v1.idx").write_bytes(b""); _ = (home / "web.v1.bin").write_bytes(b"")
        >>> indexed_path(home / "web.v1").name, indexed_path(home / "web.v1.bin").name, indexed_path(home / "else").name
        ('web.v1.idx', 'web.v1.idx', 'else')
    """
    prefix = _prefix(path) if path.suffix == TOKENS else path
    index = path.with_name(prefix.name + INDEX)
    means_index = index.is_file() and (prefix is not path or not os.path.lexists(path))
    return index if means_index else path


def pair_of(path: Path) -> tuple[Path, Path]:
    """Return the .idx and the .bin of a prefix, or of either of them.

    Example:
        >>> [one.name for one in pair_of(Path("web.v1"))], [one.name for one in pair_of(Path("web.idx"))]
        (['web.v1.idx', 'web.v1.bin'], ['web.idx', 'web.bin'])
    """
    prefix = _prefix(path) if path.suffix in (INDEX, TOKENS) else path
    return path.with_name(prefix.name + INDEX), path.with_name(prefix.name + TOKENS)


def _prefix(path: Path) -> Path:
    return path.with_name(path.name[: -len(path.suffix)])


def read_index(path: Path) -> DocumentIndex:
    """Read and check an index, and check the size of its .bin without reading it.

    Args:
        path: the .idx file, the .bin file, or their common prefix.
    """
    index_path, tokens_path = pair_of(path)
    with os_errors("read", index_path), open(index_path, "rb", opener=_open_regular) as file:
        dtype, arrays = _read(file, index_path)
    offsets = _checked(arrays, np.dtype(dtype).itemsize, index_path)
    num_tokens = int(offsets[-1])
    if not num_tokens:
        raise InvalidInputError(f"{index_path} is the index of an empty dataset; write the data again")
    size = num_tokens * np.dtype(dtype).itemsize
    _check_size(tokens_path, size, index_path)
    documents = offsets[arrays.edges]
    is_empty = np.diff(documents) == 0
    return DocumentIndex(
        index_path,
        FlatFile(tokens_path, dtype, num_tokens, 0, size),
        np.append(documents[:-1][~is_empty], num_tokens),
        len(arrays.lengths),
        int(np.count_nonzero(is_empty)),
    )


def _open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)  # a FIFO under that name must not hang the reader
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardFileError(f"{path} is not a regular file; pass the .idx file of an indexed dataset")
    return fd


def _read(file: BinaryIO, path: Path) -> tuple[str, _Arrays]:
    """Return the dtype and the arrays; the header's counts must agree with the file's size."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER.size)
    if not header.startswith(MAGIC):
        raise ShardFileError(f"{path} is not the index of a Megatron indexed dataset; check the path")
    if len(header) < _HEADER.size:
        raise truncated_file(path, size, _HEADER.size, "that its header alone takes")
    _, version, code, num_sequences, num_edges = _HEADER.unpack(header)
    dtype = _DTYPES.get(code)
    if version != _VERSION or dtype is None:
        raise UnsupportedFormatError(
            f"{path} has version {version} and dtype code {code}; megatron-core writes version {_VERSION} and codes 1 "
            "to 8: write it again with that"
        )
    if np.dtype(dtype).kind == "f":
        raise UnsupportedFormatError(f"{path} is the index of {np.dtype(dtype).name}, but token ids are integers")
    expected = _HEADER.size + num_sequences * (_LENGTH.itemsize + _PLACE.itemsize) + num_edges * _EDGE.itemsize
    if size == expected + num_sequences * _MODE.itemsize and num_sequences:
        raise UnsupportedFormatError(
            f"{path} is multimodal: it has a mode for each of its {num_sequences:,} sequences; only text can be read "
            "here: write it again without modes"
        )
    if size != expected:
        raise truncated_file(path, size, expected, "in its header")
    kinds = ((_LENGTH, num_sequences), (_PLACE, num_sequences), (_EDGE, num_edges))
    arrays: list[Any] = [np.fromfile(file, kind, count) for kind, count in kinds]
    if any(len(array) != count for array, (_, count) in zip(arrays, kinds, strict=True)):
        raise truncated_file(path, os.fstat(file.fileno()).st_size, size, "when it was opened")
    return dtype, _Arrays(*arrays)


def _checked(arrays: _Arrays, itemsize: int, path: Path) -> npt.NDArray[np.int64]:
    """Return the first token of each sequence and the total number; refuse an inconsistent index."""
    lengths, places, edges = arrays
    if (wrong := np.flatnonzero(lengths < 0)).size:
        raise _damaged(path, f"sequence {wrong[0]:,} has the length {lengths[wrong[0]]}")
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if (wrong := np.flatnonzero(places != offsets[:-1] * itemsize)).size:
        expected = int(offsets[wrong[0]]) * itemsize
        raise _damaged(path, f"sequence {wrong[0]:,} begins at byte {places[wrong[0]]:,}, not at {expected:,}")
    if not edges.size or edges[0] != 0 or edges[-1] != len(lengths) or (np.diff(edges) < 0).any():
        raise _damaged(path, f"its documents do not rise from sequence 0 to {len(lengths):,}")
    return offsets


def _damaged(path: Path, problem: str) -> ShardFileError:
    return ShardFileError(f"{path} is damaged: {problem}; copy it again, or write it again")


def _check_size(tokens: Path, expected: int, index: Path) -> None:
    try:
        status: Any = os.stat(tokens)
    except FileNotFoundError:
        raise ShardFileError(f"{tokens} is missing; {index.name} is only its index, so copy both") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected:
        raise truncated_file(tokens, status.st_size, expected, f"in {index.name}")
