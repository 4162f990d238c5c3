"""What the cache of a node does on the side: shards become durable, room is given to others, stores asked briefly."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.errors import StorageIOError
from megatron_packed_sft.remote.objects import ObjectInfo, object_info
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import fsync_directory, write_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import redacted

if TYPE_CHECKING:
    from megatron_packed_sft.remote.node_cache import NodeCache

logger = logging.getLogger(__name__)

DURABLE = "durable"
SHORT = "short"
POLL_SECONDS = 0.05
_SECONDS_TO_DURABLE = 30.0  # by then the kernel has written most of it by itself
_PATIENCE = 10.0  # seconds for the question whether a copy is still good; some clients would ask for minutes


@functools.cache
def boot() -> str | None:
    """Return what is different after every start of this machine; None where nobody tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def kept_document(file: Path, tag_file: Path) -> tuple[bytes, str] | None:
    """Return the copy of a document and the tag that its store gave it; None if there is none, or half of one."""
    try:
        data = file.read_bytes()
        found, _, tag = tag_file.read_text(encoding="utf-8", errors="replace").partition(" ")
    except OSError:
        return None
    return (data, tag) if found == checksum(data) else None


def recorded_boot(file: Path) -> Any:
    """Return in which boot a shard was fetched; None for those that were durable before they got their name."""
    return json_document.parse(file.read_bytes(), str(file)).get("boot")


def make_durable(path: Path) -> None:
    """Wait until the disk has an entry of the cache, and note it there."""
    try:
        for folder, _, names in os.walk(path):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            fsync_directory(Path(folder))
        write_file(path / DURABLE, b"")
    except (OSError, StorageIOError) as error:  # evicted meanwhile; or it is fetched again after the next reboot
        logger.debug("not durable: %s", error)


def watch_room(owner: weakref.ref[NodeCache]) -> None:
    """Unmap the shards of this process whenever another one is short of room."""
    seen = None
    while (cache := owner()) is not None:
        try:
            now = (cache.directory / SHORT).stat().st_mtime_ns
        except OSError:
            now = 0
        if seen is not None and now != seen:
            cache.unmap()
        seen = now
        del cache  # or the thread would keep it alive
        time.sleep(POLL_SECONDS)


def make_durable_later(owner: weakref.ref[NodeCache]) -> None:
    """Wait until the kernel has written most by itself, and then for the rest."""
    time.sleep(_SECONDS_TO_DURABLE)
    cache = owner()
    if cache is not None:
        cache.make_durable()


def soon(url: str) -> ObjectInfo | None:
    """Return what the store says of an object, asked once, if it answers soon."""
    answers: list[ObjectInfo | StorageIOError | None] = []

    def ask() -> None:
        try:
            answers.append(object_info(url, num_attempts=1))
        except StorageIOError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="packed-sft-look", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    answer = answers[0] if answers else StorageIOError(
        f"cannot look at {redacted(url)}: no answer for {_PATIENCE:.0f} seconds; check the network and the store"
    )  # fmt: skip
    if isinstance(answer, StorageIOError):
        raise answer
    return answer
