"""Objects behind fsspec URLs: read, listed, written and removed, with bounded retries and no credentials in errors.

Options such as endpoints and credentials come from the environment and from fsspec's own configuration files.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import importlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from megatron_packed_sft.errors import (
    InvalidInputError,
    MissingDependencyError,
    PackedSFTError,
    ShardFileError,
    StorageIOError,
)
from megatron_packed_sft.support.paths import redacted

NUM_ATTEMPTS = 5
_FIRST_PAUSE = 0.2  # seconds; doubled after each attempt, with jitter
_LONGEST_PAUSE = 10.0
_PATIENCE = 120.0  # seconds after which no new attempt begins: most clients retry by themselves, too
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "adl", "abfss"), "az"),
    "hf": "hf",
    "msc": "msc",
}
# Asking again does not help with these.
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    NotImplementedError,
)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")

_CHANGED = "its manifest says; it was changed or cut: publish it again"

Result = TypeVar("Result")


class ObjectInfo(NamedTuple):
    """What a store says of an object.

    Args:
        size: in bytes.
        tag: changes whenever the object is written: the ETag, or a time; empty if the store says nothing.
        md5: of the content, in hex, where the store gives one.
    """

    size: int
    tag: str = ""
    md5: str | None = None


def child(url: str, *names: str) -> str:
    """Return the URL of something below another; names that lead anywhere else are refused.

    Example:
        >>> child("s3://bucket/dataset/", "train", "shard_000000")
        's3://bucket/dataset/train/shard_000000'
    """
    for name in names:
        parts = name.split("/")
        if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise InvalidInputError(f"{name[:80]!r} is not a name below {redacted(url)}; it would lead elsewhere")
    return "/".join((url.rstrip("/"), *names))


def base_name(url: str) -> str:
    """Return the last name of a URL.

    Example:
        >>> base_name("s3://bucket/my_dataset/")
        'my_dataset'
    """
    return url.split("?")[0].rstrip("/").rpartition("/")[2]


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path inside it; ask again after a fork.

    Example:
        >>> file_system("memory://chats/a.jsonl")[1]
        '/chats/a.jsonl'
    """
    scheme = url.partition(":")[0].lower()
    if scheme in _GIVEN:
        return _GIVEN[scheme], url.partition("://")[2]
    url_to_fs = importlib.import_module("fsspec.core").url_to_fs
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        if scheme in _EXTRAS:
            extra = _EXTRAS[scheme]
            raise MissingDependencyError(
                f"{scheme}:// URLs need a package that is not installed; install it with "
                f"pip install 'megatron-packed-sft[{extra}]'"
            ) from error
        raise MissingDependencyError(f"cannot open {redacted(url)}: {error}") from error
    except ValueError as error:
        raise InvalidInputError(
            f"cannot open {redacted(url)}: {redacted(str(error))}; check the part before ://"
        ) from None
    return system, cast(str, path)


_GIVEN: dict[str, Any] = {}  # file systems that a caller made himself, by a scheme of their own
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def given_url(system: Any, path: str) -> Iterator[str]:
    """Yield a URL for a path of an fsspec file system that the caller made, with whatever options it has.

    Example:
        >>> import fsspec
        >>> with given_url(fsspec.filesystem("memory"), "/doc/given") as url:
        ...     write_object(url, b"abc")
        >>> read_object("memory://doc/given", 10)
        b'abc'
    """
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    scheme = f"{protocol}+{next(_NUMBERS)}"
    _GIVEN[scheme] = system
    try:
        yield f"{scheme}://{path.strip('/')}"
    finally:
        del _GIVEN[scheme]


def retried(action: str, url: str, call: Callable[[], Result], num_attempts: int | None = None) -> Result:
    """Call until it works, with growing and random pauses, a few times; then raise one sentence without secrets.

    Example:
        >>> retried("read", "memory://x", lambda: 7)
        7
    """
    most = num_attempts or NUM_ATTEMPTS
    start = time.monotonic()
    for attempt in range(most):
        try:
            return call()
        except PackedSFTError:
            raise
        except Exception as error:
            is_final = isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES
            if is_final or attempt == most - 1 or time.monotonic() - start > _PATIENCE:
                raise _translated(error, action, url, 1 if is_final else attempt + 1) from None
            time.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def _translated(error: Exception, action: str, url: str, num_attempts: int) -> PackedSFTError:
    """Our error for one of a store's; the original is not chained, since it may hold credentials."""
    reason = redacted(" ".join(str(error).split()))[:300] or type(error).__name__
    hint = "check the network and the store, then run again"
    if isinstance(error, FileNotFoundError):
        reason, hint = "it does not exist", "check the URL"
    elif isinstance(error, PermissionError) or type(error).__name__ in _FINAL_NAMES:
        hint = "check your credentials and your permission"
    elif isinstance(error, ImportError):
        return MissingDependencyError(f"cannot {action} {redacted(url)}: {reason}")
    elif isinstance(error, ValueError):
        hint = "check the URL and its options"
    times = f" ({num_attempts} attempts)" if num_attempts > 1 else ""
    result = StorageIOError(f"cannot {action} {redacted(url)}: {reason}{times}; {hint}")
    result.errno = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        result.errno = 2
    return result


def is_missing(error: StorageIOError) -> bool:
    """Return whether an error says that there is no such object.

    Example:
        >>> is_missing(StorageIOError("cannot read s3://bucket/key: it timed out"))
        False
    """
    return error.errno == 2


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an object; fewer if it ends before that.

    Example:
        >>> write_object("memory://doc/range", b"abcdef"); read_range("memory://doc/range", 1, 3)
        b'bc'
    """

    def read() -> bytes:
        system, path = file_system(url)
        return cast(bytes, system.cat_file(path, start=start, end=stop))

    data = retried("read", url, read)
    if len(data) > stop - start:
        raise StorageIOError(f"cannot read {redacted(url)}: its store ignores ranges; use another store")
    return data


def read_object(url: str, limit: int) -> bytes:
    """Return a small object, which may have at most `limit` bytes.

    Example:
        >>> write_object("memory://doc/small", b"abc"); read_object("memory://doc/small", 10)
        b'abc'
    """
    data = read_range(url, 0, limit + 1)
    if len(data) > limit:
        raise StorageIOError(f"{redacted(url)} has more than the {limit:,} bytes it may have; restore the original")
    return data


def download_file(url: str, path: Path, size: int) -> None:
    """Stream an object of a known size to a local file; one that turns out longer is given up at once."""

    def refuse_longer(so_far: int) -> None:
        if so_far > size:
            raise ShardFileError(f"{redacted(url)} is longer than the {size:,} bytes that {_CHANGED}")

    def get() -> None:
        system, place = file_system(url)
        callback = importlib.import_module("fsspec.callbacks").Callback()
        # fsspec tells the size, if it knows it, and then every block.
        callback.call = lambda *_, **__: refuse_longer(max(callback.value, callback.size or 0))
        system.get_file(place, os.fspath(path), callback=callback)

    retried("read", url, get)
    if path.stat().st_size != size:
        problem = "longer" if path.stat().st_size > size else "shorter"
        raise ShardFileError(f"{redacted(url)} is {problem} than the {size:,} bytes that {_CHANGED}")


def object_info(url: str, num_attempts: int | None = None) -> ObjectInfo | None:
    """Return what the store says of an object, asked now; None if there is none."""

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
    """Return the objects below a URL by their names there, asked now; empty if there are none.

    Example:
        >>> write_object("memory://doc/list/a/b", b"abc"); list(list_objects("memory://doc/list"))
        ['a/b']
    """

    def ask() -> dict[str, ObjectInfo]:
        system, path = file_system(url)
        system.invalidate_cache()
        top = path.strip("/") + "/"
        found = {}
        try:
            listed: Mapping[str, Any] = system.find(path, detail=True)
        except FileNotFoundError:
            return {}
        for name, info in listed.items():
            inside = name.lstrip("/").removeprefix(top)
            if name.lstrip("/").startswith(top) and inside and info.get("type") != "directory":
                found[inside] = _parsed(info)
        return found

    return retried("list", url, ask)


def write_object(url: str, data: bytes) -> None:
    """Write a small object."""

    def write() -> None:
        system, path = file_system(url)
        _make_parent(system, path)
        system.pipe_file(path, data)

    retried("write", url, write)


def upload_file(local: Path, url: str) -> None:
    """Write an object from a local file; see `uploads` for the checks."""

    def put() -> None:
        system, path = file_system(url)
        _make_parent(system, path)
        system.put_file(os.fspath(local), path)

    retried("write", url, put)


def remove_object(url: str) -> None:
    """Remove an object; one that is gone already is fine."""

    def remove() -> None:
        system, path = file_system(url)
        try:
            system.rm_file(path)
        except FileNotFoundError:
            return

    retried("remove", url, remove)


def file_md5(path: Path) -> str:
    """Return the MD5 of a local file, for comparison with what a store says of its copy."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_parent(system: Any, path: str) -> None:
    # Object stores have no directories; asking them to make one would try to create the bucket.
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    if "memory" in protocols or "file" in protocols:
        system.makedirs(path.rpartition("/")[0], exist_ok=True)


def _parsed(info: Mapping[str, Any]) -> ObjectInfo:
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    times = (info.get(name) for name in ("generation", "mtime", "created", "LastModified", "last_modified"))
    tag = etag or str(next((one for one in times if one), ""))
    return ObjectInfo(int(info["size"]), tag, _md5(info, etag))


def _md5(info: Mapping[str, Any], etag: str) -> str | None:
    """Return the MD5 that a store reports: S3's ETag of a plain upload, or the field of Google's or Azure's."""
    encoded = info.get("md5Hash") or info.get("content_md5")
    if isinstance(encoded, str):
        try:
            encoded = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return None
    if isinstance(encoded, bytes | bytearray) and len(encoded) == 16:
        return bytes(encoded).hex()
    return etag if re.fullmatch(r"[0-9a-f]{32}", etag) and "ETag" in info else None
