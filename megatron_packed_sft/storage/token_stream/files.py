"""The files of a token stream: find, sort and check them before anything is mapped.

The dtype, the vocabulary and the EOS id may be recorded beside them: in tatm's metadata.yaml, or in the meta.json of a
token cache.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import (
    InvalidInputError,
    PackedSFTError,
    ShardChangedError,
    ShardFileError,
    UnsupportedFormatError,
)
from megatron_packed_sft.storage.token_stream.options import (
    StreamMetadata,
    StreamOptions,
    parse_dtype,
)
from megatron_packed_sft.support.array_files import MAX_HEADER, NpyHeader, parse_npy_header
from megatron_packed_sft.support.atomic import os_errors, translated
from megatron_packed_sft.support.file_maps import LazyMaps, map_file, will_need
from megatron_packed_sft.support.truncated_files import truncated_file

_BLOCK_TOKENS = 1 << 20  # of a file that is read from front to back


class FlatFile(LazyMaps[npt.NDArray[Any]]):
    """A flat array of integers in a file; see `LazyMaps` for when it is mapped.

    Args:
        path: the file.
        dtype: NumPy's code of the ids.
        num_tokens: the number of ids.
        data_offset: bytes before the first id.
        size: bytes of the whole file.
    """

    def __init__(self, path: Path, dtype: str, num_tokens: int, data_offset: int, size: int) -> None:
        self.path = path
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.data_offset = data_offset
        self.size = size

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens start..stop-1 as a read-only view."""
        return self.arrays[start:stop]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (position of the first token, tokens) for consecutive blocks from start to stop, reading ahead."""
        for first in range(start, stop, _BLOCK_TOKENS):
            last = min(first + _BLOCK_TOKENS, stop)
            self.advise(first, min(last + _BLOCK_TOKENS, stop))
            yield first, self.tokens(first, last)

    def advise(self, start: int, stop: int) -> None:
        """Ask the kernel to read these tokens ahead."""
        will_need(self.arrays[start:stop])

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a few bytes of the file without mapping it."""
        fd = self._open()
        try:
            return os.pread(fd, num_bytes, offset)
        except OSError as error:
            raise translated(error, "read", self.path) from error
        finally:
            os.close(fd)

    def __repr__(self) -> str:
        return f"FlatFile({str(self.path)!r}, {self.num_tokens:,} tokens, {np.dtype(self.dtype).name})"

    def _open_arrays(self, keep: object) -> npt.NDArray[Any]:
        fd = self._open()
        try:
            if not self.num_tokens:
                return np.empty(0, self.dtype)
            data = map_file(fd, self.size, random_access=True)
        except OSError as error:
            raise translated(error, "map", self.path, self.size) from error
        finally:
            os.close(fd)
        return np.frombuffer(data, self.dtype, self.num_tokens, self.data_offset)

    def _open(self) -> int:
        try:
            # O_NONBLOCK: a FIFO under that name must not hang the reader.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ShardFileError(
                f"{self.path} is missing, but existed when its stream was opened; put it back"
            ) from None
        except OSError as error:
            raise translated(error, "open", self.path) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
            os.close(fd)
            raise truncated_file(self.path, status.st_size, self.size, "when it was opened", ShardChangedError)
        return fd


logger = logging.getLogger(__name__)

NPY, BIN = ".npy", ".bin"
SUFFIXES = (NPY, BIN)
# A directory with one of these is a shard, a token store or a dataset directory.
_FOREIGN = ("manifest.json", "dataset.json")
_INDEX = ".idx"  # a .bin file beside one is Megatron's indexed dataset
_ZIP = b"PK\x03\x04"  # torch.save writes zip files, such as a model's pytorch_model.bin
_PICKLED = b"'descr': '|O'"
_SMALL_HEADER = 256  # that of a one-dimensional array has 128 bytes
# No tokenizer has this many ids, but nearly all pairs of uint16 that are read as one uint32 are larger.
GUESSED_ID_LIMIT = 1 << 20


def is_stream(path: Path) -> bool:
    """Return whether a path is a flat file of ids, or a directory of such files without packed data.

    Only the header of the first file is read.
    """
    if not path.is_dir():
        return path.suffix in SUFFIXES and _is_flat(path)
    try:
        names = os.listdir(path)
    except OSError:
        return False
    if not set(_FOREIGN).isdisjoint(names):
        return False
    first = min((name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")), default=None)
    return first is not None and _is_flat(path / first)


def _is_flat(path: Path) -> bool:
    try:
        if path.suffix == NPY:
            header = _npy_header(path)[0]
            return len(header.shape) == 1 and np.dtype(header.dtype).kind in "iu"
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(len(_ZIP)) != _ZIP and not path.with_suffix(_INDEX).exists()
    except (OSError, PackedSFTError, TypeError):
        return False


def find_files(path: Path, options: StreamOptions, metadata: StreamMetadata) -> list[FlatFile]:
    """Return the files of a stream, sorted by name and all of one dtype.

    Args:
        path: a directory, or one file.
        options: the user's pattern and dtype, if any.
        metadata: as recorded beside the files.
    """
    paths = _matching(path, options)
    if paths[0].suffix == NPY:
        files = [_npy_file(one) for one in paths]
        _refuse_mixed_dtypes(files)
        if options.dtype is not None and parse_dtype(options.dtype, "dtype") != files[0].dtype:
            raise InvalidInputError(
                f"{options.spelled('dtype')} is {options.dtype!r}, but the header of {paths[0]} says "
                f"{_name(files[0].dtype)}; leave it out: .npy files record their dtype"
            )
        return files
    sizes = [_size(one) for one in paths]
    dtype = _bin_dtype(paths, sizes, options, metadata)
    return [_bin_file(one, size, dtype) for one, size in zip(paths, sizes, strict=True)]


def _matching(path: Path, options: StreamOptions) -> list[Path]:
    """Return the files of the stream, sorted by name; they have one suffix."""
    if not path.is_dir():
        if path.suffix not in SUFFIXES:
            raise InvalidInputError(f"{path} is not a .npy or .bin file, so it is not a token stream; check the path")
        return [path]
    with os_errors("list", path):
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if options.file_names is not None:
        names = sorted(options.file_names)
    elif options.file_pattern is not None:
        names = [name for name in names if fnmatch.fnmatchcase(name, options.file_pattern)]
        if not names:
            raise InvalidInputError(f"{path} has no file that matches {options.file_pattern!r}; check the pattern")
    elif not names:
        raise InvalidInputError(f"{path} is an empty directory; pass one that holds .npy or .bin files of tokens")
    else:
        names = [name for name in names if name.endswith(SUFFIXES)]
        if not names:
            raise InvalidInputError(f"{path} holds no .npy or .bin file, so it is not a token stream; check the path")
    if len(suffixes := {os.path.splitext(name)[1] for name in names}) > 1:
        raise InvalidInputError(
            f"{path} holds {' and '.join(sorted(suffixes))} files, but a stream has one kind; choose with "
            f"{options.spelled('file_pattern')}, such as *.npy"
        )
    if not suffixes <= set(SUFFIXES):
        raise InvalidInputError(f"{path / names[0]} is not a .npy or .bin file; choose a pattern for token files only")
    return [path / name for name in names]


def _npy_file(path: Path) -> FlatFile:
    header, size = _npy_header(path)
    dtype = np.dtype(header.dtype)
    if len(header.shape) != 1 or dtype.kind not in "iu":
        raise _not_flat(path, f"{dtype.name} of shape {header.shape}")
    expected = header.data_offset + header.shape[0] * dtype.itemsize
    if size != expected:
        raise truncated_file(path, size, expected, "in its header")
    return FlatFile(path, header.dtype, header.shape[0], header.data_offset, size)


def _npy_header(path: Path) -> tuple[NpyHeader, int]:
    """Return the header of a .npy file, and the file's size."""
    with os_errors("read", path), open(path, "rb", buffering=0, opener=_open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_SMALL_HEADER)
        try:
            return parse_npy_header(start, str(path)), size
        except ShardFileError:
            if _PICKLED in start:
                raise _not_flat(path, "Python objects (a pickle)") from None
            return parse_npy_header(start + file.read(MAX_HEADER - _SMALL_HEADER), str(path)), size


def _not_flat(path: Path, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{path} holds {what}, but a stream consists of one-dimensional arrays of integers; move the file away, or "
        "exclude it with file_pattern"
    )


def _open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)  # a FIFO under that name must not hang the reader
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardFileError(f"{path} is not a regular file; a stream consists of .npy or .bin files")
    return fd


def _size(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise translated(error, "open", path) from error
    if not stat.S_ISREG(status.st_mode):
        raise ShardFileError(f"{path} is not a regular file; a stream consists of .npy or .bin files")
    return status.st_size


def _bin_dtype(paths: Sequence[Path], sizes: Sequence[int], options: StreamOptions, metadata: StreamMetadata) -> str:
    if options.dtype is not None:
        return parse_dtype(options.dtype, "dtype")
    if metadata.dtype is not None:
        return metadata.dtype
    # One program wrote all files, so one that cannot be uint32 decides for all.
    dtype = "<u4" if all(size % 4 == 0 for size in sizes) else "<u2"
    logger.info(
        "%s: the dtype of these %s .bin files is not recorded; their sizes suggest %s, pass dtype if that is wrong",
        paths[0].parent,
        f"{len(paths):,}",
        _name(dtype),
    )
    return dtype


def _bin_file(path: Path, size: int, dtype: str) -> FlatFile:
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize:
        raise ShardFileError(
            f"{path} has {size:,} bytes, which is not a multiple of the {itemsize} bytes of a {_name(dtype)} token; "
            "pass the right dtype, or copy it again if it was truncated"
        )
    return FlatFile(path, dtype, size // itemsize, 0, size)


def _refuse_mixed_dtypes(files: Sequence[FlatFile]) -> None:
    first = files[0]
    for one in files:
        if one.dtype != first.dtype:
            raise UnsupportedFormatError(
                f"{one.path} holds {_name(one.dtype)}, but {first.path} holds {_name(first.dtype)}; a stream has one "
                "dtype: choose files with file_pattern, or write them again"
            )


def _name(dtype: str) -> str:
    return f"{np.dtype(dtype).name}{' (big-endian)' if dtype.startswith('>') else ''}"
