"""Numbers in sentences, written one way everywhere."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "file"), counted(2000, "file")
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
