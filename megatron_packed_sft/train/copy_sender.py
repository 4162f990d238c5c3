"""Checkpoints to their copies, by a thread beside the training loop: trouble with a store never stops a run.

saved ─▶ [ one waits; a newer one takes its place ] ─▶ upload, last training_state.json ─▶ old copies removed
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.remote.uploads import send_files, upload
from megatron_packed_sft.support.atomic import translated
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.wording import byte_count
from megatron_packed_sft.train.checkpoint import CheckpointDirectory
from megatron_packed_sft.train.checkpoint_copies import CopiedRun
from megatron_packed_sft.train.metrics import METRICS
from megatron_packed_sft.train.pretrained import MODEL_FILES, RECORD
from megatron_packed_sft.train.ranks import ONE_REQUEST_SECONDS, StopRequest

_POLL_SECONDS: Final = 0.1
_CONFIG: Final = "config.yaml"


class _AbandonedError(PackedSFTError):
    """The run ends without waiting for its copies."""


class CopySender:
    """Copies the checkpoints of a run, one at a time.

    Args:
        copies: where to.
        directory: the run's own checkpoints.
        keep: how many copies to keep; 0 keeps all.
        say: prints a line.
    """

    def __init__(
        self, copies: CopiedRun, directory: CheckpointDirectory, *, keep: int, say: Callable[[str], object]
    ) -> None:
        self._copies, self._directory, self._keep, self._say = copies, directory, keep, say
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._is_closing = self._is_abandoned = False
        self._told: set[str] = set()  # the kinds of trouble that were announced
        self._num_bytes = self._num_bytes_done = 0
        self._newest: str | None = None  # the last checkpoint of the run
        self._copied: str | None = None  # the last one that was copied
        self._num_skipped = 0
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._work, name="packed-sft-copies", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path) -> None:
        """Copy a checkpoint as soon as the one before it is done; returns at once."""
        with self._changed:
            self._directory.held.add(checkpoint.name)
            if self._waiting is not None:
                self._num_skipped += 1
                self._directory.held.discard(self._waiting.name)
            self._waiting = checkpoint
            self._newest = checkpoint.name
            self._changed.notify_all()

    def finish(self, *, was_signalled: bool = False) -> str | None:
        """Wait until the last checkpoint is copied; return what went wrong, in one sentence, or None.

        SIGTERM and Ctrl-C end the waiting. If one ended the run already, the first seconds of it are the same one.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            left = self._num_bytes - self._num_bytes_done + _size(self._waiting)
            if left:
                self._say(
                    f"copying {self._newest} to {self._copies.shown}: {byte_count(left)} to go; if the run is killed "
                    "now, the same command sends what is missing"
                )
        start = time.monotonic()
        with StopRequest() as stop:
            while self._thread.is_alive() and not self._is_abandoned:
                self._thread.join(_POLL_SECONDS)
                if stop.received is not None:
                    if not was_signalled or time.monotonic() - start > ONE_REQUEST_SECONDS:
                        self._is_abandoned = True
                        self._problem = f"{stop.received.name} ended the waiting"
                    stop.received = None
        return self._missing()

    def abandon(self) -> None:
        """Stop after the objects that are under way; what is missing is sent by the next run."""
        with self._changed:
            self._is_closing = self._is_abandoned = True
            self._waiting = None
            self._changed.notify_all()

    def summary(self) -> Mapping[str, Any]:
        """Return what a program wants to know of the copies."""
        return {
            "copy_to": self._copies.shown,
            "copied": self._copied,
            "num_copies_skipped": self._num_skipped,
        }

    def _missing(self) -> str | None:
        if self._newest is None or self._copied == self._newest:
            return None
        reason = self._problem or "it was not sent"
        return (
            f"{self._newest} is not in {self._copies.shown}: {reason}; it is whole in {self._directory.path}, and the "
            "same command sends what is missing"
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._is_closing:
                    self._changed.wait()
                if self._waiting is None:
                    break
                checkpoint, self._waiting = self._waiting, None
                self._current, self._num_bytes, self._num_bytes_done = checkpoint, _size(checkpoint), 0
            try:
                self._copy(checkpoint)
            except _AbandonedError:
                return
            except Exception as error:  # whatever it is, training goes on
                self._warn(checkpoint.name, error)
            finally:
                with self._changed:
                    self._current, self._num_bytes, self._num_bytes_done = None, 0, 0
                    if self._waiting is None or self._waiting.name != checkpoint.name:
                        self._directory.held.discard(checkpoint.name)
                self._directory.remove_old()
        if not self._is_abandoned and self._problem is None:
            try:
                self._send_small_files()  # again, for the last validation
            except PackedSFTError as error:
                self._warn_once("metrics", f"warning: the metrics are not copied to {self._copies.shown}: {error}")

    def _copy(self, checkpoint: Path) -> None:
        if self._copies.has(checkpoint):  # sent by the run that this one resumes
            self._copied = checkpoint.name
            return
        self._send_small_files()
        url = self._copies.checkpoint_url(checkpoint.name)
        report = upload(checkpoint, url, overwrite=True, on_bytes=self._on_bytes)
        self._copies.note_latest(checkpoint.name)
        self._copied, self._problem = checkpoint.name, None
        again = " again" if "copy" in self._told else ""
        self._told.discard("copy")
        if report.num_sent:
            self._say(f"copied{again} {checkpoint.name} to {self._copies.shown} ({byte_count(report.num_bytes)} sent)")
        try:
            self._copies.prune(self._keep)
        except PackedSFTError as error:
            self._warn_once("prune", f"warning: old copies are left, because they cannot be removed: {error}")

    def _send_small_files(self) -> None:
        output = self._directory.path.parent
        send_files(output, self._copies.url, list(_small_files(output)))

    def _on_bytes(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes_done += num_bytes
            if self._is_abandoned:
                raise _AbandonedError

    def _warn(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, PackedSFTError):
            error = translated(error, "copy", self._directory.path / name)
        self._problem = redacted(str(error)) or type(error).__name__
        self._warn_once(
            "copy",
            f"warning: {name} is not copied to {self._copies.shown}: {self._problem}; training goes on, and the next "
            "checkpoint will be tried",
        )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._say(text)


def _small_files(output: Path) -> Iterator[str]:
    """Yield the files of a run that go along with its checkpoints."""
    config = output / _CONFIG
    if config.is_file():  # a URL in it may carry a password, which must not leave the machine
        text = config.read_text(encoding="utf-8", errors="replace")
        if redacted(text) == text:
            yield _CONFIG
    yield from (name for name in (METRICS, RECORD) if (output / name).is_file())
    yield from (str(path.relative_to(output)) for path in sorted((output / MODEL_FILES).rglob("*")) if path.is_file())


def _size(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, some in os.walk(checkpoint) for name in some)
