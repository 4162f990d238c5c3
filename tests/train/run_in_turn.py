"""Training runs on request, one after the other, in the same processes: megatron.core takes ten seconds to import.

torchrun --nproc-per-node 2 run_in_turn.py FOLDER

    FOLDER/0001.json      [["data.path=a", "output=b"], ...], from `tests.train.launch.run_in_turn`
    FOLDER/0001.out       what all ranks printed
    FOLDER/0001.0, ...    the exit code of each rank

A run whose last argument is --sigterm-after=5 gets that signal, on its first rank, when it has written five steps.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_packed_sft.train.app import main

_SIGTERM_AFTER = "--sigterm-after="
_MAX_IDLE_SECONDS = 900  # in case the tests were killed


def send_sigterm(metrics: Path, num_lines: int) -> None:
    """Wait until a run has written so many lines, and ask it to stop."""
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


def do_runs(runs: list[list[str]]) -> int:
    """Do the runs up to the first that fails, and return its exit code."""
    for arguments in runs:
        if arguments[-1].startswith(_SIGTERM_AFTER):
            num_lines = int(arguments.pop().removeprefix(_SIGTERM_AFTER))
            [output] = [one.removeprefix("output=") for one in arguments if one.startswith("output=")]
            if os.environ.get("RANK", "0") == "0":
                waiting = (Path(output) / "metrics.jsonl", num_lines)
                threading.Thread(target=send_sigterm, args=waiting, daemon=True).start()
        if code := main(arguments):
            return code
    return 0


@contextmanager
def printing_to(file: Path) -> Iterator[None]:
    """Send stdout and stderr of this process into a file that other ranks write, too."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    kept = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(fd, stream)
    try:
        yield
    finally:
        for stream, before in enumerate(kept, start=1):
            (sys.stdout if stream == 1 else sys.stderr).flush()
            os.dup2(before, stream)
            os.close(before)
        os.close(fd)


def serve(folder: Path) -> None:
    for number in itertools.count(1):
        request = folder / f"{number:04d}.json"
        end = time.monotonic() + _MAX_IDLE_SECONDS
        while not request.exists():
            if time.monotonic() > end:
                return
            time.sleep(0.02)
        with printing_to(request.with_suffix(".out")):
            code = do_runs(json.loads(request.read_text()))
        answer = folder / f"{number:04d}.{os.environ.get('RANK', '0')}"
        answer.with_suffix(".part" + answer.suffix).write_text(str(code))
        answer.with_suffix(".part" + answer.suffix).rename(answer)
        if code:
            sys.exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
