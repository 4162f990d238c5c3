"""Local paths and URLs: told apart, made absolute, and shown without secrets."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.wording import without_url_secrets

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
# Also fsspec's chains (simplecache::s3://...) and s3:/..., which is what path joining makes of a URL.
_URL = re.compile(f"(?:{_SCHEME}::)*{_SCHEME}:/(?:/|(?=[^/]))")

_SECRET_VARIABLES = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|SAS|CONNECTION_STRING|CREDENTIAL")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as s3://bucket/key.

    Example:
        >>> is_url("s3://bucket/key"), is_url("simplecache::s3://bucket/key"), is_url("/data/a:b"), is_url("file:name")
        (True, True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None


def local_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return an absolute path; a URL is refused, because it would become a directory named after its scheme.

    Args:
        path: as the user gave it.
        name: what the user calls it, for the message: a key, a flag or an argument.
    """
    if is_url(path):
        raise InvalidInputError(
            f"{name} {redacted(os.fspath(path))} is a URL, but only local paths work here; use a local path, and copy "
            "the result to the URL if it must be there"
        )
    return Path(os.path.abspath(path))


def refuse_special_file(path: str | os.PathLike[str]) -> None:
    """Refuse files that block or never end: named pipes, devices, sockets and files of the kernel.

    A path that cannot be inspected passes; opening it gives the error.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    kind = kinds.get(stat.S_IFMT(mode))
    if os.path.realpath(path).startswith(("/proc/", "/sys/")):  # regular files by their mode, but /proc/kmsg never ends
        kind = "a file of the kernel"
    if kind is not None:
        raise InvalidInputError(f"{os.fspath(path)} is {kind}; write its content to a regular file and use that")


def redacted(text: str) -> str:
    """Return a URL or a message without user names, passwords, queries of URLs and the secrets of the environment.

    Example:
        >>> redacted("cannot read s3://me:secret@bucket/key?token=abc")
        'cannot read s3://***@bucket/key?***'
    """
    text = without_url_secrets(text)
    secrets = [value for name, value in os.environ.items() if _SECRET_VARIABLES.search(name.upper())]
    # Azure's connection string holds the key among other things: "AccountName=...;AccountKey=...".
    secrets += [part.partition("=")[2] for value in secrets for part in value.split(";") if "Key=" in part]
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 8:
            text = text.replace(secret, "***")
    return text
