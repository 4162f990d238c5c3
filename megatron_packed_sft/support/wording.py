"""Phrases that all messages share: counts with nouns, sizes, quoted text, and URLs without credentials.

errors.py imports this module, so it must not import anything of this package.
"""

from __future__ import annotations

import re


def plural(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "file"), plural(2000, "file")
        ('1 file', '2,000 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def byte_count(number: int) -> str:
    """Return a size in kB or MB.

    Example:
        >>> byte_count(9_700), byte_count(43_500_000)
        ('9.7 kB', '43.5 MB')
    """
    return f"{number / 1e6:,.1f} MB" if number >= 1e6 else f"{number / 1e3:,.1f} kB"


def shortened(text: str, longest: int = 500) -> str:
    r"""Return foreign text for use in a sentence: on one line, and cut if it is long.

    Example:
        >>> shortened("no such\n  key"), shortened("x" * 1_000_000, longest=5)
        ('no such key', 'xxxxx...')
    """
    line = " ".join(text[: 2 * longest].split())
    return f"{line[:longest]}..." if len(line) > longest or len(text) > 2 * longest else line


_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(
    r"(://[^\s'\"?]*)\?(?!\*\*\*)[^\s'\"]*"
)  # unless it was replaced already: a second pass would take the rest of the sentence for the query


def without_url_secrets(text: str) -> str:
    """Return a message with user names, passwords and queries removed from its URLs; cheap if it has no URL.

    Example:
        >>> without_url_secrets("really? see https://me:secret@host/page?token=abc")
        'really? see https://***@host/page?***'
    """
    return _QUERY.sub(r"\1?***", _USER_INFO.sub("***@", text)) if "://" in text else text
