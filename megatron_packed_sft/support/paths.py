"""Local paths: made absolute, and never a URL by mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
# Also fsspec's chains (simplecache::s3://...) and s3:/..., which is what path joining makes of a URL.
_URL = re.compile(f"(?:{_SCHEME}::)*{_SCHEME}:/(?:/|(?=[^/]))")


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
            f"{name} {os.fspath(path)} is a URL, and this release writes to and opens local paths only; "
            "use a local path and copy the data"
        )
    return Path(os.path.abspath(path))
