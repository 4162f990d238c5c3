"""URLs without credentials: errors show them this way, so this imports nothing of ours."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(://[^\s'\"?]*)\?(?!\*\*\*)[^\s'\"]*")  # not twice: what follows would be taken for more of it


def without_url_secrets(text: str) -> str:
    """Return a message whose URLs have no user names, passwords and queries; cheap if it has no URL.

    Example:
        >>> without_url_secrets("really? see https://me:secret@host/page?token=abc")
        'really? see https://***@host/page?***'
    """
    return _QUERY.sub(r"\1?***", _USER_INFO.sub("***@", text)) if "://" in text else text
