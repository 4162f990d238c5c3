"""`@kernel`: the one way to compile a hot loop, with a cache that never goes stale.

Numba checks a cached kernel only against the file that defines it: a kernel that calls a changed kernel of another
file, or that froze a changed constant from one, would run the old code. So the cache directory is named after a hash of
every kernel source (files called *kernel*.py) and of our modules that they import.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast

from megatron_packed_sft.support.own_directories import own_directory, private_temporary_directory, user_cache

_logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_CACHE_NAME = re.compile(rf"{_PACKAGE.name}-kernels-[0-9a-f]{{16}}")
_KEPT_SECONDS = 30 * 24 * 3600
_IMPORT = re.compile(rf"^ *from {_PACKAGE.name}\.([\w.]+) import \(?([\w, \n]+)", re.MULTILINE)

_NOTHING_IS_KEPT = (
    "no directory can hold compiled kernels, so every process compiles them again, which takes seconds; set "
    "NUMBA_CACHE_DIR to a directory that you can write to"
)


def kernel(function: _Function) -> _Function:
    """Compile a function with numba: without the GIL, without fast-math, and cached on disk."""
    return cast("_Function", _compiled(function))


def inner_kernel(function: _Function) -> _Function:
    """Compile a function that only kernels call.

    It lacks the wrapper that lets Python call it, which takes longer to compile than a small function does. Calling it
    from Python raises a TypeError.
    """
    compiled = _compiled(function, no_cpython_wrapper=True)
    if compiled is not function:
        kind: Any = type(compiled)
        compiled.__class__ = _closed_to_python(kind)
    return cast("_Function", compiled)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    import numba

    config: Any = numba.config
    directory = cache_directory()
    previous = config.CACHE_DIR
    # By default numba also makes each function callable from C, which we do not need.
    decorator = cast("Any", numba.njit)(nogil=True, no_cfunc_wrapper=True, **options)
    try:
        config.CACHE_DIR = directory or ""
        compiled: Any = decorator(function)
        if not config.DISABLE_JIT and (directory is None or not _is_kept(compiled, directory)):
            _say_once(_NOTHING_IS_KEPT)
            compiled = decorator(function)
        return compiled
    finally:
        config.CACHE_DIR = previous


@functools.cache
def _closed_to_python(dispatcher: Any) -> type:
    """Return a dispatcher class that Python cannot call and that is not recompiled for every constant argument."""
    from numba.core import types

    plain: Any = types.unliteral

    class InnerDispatcher(dispatcher):  # type: ignore[misc]
        def __call__(self, *_: Any, **__: Any) -> None:
            raise TypeError(f"{self.__name__} is called by kernels only; call it from a function with @kernel")

        def get_call_template(self, arguments: Any, named: Any) -> Any:
            kinds = {name: plain(one) for name, one in named.items()}
            return super().get_call_template([plain(one) for one in arguments], kinds)

    return InnerDispatcher


def _is_kept(compiled: Any, directory: str) -> bool:
    """Let numba cache a kernel in `directory`, and return whether it does.

    Numba falls back to another directory when it cannot write to this one, and other users may own that. A cache file
    that cannot be read or written costs a compilation, never an error.
    """
    with contextlib.suppress(RuntimeError):  # numba found no directory at all
        compiled.enable_caching()
    if not str(compiled.stats.cache_path or "").startswith(directory):
        return False
    cache = compiled._cache
    load, save = cache.load_overload, cache.save_overload

    def load_if_sound(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # a truncated pickle (full disk, crash) can raise anything
            with contextlib.suppress(OSError):
                cache.flush()
            return None

    def save_if_possible(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _say_once(
                f"cannot write compiled kernels to {directory} ({error.strerror}); they are compiled again next time"
            )

    cache.load_overload, cache.save_overload = load_if_sound, save_if_possible
    return True


@functools.cache
def _say_once(sentence: str) -> None:
    """Warn once, from one of the processes that work together."""
    from megatron_packed_sft.support.exits import is_speaker

    if is_speaker() and multiprocessing.parent_process() is None:
        _logger.warning("%s", sentence)


@functools.cache
def cache_directory() -> str | None:
    """Return the directory of compiled kernels, or None if there is none.

    It is below NUMBA_CACHE_DIR if that is set, else beside the package, else in the user's cache directory, else in a
    private directory below TMPDIR. Cached code is executed, so no other user may be able to write there.
    """
    name = f"{_PACKAGE.name}-kernels-{source_hash(_PACKAGE)}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        if directory := _cache_in(chosen, name, None):
            return directory
        _say_once(
            f"NUMBA_CACHE_DIR={chosen} is ignored: {name} in it must be your own directory, writable, with mode 0700, "
            "in a directory where other users cannot rename it"
        )
    # The owner of the package can change its code anyway.
    trusted = {0, os.geteuid(), os.stat(__file__).st_uid}
    places = [_PACKAGE / "__pycache__"]
    if user := user_cache():
        places.append(Path(user, _PACKAGE.name))
    for place in places:
        if directory := _cache_in(place, name, trusted):
            return directory
    temporary = private_temporary_directory()
    return None if temporary is None else _cache_in(temporary, name, trusted)


def _cache_in(base: str | os.PathLike[str], name: str, owners: Collection[int] | None) -> str | None:
    directory = own_directory(base, name, owners=owners)
    if directory is not None:
        _remove_old(Path(directory).parent, Path(directory))
    return directory


def _remove_old(base: Path, current: Path) -> None:
    """Remove caches of other source versions that no process has opened for 30 days, and mark this one as used.

    A process that still runs on a removed cache has its kernels in memory, or compiles them again.
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
