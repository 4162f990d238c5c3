"""Copies of a run's checkpoints elsewhere: found, fetched and pruned; `copy_sender` makes them.

COPY/                                          a URL or a directory, laid out like the run's own
  metrics.jsonl, pretrained.json, model_files/
  checkpoints/step_000040/training_state.json  sent last: without it there is no copy, only the beginning of one
  checkpoints/latest                           the newest one's name, for scripts
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, ManifestError, StorageIOError, UnsupportedFormatError
from megatron_packed_sft.remote.downloads import Contents, download, fetch_files
from megatron_packed_sft.remote.filesystem import base_name, child
from megatron_packed_sft.remote.locks import lock_exclusively
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from megatron_packed_sft.remote.uploads import remove_published, scratch_directory
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import Staging, os_errors, replace_file, write_file
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.wording import byte_count, plural
from megatron_packed_sft.train.checkpoint import (
    FORMAT,
    LATEST,
    MAX_STATE_BYTES,
    STATE,
    STEP_NAME,
    VERSION,
    CheckpointDirectory,
    TrainingState,
)
from megatron_packed_sft.train.metrics import METRICS
from megatron_packed_sft.train.pretrained import MODEL_FILES, RECORD

logger = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints"
_LOCK: Final = ".fetching.lock"  # in output/checkpoints
_LOCAL: Final = "file://"
_MAX_NUMBER: Final = (1 << 62) - 1
_RUN_OF: Final = re.compile(rf"(.+)/{CHECKPOINTS}/step_\d{{6,}}/*")


class Copy(NamedTuple):
    """A copy of a checkpoint that is whole, as far as names and sizes tell.

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
        """What it is called in messages."""
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
        """What it is called in messages."""
        return _shown(self.url)

    def checkpoint_url(self, name: str) -> str:
        """Return where the copy of a checkpoint is, such as of step_000040."""
        return child(self.url, CHECKPOINTS, name)

    def whole(self) -> Iterator[Copy]:
        """Yield the copies that are whole, the newest first; what is there in part is passed over."""
        there = list_objects(child(self.url, CHECKPOINTS))
        names = {name.partition("/")[0] for name in there if name.endswith(f"/{STATE}")}
        for name in sorted(filter(STEP_NAME.fullmatch, names), key=_step_of, reverse=True):
            try:
                copy = read_copy(self.checkpoint_url(name))
            except ManifestError as error:  # cut in the middle, where a store is a directory
                logger.warning("%s; taking an older copy", error)
                continue
            sizes = {file: info.size for file, info in there.items()}
            wrong = [one for one, record in copy.contents.files.items() if sizes.get(f"{name}/{one}") != record.bytes]
            if wrong:
                logger.warning(
                    "%s is missing or has another size; taking an older copy", _shown(child(copy.url, wrong[0]))
                )
            elif _step_of(name) == copy.step:
                yield copy

    def newest(self) -> Copy | None:
        """Return the newest copy that is whole."""
        return next(self.whole(), None)

    def has(self, checkpoint: Path) -> bool:
        """Return whether there is a whole copy of a local checkpoint."""
        step = _step_of(checkpoint.name)
        copy = next((copy for copy in self.whole() if copy.step <= step), None)
        return copy is not None and _has_state(checkpoint, copy.state)

    def note_latest(self, name: str) -> None:
        """Write down the name of the newest one, for scripts."""
        write_object(child(self.url, CHECKPOINTS, LATEST), f"{name}\n".encode())

    def prune(self, keep: int) -> int:
        """Remove all but the newest copies, and older ones that were never finished; return how many.

        Args:
            keep: how many; 0 keeps all.
        """
        there = list_objects(child(self.url, CHECKPOINTS))
        steps = {name.partition("/")[0] for name in there}
        names = sorted(filter(STEP_NAME.fullmatch, steps), key=_step_of)
        whole = [name for name in names if f"{name}/{STATE}" in there]
        kept = whole[-keep:] if keep else whole
        old = [name for name in names if whole and name not in kept and _step_of(name) < _step_of(whole[-1])]
        for name in old:
            url = self.checkpoint_url(name)
            remove_published(url)
            if url.startswith(_LOCAL):
                with contextlib.suppress(OSError):  # not empty: something there is not ours
                    os.rmdir(url.removeprefix(_LOCAL))
        return len(old)


def read_copy(url: str) -> Copy:
    """Read what the copy of a checkpoint says of itself."""
    file = _shown(child(url, STATE))
    data = read_object(child(url, STATE), MAX_STATE_BYTES)
    document = json_document.parse(data, file)
    fields = json_document.Fields(document, file)
    if fields.text("format") != FORMAT or fields.integer("version", 1, 1 << 30) != VERSION:
        raise UnsupportedFormatError(
            f"{file}: format {document['format']!r} version {document['version']!r} is not {FORMAT} {VERSION}; "
            "update megatron_packed_sft"
        )
    sizes, checksums = (fields.optional_object(name) or {} for name in ("files", "checksums"))
    records = {}
    for name, size in sizes.items():
        child(url, name)  # refuses names that lead elsewhere
        if name == STATE or type(size) is not int or not 0 <= size <= _MAX_NUMBER:
            raise fields.error("files", f"has {name[:80]!r} with {str(size)[:20]}, which cannot be")
        records[name] = FileRecord(size, str(checksums.get(name, "")))
    return Copy(fields.integer("step", 0, _MAX_NUMBER), url, data, Contents(records, DEFAULT_ALGORITHM))


def find_copy(url: str, name: str = "") -> Copy:
    """Return the copy that a URL means: a checkpoint, or the newest one of a copied run.

    Args:
        url: of either.
        name: what the user wrote before it, for the message, such as "resume=".
    """
    there = list_objects(url)
    copy = read_copy(url.rstrip("/")) if STATE in there else CopiedRun(url).newest()
    if copy is None:
        raise InvalidInputError(
            f"{name}{_shown(url)} is no copy of a checkpoint: it has no {STATE}, and no whole checkpoint in "
            f"{CHECKPOINTS}; check the URL"
        )
    return copy


def fetch_copy(copy: Copy, directory: CheckpointDirectory) -> tuple[Path, bool]:
    """Bring a copy into a run's own checkpoints, checked; return its path, and whether this process fetched it.

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


@contextlib.contextmanager
def fetched_run(url: str) -> Iterator[tuple[Path, Copy]]:
    """Fetch a copy into a run's directory in TMPDIR, which is gone after the block; yield its checkpoint.

    Args:
        url: of a copied checkpoint, or of a copied run.
    """
    copy = find_copy(url)
    with scratch_directory() as scratch:
        yield fetch_copy(copy, CheckpointDirectory(scratch / CHECKPOINTS))[0], copy


def bring_newest(
    resume: str, directory: CheckpointDirectory, copies: CopiedRun | None
) -> tuple[str | os.PathLike[str], list[str]]:
    """Fetch the checkpoint to resume from if it is not here; return what `resume` means now, and what to tell.

    Args:
        resume: auto, never, a checkpoint's path or its URL.
        directory: the run's own checkpoints.
        copies: where its checkpoints are copied to.
    """
    if is_url(resume):
        copy = find_copy(resume, "resume=")
        _refuse_later(resume, copies, copy.step)
        local = directory.newest()
        if local is not None and not _has_state(local, copy.state):
            raise InvalidInputError(
                f"resume={redacted(resume)}, but {directory.path} already has checkpoints up to {local.name}; choose "
                "another output, or remove them"
            )
        return _brought(copy, directory)
    if copies is None:
        return resume, []
    if resume != "auto":
        is_path = resume != "never" and (Path(resume) / STATE).is_file()
        _refuse_later(resume, copies, TrainingState.load(Path(resume)).step if is_path else -1)
        return resume, []
    return _newest_of_both(directory, copies)


def _newest_of_both(directory: CheckpointDirectory, copies: CopiedRun) -> tuple[str | os.PathLike[str], list[str]]:
    local = directory.newest()
    try:
        copy = copies.newest()
    except StorageIOError as error:
        if local is None:  # to start from scratch might be wrong, and would be noticed late
            raise
        return "auto", [f"warning: the copies cannot be looked at, so the newest checkpoint here is taken: {error}"]
    if copy is None or (local is not None and _step_of(local.name) >= copy.step):
        return "auto", []
    return "auto", _brought(copy, directory)[1]


def _brought(copy: Copy, directory: CheckpointDirectory) -> tuple[Path, list[str]]:
    path, is_new = fetch_copy(copy, directory)
    size = f"{plural(len(copy.contents.files), 'file')}, {byte_count(copy.contents.num_bytes)}"
    return path, [f"fetched {copy.shown} ({size})"] if is_new else []


def _refuse_later(resume: str, copies: CopiedRun | None, step: int) -> None:
    """Refuse to go back behind a copy: the next resume=auto would take that one, and it is of another history."""
    newest = None if copies is None else copies.newest()
    if copies is not None and newest is not None and newest.step > step:
        raise InvalidInputError(
            f"resume={redacted(resume)}, but {copies.shown} already has copies up to {base_name(newest.url)}, and the "
            "next resume=auto would resume from there; choose another checkpoint.copy_to, or remove the later copies"
        )


def _fetch_small_files(copy: Copy, output: Path) -> None:
    found = _RUN_OF.fullmatch(copy.url)
    if found is not None:
        names = (METRICS, RECORD)
        there = list_objects(found[1])
        wanted = (name for name in there if name in names or name.startswith(f"{MODEL_FILES}/"))
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
