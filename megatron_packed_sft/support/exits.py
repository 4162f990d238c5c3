"""How a command ends: 0 success, 1 the data or the machine is at fault, 2 the command line or a setting is wrong,
130 Ctrl-C. An error is one sentence on stderr; its traceback is shown with --debug.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.terminal import say_error


def run_command(
    run: Callable[[], int], *, name: str, debug: bool = False, interrupted: str = "interrupted; nothing was published"
) -> int:
    """Run a command and return its exit code.

    Args:
        run: returns an exit code, or raises.
        name: what the user called, such as "packed-sft prepare".
        debug: show tracebacks.
        interrupted: what Ctrl-C means for the work.
    """
    try:
        return run()
    except PackedSFTError as error:
        return refused(name, error, debug=debug)
    except BrokenPipeError:  # the other end of the pipe, such as head, has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails, too
        return 1
    except KeyboardInterrupt:
        if is_speaker():
            print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except Exception as error:  # a bug: its user needs one sentence, and whoever fixes it the traceback
        _say_unexpected(name, error, debug=debug)
        return 1


def refused(name: str, error: PackedSFTError, *, debug: bool = False, sentences: Sequence[str] = ()) -> int:
    """Say what is wrong, in the error's own sentence or in several; return the exit code for it."""
    if debug:
        traceback.print_exception(error)
    if is_speaker():
        for sentence in sentences or [str(error)]:
            say_error(f"{name}: error: {sentence}")
    return 2 if isinstance(error, InvalidInputError) else 1


def is_speaker() -> bool:
    """Return whether this process speaks for all: under torchrun every rank finds the same mistake."""
    return os.environ.get("RANK", "0") == "0"


def _say_unexpected(name: str, error: Exception, *, debug: bool) -> None:
    """Say that something happened that should not have, on whichever rank; keep the traceback."""
    what = redacted(" ".join(str(error).split()))[:500]
    kept = "see above" if debug else "run it again with --debug to see where"
    if debug:
        traceback.print_exception(error)
    else:
        with contextlib.suppress(OSError):
            file, path = tempfile.mkstemp(prefix="packed-sft-", suffix="-traceback.txt")
            with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(redacted("".join(traceback.format_exception(error))))
            kept = f"its traceback is in {path}, and --debug shows it"
    rank = "" if is_speaker() else f" on rank {os.environ['RANK']}"
    said = f"{type(error).__name__}: {what}" if what else type(error).__name__
    say_error(f"{name}: error: {said}{rank}, which should not happen; {kept}")
