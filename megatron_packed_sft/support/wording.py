"""Numbers in sentences and tables, written one way everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table: first column to the left, the others to the right.

    Example:
        >>> table(["split", "bins"], [["train", 1234]])
        ['split   bins', 'train  1,234']
    """
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
