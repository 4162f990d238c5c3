"""Local paths: made absolute, and never a URL by mistake."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.urls import is_url


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
