"""Objects to local files: in parallel, never more bytes than announced, checked on arrival."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import ShardFileError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, is_missing
from megatron_packed_sft.remote.objects import download_file
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted

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
        durable: wait until the disk has it.
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
            for name in threads.map(lambda name: _fetch(url, name, contents, target, durable), files):
                if on_bytes is not None:
                    on_bytes(contents.files[name].bytes)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _fetch(url: str, name: str, contents: Contents, target: Path, durable: bool) -> str:
    source, path = (child(url, name), target / name) if name else (url, target)
    record = contents.files[name]
    try:
        with os_errors("write", path, record.bytes):
            download_file(source, path, record.bytes)
    except StorageIOError as error:
        if is_missing(error):
            raise ShardFileError(f"{redacted(source)} is missing; the data is incomplete, publish it again") from None
        raise
    _check(url, name, record, contents.algorithm, target)
    if durable:
        with os_errors("write", path, record.bytes), open(path, "rb") as file:
            os.fsync(file.fileno())
    return name


def _check(url: str, name: str, record: FileRecord, algorithm: str, target: Path) -> None:
    path = target / name if name else target
    if record.checksum and file_checksum(path, algorithm) != record.checksum:  # a single file may have none
        raise ShardFileError(
            f"{redacted(child(url, name) if name else url)} does not have the checksum that its manifest says; it was "
            "damaged or replaced: publish it again"
        )
