"""Slices whose parts go to an object store: sent, checked and vouched for by the process that encoded them.

    ids, train, offsets, lines ─▶ manifest ─▶ receipt

So a slice is there when its receipt is, whoever dies. Two processes that encode the same slice write the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.prepare.encode_worker import (
    EncodeSettings,
    SliceResult,
    SliceTask,
    encode_slice,
    start_encoder,
)
from megatron_packed_sft.prepare.places import home_of
from megatron_packed_sft.prepare.work_directory import record_numbers_path, rendered_receipt, slice_receipt
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.objects import file_md5, write_object
from megatron_packed_sft.remote.uploads import send_file
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.remote_store import RemotePart
from megatron_packed_sft.tokens.writer import part_path

_NUM_THREADS = 4
_places: list[tuple[str, Path]] = []  # in a worker process: the URL of the work directory, and its copy on this node


def receipt_of(result: SliceResult, file: str) -> dict[str, Any]:
    """Return what the receipt of a slice notes.

    Args:
        result: what became of it.
        file: that it is a part of.
    """
    return {
        "counts": result.counts.to_json(),
        "parts": dict(result.parts),
        "record_numbers": dict(result.record_numbers),
        "file": file,
        "drops": [list(drop) for drop in result.drops],
    }


def start_sending_encoder(settings: EncodeSettings, url: str) -> None:
    """Set a process up for `encode_slice_and_send`."""
    home = home_of(url)
    _places[:] = [(url, home)]
    start_encoder(replace(settings, tokens=home / "tokens"))


def encode_slice_and_send(task: SliceTask) -> SliceResult:
    """Encode a slice, send its parts and then its receipt."""
    result = encode_slice(task)
    url, home = _places[0]
    tokens = home / "tokens"
    parts = {split: TokenPart.open(part_path(tokens / split, task.number)) for split in result.parts}
    files = [path for part in parts.values() for path in part.path.iterdir()]
    files += [record_numbers_path(tokens, split, task.number) for split in parts]
    objects = {os.path.relpath(path, home): [path.stat().st_size, file_md5(path)] for path in files}
    _send(home, url, [name for name in objects if not name.endswith(MANIFEST)])
    _send(home, url, [name for name in objects if name.endswith(MANIFEST)])
    task.slice.file.refuse_changed()  # or its receipt would vouch for other records
    noted = {**receipt_of(result, task.slice.file.shown), "objects": objects}
    write_object(child(url, f"{slice_receipt(task.number)}.json"), rendered_receipt(task.fingerprint, noted))
    _let_go(url, parts, [record_numbers_path(tokens, split, task.number) for split in parts])
    return result._replace(drops=())


def _send(home: Path, url: str, names: list[str]) -> None:
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-send") as threads:
        list(threads.map(lambda name: send_file(home / name, child(url, name)), names))


def _let_go(url: str, parts: Mapping[str, TokenPart], files: list[Path]) -> None:
    """Move what was sent into the cache of the node, for its publishing tasks, or remove it."""
    for split, part in parts.items():
        part.unmap()
        RemotePart(child(url, "tokens", split, part.path.name), part.fingerprint, url).adopt(part)
        shutil.rmtree(part.path, ignore_errors=True)
    for path in files:
        path.unlink(missing_ok=True)
