"""Read a local file or an fsspec URL: a range of bytes, or decompressed blocks in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, StorageIOError
from megatron_packed_sft.records.limits import refuse_expansion
from megatron_packed_sft.remote.filesystem import file_system, translated
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import is_url, refuse_special_file

BLOCK_BYTES = 1 << 20
_LOOK_BYTES = 4 << 20
# Four bytes of zstd may expand to 128 KB, so portions shrink while their output is large.
_ZSTD_SMALLEST_PORTION = 128
_ZSTD_LARGEST_PORTION = 8 << 10
_ZSTD_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageIOError; for URLs any error, since file systems differ.

    Example:
        >>> with reading("/no/such/file"):
        ...     open("/no/such/file")
        Traceback (most recent call last):
        megatron_packed_sft.errors.StorageIOError: cannot read /no/such/file: No such file or directory; check the path
    """
    try:
        yield
    except PackedSFTError:
        raise
    except Exception as error:
        if is_url(path):
            raise translated(error, "read", path, 1) from None
        if not isinstance(error, OSError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
        raise StorageIOError(f"cannot read {path}: {reason}; check the path") from error


def open_file(path: str, block_bytes: int | None = BLOCK_BYTES) -> BinaryIO:
    """Open a local file or a URL for reading.

    Args:
        path: a local file or a URL.
        block_bytes: how much of a URL is fetched beyond what is asked for; None for what its file system likes, which
            may be 50 MB: good for whole files, too much for a look.
    """
    with reading(path):
        if is_url(path):
            system, name = file_system(path)
            # Only fsspec's own files know blocks; the client of msc:// refuses what it does not know.
            options = {} if block_bytes is None or system.protocol == "msc" else {"block_size": block_bytes}
            return cast(BinaryIO, system.open(name, "rb", **options))
        refuse_special_file(path)
        return open(path, "rb")


class _SequentialFile:
    """A URL that is read from its beginning: in small blocks as long as it may be no more than a look, then in large.

    It has only the method that decompressors use.
    """

    def __init__(self, path: str) -> None:
        self._path, self._position, self._is_look = path, 0, True
        self._file = open_file(path)

    def read(self, size: int = -1) -> bytes:
        if self._is_look and self._position > _LOOK_BYTES:
            self._is_look = False
            if getattr(self._file, "size", None) is None:  # a stream, which cannot go on in the middle
                return self.read(size)
            self._file.close()
            self._file = open_file(self._path, None)
            self._file.seek(self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data

    def __enter__(self) -> _SequentialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_range(path: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a local file or a URL."""
    with reading(path):
        if is_url(path):
            system, name = file_system(path)
            data = cast(bytes, system.cat_file(name, start=start, end=stop))
        else:
            with open_file(path) as file:
                file.seek(start)
                data = file.read(stop - start)
    if len(data) != stop - start:
        raise InvalidInputError(f"{path} ended before byte {stop:,}: it changed while it was being read; run again")
    return data


def read_blocks(
    path: str, compression: str | None = None, on_read: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """Yield the content of a file in blocks, decompressed.

    Args:
        path: a local file or a URL.
        compression: `gzip`, `zstd` or None.
        on_read: called with the number of stored bytes after each read.
    """
    decompress = {None: _plain, "gzip": _gunzip, "zstd": _unzstd}[compression]
    num_bytes = 0
    with _SequentialFile(path) if is_url(path) else open_file(path) as file, reading(path):
        counted = _CountedFile(file, on_read)
        try:
            for block in decompress(cast(BinaryIO, counted)):
                num_bytes += len(block)
                if compression is not None:
                    refuse_expansion(path, counted.num_bytes, num_bytes)
                yield block
        except _DamagedError as error:
            raise InvalidInputError(
                f"{path} is truncated or damaged: {compression} says '{error}' after {num_bytes:,} decompressed bytes; "
                "get the file again"
            ) from error


class _CountedFile:
    """A file that tells how much of it was read; it has only the method that decompressors use."""

    def __init__(self, file: BinaryIO | _SequentialFile, on_read: Callable[[int], None] | None) -> None:
        self._file, self._on_read = file, on_read
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.num_bytes += len(data)
        if self._on_read is not None:
            self._on_read(len(data))
        return data


class _DamagedError(Exception):
    """A compressed stream is broken."""


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:
        try:
            while block := stream.read(BLOCK_BYTES):
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _DamagedError(str(error)) from error


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    # zstandard's own stream reader would take a truncated file for a complete one.
    zstandard = load("zstandard", "zstd", "reading .zst files")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_LARGEST_WINDOW)
    frame = None
    portion_bytes = _ZSTD_SMALLEST_PORTION
    while data := file.read(portion_bytes):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                block = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _DamagedError(str(error)) from error
            if block:
                yield block
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
        if len(block) > BLOCK_BYTES:
            portion_bytes = max(portion_bytes // 4, _ZSTD_SMALLEST_PORTION)
        elif len(block) < BLOCK_BYTES // 4:
            portion_bytes = min(portion_bytes * 2, _ZSTD_LARGEST_PORTION)
    if frame is not None:
        raise _DamagedError("the file ends in the middle of a frame")
