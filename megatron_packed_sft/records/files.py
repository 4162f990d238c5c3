"""The input files of a run: paths, globs and URLs to a checked list with formats and checksums."""

from __future__ import annotations

import glob
import json
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.streams import read_blocks, reading
from megatron_packed_sft.remote.filesystem import base_name, file_system
from megatron_packed_sft.support.paths import is_url, redacted

Format = Literal["jsonl", "json", "parquet", "hf_dataset"]
Compression = Literal["gzip", "zstd"]

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_KNOWN = f"{' '.join(_FORMATS)}, each JSON one also with {' or '.join(_COMPRESSIONS)}"
# What `datasets.save_to_disk` leaves in a folder.
_HF_STATE = "state.json"
_HF_INFO = "dataset_info.json"
_HF_SPLITS = "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read, or one folder that `datasets.save_to_disk` wrote.

    Args:
        path: absolute local path, or URL.
        format: by suffix; a `.json` file that does not begin with `[` is JSON lines.
        compression: of JSON files; None for none.
        size: in bytes, as stored.
        checksum: xxh3_128 of the stored bytes, in hex.
        modified: modification time in nanoseconds, taken before the checksum; None if unknown.
    """

    path: str
    format: Format
    compression: Compression | None
    size: int
    checksum: str
    modified: int | None = None

    @property
    def name(self) -> str:
        """Its last name, without folders and without the query of a URL."""
        return base_name(self.path) if is_url(self.path) else posixpath.basename(self.path)

    @property
    def shown(self) -> str:
        """Its path without credentials: for whatever is printed or kept."""
        return redacted(self.path)

    def refuse_changed(self) -> None:
        """Raise an error if the file was written to since it was found."""
        if self.modified is not None and _modified(self.path) != self.modified:
            raise InvalidInputError(f"{self.path} changed while it was being read; run again when nothing writes to it")


def find_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    on_read: Callable[[int], None] | None = None,
    *,
    with_checksums: bool = True,
) -> list[InputFile]:
    """Find the files of a run, in the order given; matches of a glob are sorted.

    Every file is read once for its checksum, unless nobody needs it.

    Args:
        paths: files, globs (`**` descends into folders), folders saved by `datasets`, fsspec URLs, or a list of these.
        on_read: called with the number of bytes after each block.
        with_checksums: False for a quick look: no file is read, and size and checksum are empty.

    Example:
        >>> import tempfile, pathlib
        >>> home = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (home / "a.jsonl").write_text('{"text": "Hello"}')
        >>> [file.format for file in find_files(f"{home}/*.jsonl")]
        ['jsonl']
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise InvalidInputError("no input files; give at least one path")
    found = [path for pattern in given for path in expand_path(os.fspath(pattern))]
    for path, num_times in Counter(found).items():
        if num_times > 1:
            raise InvalidInputError(
                f"{path} is listed {num_times} times; list it once (weight repeats the records of a source)"
            )
    return [_inspect(path, (on_read or _ignore) if with_checksums else None) for path in found]


def _ignore(num_bytes: int) -> None:
    """No-op progress callback."""


def expand_path(pattern: str) -> list[str]:
    """Return the files that a path, a glob or a URL stands for, sorted; at least one."""
    if is_url(pattern) and not pattern.startswith("file://"):
        with reading(pattern):
            system, path = file_system(pattern)
            if system.exists(path):
                return [pattern]
            found = [str(system.unstrip_protocol(name)) for name in sorted(system.glob(path))]
    else:
        path = os.path.abspath(pattern.removeprefix("file://"))
        if os.path.lexists(path):
            return [path]
        found = sorted(glob.glob(path, recursive=True))
        if "**" in path:  # also matches folders
            found = [name for name in found if not os.path.isdir(name)]
    if not found:
        raise InvalidInputError(f"{pattern} does not exist and matches no file; check the path")
    return found


def _inspect(path: str, on_read: Callable[[int], None] | None) -> InputFile:
    if path != path.encode("utf-8", "replace").decode():
        raise InvalidInputError(f"{path!r} is not valid UTF-8, so a manifest cannot record it; rename it")
    if _is_folder(path):
        return _inspect_folder(path, on_read)
    stem, suffix = posixpath.splitext((path.split("?")[0] if is_url(path) else path).lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = posixpath.splitext(stem)[1]
    file_format = _FORMATS.get(suffix)
    if file_format is None or (compression and file_format == "parquet"):
        raise InvalidInputError(f"{path} has no known format; rename it to one of {_KNOWN}")
    if file_format == "json" and not _begins_an_array(path, compression):
        file_format = "jsonl"
    modified = None if is_url(path) else _modified(path)
    size, checksum = (0, "") if on_read is None else size_and_checksum([path], on_read)
    return InputFile(path, file_format, compression, size, checksum, modified)


def _modified(path: str) -> int:
    with reading(path):
        return os.stat(path).st_mtime_ns


def _inspect_folder(path: str, on_read: Callable[[int], None] | None) -> InputFile:
    names = _names_in(path)
    if _HF_SPLITS in names:
        splits = ", ".join(_strings_in(f"{path}/{_HF_SPLITS}", lambda document: document["splits"]))
        raise InvalidInputError(f"{path} holds the splits {splits}; give one of them, such as {path}/train")
    if not {_HF_STATE, _HF_INFO} <= names:
        raise InvalidInputError(
            f"{path} is a folder that `datasets.save_to_disk` did not write; give its files, such as {path}/*.jsonl"
        )
    data_files = _strings_in(
        f"{path}/{_HF_STATE}", lambda document: [entry["filename"] for entry in document["_data_files"]]
    )
    files = [f"{path}/{name}" for name in (_HF_STATE, _HF_INFO, *data_files)]
    size, checksum = (0, "") if on_read is None else size_and_checksum(files, on_read)
    return InputFile(path, "hf_dataset", None, size, checksum)


def _is_folder(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    if path.startswith(("http://", "https://")):  # a page of links is no folder, and asking would fetch it whole
        return False
    system, name = file_system(path)
    with reading(path):
        return bool(system.isdir(name))


def _names_in(folder: str) -> set[str]:
    with reading(folder):
        if not is_url(folder):
            return set(os.listdir(folder))
        system, name = file_system(folder)
        return {posixpath.basename(entry.rstrip("/")) for entry in system.ls(name, detail=False)}


def _strings_in(path: str, select: Callable[[Any], list[Any]]) -> list[str]:
    """Return the selected strings of a file that `datasets` wrote."""
    text = b"".join(read_blocks(path))
    try:
        found = select(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not what `datasets` writes ({error!r}); save the dataset again") from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInputError(f"{path} is not what `datasets` writes; save the dataset again")
    return found


def _begins_an_array(path: str, compression: Compression | None) -> bool:
    for block in read_blocks(path, compression):
        if text := block.removeprefix(b"\xef\xbb\xbf").lstrip():
            return text.startswith(b"[")
    return False


def size_and_checksum(paths: list[str], on_read: Callable[[int], None] = _ignore) -> tuple[int, str]:
    """Return the stored bytes of some files together, and one checksum of them."""
    checksum = xxhash.xxh3_128()
    size = 0
    for block in _all_blocks(paths):
        checksum.update(block)
        size += len(block)
        on_read(len(block))
    return size, checksum.hexdigest()


def _all_blocks(paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        yield from read_blocks(path)
