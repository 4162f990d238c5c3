"""What counts as a URL, for what is read and for what must be a local path."""

from __future__ import annotations

import os
import re

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
# Also fsspec's chains (simplecache::s3://...), and s3:/..., which is what joining paths makes of a URL.
_URL = re.compile(f"(?:{_SCHEME}::)*{_SCHEME}:/(?:/|(?=[^/]))")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as s3://bucket/key.

    Example:
        >>> is_url("s3://bucket/key"), is_url("simplecache::s3://bucket/key"), is_url("/data/a:b"), is_url("file:name")
        (True, True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None
