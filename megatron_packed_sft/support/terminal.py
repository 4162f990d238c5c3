"""Output for people: tables and colours on a terminal, plain text in a pipe.

rich draws it, and is imported only when something is shown, so that --help stays fast. Colours follow NO_COLOR and the
terminal; characters that the output's encoding lacks are written as escapes.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_ANY_WIDTH = 100_000  # the terminal wraps longer lines; rich would cut numbers


def console(stream: TextIO | None = None) -> Console:
    """Return a rich console for a stream (stdout by default), in colour if it is a terminal."""
    return _console(stream or sys.stdout)


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, styles: Mapping[str, str] | None = None, left: int = 1
) -> Table:
    """Return a table whose first `left` columns are aligned left and the others right; numbers get commas.

    Args:
        header: the columns' names; all empty for a table without a header.
        rows: cells, as text or numbers.
        styles: colours of columns by name, such as {"trained": "green"}.
        left: how many columns to align left.

    Example:
        >>> print(as_text(table(["split", "bins"], [["train", 1234]])))
        split   bins
        train  1,234
    """
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(header), header_style="bold")
    for number, name in enumerate(header):
        justify = "left" if number < left else "right"
        result.add_column(Text(name), justify=justify, style=(styles or {}).get(name, ""), no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        result.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    return result


def show(*parts: RenderableType, stream: TextIO | None = None) -> None:
    """Print texts, styled texts and tables, one below the other."""
    stream = stream or sys.stdout
    stream.write(_drawn(parts, force_terminal=stream.isatty() or None))  # None: unless FORCE_COLOR says otherwise
    stream.flush()


def as_text(*parts: RenderableType) -> str:
    """Return what `show` prints to a pipe, without the final line break."""
    return _drawn(parts, force_terminal=False).removesuffix("\n")


def show_json(document: Any) -> None:
    """Print a document on stdout as JSON in ASCII."""
    print(json.dumps(document, indent=2), flush=True)


def say_error(sentence: str) -> None:
    """Print a sentence on stderr as one line, its `packed-sft: error:` in red on a terminal."""
    sentence = "".join(one if one.isprintable() else " " for one in sentence)  # it may quote the content of a file
    start, colon, rest = sentence.partition(": error: ")
    if not colon or not is_terminal(sys.stderr):
        print(sentence, file=sys.stderr, flush=True)
        return
    from rich.text import Text

    show(Text.assemble((f"{start}: error: ", "bold red"), rest), stream=sys.stderr)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def shows_colours(stream: TextIO | None = None) -> bool:
    """Return whether `show` writes colours to a stream (stdout by default)."""
    drawn = _console(stream or sys.stdout)
    return drawn.color_system is not None and not drawn.no_color


def never_fail_on_characters() -> None:
    """Make stdout and stderr write escapes for characters that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drawn(parts: Sequence[RenderableType], *, force_terminal: bool | None) -> str:
    """Return parts as one text, in colour if it is for a terminal, each part as wide as it needs."""
    drawn = _console(io.StringIO(), force_terminal=force_terminal, width=_ANY_WIDTH)
    for part in parts:
        drawn.print(part)
    assert isinstance(drawn.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in drawn.file.getvalue().splitlines())


def _console(stream: TextIO, **options: Any) -> Console:
    from rich.console import Console, ConsoleDimensions

    class SteadyConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # a killed process would leave the terminal without its cursor

        @property  # type: ignore[misc]  # rich's is settable; this one is never set
        def size(self) -> ConsoleDimensions:
            try:  # rich would ask the process's own streams, which may be another terminal or none
                if "width" not in options and "COLUMNS" not in os.environ and stream.isatty():
                    columns, lines = os.get_terminal_size(stream.fileno())
                    return ConsoleDimensions(columns or 80, lines or 25)
            except (OSError, ValueError):
                pass
            return super().size

    return SteadyConsole(file=stream, markup=False, emoji=False, highlight=False, **options)
