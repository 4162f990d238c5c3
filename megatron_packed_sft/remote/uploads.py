"""A local directory to a store: whole or not readable. The document that readers begin with goes last.

    arrays ─▶ manifest.json of each shard ─▶ dataset.json
    tensors of a checkpoint ───────────────▶ training_state.json

While an upload runs, .upload.json lists every object that it writes or replaces. So a run after a crash knows what is
ours, sends only what is missing or different, and removes what an older dataset left; anything else is never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import ManifestError, ShardError, StorageIOError, TargetExistsError
from megatron_packed_sft.remote.filesystem import base_name, child, is_missing, refuse_read_only
from megatron_packed_sft.remote.objects import (
    TRIAL,
    ObjectInfo,
    file_md5,
    list_objects,
    object_info,
    read_object,
    read_range,
    remove_object,
    upload_file,
    write_object,
)
from megatron_packed_sft.remote.part_tags import is_tag_of_parts
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum, new_hasher
from megatron_packed_sft.support.paths import redacted

UNFINISHED = ".upload.json"  # there while an upload runs, and after one that was cut
_DATASET = "dataset.json"
# A reader begins with the first of these that there is; the last one belongs to checkpoints.
_CLOSING = (_DATASET, json_document.MANIFEST, "training_state.json")
_MAX_LIST_BYTES = 64 << 20
_BLOCK = 16 << 20
_NUM_THREADS = 4


class UploadReport(NamedTuple):
    """What an upload did: objects sent, those that were there already, and old ones removed."""

    num_sent: int
    num_kept: int
    num_removed: int
    num_bytes: int


@contextlib.contextmanager
def scratch_directory(near: Path | None = None) -> Iterator[Path]:
    """Make a directory for files on their way to a store, in TMPDIR or in `near`; it is removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="packed-sft-upload-", dir=near))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def uploading(url: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a local path to write to; what is there at the end of the block is published under the URL.

    Example:
        >>> with uploading("memory://doc/file") as path:
        ...     _ = path.write_text("whole")
        >>> read_object("memory://doc/file", 10)
        b'whole'
    """
    refuse_existing(url, overwrite=overwrite)
    with scratch_directory() as scratch:
        local = scratch / (base_name(url) or "data")
        yield local
        upload(local, url, overwrite=overwrite)


def begin_upload(url: str, shards: Sequence[str]) -> None:
    """Announce shards that many processes will send, each with `send_shard`; `upload` of the rest ends it.

    What is published there is not readable any more, and may be replaced.

    Args:
        url: of the dataset.
        shards: their names below it.
    """
    there = list_objects(url)
    ours = _listed(url, there) | set(shards) | {f"{name}/" for name in shards}
    published = next((name for name in _CLOSING if name in there), None)
    if published is not None:
        ours |= _published_names(url, published)
    write_object(child(url, UNFINISHED), json_document.render({"objects": sorted(ours)}))
    if published is not None:
        remove_object(child(url, published))


def send_shard(local: Path, url: str) -> int:
    """Send the files of a shard that are not there yet, its manifest last, and remove others; return the bytes sent.

    Every object is checked as by `upload`.
    """
    if local.is_file():
        return _send(local, url, object_info(url), None) or 0
    there = list_objects(url)
    names = [os.path.relpath(os.path.join(folder, name), local) for folder, _, some in os.walk(local) for name in some]
    num_bytes = 0
    for batch in _in_order(sorted(names)):
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-upload") as threads:
            sent = threads.map(lambda name: _send(local / name, child(url, name), there.get(name), None), batch)
            num_bytes += sum(size or 0 for size in sent)
    for name in there.keys() - set(names):
        remove_object(child(url, name))
    return num_bytes


def send_file(local: Path, url: str) -> None:
    """Send a file and check the object, without a look at what is there."""
    _send(local, url, None, None)


def upload(
    local: Path,
    url: str,
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int], object] | None = None,
    elsewhere: Sequence[str] = (),
) -> UploadReport:
    """Publish a local shard, file or dataset directory under a URL.

    Every object is compared with its file after it was sent: in size, and in MD5 where the store reports one, else it
    is read back. What is there already with the same content is not sent again.

    Args:
        local: the directory or the file.
        url: what it will be called.
        overwrite: replace other data that was published there. Objects that no publication lists are never removed.
        on_bytes: called with the size of each file after it was checked.
        elsewhere: names of shards that are there already, after `begin_upload` and `send_shard`.

    Example:
        >>> import tempfile; home = Path(tempfile.mkdtemp()); _ = (home / "manifest.json").write_text("{}")
        >>> upload(home, "memory://doc/shard").num_sent, upload(home, "memory://doc/shard").num_sent
        (1, 0)
    """
    if local.is_file():
        return _upload_one(local, url, overwrite)
    names = _files_below(local)
    closing = next(name for name in _CLOSING if name in names)
    there = list_objects(url)
    replaced = _refuse_others(url, names, closing, there, local, overwrite=overwrite)
    lost = set(elsewhere) - {_shard_of(name) for name in there}
    if lost:
        raise StorageIOError(f"{redacted(child(url, min(lost)))} was sent, but is not there; run again")
    kept = {*names, UNFINISHED, *elsewhere, *(f"{name}/" for name in elsewhere)}
    stale = sorted(name for name in replaced & set(there) if not _is_covered(name, kept))
    is_whole = closing in there and not stale and UNFINISHED not in there
    if is_whole and all(_is_same(local / name, child(url, name), there.get(name)) for name in names):
        return UploadReport(0, len(names), 0, 0)
    write_object(child(url, UNFINISHED), json_document.render({"objects": sorted(replaced | kept)}))
    if closing in there:
        remove_object(child(url, closing))  # from here on until the end there is nothing that a reader would open
        there.pop(closing)
    num_sent = num_bytes = 0
    for batch in _in_order(names, closing):
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-upload") as threads:
            sent = list(
                threads.map(lambda name: _send(local / name, child(url, name), there.get(name), on_bytes), batch)
            )
        num_sent += sum(1 for size in sent if size is not None)
        num_bytes += sum(size for size in sent if size is not None)
    for name in stale:
        remove_object(child(url, name))
    remove_object(child(url, UNFINISHED))
    return UploadReport(num_sent, len(names) - num_sent, len(stale), num_bytes)


def remove_published(url: str) -> int:
    """Remove what was published under a URL, whole or in part; return how many objects. Strangers are left alone.

    Example:
        >>> import tempfile; home = Path(tempfile.mkdtemp()); _ = (home / "manifest.json").write_text("{}")
        >>> _ = upload(home, "memory://doc/removed")
        >>> remove_published("memory://doc/removed"), list_objects("memory://doc/removed")
        (1, {})
    """
    there = list_objects(url)
    closing = next((name for name in _CLOSING if name in there), None)
    listed = _listed(url, there) | (set() if closing is None else _published_names(url, closing))
    ours = sorted(listed & set(there))
    if ours:  # as for an upload: whoever comes after a crash knows what is ours
        write_object(child(url, UNFINISHED), json_document.render({"objects": ours}))
    for name in sorted(ours, key=lambda name: name != closing):  # not readable from the first one on
        remove_object(child(url, name))
    if ours or UNFINISHED in there:
        remove_object(child(url, UNFINISHED))
    return len(ours)


def refuse_existing(url: str, *, overwrite: bool = False) -> None:
    """Refuse a URL with something in it, before hours of work; what an upload that was cut left there is fine."""
    refuse_read_only(url)
    there = list_objects(url)
    there.pop(TRIAL, None)
    if not there or overwrite or (UNFINISHED in there and not any(name in there for name in _CLOSING)):
        return
    raise _exists(url, there)


def refuse_unfinished(url: str, there: Collection[str] | None = None) -> None:
    """Refuse what an upload has not finished: it looks like a folder of arrays, which nobody should work with.

    Args:
        url: of a dataset, a shard or a checkpoint.
        there: the names of the objects below it; asked for if they are not known.
    """
    is_unfinished = UNFINISHED in there if there is not None else object_info(child(url, UNFINISHED)) is not None
    if is_unfinished and not any(name in (there or ()) for name in _CLOSING):
        raise StorageIOError(
            f"{redacted(url)} is not whole: an upload to it is under way, or was cut; wait for it, or run the command "
            "again that writes it"
        )


def _files_below(local: Path) -> list[str]:
    found = sorted(
        os.path.relpath(os.path.join(folder, name), local) for folder, _, some in os.walk(local) for name in some
    )
    if not any(name in found for name in _CLOSING):
        raise ShardError(f"{local} has none of {', '.join(_CLOSING)}; it is not whole, write it again")
    return found


def _in_order(names: Sequence[str], closing: str | None = None) -> Iterator[list[str]]:
    """Yield what may be sent at the same time: everything that a document vouches for comes before it."""
    manifests = [name for name in names if name.rpartition("/")[2] == json_document.MANIFEST and name != closing]
    yield sorted(set(names) - {closing, *manifests})
    yield manifests
    yield [] if closing is None else [closing]


def _refuse_others(
    url: str, names: Sequence[str], closing: str, there: dict[str, ObjectInfo], local: Path, *, overwrite: bool
) -> set[str]:
    """Return the names of what may be replaced; refuse a target that holds anything else."""
    ours = {UNFINISHED, TRIAL, *_listed(url, there)}
    published = next((name for name in _CLOSING if name in there), None)
    if published is not None:
        same = published == closing and _is_same(local / closing, child(url, closing), there[closing])
        if not same and not overwrite:
            raise _exists(url, there)
        ours |= _published_names(url, published)
        return ours | {name for name in names if name in there}
    strangers = {name for name in there if name not in names and not _is_covered(name, ours)}
    if strangers:
        shown = ", ".join(sorted(strangers)[:3])
        raise TargetExistsError(f"{redacted(url)} holds other objects ({shown}); choose another URL")
    return {name for name in there if _is_covered(name, ours)} | ours


def _is_covered(name: str, listed: Set[str]) -> bool:
    """Return whether a list has a name, or a directory of it: those end with a slash."""
    parts = name.split("/")
    return name in listed or any("/".join(parts[:depth]) + "/" in listed for depth in range(1, len(parts)))


def _shard_of(name: str) -> str:
    """Return SPLIT/SHARD of SPLIT/SHARD/FILE."""
    return "/".join(name.split("/")[:2])


def _listed(url: str, there: dict[str, ObjectInfo]) -> set[str]:
    """Return what an upload that was cut says it would write."""
    if UNFINISHED not in there:
        return set()
    try:
        document = json_document.parse(read_object(child(url, UNFINISHED), _MAX_LIST_BYTES), UNFINISHED)
    except (ManifestError, StorageIOError):
        return set()
    found = document.get("objects")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _published_names(url: str, closing: str) -> set[str]:
    """Return the objects that belong to what is published: those that its own documents name."""
    try:
        document = json_document.parse(read_object(child(url, closing), _MAX_LIST_BYTES), closing)
    except ManifestError:
        return {closing}
    names = {closing, "README.md"}
    files = document.get("files")
    names |= set(files) if isinstance(files, dict) else set()
    splits = document.get("splits")
    shards = {
        f"{split}/{shard['name']}"
        for split, description in (splits.items() if isinstance(splits, dict) else ())
        for shard in (description.get("shards") or () if isinstance(description, dict) else ())
        if isinstance(shard, dict) and isinstance(shard.get("name"), str)
    }
    return names | {
        name for name in list_objects(url) if any(name == one or name.startswith(f"{one}/") for one in shards)
    }


def _upload_one(local: Path, url: str, overwrite: bool) -> UploadReport:
    there = object_info(url)
    if there is not None and not overwrite and not _is_same(local, url, there):
        raise _exists(url, {})
    sent = _send(local, url, there, None)
    return UploadReport(int(sent is not None), int(sent is None), 0, sent or 0)


def _send(local: Path, url: str, there: ObjectInfo | None, on_bytes: Callable[[int], object] | None) -> int | None:
    """Upload a file unless its content is there, check the object, and return the bytes sent or None."""
    size, sent = local.stat().st_size, False
    if not _is_same(local, url, there):
        upload_file(local, url)
        sent = True
        if not _is_same(local, url, object_info(url)):
            raise StorageIOError(f"{redacted(url)} is not what was sent; another writer may be at work, or run again")
    if on_bytes is not None:
        on_bytes(size)
    return size if sent else None


def _is_same(local: Path, url: str, there: ObjectInfo | None) -> bool:
    if there is None or there.size != local.stat().st_size:
        return False
    if there.md5 is not None and there.md5 == file_md5(local):
        return True
    if is_tag_of_parts(local, there.tag):
        return True
    # No MD5, or one of something else than the content (encryption, parts): read it back.
    hasher = new_hasher(DEFAULT_ALGORITHM)
    try:
        for start in range(0, there.size, _BLOCK):
            hasher.update(read_range(url, start, min(start + _BLOCK, there.size)))
    except StorageIOError as error:
        if is_missing(error):
            return False
        raise
    return hasher.hexdigest() == file_checksum(local)


def _exists(url: str, there: dict[str, ObjectInfo]) -> TargetExistsError:
    if there and not any(name in there for name in _CLOSING) and UNFINISHED not in there:
        shown = ", ".join(sorted(there)[:3])
        return TargetExistsError(f"{redacted(url)} holds other objects ({shown}); choose another URL")
    return TargetExistsError(
        f"{redacted(url)} exists already; choose another name, or add --overwrite (overwrite=True)"
    )
