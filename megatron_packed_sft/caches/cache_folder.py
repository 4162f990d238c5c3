"""A cache on disk: published whole or not at all, never over another folder, described by its meta.json.

    cache/pretrain/NAME/  train/shard_00000.bin ...   val/shard_00000.bin ...   meta.json
    cache/sft/NAME/       train_tokens.bin  train_idx.npy   val_tokens.bin  val_idx.npy   meta.json

meta.json is one JSON object with sorted keys. `write_meta` adds a checksum of the document itself, which `read_meta`
checks and removes again; a meta.json that another program wrote needs none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed_sft.caches.text_encoder import ALGORITHM, TextEncoder
from megatron_packed_sft.errors import InvalidInputError, ManifestError, PackedSFTError, TargetExistsError
from megatron_packed_sft.storage.token_stream.writer import token_dtype_for
from megatron_packed_sft.support.atomic import Staging, os_errors, replace_file, write_file
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import SELF_CHECKSUM, FileRecord, parse, render
from megatron_packed_sft.support.paths import local_path

META = "meta.json"
_FORMAT_KEY, _FORMAT = "cache_format", 1
_MAX_META_BYTES = 16 << 20  # the limit of the readers of token streams


def write_meta(path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Write a meta.json in one step, over an earlier one if there is one.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> write_meta(f"{home}/meta.json", {"seed": 42})
        >>> read_meta(f"{home}/meta.json")
        {'seed': 42}
    """
    replace_file(local_path(path), _meta_bytes(meta, path))


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a meta.json; damage is one sentence.

    Raises:
        StorageIOError: it is missing or cannot be read.
        ManifestError: it is not a JSON object, or it was changed since `write_meta`.
    """
    location = local_path(path)
    with os_errors("read", location), open(location, "rb") as file:
        data = file.read(_MAX_META_BYTES + 1)
    if len(data) > _MAX_META_BYTES:
        raise ManifestError(f"{location} has more than {_MAX_META_BYTES:,} bytes; restore the original")
    document = parse(data, str(location))
    document.pop(SELF_CHECKSUM, None)
    return document


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in blocks.

    Example:
        >>> import tempfile; path = Path(tempfile.mkdtemp()) / "a"; _ = path.write_bytes(b"abc")
        >>> sha256_file(path)[:16]
        'ba7816bf8f01cfea'
    """
    location = local_path(path)
    if location.is_dir():
        raise InvalidInputError(f"{location} is a folder; sha256_file takes one file")
    return file_checksum(location, ALGORITHM)


@contextlib.contextmanager
def staged(target: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Staging]:
    """Open a staging directory for a cache; only a cache of ours is ever replaced.

    A folder that is empty, or whose meta.json says that it is not built, is replaced without `overwrite`.
    """
    location = local_path(target, "out_dir")
    published = published_meta(location)
    if published is None and location.exists() and (not location.is_dir() or any(location.iterdir())):
        raise TargetExistsError(f"{location} exists and is not a cache; choose another out_dir")
    is_free = published is not None and published.get("built") is False
    with Staging(location, overwrite=overwrite or is_free) as staging:
        yield staging


def publish(staging: Staging, meta: Mapping[str, Any]) -> None:
    """Write the meta.json, last of all files, and publish."""
    write_file(staging.path / META, _meta_bytes({_FORMAT_KEY: _FORMAT, **meta}, staging.target / META))
    staging.publish()


def published_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a cache that we wrote, or None."""
    try:
        meta = read_meta(folder / META)
    except PackedSFTError:
        return None
    return meta if meta.get(_FORMAT_KEY) == _FORMAT else None


def common_meta(encoder: TextEncoder, folder: Path, seed: int) -> dict[str, Any]:
    """Return the keys that the meta.json of every cache has."""
    return {
        "built": True,
        "dataset_name": folder.name,
        "dataset_config": None,
        "seed": seed,
        "token_dtype": token_dtype_for(encoder.vocab_size),
        "tokenizer_sha256": encoder.sha256(),
        "vocab_size": encoder.vocab_size,
        "special_token_ids": encoder.special_ids,
        "tokenizer": encoder.identity,
    }


def file_records(records: Mapping[str, FileRecord]) -> dict[str, Any]:
    """Return the keys of a meta.json that name its files, with sizes and checksums."""
    return {"checksum_algorithm": ALGORITHM, "files": {name: record._asdict() for name, record in records.items()}}


def _meta_bytes(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> bytes:
    try:
        return render(meta)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{os.fspath(path)}: meta cannot be written as JSON ({error}); use text, finite numbers, lists and dicts"
        ) from None
