"""The input files of a run: found by path, glob or URL, with formats and checksums; and read, by range or in blocks.

find_files ──▶ InputFile ──▶ read_range, read_blocks (decompressed), open_file
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import json
import os
import posixpath
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

import xxhash

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, StorageIOError
from megatron_packed_sft.remote.filesystem import base_name, file_system, translated
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import is_url, redacted, refuse_special_file

Format = Literal["jsonl", "json", "parquet", "hf_dataset"]
Compression = Literal["gzip", "zstd"]

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_KNOWN = f"{' '.join(_FORMATS)}, each JSON one also with {' or '.join(_COMPRESSIONS)}"
# The files that `datasets.save_to_disk` writes into a folder.
_HF_STATE = "state.json"
_HF_INFO = "dataset_info.json"
_HF_SPLITS = "dataset_dict.json"

BLOCK_BYTES = 1 << 20
_LOOK_BYTES = 4 << 20  # of a URL that are read in small blocks: only the first records may be needed
# Four bytes of zstd may expand to 128 KB, so portions shrink while their output is large.
_ZSTD_SMALLEST_PORTION, _ZSTD_LARGEST_PORTION = 128, 8 << 10
_ZSTD_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read, or one folder that `datasets.save_to_disk` wrote.

    Args:
        path: absolute local path, or URL.
        format: by suffix; a `.json` file that does not begin with `[` is JSON lines.
        compression: of JSON files; None for none.
        size: in bytes, as stored.
        checksum: xxh3_128 of the stored bytes, in hex.
        modified: modification time in nanoseconds, taken before the checksum; None if unknown.
    """

    path: str
    format: Format
    compression: Compression | None
    size: int
    checksum: str
    modified: int | None = None

    @property
    def name(self) -> str:
        """Its last name, without folders and without the query of a URL."""
        return base_name(self.path) if is_url(self.path) else posixpath.basename(self.path)

    @property
    def shown(self) -> str:
        """Its path without credentials, to be printed or stored."""
        return redacted(self.path)

    def refuse_changed(self) -> None:
        """Raise an error if the file was written to since it was found."""
        if self.modified is not None and _modified(self.path) != self.modified:
            raise InvalidInputError(f"{self.path} changed while it was being read; run again when nothing writes to it")


def find_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    on_read: Callable[[int], None] | None = None,
    *,
    with_checksums: bool = True,
) -> list[InputFile]:
    """Find the files of a run, in the order given; matches of a glob are sorted.

    Every file is read once for its checksum.

    Args:
        paths: files, globs (`**` descends into folders), folders saved by `datasets`, fsspec URLs, or a list of these.
        on_read: called with the number of bytes after each block.
        with_checksums: False reads no file and leaves size and checksum empty, for the first records alone.

    Example:
        >>> import tempfile, pathlib
        >>> home = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (home / "a.jsonl").write_text('{"text": "Hello"}')
        >>> [file.format for file in find_files(f"{home}/*.jsonl")]
        ['jsonl']
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise InvalidInputError("no input files; give at least one path")
    found = [path for pattern in given for path in expand_path(os.fspath(pattern))]
    for path, num_times in Counter(found).items():
        if num_times > 1:
            raise InvalidInputError(
                f"{path} is listed {num_times} times; list it once (weight repeats the records of a source)"
            )
    return [_inspect(path, (on_read or _ignore) if with_checksums else None) for path in found]


def _ignore(num_bytes: int) -> None:
    """No-op progress callback."""


def expand_path(pattern: str) -> list[str]:
    """Return the files that a path, a glob or a URL names, sorted; at least one."""
    if is_url(pattern) and not pattern.startswith("file://"):
        with reading(pattern):
            system, path = file_system(pattern)
            if system.exists(path):
                return [pattern]
            found = [str(system.unstrip_protocol(name)) for name in sorted(system.glob(path))]
    else:
        path = os.path.abspath(pattern.removeprefix("file://"))
        if os.path.lexists(path):
            return [path]
        found = sorted(glob.glob(path, recursive=True))
        if "**" in path:  # also matches folders
            found = [name for name in found if not os.path.isdir(name)]
    if not found:
        raise InvalidInputError(f"{pattern} does not exist and matches no file; check the path")
    return found


def _inspect(path: str, on_read: Callable[[int], None] | None) -> InputFile:
    if path != path.encode("utf-8", "replace").decode():
        raise InvalidInputError(f"{path!r} is not valid UTF-8, so a manifest cannot record it; rename it")
    if _is_folder(path):
        return _inspect_folder(path, on_read)
    stem, suffix = posixpath.splitext((path.split("?")[0] if is_url(path) else path).lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = posixpath.splitext(stem)[1]
    file_format = _FORMATS.get(suffix)
    if file_format is None or (compression and file_format == "parquet"):
        raise InvalidInputError(f"{path} has no known format; rename it to one of {_KNOWN}")
    if file_format == "json" and not _begins_an_array(path, compression):
        file_format = "jsonl"
    modified = None if is_url(path) else _modified(path)
    size, checksum = (0, "") if on_read is None else size_and_checksum([path], on_read)
    return InputFile(path, file_format, compression, size, checksum, modified)


def _modified(path: str) -> int:
    with reading(path):
        return os.stat(path).st_mtime_ns


def _inspect_folder(path: str, on_read: Callable[[int], None] | None) -> InputFile:
    names = _names_in(path)
    if _HF_SPLITS in names:
        splits = ", ".join(_strings_in(f"{path}/{_HF_SPLITS}", lambda document: document["splits"]))
        raise InvalidInputError(f"{path} holds the splits {splits}; give one of them, such as {path}/train")
    if not {_HF_STATE, _HF_INFO} <= names:
        raise InvalidInputError(
            f"{path} is a folder that `datasets.save_to_disk` did not write; give its files, such as {path}/*.jsonl"
        )
    data_files = _strings_in(
        f"{path}/{_HF_STATE}", lambda document: [entry["filename"] for entry in document["_data_files"]]
    )
    files = [f"{path}/{name}" for name in (_HF_STATE, _HF_INFO, *data_files)]
    size, checksum = (0, "") if on_read is None else size_and_checksum(files, on_read)
    return InputFile(path, "hf_dataset", None, size, checksum)


def _is_folder(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    if path.startswith(
        ("http://", "https://")
    ):  # a page of links is not a folder, and the question would fetch it whole
        return False
    system, name = file_system(path)
    with reading(path):
        return bool(system.isdir(name))


def _names_in(folder: str) -> set[str]:
    with reading(folder):
        if not is_url(folder):
            return set(os.listdir(folder))
        system, name = file_system(folder)
        return {posixpath.basename(entry.rstrip("/")) for entry in system.ls(name, detail=False)}


def _strings_in(path: str, select: Callable[[Any], list[Any]]) -> list[str]:
    """Return the selected strings of a file that `datasets` wrote."""
    text = b"".join(read_blocks(path))
    try:
        found = select(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not what `datasets` writes ({error!r}); save the dataset again") from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInputError(f"{path} is not what `datasets` writes; save the dataset again")
    return found


def _begins_an_array(path: str, compression: Compression | None) -> bool:
    for block in read_blocks(path, compression):
        if text := block.removeprefix(b"\xef\xbb\xbf").lstrip():
            return text.startswith(b"[")
    return False


def size_and_checksum(paths: list[str], on_read: Callable[[int], None] = _ignore) -> tuple[int, str]:
    """Return the stored bytes of some files together, and one checksum of them."""
    checksum = xxhash.xxh3_128()
    size = 0
    for block in _all_blocks(paths):
        checksum.update(block)
        size += len(block)
        on_read(len(block))
    return size, checksum.hexdigest()


def _all_blocks(paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        yield from read_blocks(path)


# ---- reading


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
        block_bytes: the number of bytes of a URL that are fetched at once; None for the default of its file system,
            which may be 50 MB: good for whole files, too much for the first records.
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
    """A URL that is read from its beginning: the first megabytes in small blocks, the rest in large ones.

    It has only the method that decompressors use.
    """

    def __init__(self, path: str) -> None:
        self._path, self._position, self._is_look = path, 0, True
        self._file = open_file(path)

    def read(self, size: int = -1) -> bytes:
        if self._is_look and self._position > _LOOK_BYTES:
            self._is_look = False
            if getattr(self._file, "size", None) is None:  # a stream, which cannot continue in the middle
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
        try:
            for block in decompress(cast(BinaryIO, _CountedFile(file, on_read))):
                num_bytes += len(block)
                yield block
        except _DamagedError as error:
            raise InvalidInputError(
                f"{path} is truncated or damaged: {compression} says '{error}' after {num_bytes:,} decompressed bytes; "
                "get the file again"
            ) from error


class _CountedFile:
    """A file that reports what is read of it; it has only the method that decompressors use."""

    def __init__(self, file: BinaryIO | _SequentialFile, on_read: Callable[[int], None] | None) -> None:
        self._file, self._on_read = file, on_read

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
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
