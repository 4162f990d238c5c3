"""Publish whole or not at all: everything is written into a hidden sibling and published by one rename.

    my_dir/.shard_000000.staging-host-4711-9f3c/   written and fsynced here; locked by flock while its writer lives
    my_dir/shard_000000/                           ... and renamed to this, with fsyncs before and after

A staging directory whose writer died is unlocked; the next writer of the same target on that host removes it. Staging
names never collide, so leftovers from another host never block a writer.

All calls go through `os`, one by one: tests/faults kills the process before and after each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_packed_sft.errors import (
    InvalidInputError,
    NoSpaceError,
    PackedSFTError,
    StorageIOError,
    TargetExistsError,
    WriterStateError,
)
from megatron_packed_sft.support.paths import local_path

_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:32] or "host"
_STAGING = f".staging-{_HOST}-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def os_errors(action: str, path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Turn an OSError inside the block into ours: what was tried, on which path, and a remedy.

    Example:
        >>> with os_errors("read", "/no/such/file"):  # doctest: +IGNORE_EXCEPTION_DETAIL
        ...     open("/no/such/file")
        Traceback (most recent call last):
        StorageIOError: cannot read /no/such/file: No such file or directory
    """
    try:
        yield
    except PackedSFTError:
        raise  # ours already
    except OSError as error:
        raise translated(error, action, path, needed) from error


def translated(error: OSError, action: str, path: str | os.PathLike[str], needed: int | None = None) -> StorageIOError:
    """Return our error for one of the operating system's.

    Example:
        >>> translated(OSError(28, "ENOSPC"), "write", "x.npy", 10).args[0]
        'cannot write x.npy: No space left on device; it needs 10 bytes; free some space or choose another disk'
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"cannot {action} {os.fspath(path)}: {reason}"
    size = f"; it needs {needed:,} bytes" if needed is not None else ""
    kind: type[StorageIOError] = StorageIOError
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind, message = NoSpaceError, f"{message}{size}; free some space or choose another disk"
    elif error.errno == errno.EFBIG:
        kind, message = NoSpaceError, f"{message}{size}; raise the file-size limit (ulimit -f) or write smaller shards"
    elif error.errno in (errno.EACCES, errno.EPERM):
        message += "; check who owns it and its permissions"
    elif error.errno == errno.EROFS:
        message += "; choose a path on a writable disk"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        message += "; check the path"
    result = kind(message)
    result.errno = error.errno  # kept for callers that tell a missing file from a broken disk
    return result


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset`, in as many calls as needed."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def preallocate(fd: int, size: int) -> None:
    """Reserve the disk blocks now, so that a full disk is an error here and not halfway through the file."""
    if size == 0 or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # On a file system without fallocate the writes report a full disk.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def fsync_directory(path: Path) -> None:
    """Make the names inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a new small file and fsync it."""
    with os_errors("write", path, len(data)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_at(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write or replace a small file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write_file(temporary, data)
        with os_errors("publish", path):
            os.rename(temporary, path)
            fsync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


class Staging:
    """A hidden directory beside `target` that becomes `target` or is removed.

    The context manager discards it unless it was published.

    Example:
        >>> import tempfile; home = Path(tempfile.mkdtemp())
        >>> with Staging(home / "result") as staging:
        ...     write_file(staging.path / "data.bin", b"whole")
        ...     staging.publish()
        >>> (home / "result" / "data.bin").read_bytes()
        b'whole'
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.target = local_path(target, "output")
        self._overwrite = overwrite
        if not self.target.name:
            raise InvalidInputError(f"{self.target} cannot be a target: name a path below an existing directory")
        self._refuse_existing()
        self._lock_fd = -1
        with os_errors("create a directory for", self.target):
            if not self.target.parent.is_dir():
                self.target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.target.parent, self.target.name)
            self.path = self._create()

    def publish(self) -> None:
        """Publish the directory under the target's name, durably. Its files must be fsynced already."""
        with os_errors("publish", self.target):
            fsync_directory(self.path)
            if self._overwrite and os.path.lexists(self.target):
                self._replace()
            else:
                self._refuse_existing()
                try:
                    os.rename(self.path, self.target)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise self._exists() from None
                    raise
            fsync_directory(self.target.parent)
        self._release()

    def publish_file(self, name: str) -> None:
        """Publish the single file `name` of the directory as the target. It must be fsynced already."""
        with os_errors("publish", self.target):
            if self._overwrite:
                os.rename(self.path / name, self.target)
            else:
                try:
                    os.link(self.path / name, self.target)  # unlike rename, never replaces another writer's file
                except FileExistsError:
                    raise self._exists() from None
            fsync_directory(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging directory; harmless after `publish` and when called twice."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _prefix(self) -> str:
        return f".{self.target.name}{_STAGING}"

    def _create(self) -> Path:
        while True:
            path = self.target.parent / f"{self._prefix()}{os.getpid()}-{secrets.token_hex(4)}"
            os.mkdir(path)
            try:
                self._lock_fd = _open_locked(path)
            except (BlockingIOError, FileNotFoundError):
                continue  # between mkdir and flock another writer took the directory for a leftover
            if path.exists():
                return path
            self._release()

    def _replace(self) -> None:
        """Swap with the existing target, in one step where the system can, and remove the old one."""
        old = self.path
        if not _exchange(self.path, self.target):
            old = self.path.with_name(f"{self.path.name}-old")
            os.rename(self.target, old)
            os.rename(self.path, self.target)
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.unlink(old)

    def _refuse_existing(self) -> None:
        # Rename replaces an empty directory, and callers often create their output folder first.
        if self._overwrite or not os.path.lexists(self.target):
            return
        if self.target.is_dir() and not self.target.is_symlink():
            with os_errors("look into", self.target), os.scandir(self.target) as entries:
                if next(entries, None) is None:
                    return
        raise self._exists()

    def _exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"{self.target} exists already; choose another name, or add --overwrite (overwrite=True)"
        )

    def _release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_leftovers(directory: Path, target: str | None = None) -> list[str]:
    """Remove the staging directories of dead writers on this host, and return their names.

    Args:
        directory: where their targets are.
        target: only those meant for this name; by default all.
    """
    removed = []
    for entry in os.listdir(directory):
        is_staging = entry.startswith(".") and _STAGING in entry
        if is_staging and (target is None or entry.startswith(f".{target}{_STAGING}")):
            path = directory / entry
            try:
                fd = _open_locked(path, must_lock=True)
            except OSError:
                continue  # its writer lives, or this file system has no locks
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
            removed.append(entry)
    return removed


def _open_locked(path: Path, *, must_lock: bool = False) -> int:
    """Open a directory and take its lock; BlockingIOError when another process holds it.

    File systems without flock give an unlocked descriptor, or an OSError with `must_lock`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if must_lock or isinstance(error, BlockingIOError):
            os.close(fd)
            raise
    return fd


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux renameat2); False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return bool(done == 0)


class StagedWriter:
    """A staging directory and the open files in it, cleaned up together.

    Subclasses write into `self._staging.path`, register what must be closed with `self._cleanup.callback`, and publish
    from their `finalize`. As a context manager a writer leaves nothing behind unless it was published.

    Example:
        >>> class OneFileWriter(StagedWriter):
        ...     def finalize(self):
        ...         self._require_open()
        ...         with self._closing():
        ...             (self._staging.path / "data").write_text("whole")
        ...             self._staging.publish()
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with OneFileWriter(f"{home}/result") as writer:
        ...     writer.finalize()
        >>> os.listdir(home)
        ['result']
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self._staging = Staging(target, overwrite=overwrite)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._staging.discard)
        self._is_open = True

    @property
    def target(self) -> Path:
        """What the writer publishes."""
        return self._staging.target

    def abort(self) -> None:
        """Give up: nothing is published and the staging directory is removed. Harmless after `finalize`."""
        self._is_open = False
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._is_open:
            raise WriterStateError(f"the writer of {self.target} is closed; open a new one to write more")

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Abort if the block fails, for steps that cannot be repeated."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the writer after the block, and remove what it did not publish."""
        try:
            yield
        finally:
            self.abort()
