"""The token stores of a work directory, one per split: opened if whole, cleared of what other runs left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.prepare.splits import SPLITS
from megatron_packed_sft.tokens.store import TokenStore, open_token_store, publish_store
from megatron_packed_sft.tokens.validate import validate_token_store
from megatron_packed_sft.tokens.writer import part_path


def open_stores(tokens: Path, fingerprints: Mapping[str, str]) -> dict[str, TokenStore] | None:
    """The stores of some splits, if all are there with these fingerprints."""
    stores = {}
    for split, fingerprint in fingerprints.items():
        with suppress(PackedSFTError):
            store = open_token_store(tokens / split)
            if store.fingerprint == fingerprint:
                stores[split] = store
    return stores if len(stores) == len(fingerprints) else None


def publish_parts(store: Path, numbers: Sequence[int]) -> TokenStore:
    """List the parts of this run in store.json, and remove what other runs left beside them."""
    wanted = {part_path(store, number).name for number in numbers}
    with os_errors("clear", store):
        for entry in os.scandir(store):
            if entry.name.lstrip(".").startswith("part_") and entry.name not in wanted:  # with a dot: unfinished
                shutil.rmtree(entry.path)
    return publish_store(store)


def remove_other_stores(tokens: Path, stores: Mapping[str, TokenStore]) -> None:
    """Remove the stores of splits that got no row this time."""
    for split in SPLITS:
        if split not in stores:
            shutil.rmtree(tokens / split, ignore_errors=True)


def remove_damaged_parts(stores: Iterable[TokenStore], *, progress: bool) -> int:
    """Check every byte of every part and remove those that are not as they were written; return how many.

    Opening a store looks at sizes only. Without this, a flipped bit would get a new, matching checksum in a shard.
    """
    num_removed = 0
    for store in stores:
        if validate_token_store(store.path, progress=progress).ok:
            continue
        for part in store.parts:
            if not validate_token_store(part.path).ok:
                num_removed += 1
                with os_errors("remove", part.path):
                    shutil.rmtree(part.path)
    return num_removed
