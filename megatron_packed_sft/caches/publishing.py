"""How a cache appears on disk: whole or not at all, never over something else, with a meta.json that tells it all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed_sft.caches.meta import META, is_complete, meta_bytes, read_meta
from megatron_packed_sft.caches.text_encoder import TextEncoder
from megatron_packed_sft.errors import PackedSFTError, TargetExistsError
from megatron_packed_sft.storage.token_stream.writer import token_dtype_for
from megatron_packed_sft.support.atomic import Staging, write_file
from megatron_packed_sft.support.paths import local_path

FORMAT_KEY, FORMAT = "cache_format", 1


@contextlib.contextmanager
def staged(target: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Staging]:
    """Open a staging directory for a cache; only a cache of ours is ever replaced.

    A folder that says it is not built, or that is empty, is replaced without being asked.
    """
    location = local_path(target, "out_dir")
    published = published_meta(location)
    if published is None and location.exists() and (not location.is_dir() or any(location.iterdir())):
        raise TargetExistsError(f"{location} holds something else than a cache of ours; choose another out_dir")
    is_free = published is not None and published.get("built") is False
    with Staging(location, overwrite=overwrite or is_free) as staging:
        yield staging


def publish(staging: Staging, meta: Mapping[str, Any]) -> None:
    """Write the meta.json, last of all files, and publish."""
    write_file(staging.path / META, meta_bytes({FORMAT_KEY: FORMAT, **meta}, staging.target / META))
    staging.publish()


def published_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a cache that we wrote, or None."""
    try:
        meta = read_meta(folder / META)
    except PackedSFTError:
        return None
    return meta if meta.get(FORMAT_KEY) == FORMAT else None


def is_published(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether a complete cache made from the same things is there already."""
    meta = published_meta(folder)
    return meta is not None and meta.get("made_from") == made_from and is_complete(folder, meta)


def differences(folder: Path, made_from: Mapping[str, Any]) -> list[str]:
    """Return what a published cache was made from otherwise, such as `seed 1 -> 42`."""
    before = (published_meta(folder) or {}).get("made_from") or {}
    return [
        f"{name} {_shown(before.get(name))} -> {_shown(made_from.get(name))}"
        for name in sorted({*before, *made_from})
        if before.get(name) != made_from.get(name)
    ]


def common_meta(
    encoder: TextEncoder, folder: Path, dataset_name: str | None, dataset_config: str | None, seed: int
) -> dict[str, Any]:
    """Return the keys that the meta.json of every cache has."""
    return {
        "built": True,
        "dataset_name": folder.name if dataset_name is None else dataset_name,
        "dataset_config": dataset_config,
        "seed": seed,
        "token_dtype": token_dtype_for(encoder.vocab_size),
        "tokenizer_sha256": encoder.sha256(),
        "vocab_size": encoder.vocab_size,
        "special_token_ids": encoder.special_ids,
        **({"tokenizer": identity} if (identity := encoder.identity()) else {}),
    }


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
