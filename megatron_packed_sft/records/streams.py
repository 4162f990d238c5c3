"""Read a local file or an fsspec URL: a range of bytes, or decompressed blocks in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, StorageIOError
from megatron_packed_sft.remote.filesystem import file_system
from megatron_packed_sft.support.dependencies import load
from megatron_packed_sft.support.paths import is_url, redacted

BLOCK_BYTES = 1 << 20
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
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else redacted(str(error)) or type(error).__name__
        # The error of a store may hold credentials.
        cause = None if is_url(path) else error
        raise StorageIOError(f"cannot read {redacted(path)}: {reason}; check the path") from cause
    except Exception as error:
        if not is_url(path):
            raise
        reason = redacted(" ".join(str(error).split())) or type(error).__name__
        raise StorageIOError(
            f"cannot read {redacted(path)}: {reason}; check the URL and your permission to read it"
        ) from None


def open_file(path: str) -> BinaryIO:
    """Open a local file or a URL for reading."""
    with reading(path):
        if is_url(path):
            system, name = file_system(path)
            return cast(BinaryIO, system.open(name, "rb"))
        return open(path, "rb")


def read_range(path: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a local file or a URL."""
    with reading(path):
        if is_url(path):
            system, name = file_system(path)
            data = cast(bytes, system.cat_file(name, start=start, end=stop))
        else:
            with open(path, "rb") as file:
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
    with open_file(path) as file, reading(path):
        try:
            for block in decompress(file if on_read is None else cast(BinaryIO, _CountedFile(file, on_read))):
                num_bytes += len(block)
                yield block
        except _DamagedError as error:
            raise InvalidInputError(
                f"{path} is truncated or damaged: {compression} says '{error}' after {num_bytes:,} decompressed bytes; "
                "get the file again"
            ) from error


class _CountedFile:
    """A file that reports how much of it was read; it has only the method that decompressors use."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]) -> None:
        self._file, self._on_read = file, on_read

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
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
