"""`@kernel`: one way to compile a hot loop, with a cache that a source change can never leave stale.

Numba compares a cached kernel with the file that defines it, and with nothing else: a kernel that calls a changed
kernel of another file, or that froze a changed constant of one, would run the old code. So the cache directory is named
after a hash of every kernel source and of the modules of ours that they import.
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
    "no directory can keep compiled kernels, so every process compiles them again, which takes seconds; set "
    "NUMBA_CACHE_DIR to one that you can write to"
)


def kernel(function: _Function) -> _Function:
    """Compile a function with numba: without the GIL, without fast-math, and cached on disk."""
    return cast("_Function", _compiled(function))


def inner_kernel(function: _Function) -> _Function:
    """Compile a function that kernels call and Python does not.

    It is a kernel without the code that lets Python call it, which takes longer to compile than a small function. From
    Python it is a TypeError.
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
    # Numba would also make each function callable from C.
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
    """Return a kind of dispatcher that Python cannot call, and that is not compiled again for every constant."""
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
    """Let numba cache a kernel in `directory`, where files that cannot be read or written end nothing; return whether
    it does. Where it cannot write it looks for another place, which may be anybody's.
    """
    with contextlib.suppress(RuntimeError):  # no place at all
        compiled.enable_caching()
    if not str(compiled.stats.cache_path or "").startswith(directory):
        return False
    cache = compiled._cache
    load, save = cache.load_overload, cache.save_overload

    def load_if_sound(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # a pickle that a full disk or a crash has cut short fails in any way
            with contextlib.suppress(OSError):
                cache.flush()
            return None

    def save_if_possible(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _say_once(f"{directory} cannot keep compiled kernels ({error.strerror}): they are compiled again next time")

    cache.load_overload, cache.save_overload = load_if_sound, save_if_possible
    return True


@functools.cache
def _say_once(sentence: str) -> None:
    """Warn, in one process of those that work together."""
    from megatron_packed_sft.support.exits import is_speaker

    if is_speaker() and multiprocessing.parent_process() is None:
        _logger.warning("%s", sentence)


@functools.cache
def cache_directory() -> str | None:
    """Return where compiled kernels are kept, or None when there is no such place.

    Below NUMBA_CACHE_DIR if that is set, else beside the package, else in the user's cache directory, else in a private
    one below TMPDIR. Whoever can write there can make this process run anything, so it is a directory of this user's
    that is closed to others.
    """
    name = f"{_PACKAGE.name}-kernels-{source_hash(_PACKAGE)}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        if directory := _cache_in(chosen, name, None):
            return directory
        _say_once(
            f"NUMBA_CACHE_DIR is {chosen}, which is not used: {name} in it must be a directory of your own that you "
            "can write to, and that others can neither open (mode 0700) nor rename"
        )
    # Whoever owns the package can change its code anyway.
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
