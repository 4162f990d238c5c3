"""What the clients of the stores raise, as one of ours: whether to ask again, and a sentence without secrets.

Every client has its own way to say "forbidden" or "not there": PermissionError (s3fs), an OSError without a number
(gcsfs), or an error of its HTTP library with a status (adlfs, huggingface_hub, fsspec's HTTP).
"""

from __future__ import annotations

import errno
import re

from megatron_packed_sft.errors import MissingDependencyError, PackedSFTError, StorageIOError
from megatron_packed_sft.support.paths import redacted

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
# Some stores say with a 400 or 409 that they are busy.
_BUSY = re.compile("RequestTimeout|SlowDown|Throttl|OperationAborted|ServerBusy", re.IGNORECASE)
# The answer was cut: aiohttp gives these a status of 400, which no server sent.
_CUT = ("ClientPayloadError", "ContentLengthError", "TransferEncodingError")
_DEPTH = 4  # errors that are the cause of one another
_DETAILS = re.compile(r"\s+(?:RequestId:|Content:|\(Request ID:|For more information)")  # what follows helps no reader


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error, or its cause, tells of; None if there is none.

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
    """Return whether asking again is useless.

    Example:
        >>> is_final(PermissionError("denied")), is_final(TimeoutError("slow"))
        (True, False)
    """
    if isinstance(error, _FINAL) or type(error).__name__ in _NO_CREDENTIALS:
        return True
    return http_status(error) in _FINAL_STATUS and not _BUSY.search(str(error))


def translated(error: Exception, action: str, url: str, num_attempts: int) -> PackedSFTError:
    """Return our error for one of a store's; the original is not chained, since it may hold credentials.

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
