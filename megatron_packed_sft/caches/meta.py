"""meta.json: what a cache was made from, what is in it, and the checksum of each of its files.

It is one JSON object with sorted keys. `write_meta` adds a checksum of the document itself, which `read_meta` checks
and leaves out again; a meta.json that another program wrote need not have one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, ManifestError
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import SELF_CHECKSUM, Fields, FileRecord, parse, render
from megatron_packed_sft.support.paths import local_path

META = "meta.json"
ALGORITHM = "sha256"
_MAX_META_BYTES = 16 << 20  # what readers of token streams accept


def write_meta(path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Write a meta.json in one step, whether or not there was one before.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> write_meta(f"{home}/meta.json", {"seed": 42})
        >>> read_meta(f"{home}/meta.json")
        {'seed': 42}
    """
    replace_file(local_path(path), meta_bytes(meta, path))


def meta_bytes(meta: Mapping[str, Any], path: str | os.PathLike[str] = META) -> bytes:
    """Return the bytes of a meta.json.

    Example:
        >>> print(meta_bytes({"seed": 42}).decode().splitlines()[1])
        "seed": 42,
    """
    try:
        return render(meta)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{os.fspath(path)}: meta cannot be written as JSON ({error}); use text, finite numbers, lists and dicts"
        ) from None


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


def file_records(records: Mapping[str, FileRecord]) -> dict[str, Any]:
    """Return the keys of a meta.json that name its files, with sizes and checksums."""
    return {"checksum_algorithm": ALGORITHM, "files": {name: record._asdict() for name, record in records.items()}}


def is_complete(folder: Path, meta: Mapping[str, Any]) -> bool:
    """Return whether every file that a meta.json lists is there, with its size."""
    files = meta.get("files")
    if not isinstance(files, Mapping) or meta.get("built") is False:
        return False
    return all(
        isinstance(record, Mapping) and _size(folder / name) == record.get("bytes") for name, record in files.items()
    )


def special_token_id(meta: Mapping[str, Any], name: str, file: str) -> int | None:
    """Return the id of `sys`, `usr`, `asst` or `eot`, or None if the meta.json does not say."""
    ids = Fields(meta, file).optional_object("special_token_ids")
    return None if ids is None else Fields(ids, file).optional_integer(name, 0, (1 << 32) - 1)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
