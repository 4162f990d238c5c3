"""Read, list, write and remove objects behind URLs; every request is retried as `filesystem.retried` does."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_packed_sft.errors import InvalidInputError, ShardFileError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, file_system, http_status, refuse_read_only, retried
from megatron_packed_sft.support.paths import redacted

_TAGS = ("generation", "blob_id", "mtime", "created", "LastModified", "last_modified")  # of stores without ETags
TRIAL = ".upload.trial"  # exists for a moment; after a kill it stays, and may be removed
_CHANGED = "in its manifest; it was changed or cut off: publish it again"


class ObjectInfo(NamedTuple):
    """What a store reports about an object.

    Args:
        size: in bytes.
        tag: changes whenever the object is written: the ETag, or a time; empty if the store reports neither.
        md5: of the content, in hex, if the store reports it.
    """

    size: int
    tag: str = ""
    md5: str | None = None


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an object; fewer if it ends before that.

    Example:
        >>> write_object("memory://doc/range", b"abcdef"); read_range("memory://doc/range", 1, 3)
        b'bc'
    """

    def read() -> bytes:
        system, path = file_system(url)
        try:
            return cast(bytes, system.cat_file(path, start=start, end=stop))
        except Exception as error:
            if http_status(error) == 416:  # the object ends before the range begins
                return b""
            raise

    data = retried("read", url, read)
    if len(data) > stop - start:
        raise StorageIOError(f"cannot read {redacted(url)}: the store ignores ranges; use another store")
    return data


def read_object(url: str, limit: int) -> bytes:
    """Return a small object, which may have at most `limit` bytes.

    Example:
        >>> write_object("memory://doc/small", b"abc"); read_object("memory://doc/small", 10)
        b'abc'
    """
    data = read_range(url, 0, limit + 1)
    if len(data) > limit:
        raise StorageIOError(f"{redacted(url)} has more than the {limit:,} bytes allowed; restore the original")
    return data


def download_file(url: str, path: Path, size: int) -> None:
    """Stream an object of a known size to a local file; stop as soon as it turns out longer."""

    def refuse_longer(so_far: int) -> None:
        if so_far > size:
            raise ShardFileError(f"{redacted(url)} is longer than the {size:,} bytes {_CHANGED}")

    def get() -> None:
        system, place = file_system(url)
        if system.protocol == "msc":  # its downloads report no progress
            refuse_longer(int(system.info(place)["size"]))
        callback = importlib.import_module("fsspec.callbacks").Callback()
        # fsspec reports the size, if it knows it, and then every block.
        callback.call = lambda *_, **__: refuse_longer(max(callback.value, callback.size or 0))
        system.get_file(place, os.fspath(path), callback=callback)

    retried("read", url, get, is_transfer=True)
    if path.stat().st_size != size:
        problem = "longer" if path.stat().st_size > size else "shorter"
        raise ShardFileError(f"{redacted(url)} is {problem} than the {size:,} bytes {_CHANGED}")


def object_info(url: str, num_attempts: int | None = None) -> ObjectInfo | None:
    """Return what the store reports about an object, asked now; None if there is none."""

    def ask() -> ObjectInfo | None:
        system, path = file_system(url)
        system.invalidate_cache()
        try:
            info = system.info(path)
        except FileNotFoundError:
            return None
        return None if info.get("type") == "directory" else _parsed(info)

    return retried("look at", url, ask, num_attempts)


def list_objects(url: str) -> dict[str, ObjectInfo]:
    """Return name -> report of all objects below a URL, asked now.

    Example:
        >>> write_object("memory://doc/list/a/b", b"abc"); list(list_objects("memory://doc/list"))
        ['a/b']
    """
    if url.lower().startswith(("http://", "https://")):
        raise InvalidInputError(
            f"{redacted(url)} cannot be listed: plain HTTP has no listings; copy the data to a local path or a bucket"
        )

    def ask() -> dict[str, ObjectInfo]:
        system, path = file_system(url)
        system.invalidate_cache()
        top = path.strip("/") + "/"
        found = {}
        try:
            listed: Mapping[str, Any] = system.find(path, detail=True, **_raising_errors(system))
        except FileNotFoundError:
            return {}
        for name, info in listed.items():
            inside = name.lstrip("/").removeprefix(top)
            # The web consoles of stores make empty objects called "folder/".
            is_file = info.get("type") != "directory" and not inside.endswith("/")
            if name.lstrip("/").startswith(top) and inside and is_file:
                found[inside] = _parsed(info)
        return found

    return retried("list", url, ask)


def _raising_errors(system: Any) -> dict[str, Any]:
    """Return options that make a listing raise its errors; fsspec's own, which some clients use, skips them."""
    asynchronous = importlib.import_module("fsspec.asyn").AsyncFileSystem
    parent, name = (
        (asynchronous, "_find")
        if isinstance(system, asynchronous)
        else (importlib.import_module("fsspec.spec").AbstractFileSystem, "find")
    )
    if getattr(type(system), name) is not getattr(parent, name):
        return {}  # the client has a listing of its own

    def fail(error: Exception) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return {"on_error": fail}


def write_object(url: str, data: bytes) -> None:
    """Write a small object."""
    refuse_read_only(url)

    def write() -> None:
        system, path = file_system(url)
        _make_parent(system, path)
        system.pipe_file(path, data)

    retried("write", url, write)


def try_writing(url: str) -> None:
    """Write and remove a small object below a URL, to find a closed or missing bucket before hours of work.

    Where folders are real, this may create one.

    Example:
        >>> try_writing("memory://doc/tried"); list_objects("memory://doc/tried")
        {}
    """
    refuse_read_only(url)

    def write() -> None:
        system, path = file_system(child(url, TRIAL))
        _make_parent(system, path)
        system.pipe_file(path, b"{}")
        try:
            system.rm_file(path)
        except FileNotFoundError:  # another process did the same
            return

    retried("write to", url, write)


def upload_file(local: Path, url: str) -> None:
    """Write an object from a local file; see `uploads` for the checks."""
    refuse_read_only(url)

    def put() -> None:
        system, path = file_system(url)
        _make_parent(system, path)
        system.put_file(os.fspath(local), path)

    retried("write", url, put, is_transfer=True)


def remove_object(url: str) -> None:
    """Remove an object, if it still exists."""

    def remove() -> None:
        system, path = file_system(url)
        try:
            system.rm_file(path)
        except FileNotFoundError:
            return

    retried("remove", url, remove)


def file_md5(path: Path) -> str:
    """Return the MD5 of a local file, for comparison with what a store reports."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_parent(system: Any, path: str) -> None:
    # Object stores have no directories; to make one is to create the bucket.
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    if "memory" in protocols or "file" in protocols:
        system.makedirs(path.rpartition("/")[0], exist_ok=True)


def _parsed(info: Mapping[str, Any]) -> ObjectInfo:
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    times = (info.get(name) for name in _TAGS)
    tag = etag or str(next((one for one in times if one), ""))
    return ObjectInfo(int(info["size"]), tag, _md5(info, etag))


def _md5(info: Mapping[str, Any], etag: str) -> str | None:
    """Return the MD5 that a store reports: S3's ETag of a plain upload, or the field of Google's or Azure's."""
    # Google's field, or an attribute of Azure's settings.
    encoded = info.get("md5Hash") or getattr(info.get("content_settings"), "content_md5", None)
    if isinstance(encoded, str):
        try:
            encoded = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return None
    if isinstance(encoded, bytes | bytearray) and len(encoded) == 16:
        return bytes(encoded).hex()
    return etag if re.fullmatch(r"[0-9a-f]{32}", etag) and "ETag" in info else None
