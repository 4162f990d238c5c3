"""The file systems behind URLs, and requests to them: bounded retries, one sentence per error, no credentials in it.

Options such as endpoints and credentials come from the environment and from fsspec's own configuration files.

Every client reports "forbidden" or "not found" in its own way: as a PermissionError (s3fs), as an OSError without a
number (gcsfs), or as an error of its HTTP library with a status (adlfs, huggingface_hub, fsspec's HTTP).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from megatron_packed_sft.errors import (
    InvalidInputError,
    MissingDependencyError,
    PackedSFTError,
    StorageIOError,
)
from megatron_packed_sft.support.paths import redacted

NUM_ATTEMPTS = 5
_FIRST_PAUSE = 0.2  # seconds; doubled after each attempt, with jitter
_LONGEST_PAUSE = 10.0
_SECONDS_OF_ATTEMPTS = 120.0  # no new attempt begins after that: most clients retry by themselves, too
PATIENCE = 15.0  # seconds without an answer before the user is told
_SECONDS_BETWEEN_WARNINGS = 60.0  # many threads may wait for one store
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
# Another attempt fails in the same way.
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
    KeyError,
    NotImplementedError,
)
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
)
_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 409, 410, 411, 412, 413, 416, 451})
# Some stores answer 400 or 409 when they are busy.
_BUSY = re.compile("RequestTimeout|SlowDown|Throttl|OperationAborted|ServerBusy", re.IGNORECASE)
# The answer was cut off: aiohttp gives these a status of 400, which no server sent.
_CUT = ("ClientPayloadError", "ContentLengthError", "TransferEncodingError")
_DEPTH = 4  # of a chain of causes
_DETAILS = re.compile(r"\s+(?:RequestId:|Content:|\(Request ID:|For more information)")  # not worth showing

logger = logging.getLogger(__name__)
# These clients log failures that our own error reports; without a handler Python prints them to stderr.
for _client in ("gcsfs", "adlfs", "azure", "multistorageclient"):
    logging.getLogger(_client).addHandler(logging.NullHandler())

Result = TypeVar("Result")


def child(url: str, *names: str) -> str:
    """Return the URL of an object below another URL; refuse names that would lead elsewhere.

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
        what = f"{redacted(url)} contains a query or a password, which would end up in receipts and messages; "
        if scheme in ("http", "https"):
            raise InvalidInputError(
                f"{what}download the file and give its local path, or replace a pre-signed URL by its s3://, gs:// or "
                "az:// URL, with credentials in environment variables"
            )
        raise InvalidInputError(f"{what}give the plain URL, and set credentials in environment variables")
    if scheme in _WITH_BUCKETS and not url.partition("://")[2].partition("/")[0]:
        raise InvalidInputError(f"{redacted(url)} names no bucket; write {scheme}://BUCKET/NAME")


def is_of_one_process(url: str) -> bool:
    """Return whether only this process can see what is written under a URL.

    Example:
        >>> is_of_one_process("memory://a"), is_of_one_process("s3://a")
        (True, False)
    """
    scheme = url.partition(":")[0].lower()
    return scheme == "memory" or scheme in _GIVEN


def refuse_read_only(url: str, name: str = "output") -> None:
    """Refuse a URL that can only be read, before any work.

    Args:
        url: that is to be written to.
        name: what the user calls it.

    Example:
        >>> refuse_read_only("hf://datasets/me/chats")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: output is hf://datasets/me/chats, but hf:// is read-only; ...
    """
    scheme = url.partition(":")[0].lower()
    if scheme in _READ_ONLY:
        raise InvalidInputError(
            f"{name} is {redacted(url)}, but {scheme}:// is read-only; write to a local path or a bucket, and copy the "
            "result from there"
        )


_GIVEN: dict[str, Any] = {}  # file systems that a caller made, each with a scheme of its own
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
    """Return the result of a request, tried a few times with growing, random pauses; errors hold no credentials.

    Args:
        action: what the call does with the URL, such as "read".
        url: for the message.
        call: makes one request.
        num_attempts: how often to try.
        is_transfer: the call moves a file and may take long; otherwise the user is told when it does.

    Example:
        >>> retried("read", "memory://x", lambda: 7)
        7
    """
    most = num_attempts or NUM_ATTEMPTS
    start = time.monotonic()
    for attempt in range(most):
        try:
            with contextlib.nullcontext() if is_transfer else _warning_when_slow(action, redacted(url)):
                return call()
        except PackedSFTError:
            raise
        except Exception as error:
            is_useless = is_final(error)
            if is_useless or attempt == most - 1 or time.monotonic() - start > _SECONDS_OF_ATTEMPTS:
                raise translated(error, action, url, 1 if is_useless else attempt + 1) from None
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


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or of its causes; None if there is none.

    Example:
        >>> http_status(OSError("Forbidden: bucket/key"))
        403
    """
    one: BaseException | None = error
    for _ in range(_DEPTH):
        if one is None or type(one).__name__ in _CUT:
            break
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            response_status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            response_status = getattr(response, "status_code", None)
        found = (response_status, *(getattr(one, name, None) for name in ("status_code", "status", "code")))
        for status in found:
            if str(status).isdecimal() and 400 <= int(str(status)) < 600:
                return int(str(status))
        if isinstance(one, OSError) and str(one).startswith("Forbidden"):
            return 403
        one = one.__cause__
    return None


def is_final(error: Exception) -> bool:
    """Return whether another attempt would fail in the same way.

    Example:
        >>> is_final(PermissionError("denied")), is_final(TimeoutError("slow"))
        (True, False)
    """
    if isinstance(error, _FINAL) or type(error).__name__ in _NO_CREDENTIALS:
        return True
    return http_status(error) in _FINAL_STATUS and not _BUSY.search(str(error))


def translated(error: Exception, action: str, url: str, num_attempts: int) -> PackedSFTError:
    """Return our error for a client's; the original is not chained, since it may hold credentials.

    Example:
        >>> translated(FileNotFoundError("bucket/key"), "read", "s3://bucket/key", 1)
        StorageIOError('cannot read s3://bucket/key: it does not exist; check the URL')
    """
    reason = redacted(_DETAILS.split(" ".join(str(error).split()), maxsplit=1)[0])[:300].rstrip(" .;")
    reason, hint = reason or type(error).__name__, "check the network and the store, then run again"
    status = http_status(error)
    is_missing = isinstance(error, FileNotFoundError) or (status == 404 and not isinstance(error, PermissionError))
    if is_missing:
        reason, hint = "it does not exist", "check the URL"
        if action.startswith("write"):
            reason, hint = "its bucket does not exist", "create it, or check the URL"
    elif isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in _NO_CREDENTIALS:
        hint = "check your credentials and your permission"
    elif isinstance(error, ImportError):
        return MissingDependencyError(f"cannot {action} {redacted(url)}: {reason}")
    elif isinstance(error, ValueError | KeyError):
        hint = "check the URL and its options"
    times = f" ({num_attempts} attempts)" if num_attempts > 1 else ""
    result = StorageIOError(f"cannot {action} {redacted(url)}: {reason}{times}; {hint}")
    result.errno = error.errno if isinstance(error, OSError) else None
    if is_missing:
        result.errno = errno.ENOENT
    return result


_waiting: dict[int, tuple[float, str]] = {}  # requests under way: when they began, and what they do
_numbers = itertools.count()
_started = threading.Event()


@contextlib.contextmanager
def _warning_when_slow(action: str, shown: str) -> Iterator[None]:
    """Tell the user after 15 seconds that the object store is not responding; the client itself retries silently.

    Args:
        action: what the block does, such as "read".
        shown: the URL without credentials.

    Example:
        >>> with _warning_when_slow("read", "s3://bucket/key"):
        ...     len(_waiting)
        1
    """
    number = next(_numbers)
    _waiting[number] = time.monotonic(), f"{action} {shown}"
    if not _started.is_set():
        _started.set()
        threading.Thread(target=_watch, name="packed-sft-waiting", daemon=True).start()
    try:
        yield
    finally:
        _waiting.pop(number, None)


def _watch() -> None:
    last = -_SECONDS_BETWEEN_WARNINGS
    while True:
        time.sleep(min(PATIENCE / 4, 1.0))
        now = time.monotonic()
        start, what = min(list(_waiting.values()), default=(now, ""))
        if now - start > PATIENCE and now - last > _SECONDS_BETWEEN_WARNINGS:
            last = now
            logger.warning(
                "the object store has not answered the request to %s for %.0f seconds; still trying", what, now - start
            )


def _start_anew_after_fork() -> None:
    _waiting.clear()  # the parent's
    _started.clear()


os.register_at_fork(after_in_child=_start_anew_after_fork)
