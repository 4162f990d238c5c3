"""Exit codes and error messages of commands: 0 success, 1 the data or the machine is at fault, 2 the command line or a
setting is wrong, 130 Ctrl-C. An error is one sentence on stderr; --debug also shows its traceback.
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
        name: the command, such as "packed-sft prepare".
        debug: show tracebacks.
        interrupted: what to print after Ctrl-C.
    """
    try:
        return run()
    except PackedSFTError as error:
        return refused(name, error, debug=debug)
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails as well
        return 1
    except KeyboardInterrupt:
        if is_speaker():
            print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except Exception as error:  # a bug: one sentence for the user, and the traceback in a file for its report
        _say_unexpected(name, error, debug=debug)
        return 1


def refused(name: str, error: PackedSFTError, *, debug: bool = False, sentences: Sequence[str] = ()) -> int:
    """Print an error, as its own sentence or the given ones, and return its exit code."""
    if debug:
        traceback.print_exception(error)
    if is_speaker():
        for sentence in sentences or [str(error)]:
            say_error(f"{name}: error: {sentence}")
    return 2 if isinstance(error, InvalidInputError) else 1


def is_speaker() -> bool:
    """Return whether this process prints for all ranks: under torchrun each of them finds the same mistake."""
    return os.environ.get("RANK", "0") == "0"


def _say_unexpected(name: str, error: Exception, *, debug: bool) -> None:
    """Print one sentence about an unexpected error, on any rank, and keep the traceback in a file."""
    message = redacted(" ".join(str(error).split()))[:500]
    remedy = "please report it with the traceback above"
    if debug:
        traceback.print_exception(error)
    else:
        remedy = "run it again with --debug for the traceback"
        with contextlib.suppress(OSError):
            file, path = tempfile.mkstemp(prefix="packed-sft-", suffix="-traceback.txt")
            with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(redacted("".join(traceback.format_exception(error))))
            remedy = f"please report it with the traceback in {path}"
    rank = "" if is_speaker() else f" on rank {os.environ['RANK']}"
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    say_error(f"{name}: error: unexpected {what}{rank}; {remedy}")
