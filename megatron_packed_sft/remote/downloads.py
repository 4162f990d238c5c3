"""Objects to local files: in parallel, never more bytes than announced, and checked on arrival."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import ShardFileError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, is_missing
from megatron_packed_sft.remote.objects import ObjectInfo, download_file, file_md5
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted

_NUM_THREADS = 8
_NUM_THREADS_FOR_SMALL_FILES = 16


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


def download(
    url: str,
    contents: Contents,
    target: Path,
    on_bytes: Callable[[int], object] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Download all files of a shard; `target` becomes a directory, or a file if the URL is one object.

    Args:
        url: of the shard.
        contents: its files.
        target: must not exist, or be an empty directory.
        on_bytes: called with the size of each file.
        durable: fsync every file.
    """
    if "" not in contents.files:
        with os_errors("create", target):
            for folder in {target, *((target / name).parent for name in contents.files)}:
                folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.ready.items():
        with os_errors("write", target / name):
            (target / name).write_bytes(data)
    files = [name for name in contents.files if name not in contents.ready]
    # A pool of its own: threads of a shared one would not survive a fork.
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-download") as threads:
        try:
            for name in threads.map(lambda name: _download_checked(url, name, contents, target, durable), files):
                if on_bytes is not None:
                    on_bytes(contents.files[name].bytes)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _download_checked(url: str, name: str, contents: Contents, target: Path, durable: bool) -> str:
    source, path = (child(url, name), target / name) if name else (url, target)
    record = contents.files[name]
    _download_announced(source, path, record.bytes)
    if record.checksum and file_checksum(path, contents.algorithm) != record.checksum:  # a single file may have none
        raise ShardFileError(
            f"{redacted(source)} does not have the checksum in its manifest; it was damaged or replaced: publish it "
            "again"
        )
    if durable:
        with os_errors("write", path, record.bytes), open(path, "rb") as file:
            os.fsync(file.fileno())
    return name


def _download_announced(url: str, path: Path, num_bytes: int) -> None:
    try:
        with os_errors("write", path, num_bytes):
            download_file(url, path, num_bytes)
    except StorageIOError as error:
        if is_missing(error):
            raise ShardFileError(f"{redacted(url)} is missing; the data is incomplete, publish it again") from None
        raise


def fetch_files(url: str, local: Path, there: Mapping[str, ObjectInfo]) -> int:
    """Bring the local copy of a directory up to date: fetch missing and different files, and return how many.

    Args:
        url: of a directory in a store.
        local: its copy.
        there: the objects to fetch, by their names below the URL, as the store lists them.
    """
    for name in there:
        child(url, name)  # refuses names that lead elsewhere, before anything is touched
    names = [name for name, info in there.items() if not is_same_file(local / name, info)]

    def fetch(name: str) -> None:
        path = local / name
        with os_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        _download_announced(child(url, name), path, there[name].size)

    with ThreadPoolExecutor(_NUM_THREADS_FOR_SMALL_FILES, thread_name_prefix="packed-sft-fetch") as threads:
        list(threads.map(fetch, names))
    return len(names)


def is_same_file(local: Path, there: ObjectInfo) -> bool:
    """Return whether the store says that an object has the content of a local file."""
    if not local.is_file() or local.stat().st_size != there.size:
        return False
    return there.md5 is not None and there.md5 == file_md5(local)
