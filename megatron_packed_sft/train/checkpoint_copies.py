"""Copies of a run's checkpoints in an object store or another directory: uploaded by a thread, fetched at the start.

    COPY/                                          a URL or a directory, laid out like the run's own
      metrics.jsonl, pretrained.json, model_files/
      checkpoints/step_000040/training_state.json  sent last: without it the copy is not complete
      checkpoints/latest                           the newest copy's name, for scripts

A store that cannot be reached never stops a run. Checkpoints wait in a queue of one: a newer one takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, ManifestError, PackedSFTError, StorageIOError
from megatron_packed_sft.remote.downloads import Contents, download, fetch_files
from megatron_packed_sft.remote.filesystem import base_name, child
from megatron_packed_sft.remote.locks import lock_exclusively
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from megatron_packed_sft.remote.uploads import remove_published, scratch_directory, send_files, upload
from megatron_packed_sft.support.atomic import Staging, os_errors, replace_file, translated, write_file
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.wording import byte_count, plural
from megatron_packed_sft.train.checkpoint import (
    LATEST,
    MAX_STATE_BYTES,
    STATE,
    STEP_NAME,
    CheckpointDirectory,
    TrainingState,
)
from megatron_packed_sft.train.metrics import METRICS
from megatron_packed_sft.train.pretrained import MODEL_FILES, RECORD
from megatron_packed_sft.train.ranks import ONE_REQUEST_SECONDS, StopRequest

logger = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints"
_CONFIG: Final = "config.yaml"
_LOCK: Final = ".fetching.lock"  # in output/checkpoints
_LOCAL: Final = "file://"
_POLL_SECONDS: Final = 0.1
_RUN_OF: Final = re.compile(rf"(.+)/{CHECKPOINTS}/step_\d{{6,}}/*")


class Copy(NamedTuple):
    """A complete copy of a checkpoint.

    Args:
        step: of the checkpoint.
        url: of its directory.
        state: the bytes of its training_state.json.
        contents: its other files.
    """

    step: int
    url: str
    state: bytes
    contents: Contents

    @property
    def shown(self) -> str:
        """Its URL or path as messages show it."""
        return _shown(self.url)


class CopiedRun:
    """The copies of a run's checkpoints.

    Args:
        place: a URL, or a directory.

    Example:
        >>> CopiedRun("/backup/run").shown, CopiedRun("s3://me:secret@bucket/run/").shown
        ('/backup/run', 's3://***@bucket/run')
    """

    def __init__(self, place: str) -> None:
        self.url = (place if is_url(place) else f"{_LOCAL}{local_path(place)}").rstrip("/")

    @property
    def shown(self) -> str:
        """Its URL or path as messages show it."""
        return _shown(self.url)

    def names(self) -> list[str]:
        """Return the names of the complete copies, such as step_000040; the newest first."""
        there = list_objects(child(self.url, CHECKPOINTS))
        names = {name.partition("/")[0] for name in there if name.endswith(f"/{STATE}")}
        return sorted(filter(STEP_NAME.fullmatch, names), key=_step_of, reverse=True)

    def newest(self) -> Copy | None:
        """Return the newest complete copy."""
        for name in self.names():
            try:
                return read_copy(child(self.url, CHECKPOINTS, name))
            except ManifestError as error:  # cut in the middle, which a plain directory allows
                logger.warning("%s; taking an older copy", error)
        return None

    def send(self, checkpoint: Path, on_bytes: Callable[[int], object] | None = None) -> int | None:
        """Upload a checkpoint, its training_state.json last; return the bytes sent, None if the copy is complete.

        Args:
            checkpoint: published and complete.
            on_bytes: called with the size of each file that was sent.
        """
        url = child(self.url, CHECKPOINTS, checkpoint.name)
        if checkpoint.name in self.names() and _has_state(checkpoint, read_object(child(url, STATE), MAX_STATE_BYTES)):
            return None
        report = upload(checkpoint, url, overwrite=True, on_bytes=on_bytes)
        write_object(child(self.url, CHECKPOINTS, LATEST), f"{checkpoint.name}\n".encode())
        return report.num_bytes

    def send_small_files(self, output: Path) -> None:
        """Upload the files of a run that go along with its checkpoints, where they changed."""
        send_files(output, self.url, list(_small_files(output)))

    def remove_old(self, keep: int) -> None:
        """Remove all but the newest copies.

        Args:
            keep: how many; 0 keeps all.
        """
        for name in self.names()[keep:] if keep else ():
            url = child(self.url, CHECKPOINTS, name)
            remove_published(url)
            if url.startswith(_LOCAL):
                with contextlib.suppress(OSError):  # it holds files of the user
                    os.rmdir(url.removeprefix(_LOCAL))


class CopySender:
    """A thread that uploads the checkpoints of a run, one at a time.

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
        self._is_closing = self._is_abandoned = False
        self._newest: str | None = None  # the last checkpoint of the run
        self._copied: str | None = None  # the last one that was copied
        self._num_skipped = 0
        self._problem: str | None = None  # of the last checkpoint
        self._thread = threading.Thread(target=self._work, name="packed-sft-copies", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path) -> None:
        """Upload a checkpoint as soon as the one before it is done; returns at once."""
        with self._changed:
            self._directory.held.add(checkpoint.name)
            if self._waiting is not None:
                self._num_skipped += 1
                self._directory.held.discard(self._waiting.name)
            self._waiting, self._newest = checkpoint, checkpoint.name
            self._changed.notify_all()

    def finish(self, *, was_signalled: bool = False) -> str | None:
        """Wait until the last checkpoint is uploaded; return what went wrong, in one sentence, or None.

        SIGTERM and Ctrl-C end the waiting.

        Args:
            was_signalled: whether a signal ended the run; in the first seconds another one belongs to the same request.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if self._newest != self._copied:
                self._say(
                    f"copying {self._newest} to {self._copies.shown}; if the run is killed now, the same command sends "
                    "what is missing"
                )
        start = time.monotonic()
        with StopRequest() as stop:
            while self._thread.is_alive() and not self._is_abandoned:
                self._thread.join(_POLL_SECONDS)
                if stop.received is not None:
                    if not was_signalled or time.monotonic() - start > ONE_REQUEST_SECONDS:
                        self._is_abandoned = True
                        self._problem = f"{stop.received.name} ended the upload"
                    stop.received = None
        if self._newest == self._copied:
            return None
        return (
            f"{self._newest} is not in {self._copies.shown}: {self._problem or 'it was not sent'}; it is complete in "
            f"{self._directory.path}, and the same command sends what is missing"
        )

    def abandon(self) -> None:
        """Stop after the objects that are under way; the next run sends what is missing."""
        with self._changed:
            self._is_closing = self._is_abandoned = True
            self._waiting = None
            self._changed.notify_all()

    def summary(self) -> Mapping[str, Any]:
        """Return what the run's summary says of its copies."""
        return {"copy_to": self._copies.shown, "copied": self._copied, "num_copies_skipped": self._num_skipped}

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self._send(checkpoint)
            except _AbandonedError:
                return
            except Exception as error:  # training goes on in any case
                self._warn(checkpoint.name, error)
            with self._changed:
                if self._waiting != checkpoint:
                    self._directory.held.discard(checkpoint.name)
            self._directory.remove_old()
        if not self._is_abandoned and self._problem is None:
            with contextlib.suppress(PackedSFTError):
                self._copies.send_small_files(self._directory.path.parent)  # again, for the last validation

    def _next(self) -> Path | None:
        """Wait for the next checkpoint; None at the end of the run."""
        with self._changed:
            while self._waiting is None and not self._is_closing:
                self._changed.wait()
            checkpoint, self._waiting = self._waiting, None
            return checkpoint

    def _send(self, checkpoint: Path) -> None:
        self._copies.send_small_files(self._directory.path.parent)
        num_bytes = self._copies.send(checkpoint, on_bytes=self._refuse_if_abandoned)
        self._copied, self._problem = checkpoint.name, None
        if num_bytes is not None:
            self._say(f"copied {checkpoint.name} to {self._copies.shown} ({byte_count(num_bytes)} sent)")
        self._copies.remove_old(self._keep)

    def _refuse_if_abandoned(self, num_bytes: int) -> None:
        if self._is_abandoned:
            raise _AbandonedError

    def _warn(self, name: str, error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, PackedSFTError):
            error = translated(error, "copy", self._directory.path / name)
        is_new, is_sent = self._problem is None, self._copied == name
        problem = redacted(str(error)) or type(error).__name__
        if not is_sent:
            self._problem = problem
        if is_new:  # a store that stays away is reported once
            place = self._copies.shown
            what = f"old copies in {place} are kept" if is_sent else f"{name} is not copied to {place}"
            self._say(f"warning: {what}: {problem}; training goes on, and the next checkpoint will be tried")


class _AbandonedError(PackedSFTError):
    """The run ends without waiting for its copies."""


def read_copy(url: str) -> Copy:
    """Return the copy of a checkpoint, as its training_state.json describes it."""
    file = _shown(child(url, STATE))
    data = read_object(child(url, STATE), MAX_STATE_BYTES)
    state = TrainingState.parse(data, file)
    for name in state.files:
        child(url, name)  # refuses names that lead elsewhere
    records = {name: FileRecord(size, state.checksums.get(name, "")) for name, size in state.files.items()}
    return Copy(state.step, url, data, Contents(records, DEFAULT_ALGORITHM))


def find_copy(url: str, name: str = "") -> Copy:
    """Return the copy that a URL means: a checkpoint, or the newest one of a copied run.

    Args:
        url: of either.
        name: what the user wrote before it, for the message, such as "resume=".
    """
    copy = read_copy(url.rstrip("/")) if STATE in list_objects(url) else CopiedRun(url).newest()
    if copy is None:
        raise InvalidInputError(
            f"{name}{_shown(url)} is not a copy of a checkpoint: it has no {STATE}, and no complete checkpoint in "
            f"{CHECKPOINTS}; check the URL"
        )
    return copy


def fetch_copy(copy: Copy, directory: CheckpointDirectory) -> tuple[Path, bool]:
    """Download a copy into a run's own checkpoints, checked; return its path, and whether this process fetched it.

    All ranks of a node may call it: one fetches, the others wait. The run's small files come along.
    """
    target = directory.path / f"step_{copy.step:06d}"
    with os_errors("create", directory.path):
        directory.path.mkdir(parents=True, exist_ok=True)
    with lock_exclusively(directory.path / _LOCK, "0"):
        if _has_state(target, copy.state):
            return target, False
        _fetch_small_files(copy, directory.path.parent)
        with Staging(target, overwrite=True) as staging:
            download(copy.url, copy.contents, staging.path)
            write_file(staging.path / STATE, copy.state)
            staging.publish()
        replace_file(directory.path / LATEST, f"{target.name}\n".encode())
    return target, True


@contextmanager
def fetched_run(url: str) -> Iterator[tuple[Path, Copy]]:
    """Fetch a copy into a run's directory in TMPDIR, which is removed after the block; yield its checkpoint.

    Args:
        url: of a copied checkpoint, or of a copied run.
    """
    copy = find_copy(url)
    with scratch_directory() as scratch:
        yield fetch_copy(copy, CheckpointDirectory(scratch / CHECKPOINTS))[0], copy


def bring_newest(
    resume: str, directory: CheckpointDirectory, copies: CopiedRun | None
) -> tuple[str | os.PathLike[str], list[str]]:
    """Fetch the checkpoint to resume from if it is not here; return the new value of `resume`, and lines to print.

    Args:
        resume: auto, never, a checkpoint's path or its URL.
        directory: the run's own checkpoints.
        copies: where its checkpoints are copied to.
    """
    local = directory.newest()
    if is_url(resume):
        copy = find_copy(resume, "resume=")
        _refuse_older(resume, copies, copy.step)
        if local is not None and not _has_state(local, copy.state):
            raise InvalidInputError(
                f"resume={redacted(resume)}, but {directory.path} already has checkpoints up to {local.name}; choose "
                "another output, or remove them"
            )
        return _fetched(copy, directory)
    if copies is None:
        return resume, []
    if resume != "auto":
        is_path = resume != "never" and (Path(resume) / STATE).is_file()
        _refuse_older(resume, copies, TrainingState.load(Path(resume)).step if is_path else -1)
        return resume, []
    try:
        newest = copies.newest()
    except StorageIOError as error:
        if local is None:  # starting over might be wrong, and would be noticed late
            raise
        return "auto", [f"warning: the copies cannot be listed, so the newest local checkpoint is used: {error}"]
    if newest is None or (local is not None and _step_of(local.name) >= newest.step):
        return "auto", []
    return "auto", _fetched(newest, directory)[1]


def _fetched(copy: Copy, directory: CheckpointDirectory) -> tuple[Path, list[str]]:
    path, is_new = fetch_copy(copy, directory)
    size = f"{plural(len(copy.contents.files), 'file')}, {byte_count(copy.contents.num_bytes)}"
    return path, [f"fetched {copy.shown} ({size})"] if is_new else []


def _refuse_older(resume: str, copies: CopiedRun | None, step: int) -> None:
    """Refuse to resume before the newest copy: the next resume=auto would take that one, of another history."""
    newest = None if copies is None else copies.newest()
    if copies is not None and newest is not None and newest.step > step:
        raise InvalidInputError(
            f"resume={redacted(resume)}, but {copies.shown} already has copies up to {base_name(newest.url)}, and the "
            "next resume=auto would resume from there; choose another checkpoint.copy_to, or remove the later copies"
        )


def _small_files(output: Path) -> Iterator[str]:
    config = output / _CONFIG
    if config.is_file():  # a URL in it may carry a password, which must not leave the machine
        text = config.read_text(encoding="utf-8", errors="replace")
        if redacted(text) == text:
            yield _CONFIG
    yield from (name for name in (METRICS, RECORD) if (output / name).is_file())
    yield from (str(path.relative_to(output)) for path in sorted((output / MODEL_FILES).rglob("*")) if path.is_file())


def _fetch_small_files(copy: Copy, output: Path) -> None:
    found = _RUN_OF.fullmatch(copy.url)
    if found is not None:
        there = list_objects(found[1])
        wanted = (name for name in there if name in (METRICS, RECORD) or name.startswith(f"{MODEL_FILES}/"))
        fetch_files(found[1], output, {name: there[name] for name in wanted})


def _has_state(checkpoint: Path, state: bytes) -> bool:
    try:
        return (checkpoint / STATE).read_bytes() == state
    except OSError:
        return False


def _step_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def _shown(url: str) -> str:
    return redacted(url).removeprefix(_LOCAL)
