"""Directories that no other user can write to, for files that are trusted when read back, such as compiled code.

$XDG_CACHE_HOME or ~/.cache          the user's cache; there may be no home, or it may be read-only
$TMPDIR/megatron_packed_sft-1000     in a directory shared by all users: used only if owner and mode are right
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

_NAME = "megatron_packed_sft"


def user_cache() -> str | None:
    """Return the user's cache directory, which may not exist yet; None when there is no home.

    Example:
        >>> user_cache() is None or os.path.isabs(user_cache())
        True
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return chosen
    home = os.path.expanduser("~")  # stays "~" for a user that the machine does not know
    return os.path.join(home, ".cache") if os.path.isabs(home) else None


def private_temporary_directory() -> str | None:
    """Return a directory below TMPDIR that only this user can open, the same for every process.

    None if there cannot be one, for example because another user has created it.
    """
    base = os.environ.get("TMPDIR") or "/tmp"
    return own_directory(base, f"{_NAME}-{os.geteuid()}", owners={0, os.geteuid()})


def own_directory(base: str | os.PathLike[str], name: str, *, owners: Collection[int] | None = None) -> str | None:
    """Return the directory `name` in `base`, created with mode 0700 if missing; None if it is not safe to use.

    It must belong to this user, be writable and closed to others, and not be a link. `base` must belong to one of
    `owners`, and other users must not be able to rename entries in it or in a directory above it.

    Args:
        base: created if it does not exist.
        name: of the directory.
        owners: user ids; None for any.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> oct(os.stat(own_directory(home, "mine")).st_mode & 0o777)
        '0o700'
        >>> os.chmod(f"{home}/mine", 0o777); print(own_directory(home, "mine"))
        None
    """
    try:
        _make(Path(base))
        place = os.path.realpath(base)  # so that what is looked at is what is used
        if (owners is not None and os.stat(place).st_uid not in owners) or _others_can_rename(Path(place)):
            return None
        directory = os.path.join(place, name)
        try:
            os.mkdir(directory, 0o700)
            os.chmod(directory, 0o700)  # where a default ACL had widened it
        except FileExistsError:
            pass
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        return None


def _make(path: Path) -> None:
    """Make a directory and those above it; whatever the umask is, others cannot write to them."""
    if not path.is_dir():
        _make(path.parent)
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:  # another process was faster
            if not path.is_dir():
                raise


def _others_can_rename(path: Path) -> bool:
    """Return whether others may write to a directory or to one above it without a sticky bit."""
    modes = (os.stat(place).st_mode for place in (path, *path.parents))
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)
