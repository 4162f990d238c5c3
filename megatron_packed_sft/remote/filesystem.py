"""File systems behind fsspec URLs, and requests to them: bounded retries, and no credentials in errors.

Options such as endpoints and credentials come from the environment and from fsspec's own configuration files.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from megatron_packed_sft.errors import (
    InvalidInputError,
    MissingDependencyError,
    PackedSFTError,
    StorageIOError,
)
from megatron_packed_sft.remote.client_errors import is_final, translated
from megatron_packed_sft.remote.waiting import watched
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
_SECRET_PART = re.compile(r"\?[\w.-]+=|://[^/@\s]*:[^/@\s]*@")  # a lone ? is a glob, a lone name may be a container
_ONE_SLASH = re.compile(r"((?:[\w+.-]+::)*[\w+.-]+):/(?!/)")  # what joining paths makes of a URL
_WITH_BUCKETS = frozenset(_EXTRAS) - {"hf"}
_READ_ONLY = ("hf", "http", "https")
# Their clients log failures that end up in our own sentence; without a handler Python prints them to stderr.
for _client in ("gcsfs", "adlfs", "azure", "multistorageclient"):
    logging.getLogger(_client).addHandler(logging.NullHandler())

Result = TypeVar("Result")


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
    _refuse_malformed(url, scheme)
    url_to_fs = importlib.import_module("fsspec.core").url_to_fs
    try:
        system, path = url_to_fs(scheme + url[len(scheme) :])
    except (ImportError, ValueError) as error:
        is_unknown = isinstance(error, ImportError) or "Protocol not known" in str(error)
        if scheme in _EXTRAS and is_unknown:
            raise MissingDependencyError(
                f"{scheme}:// URLs need a package that is not installed; install it with "
                f"pip install 'megatron-packed-sft[{_EXTRAS[scheme]}]'"
            ) from None
        if isinstance(error, ImportError):
            raise MissingDependencyError(f"cannot open {redacted(url)}: {redacted(str(error))}") from error
        raise InvalidInputError(
            f"cannot open {redacted(url)}: {redacted(str(error))}; check the part before ://, and your credentials"
        ) from None
    return system, cast(str, path)


def _refuse_malformed(url: str, scheme: str) -> None:
    """Refuse a URL that fsspec would take for a local path, that names no bucket, or that holds a credential."""
    one_slash = _ONE_SLASH.match(url)
    if one_slash:
        rest = url[one_slash.end() - (scheme == "file") :]
        raise InvalidInputError(
            f"{redacted(url)} has one slash after its scheme; write {redacted(f'{one_slash[1]}://{rest}')}"
        )
    if _SECRET_PART.search(url):  # it would get into receipts and messages
        what = f"{redacted(url)} holds a query or a password, which is a credential and would be noted in receipts; "
        if scheme in ("http", "https"):
            raise InvalidInputError(
                f"{what}download the file and give its local path, or give the s3://, gs:// or az:// URL behind a "
                "pre-signed one, with credentials in the environment"
            )
        raise InvalidInputError(f"{what}give the plain URL, and credentials by environment variables")
    if scheme in _WITH_BUCKETS and not url.partition("://")[2].partition("/")[0]:
        raise InvalidInputError(f"{redacted(url)} names no bucket; write {scheme}://BUCKET/NAME")


def is_of_one_process(url: str) -> bool:
    """Return whether no other process, not even one of this machine, sees what is written under a URL.

    Example:
        >>> is_of_one_process("memory://a"), is_of_one_process("s3://a")
        (True, False)
    """
    scheme = url.partition(":")[0].lower()
    return scheme == "memory" or scheme in _GIVEN


def refuse_read_only(url: str, name: str = "output") -> None:
    """Refuse a URL that can only be read, before any work.

    Args:
        url: where something shall be written.
        name: what the user calls it.

    Example:
        >>> refuse_read_only("hf://datasets/me/chats")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: output is hf://datasets/me/chats, and hf:// is for input only; ...
    """
    scheme = url.partition(":")[0].lower()
    if scheme in _READ_ONLY:
        raise InvalidInputError(
            f"{name} is {redacted(url)}, and {scheme}:// is for input only; write to a local path or a bucket, and "
            "copy it from there"
        )


_GIVEN: dict[str, Any] = {}  # file systems that a caller made himself, by a scheme of their own
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def given_url(system: Any, path: str) -> Iterator[str]:
    """Yield a URL for a path of an fsspec file system that the caller made, with whatever options it has.

    Example:
        >>> import fsspec
        >>> memory = fsspec.filesystem("memory")
        >>> with given_url(memory, "/doc/given") as url:
        ...     file_system(url)[0] is memory
        True
    """
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    scheme = f"{protocol}+{next(_NUMBERS)}"
    _GIVEN[scheme] = system
    try:
        yield f"{scheme}://{path.strip('/')}"
    finally:
        del _GIVEN[scheme]


def retried(
    action: str, url: str, call: Callable[[], Result], num_attempts: int | None = None, *, is_transfer: bool = False
) -> Result:
    """Call until it works, with growing and random pauses, a few times; then raise one sentence without secrets.

    Args:
        action: what the call does with the URL, such as "read".
        url: for the message.
        call: one request.
        num_attempts: how often to try.
        is_transfer: it moves a file, which takes its time; anything else that takes long is mentioned.

    Example:
        >>> retried("read", "memory://x", lambda: 7)
        7
    """
    most = num_attempts or NUM_ATTEMPTS
    start = time.monotonic()
    for attempt in range(most):
        try:
            with contextlib.nullcontext() if is_transfer else watched(action, redacted(url)):
                return call()
        except PackedSFTError:
            raise
        except Exception as error:
            useless = is_final(error)
            if useless or attempt == most - 1 or time.monotonic() - start > _PATIENCE:
                raise translated(error, action, url, 1 if useless else attempt + 1) from None
            time.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def missing_error(sentence: str) -> StorageIOError:
    """Return an error that `is_missing` knows.

    Example:
        >>> is_missing(missing_error("s3://bucket/key does not exist; check the URL"))
        True
    """
    error = StorageIOError(sentence)
    error.errno = errno.ENOENT
    return error


def is_missing(error: StorageIOError) -> bool:
    """Return whether an error says that there is no such object.

    Example:
        >>> is_missing(StorageIOError("cannot read s3://bucket/key: it timed out"))
        False
    """
    return error.errno == errno.ENOENT
