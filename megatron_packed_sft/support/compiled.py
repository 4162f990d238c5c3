"""`@kernel`: one way to compile a hot loop, with a cache that a source change can never leave stale.

Numba compares a cached kernel with the file that defines it, and with nothing else: a kernel that calls a changed
kernel of another file, or that froze a changed constant of one, would run the old code. So the cache directory is named
after a hash of every kernel source and of the modules of ours that they import.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

_PACKAGE = Path(__file__).parents[1]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_CACHE_NAME = re.compile(rf"{_PACKAGE.name}-kernels-[0-9a-f]{{16}}")
_KEPT_SECONDS = 30 * 24 * 3600
_IMPORT = re.compile(rf"^ *from {_PACKAGE.name}\.([\w.]+) import \(?([\w, \n]+)", re.MULTILINE)


def kernel(function: _Function) -> _Function:
    """Compile a function with numba: without the GIL, without fast-math, and cached on disk."""
    import numba

    config: Any = numba.config
    directory = cache_directory()
    previous = config.CACHE_DIR
    try:
        config.CACHE_DIR = directory or ""
        compiled: Any = numba.njit(cache=directory is not None, nogil=True)(function)
        return cast("_Function", compiled)
    finally:
        config.CACHE_DIR = previous


@functools.cache
def cache_directory() -> str | None:
    """Return where compiled kernels are kept, or None when no such place is writable.

    Below NUMBA_CACHE_DIR if that is set, else beside the package, else in the user's cache directory.
    """
    name = f"{_PACKAGE.name}-kernels-{source_hash(_PACKAGE)}"
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    for base in [chosen] if chosen else [str(_PACKAGE / "__pycache__"), os.path.join(user_cache, _PACKAGE.name)]:
        directory = os.path.join(base, name)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK):
            _remove_old(Path(base), Path(directory))
            return directory
    return None


def _remove_old(base: Path, current: Path) -> None:
    """Remove the caches of other sources that nobody has started with for 30 days, and note that this one is in use.

    A process that still runs on one of them has its kernels in memory; one that loses a file compiles it again.
    """
    with contextlib.suppress(OSError):
        os.utime(current)
        for entry in os.scandir(base):
            is_ours = _CACHE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_ours and entry.stat().st_mtime < time.time() - _KEPT_SECONDS and entry.name != current.name:
                shutil.rmtree(entry.path, ignore_errors=True)


def source_hash(package: Path) -> str:
    """Return a hash of all kernel sources below `package` and of the modules of the package that they import."""
    sources = {path: path.read_text() for path in package.rglob("*kernel*.py")}
    waiting = list(sources.values())
    while waiting:
        for path in _imported(package, waiting.pop()):
            if path not in sources:
                sources[path] = path.read_text()
                waiting.append(sources[path])
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(f"{path.relative_to(package)}\0{sources[path]}\0".encode())
    return digest.hexdigest()[:16]


def _imported(package: Path, source: str) -> list[Path]:
    """Return the files of our own modules that a source imports; a name may be a module or a thing inside one."""
    found = []
    for module, names in _IMPORT.findall(source):
        inside = package.joinpath(*module.split("."))
        candidates = [inside, *(inside / name.strip() for name in names.split(",") if name.strip())]
        found += [path.with_suffix(".py") for path in candidates if path.with_suffix(".py").is_file()]
    return found
