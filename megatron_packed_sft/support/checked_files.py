"""Open files that may be damaged, hostile or half copied: all checks run before the first byte is mapped."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ManifestError, ShardError, ShardFileError
from megatron_packed_sft.support.array_files import MAX_HEADER, ArraySpec, NpyHeader, parse_npy_header
from megatron_packed_sft.support.atomic import os_errors, translated
from megatron_packed_sft.support.checksum import Hasher, new_hasher
from megatron_packed_sft.support.file_maps import map_file
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.support.truncated_files import truncated_file

# O_NOFOLLOW: a shard's files are its own. O_NONBLOCK: a FIFO under that name must not hang the reader.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CheckedFile(NamedTuple):
    """An open array file whose size, dtype and shape have been checked."""

    path: Path
    fd: int
    size: int
    header: NpyHeader

    @property
    def name(self) -> str:
        """The file's name inside its directory."""
        return self.path.name

    def map(self, keep: object = None) -> npt.NDArray[Any]:
        """Return the array, read-only, over a map of the file; matrices are mapped for random access."""
        with os_errors("map", self.path, self.size):
            data = map_file(self.fd, self.size, random_access=len(self.header.shape) == 2, keep=keep)
        count = int(np.prod(self.header.shape, dtype=np.int64))
        array: npt.NDArray[Any] = np.frombuffer(data, self.header.dtype, count, self.header.data_offset)
        return array.reshape(self.header.shape)


class CheckedDirectory:
    """Opens the files of one directory through one descriptor, and closes all of them at the end.

    If the directory is replaced meanwhile, all files come from the same one, old or new.
    """

    def __init__(self, path: Path, fd: int, closing: contextlib.ExitStack) -> None:
        self.path = path
        self._fd = fd
        self._closing = closing

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[CheckedDirectory]:
        """Open the directory; its files are closed when the block is left."""
        with contextlib.ExitStack() as closing:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise ShardError(f"{path} does not exist; check the path") from None
            except NotADirectoryError:
                raise ShardError(f"{path} is not a directory; pass the directory that holds the manifest") from None
            except ValueError:
                raise ShardError(f"{str(path)!r} is not a path; check it for odd characters") from None
            except OSError as error:
                raise translated(error, "open", path) from error
            closing.callback(os.close, fd)
            yield cls(path, fd, closing)

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a small file of at most `limit` bytes."""
        fd = self._open_regular(name)
        size = os.fstat(fd).st_size
        path = self.path / name
        if size > limit:
            raise ManifestError(f"{path} has {size:,} bytes, more than the {limit:,} allowed; restore the original")
        with os_errors("read", path):
            return os.read(fd, size)

    def array(self, spec: ArraySpec, record: FileRecord | None) -> CheckedFile:
        """Open an array file, and check it against `spec` and the size recorded in the manifest."""
        path = self.path / spec.name
        fd = self._open_regular(spec.name)
        size = os.fstat(fd).st_size
        if record is not None and size != record.bytes:
            raise truncated_file(path, size, record.bytes, "in the manifest")
        with os_errors("read", path):
            header = parse_npy_header(os.pread(fd, MAX_HEADER, 0), str(path))
        if header.dtype != spec.dtype or header.shape != spec.shape:
            raise ShardFileError(
                f"{path} holds {header.dtype} {header.shape}, and should hold {spec.dtype} {spec.shape}; "
                "it belongs to another shard: copy the right one"
            )
        if header.data_offset != spec.header_size:
            raise ShardFileError(
                f"{path} has a header of {header.data_offset} bytes, not {spec.header_size}; write the shard again"
            )
        expected = header.data_offset + spec.nbytes
        if size != expected:
            raise truncated_file(path, size, expected, "in its header")
        return CheckedFile(path, fd, size, header)

    def _open_regular(self, name: str) -> int:
        path = self.path / name
        try:
            fd = os.open(name, _OPEN_FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            raise ShardFileError(f"{path} is missing; the shard is incomplete, copy or write it again") from None
        except OSError as error:
            if path.is_symlink():
                raise ShardFileError(
                    f"{path} is a symbolic link; a shard must contain its files, so replace the link by a copy"
                ) from None
            raise translated(error, "open", path) from error
        self._closing.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ShardFileError(f"{path} is not a regular file; restore it from the original shard")
        return fd


class HashingReader:
    """Read a file from front to back into the caller's buffers, hashing the bytes."""

    def __init__(self, file: CheckedFile, algorithm: str, bar: Progress) -> None:
        self._path = file.path
        self._fd = file.fd
        self._bar = bar
        self._hasher: Hasher = new_hasher(algorithm)
        self._position = 0
        self._size = self.remaining = file.size
        self.read_into(np.empty(file.header.data_offset, np.uint8))

    def read_into(self, array: npt.NDArray[Any]) -> None:
        """Fill `array` with the file's next bytes."""
        view = array.reshape(-1).view(np.uint8).data
        filled = 0
        while filled < len(view):
            with os_errors("read", self._path):
                count = os.preadv(self._fd, [view[filled:]], self._position)
            if count == 0:
                raise truncated_file(self._path, self._position, self._size, "when it was opened")
            filled += count
            self._position += count
        self._hasher.update(view)
        self.remaining -= filled
        self._bar.update(filled)

    def hexdigest(self) -> str:
        """Return the checksum of everything read so far."""
        return self._hasher.hexdigest()
