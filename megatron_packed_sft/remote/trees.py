"""A directory of work kept in a store between runs: what is new is sent, what is missing is fetched.

Documents go after the arrays that they vouch for, so that a copy that was cut is work not yet done, never wrong work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.disk.json_document import FileRecord
from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.filesystem import ObjectInfo, child, file_md5, list_objects, upload_file

_NUM_THREADS = 4


def send_tree(local: Path, url: str, wanted: Callable[[str], bool]) -> int:
    """Send the files that are new or changed; return how many. Nothing is removed from the store.

    Args:
        local: a directory.
        url: what it is called in the store.
        wanted: whether a file belongs to the tree, by its name there.
    """
    there = list_objects(url)
    names = [
        name
        for folder, _, files in os.walk(local)
        for file in files
        if wanted(name := os.path.relpath(os.path.join(folder, file), local))
    ]
    changed = [name for name in names if not _is_same(local / name, there.get(name))]
    for rank in range(3):
        batch = [name for name in changed if _rank(name) == rank]
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(lambda name: upload_file(local / name, child(url, name)), batch))
    return len(changed)


def fetch_tree(url: str, local: Path, wanted: Callable[[str], bool]) -> int:
    """Fetch the files that are missing or different here; return how many."""
    there = {name: info for name, info in list_objects(url).items() if wanted(name)}
    names = [name for name, info in there.items() if not _is_same(local / name, info)]
    for name in sorted(names, key=_rank):
        path = local / name
        with os_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        download(child(url, name), Contents({"": FileRecord(there[name].size, "")}, DEFAULT_ALGORITHM), path)
    return len(names)


def _rank(name: str) -> int:
    if not name.endswith(".json"):
        return 0
    return 1 if name.endswith(("manifest.json", "store.json")) else 2  # receipts last


def _is_same(local: Path, there: ObjectInfo | None) -> bool:
    if there is None or not local.is_file() or local.stat().st_size != there.size:
        return False
    return there.md5 is not None and there.md5 == file_md5(local)
