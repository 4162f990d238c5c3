"""Local paths: made absolute, and never a URL by mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
# Also fsspec's chains (simplecache::s3://...) and s3:/..., which is what path joining makes of a URL.
_URL = re.compile(f"(?:{_SCHEME}::)*{_SCHEME}:/(?:/|(?=[^/]))")

_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"\?[^\s'\"]*")
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
            f"{name} {redacted(os.fspath(path))} is a URL, and only local paths work here; use a local path, and copy "
            "the data if it must be at the URL"
        )
    return Path(os.path.abspath(path))


def redacted(text: str) -> str:
    """Return a URL or a message without user names, passwords, queries and the secrets of the environment.

    Example:
        >>> redacted("cannot read s3://me:secret@bucket/key?token=abc")
        'cannot read s3://***@bucket/key?***'
    """
    text = _QUERY.sub("?***", _USER_INFO.sub("***@", text))
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_VARIABLES.search(name.upper()) and value in text:
            text = text.replace(value, "***")
    return text
