"""Files of a directory and their copies in a store, brought up to date: what is missing or different is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.objects import ObjectInfo, file_md5, list_objects, upload_file
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import FileRecord

_NUM_THREADS = 16


def fetch_files(url: str, local: Path, there: Mapping[str, ObjectInfo]) -> int:
    """Fetch the files that are missing or different here; return how many.

    Args:
        url: of a directory in a store.
        local: its copy.
        there: the objects to fetch, by their names below the URL, as the store lists them.
    """
    for name in there:
        child(url, name)  # refuses names that lead elsewhere, before anything is touched
    names = [name for name, info in there.items() if not _is_same(local / name, info)]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-fetch") as threads:
        list(threads.map(lambda name: _fetch(url, local, name, there[name]), names))
    return len(names)


def send_files(local: Path, url: str, names: Sequence[str]) -> int:
    """Send the files that are missing or different there; return how many. Nothing is removed from the store.

    Args:
        local: a directory.
        url: what it is called in the store.
        names: of the files, below it.
    """
    there = list_objects(url)
    changed = [name for name in names if name not in there or not _is_same(local / name, there[name])]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-send") as threads:
        list(threads.map(lambda name: upload_file(local / name, child(url, name)), changed))
    return len(changed)


def _fetch(url: str, local: Path, name: str, info: ObjectInfo) -> None:
    path = local / name
    with os_errors("create", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    download(child(url, name), Contents({"": FileRecord(info.size, "")}, DEFAULT_ALGORITHM), path)


def _is_same(local: Path, there: ObjectInfo) -> bool:
    if not local.is_file() or local.stat().st_size != there.size:
        return False
    return there.md5 is not None and there.md5 == file_md5(local)
