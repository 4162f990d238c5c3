"""Commands run as people run them: on a real pseudo terminal, or with their output in pipes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What decides about colours and widths; a test sets what it is about.
_DECIDING = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
PROGRAM = (sys.executable, "-m", "megatron_packed_sft")
_ROOT = Path(__file__).parents[1]


class Shown(NamedTuple):
    """What a command wrote to its terminal, where stdout and stderr are one, and its exit code."""

    code: int
    text: str

    @property
    def plain(self) -> str:
        """The text without colours and movements of the cursor; bars appear as often as they were drawn."""
        return CONTROLS.sub("", self.text).replace("\r\n", "\n")


class Piped(NamedTuple):
    """What a command wrote to pipes, and its exit code."""

    code: int
    out: str
    err: str


def on_terminal(
    *arguments: object,
    columns: int = 120,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    program: Sequence[str] = PROGRAM,
) -> Shown:
    """Run `packed-sft ARGUMENTS`, or another program, on a pseudo terminal of its own."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [*program, *map(str, arguments)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=_environment({"TERM": "xterm-256color", **(environment or {})}),
        cwd=cwd,
        start_new_session=True,
    ) as run:
        os.close(terminal)
        text = _everything(controller)
        code = run.wait()
    os.close(controller)
    return Shown(code, text.decode(errors="backslashreplace"))


def in_pipe(*arguments: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Piped:
    """Run `packed-sft ARGUMENTS` with its output in pipes, as in a log or before `| head`."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, env=_environment(environment or {}), cwd=cwd
    )
    return Piped(done.returncode, done.stdout.decode(), done.stderr.decode())


def modules_of(*arguments: object) -> set[str]:
    """Return the modules that `packed-sft ARGUMENTS` imports, by whatever way it ends."""
    script = (
        "import sys, atexit; from megatron_packed_sft.cli.main import main; "
        "atexit.register(lambda: print('\\nMODULES', *sys.modules, file=sys.__stderr__)); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, env=_environment({})
    )
    return set(done.stderr.rpartition("MODULES ")[2].split())


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path, **own}


def _everything(controller: int) -> bytes:
    read = bytearray()
    while True:
        ready, _, _ = select.select([controller], [], [], 300)
        if not ready:
            return bytes(read)
        try:
            part = os.read(controller, 1 << 16)
        except OSError:  # Linux says so when the last process has closed the terminal
            return bytes(read)
        if not part:
            return bytes(read)
        read += part


def screen(text: str) -> list[str]:
    """Return the lines that a reader sees in the end, on a terminal that is wide and tall enough.

    Knows carriage returns, line feeds, and moving up and erasing as bars do.
    """
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [[]] * (row >= len(lines))
        elif part.startswith("\x1b"):
            row, column = _moved(part, lines, row, column)
        else:
            line = lines[row] = [*lines[row], *" " * (column - len(lines[row]))]
            line[column : column + len(part)] = part
            column += len(part)
    seen = ["".join(line).rstrip() for line in lines]
    while seen and not seen[-1]:
        seen.pop()
    return seen


def _moved(control: str, lines: list[list[str]], row: int, column: int) -> tuple[int, int]:
    kind, amount = control[-1], int(re.sub(r"\D", "", control) or 0)
    if kind == "A":
        row = max(row - max(amount, 1), 0)
    elif kind == "K":
        lines[row] = [] if amount == 2 else lines[row][:column]
    return row, column
