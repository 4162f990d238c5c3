"""Limits of a template: computing time for each record, and characters of output.

Jinja's sandbox keeps a template from the machine, but not from its time and memory. So a timer runs while records are
encoded, and interrupts a template that computes for more than `MAX_SECONDS`. It counts the process's computing time
(`ITIMER_VIRTUAL`), not wall-clock time, so a busy machine refuses no record that a quiet one would encode.

The timer works in Python's main thread and on platforms with `signal.setitimer`. In other threads and on Windows there
is no time limit. It interrupts Python code and long computations with whole numbers, but not a single call of C code
that fills memory, such as `'x'.center(10**10)`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10  # computing time for all renders of a record
MAX_CHARACTERS = 64_000_000  # that a template may write for a chat, or repeat with `*`
_MAX_PARTS = 10_000_000  # pieces of text that a template may write for a chat
_MAX_CODE = 8_000_000  # characters of the Python code that a template is compiled to
_TICK = 1.0  # seconds


class TemplateLimitError(BaseException):
    """A template exceeds a limit; the message says how, in words that follow the template's name.

    Not an `Exception`: Jinja swallows those while it evaluates constants.
    """


class _Timer:
    """The state of this process's timer."""

    is_running = False
    seconds_left = 0
    is_interruptible = False  # a template is being rendered or compiled


_timer = _Timer()


@contextlib.contextmanager
def time_limited() -> Iterator[None]:
    """Run the timer: it gives all templates inside `MAX_SECONDS` together, counted anew by every `restart_timer`.

    Starting it takes a few microseconds, so put it around many records. Inside another one, this does nothing. The
    handler and the timer that were set before are restored.
    """
    if _timer.is_running or not hasattr(signal, "setitimer") or not _is_main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _tick)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
    _timer.is_running = True
    restart_timer()
    try:
        yield
    finally:
        _timer.is_running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)


def restart_timer() -> None:
    """Give the next record its full time."""
    _timer.seconds_left = MAX_SECONDS


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the timer interrupt the code inside with a TemplateLimitError; it interrupts nothing else."""
    with time_limited():
        if _timer.is_running and _is_main_thread():
            if _timer.seconds_left <= 0:
                raise _too_slow()
            _timer.is_interruptible = True
        try:
            yield
        finally:
            _timer.is_interruptible = False


def _tick(number: int, frame: FrameType | None) -> None:
    _timer.seconds_left -= 1
    if _timer.seconds_left <= 0 and _timer.is_interruptible:
        _timer.is_interruptible = False
        raise _too_slow()


def _too_slow() -> TemplateLimitError:
    return TemplateLimitError(f"took longer than {MAX_SECONDS} seconds")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def limited_parts(parts: Iterable[str]) -> list[str]:
    """Return the texts that a template writes, to be joined; raise TemplateLimitError if they are too long."""
    found = list(islice(parts, _MAX_PARTS + 1))
    if len(found) > _MAX_PARTS or sum(map(str.__len__, found)) > MAX_CHARACTERS:
        raise TemplateLimitError(f"writes more than {MAX_CHARACTERS:,} characters")
    return found


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit on how often `*` repeats a text or a list."""

    # What is intercepted is not evaluated when a template is compiled, either.
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power."""
        many, times = (right, left) if isinstance(left, int) else (left, right)
        kind: Any = next((kind for kind in (str, bytes, list, tuple) if isinstance(many, kind)), None)
        if kind is not None and isinstance(times, int) and kind.__len__(many) * int(times) > MAX_CHARACTERS:
            raise TemplateLimitError(f"repeats a text or a list to a length of more than {MAX_CHARACTERS:,}")
        return super().call_binop(context, operator, left, right)

    def _compile(self, source: str, filename: str) -> Any:
        """Compile the Python code of a template, unless Jinja has evaluated constants in it that would take minutes."""
        if len(source) > _MAX_CODE:
            raise TemplateLimitError("has constants that are too long")
        return super()._compile(source, filename)
