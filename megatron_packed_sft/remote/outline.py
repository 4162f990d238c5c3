"""The outline of a directory in a store: a local directory with all files in their sizes, but few of their bytes.

Documents are whole. Array files are sparse: their header was read with a range request, the rest is a hole. So code
that looks at names, sizes, manifests and headers works on data of any size, for one request per file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.objects import ObjectInfo, list_objects, read_range
from megatron_packed_sft.remote.uploads import refuse_unfinished, scratch_directory
from megatron_packed_sft.support.array_files import MAX_HEADER
from megatron_packed_sft.support.atomic import os_errors, write_at
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted

_NUM_THREADS = 16
_SMALL = 64 << 10  # bytes; files up to this are read whole
_MAX_DOCUMENT = 64 << 20


class Outline:
    """A local directory that looks like one of a store.

    Args:
        url: of the directory.
        path: the local directory.
        objects: what is in the store.
    """

    def __init__(self, url: str, path: Path, objects: dict[str, ObjectInfo]) -> None:
        self.url = url
        self.path = path
        self._objects = objects
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(self._sketch, objects))

    @classmethod
    @contextlib.contextmanager
    def of(cls, url: str) -> Iterator[Outline]:
        """Make the outline of a URL in a scratch directory, and remove it after the block."""
        objects = list_objects(url)
        if not objects:
            raise InvalidInputError(f"{redacted(url)} does not exist; check the URL")
        for name in objects:
            child(url, name)  # refuses names that lead elsewhere
        refuse_unfinished(url, objects)
        with scratch_directory() as scratch:
            path = scratch / "outline"
            path.mkdir()
            outline = cls(url, path, objects)
            try:
                yield outline
            except PackedSFTError as error:
                error.args = tuple(outline.at_home(one) if isinstance(one, str) else one for one in error.args)
                raise

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[Path]:
        """Fill one file or directory of the outline, or "" for all, with all of its bytes while the block runs."""
        path = self.path / name
        prefix = f"{name}/" if name else ""
        inside = {one.removeprefix(prefix): info for one, info in self._objects.items() if one.startswith(prefix)}
        if name in self._objects:
            inside = {"": self._objects[name]}
        if not inside:
            yield path  # opening it raises the error that it is missing
            return
        aside = path.with_name(f"{path.name}.outline")
        os.rename(path, aside)
        files = {one: FileRecord(info.size, "") for one, info in inside.items()}
        try:
            download(child(self.url, name) if name else self.url, Contents(files, DEFAULT_ALGORITHM), path)
            yield path
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            os.rename(aside, path)

    def at_home(self, text: str) -> str:
        """Return a message about the outline as one about the store."""
        return text.replace(str(self.path), redacted(self.url))

    def _sketch(self, name: str) -> None:
        path, size = self.path / name, self._objects[name].size
        with os_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        is_document = name.endswith((".json", ".jsonl")) and size <= _MAX_DOCUMENT
        known = size if is_document or size <= _SMALL else MAX_HEADER
        data = read_range(child(self.url, name), 0, known) if known else b""
        with os_errors("write", path), open(path, "xb") as file:
            write_at(file.fileno(), data, 0)
            os.truncate(file.fileno(), size)
