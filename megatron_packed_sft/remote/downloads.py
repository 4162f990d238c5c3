"""Objects to local files: in parallel ranges, never more bytes than announced, checked on arrival."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.disk.atomic import os_errors, write_at
from megatron_packed_sft.disk.checksum import file_checksum
from megatron_packed_sft.disk.json_document import FileRecord
from megatron_packed_sft.errors import ShardFileError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, is_missing, read_range
from megatron_packed_sft.support.paths import redacted

_BLOCK = 16 << 20
_NUM_THREADS = 8


class Contents(NamedTuple):
    """What there is to download.

    Args:
        files: name -> size and checksum; the name "" is the URL itself, an object and no directory.
        algorithm: of the checksums.
        ready: the content of files that were read to learn all this.
    """

    files: Mapping[str, FileRecord]
    algorithm: str
    ready: Mapping[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(record.bytes for record in self.files.values())


def download(url: str, contents: Contents, target: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    """Download all files of a shard; `target` becomes a directory, or a file if the URL is one object.

    Args:
        url: of the shard.
        contents: its files.
        target: must not exist.
        on_bytes: called with the number of bytes after each range.
    """
    if "" not in contents.files:
        with os_errors("create", target):
            target.mkdir()
    # A pool of its own: threads of a shared one would not survive a fork.
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-download") as threads:
        for name, data in contents.ready.items():
            (target / name).write_bytes(data)
        files = {name: record for name, record in contents.files.items() if name not in contents.ready}
        try:
            pending = [(name, _start(threads, url, name, files[name], target, on_bytes)) for name in files]
            for name, parts in pending:
                for part in parts:
                    part.result()
                _check(url, name, files[name], contents.algorithm, target)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _start(
    threads: ThreadPoolExecutor,
    url: str,
    name: str,
    record: FileRecord,
    target: Path,
    on_bytes: Callable[[int], object] | None,
) -> list[Future[None]]:
    source, path = (child(url, name), target / name) if name else (url, target)
    with os_errors("write", path, record.bytes), open(path, "xb") as file:
        os.truncate(file.fileno(), record.bytes)
    starts = range(0, max(record.bytes, 1), _BLOCK)
    return [threads.submit(_fetch_range, source, path, start, record.bytes, on_bytes) for start in starts]


def _fetch_range(source: str, path: Path, start: int, size: int, on_bytes: Callable[[int], object] | None) -> None:
    stop = min(start + _BLOCK, size)
    # The last range asks for one byte more: an object that is longer than announced is noticed without a request.
    try:
        data = read_range(source, start, stop + (stop == size))
    except StorageIOError as error:
        if is_missing(error):
            raise ShardFileError(f"{redacted(source)} is missing; the data is incomplete, publish it again") from None
        raise
    if len(data) != stop - start:
        problem = "longer" if len(data) > stop - start else "shorter"
        raise ShardFileError(
            f"{redacted(source)} is {problem} than the {size:,} bytes that its manifest says; it was changed or cut: "
            "publish it again"
        )
    with os_errors("write", path, size):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_at(fd, data, start)
        finally:
            os.close(fd)
    if on_bytes is not None:
        on_bytes(len(data))


def _check(url: str, name: str, record: FileRecord, algorithm: str, target: Path) -> None:
    path = target / name if name else target
    if record.checksum and file_checksum(path, algorithm) != record.checksum:  # a single file may have none
        raise ShardFileError(
            f"{redacted(child(url, name) if name else url)} does not have the checksum that its manifest says; it was "
            "damaged or replaced: publish it again"
        )
    with os_errors("write", path, record.bytes), open(path, "rb") as file:
        os.fsync(file.fileno())
