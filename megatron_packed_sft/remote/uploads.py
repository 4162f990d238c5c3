"""Publish a local directory in a store, whole or unreadable: the document that readers open first is sent last.

    arrays ─▶ manifest.json of each shard ─▶ dataset.json
    tensors of a checkpoint ───────────────▶ training_state.json

During an upload, .upload.json lists every object that is written or replaced. After a crash the next run knows from it
which objects are ours, sends what is missing or different, and removes what an older dataset left. It touches nothing
else.

Every object is compared with its file: by MD5 where the store reports one, else by the tag of an S3 upload in parts
(the MD5 of the parts' MD5s; the size of the parts is unknown, so the usual ones are tried), else by reading it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron_packed_sft.errors import ManifestError, ShardError, StorageIOError, TargetExistsError
from megatron_packed_sft.remote.downloads import is_same_file
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
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum, new_hasher
from megatron_packed_sft.support.paths import redacted

UNFINISHED = ".upload.json"  # exists during an upload, and after one that was killed
_DATASET = "dataset.json"
# A reader opens the first of these that exists; the last one belongs to checkpoints.
_CLOSING = (_DATASET, json_document.MANIFEST, "training_state.json")
_MAX_LIST_BYTES = 64 << 20
_BLOCK = 16 << 20
_NUM_THREADS = 4
_NUM_THREADS_FOR_SMALL_FILES = 16
# s3fs takes 50 MiB, boto3 and the AWS command line 8 MiB; then come the parts of other clients and settings.
_PART_SIZES = tuple(size << 20 for size in (50, 8, 5, 10, 16, 32, 64, 100, 128, 512))
_TAG_OF_PARTS = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,4})")


class UploadReport(NamedTuple):
    """How many objects an upload sent, how many were there already, and how many old ones it removed."""

    num_sent: int
    num_kept: int
    num_removed: int
    num_bytes: int


@contextlib.contextmanager
def scratch_directory(near: Path | None = None) -> Iterator[Path]:
    """Make a directory for files on their way to a store, in TMPDIR or in `near`, and remove it after the block."""
    path = Path(tempfile.mkdtemp(prefix="packed-sft-upload-", dir=near))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def uploading(url: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a local path to write to, and publish its content under the URL at the end of the block.

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
    """Announce shards that many processes will send with `send_shard`, before `upload` sends the rest.

    A dataset that is published there becomes unreadable, and may be replaced.

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
    """Send the files of a shard that are not there yet, its manifest last; return the bytes sent.

    Every object is checked as by `upload`; objects that are no files of the shard are removed.
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
    """Send a file and check the object, whether or not it was there already."""
    _send(local, url, None, None)


def send_files(local: Path, url: str, names: Sequence[str]) -> int:
    """Send the files that are missing or different in a store, unchecked, and return how many.

    Args:
        local: a directory.
        url: of its copy.
        names: of the files, below it.
    """
    there = list_objects(url)
    changed = [name for name in names if name not in there or not is_same_file(local / name, there[name])]
    with ThreadPoolExecutor(_NUM_THREADS_FOR_SMALL_FILES, thread_name_prefix="packed-sft-send") as threads:
        list(threads.map(lambda name: upload_file(local / name, child(url, name)), changed))
    return len(changed)


def upload(
    local: Path,
    url: str,
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int], object] | None = None,
    elsewhere: Sequence[str] = (),
) -> UploadReport:
    """Publish a local shard, file or dataset directory under a URL.

    Every object is compared with its file after it was sent. One that is there already with the same content is not
    sent again.

    Args:
        local: the directory or the file.
        url: to publish it under.
        overwrite: replace other data that was published there; objects that no publication lists are never removed.
        on_bytes: called with the size of each file after it was checked.
        elsewhere: names of shards that other processes have sent, after `begin_upload` and `send_shard`.

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
        raise StorageIOError(f"{redacted(child(url, min(lost)))} was sent, but is missing now; run again")
    kept = {*names, UNFINISHED, *elsewhere, *(f"{name}/" for name in elsewhere)}
    stale = sorted(name for name in replaced & set(there) if not _is_covered(name, kept))
    is_whole = closing in there and not stale and UNFINISHED not in there
    if is_whole and all(_is_same(local / name, child(url, name), there.get(name)) for name in names):
        return UploadReport(0, len(names), 0, 0)
    write_object(child(url, UNFINISHED), json_document.render({"objects": sorted(replaced | kept)}))
    if closing in there:
        remove_object(child(url, closing))  # from here until the end, there is nothing that a reader would open
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
    """Remove what was published under a URL, whole or in part, and return how many objects; leave all others alone.

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
    if ours:  # as in an upload: after a crash, the next run knows what is ours
        write_object(child(url, UNFINISHED), json_document.render({"objects": ours}))
    for name in sorted(ours, key=lambda name: name != closing):  # not readable from the first one on
        remove_object(child(url, name))
    if ours or UNFINISHED in there:
        remove_object(child(url, UNFINISHED))
    return len(ours)


def refuse_existing(url: str, *, overwrite: bool = False) -> None:
    """Refuse a URL that holds anything but the remains of a killed upload, before hours of work."""
    refuse_read_only(url)
    there = list_objects(url)
    there.pop(TRIAL, None)
    if not there or overwrite or (UNFINISHED in there and not any(name in there for name in _CLOSING)):
        return
    raise _exists(url, there)


def refuse_unfinished(url: str, there: Collection[str] | None = None) -> None:
    """Refuse an unfinished upload, which would look like a folder of arrays.

    Args:
        url: of a dataset, a shard or a checkpoint.
        there: the names of the objects below it; None asks the store.
    """
    is_unfinished = UNFINISHED in there if there is not None else object_info(child(url, UNFINISHED)) is not None
    if is_unfinished and not any(name in (there or ()) for name in _CLOSING):
        raise StorageIOError(
            f"{redacted(url)} is incomplete: an upload to it is running or was killed; wait for it, or run the command "
            "that writes it again"
        )


def _files_below(local: Path) -> list[str]:
    found = sorted(
        os.path.relpath(os.path.join(folder, name), local) for folder, _, some in os.walk(local) for name in some
    )
    if not any(name in found for name in _CLOSING):
        raise ShardError(f"{local} has none of {', '.join(_CLOSING)}; it is incomplete, write it again")
    return found


def _in_order(names: Sequence[str], closing: str | None = None) -> Iterator[list[str]]:
    """Yield batches of files that may be sent at the same time; a document comes after everything that it lists."""
    manifests = [name for name in names if name.rpartition("/")[2] == json_document.MANIFEST and name != closing]
    yield sorted(set(names) - {closing, *manifests})
    yield manifests
    yield [] if closing is None else [closing]


def _refuse_others(
    url: str, names: Sequence[str], closing: str, there: dict[str, ObjectInfo], local: Path, *, overwrite: bool
) -> set[str]:
    """Return the names of the objects that may be replaced; refuse a target that holds any other."""
    ours = {UNFINISHED, TRIAL, *_listed(url, there)}
    published = next((name for name in _CLOSING if name in there), None)
    if published is not None:
        same = published == closing and _is_same(local / closing, child(url, closing), there[closing])
        if not same and not overwrite:
            raise _exists(url, there)
        ours |= _published_names(url, published)
        return ours | {name for name in names if name in there}
    others = {name for name in there if name not in names and not _is_covered(name, ours)}
    if others:
        shown = ", ".join(sorted(others)[:3])
        raise TargetExistsError(f"{redacted(url)} holds other objects ({shown}); choose another URL")
    return {name for name in there if _is_covered(name, ours)} | ours


def _is_covered(name: str, listed: Set[str]) -> bool:
    """Return whether a list names an object or one of its directories; those end with a slash."""
    parts = name.split("/")
    return name in listed or any("/".join(parts[:depth]) + "/" in listed for depth in range(1, len(parts)))


def _shard_of(name: str) -> str:
    """Return SPLIT/SHARD of SPLIT/SHARD/FILE."""
    return "/".join(name.split("/")[:2])


def _listed(url: str, there: dict[str, ObjectInfo]) -> set[str]:
    """Return what a running or killed upload announced."""
    if UNFINISHED not in there:
        return set()
    try:
        document = json_document.parse(read_object(child(url, UNFINISHED), _MAX_LIST_BYTES), UNFINISHED)
    except (ManifestError, StorageIOError):
        return set()
    found = document.get("objects")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _published_names(url: str, closing: str) -> set[str]:
    """Return the objects of a publication: those that its own documents name."""
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
            raise StorageIOError(
                f"{redacted(url)} is not what was sent; run again, and check that no other process writes there"
            )
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
    # No MD5, or one of something other than the content (encryption, parts): read it back.
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


def is_tag_of_parts(local: Path, tag: str) -> bool:
    """Return whether a tag proves that an object has the content of a local file.

    Example:
        >>> is_tag_of_parts(Path("not even opened"), "0123")
        False
    """
    found = _TAG_OF_PARTS.fullmatch(tag)
    if found is None:
        return False
    size, num_parts = local.stat().st_size, int(found[2])
    sizes = [one for one in _PART_SIZES if -(-size // one) == num_parts]
    return any(_tag(local, one) == tag for one in sizes)


def _tag(local: Path, part_size: int) -> str:
    parts = b""
    with open(local, "rb", buffering=0) as file:
        while True:
            digest, missing = hashlib.md5(usedforsecurity=False), part_size
            while missing and (block := file.read(min(1 << 20, missing))):
                digest.update(block)
                missing -= len(block)
            if missing == part_size:
                break
            parts += digest.digest()
            if missing:
                break
    return f"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(parts) // 16}"
