"""Which call of an array reads which files, and what the calls tell each other of the files that they read.

All files lie one after the other on a line of bytes, in an order that mixes sources, and call I of N owns the I-th part
of that line. A slice belongs to whoever owns its first byte. So a call reads the files of its part only, for checksums,
cuts and records, and notes a receipt per file; the last call takes checksums and cuts from those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.array import ranges
from megatron_packed_sft.prepare.sources import ScannedSource, Source, scan
from megatron_packed_sft.prepare.work_directory import WorkDirectory
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.slices import FileSlice
from megatron_packed_sft.remote.objects import list_objects, object_info
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url
from megatron_packed_sft.support.wording import plural


@dataclass(frozen=True)
class LookedAt:
    """The files of all sources, of which no byte was read.

    Args:
        sources: with the sizes of their files, and without checksums.
        states: path -> what changes when a file is written to; None where nobody can tell.
    """

    sources: list[ScannedSource]
    states: dict[str, str | None]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> LookedAt:
        """Find the files of all sources, and ask for their sizes."""
        states: dict[str, str | None] = {}
        looked = []
        for one in scan(sources, with_checksums=False):
            files = []
            for file in one.files:
                size, states[file.path] = _size_and_state(file)
                files.append(replace(file, size=size))
            looked.append(replace(one, files=tuple(files)))
        return cls(looked, states)


@dataclass
class Share:
    """The part of the input that one call of an array owns.

    Args:
        looked: all files.
        count: of the calls.
        index: of this one; None owns everything.

    Example:
        >>> file = InputFile("a.jsonl", "jsonl", None, 100, "")
        >>> looked = LookedAt([ScannedSource(Source("input", ("a.jsonl",)), (file,))], {})
        >>> share = Share(looked, count=4, index=1)
        >>> [share.owner(file, position) for position in (0, 30, 99)], share.owners_of(file)
        ([0, 1, 3], [0, 1, 2, 3])
    """

    looked: LookedAt
    count: int
    index: int | None = None
    owners: dict[int, int] = field(init=False, default_factory=dict)  # slice -> call, of those that were asked for
    _starts: dict[str, int] = field(init=False, default_factory=dict)
    _sizes: dict[str, int] = field(init=False, default_factory=dict)
    _total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        files = [file for one in self.looked.sources for file in one.files]
        # Mixed, because one source may take longer per byte than another; by number, since paths differ among nodes.
        for _, file in sorted(enumerate(files), key=lambda one: checksum(str(one[0]).encode())):
            self._starts[file.path], self._sizes[file.path] = self._total, max(1, file.size)
            self._total += self._sizes[file.path]

    def owner(self, file: InputFile, position: int) -> int:
        """Return the call that owns a byte of a file."""
        return min(self.count - 1, (self._starts[file.path] + position) * self.count // self._total)

    def owners_of(self, file: InputFile) -> list[int]:
        """Return the calls that own a part of a file."""
        return list(range(self.owner(file, 0), self.owner(file, self._sizes[file.path] - 1) + 1))

    def has_part_of(self, file: InputFile) -> bool:
        """Whether any slice of a file may be this call's."""
        return self.index is None or self.index in self.owners_of(file)

    def takes(self, number: int, file: InputFile, position: int) -> bool:
        """Whether a slice is this call's; its owner is remembered.

        Args:
            number: of the slice.
            file: that it is of.
            position: of its first byte.
        """
        owner = self.owners[number] = self.owner(file, position)
        return self.index in (None, owner)

    def of_this_call(self, work: WorkDirectory, on_read: Callable[[int], None]) -> list[ScannedSource]:
        """Return the sources with the checksums of the files that this call reads.

        Args:
            work: where the receipts of files are.
            on_read: called with the number of bytes after each block.
        """
        found = []
        for one in self.looked.sources:
            files, known = [], {}
            for file in one.files:
                if self.has_part_of(file):
                    noted = self._noted(work, file)
                    file = _as_noted(file, noted) if noted else find_files(file.path, on_read)[0]
                    if noted and not noted["carried"]:
                        known[file.path] = _slices(file, noted)
                files.append(file)
            found.append(replace(one, files=tuple(files), known=known))
        return found

    def joined(self, work: WorkDirectory, on_read: Callable[[int], None]) -> list[ScannedSource]:
        """Return the sources as all calls together found them; only files whose changes nobody can tell are read.

        Files that no call has read, and files that were written to since, are an error.
        """
        missing: list[InputFile] = []
        found = []
        for one in self.looked.sources:
            files, known = [], {}
            for file in one.files:
                noted = self._noted(work, file)
                if self.looked.states[file.path] is None:
                    files.append(find_files(file.path, on_read)[0])
                elif noted is None:
                    missing.append(file)
                else:
                    files.append(_as_noted(file, noted))
                    known[file.path] = _slices(files[-1], noted)
            found.append(replace(one, files=tuple(files), known=known))
        if missing:
            raise self._unread(work, missing)
        return found

    def _unread(self, work: WorkDirectory, missing: Sequence[InputFile]) -> InvalidInputError:
        indices = sorted({index for file in missing for index in self.owners_of(file)})
        changed = next((file for file in missing if work.receipt(_name(file), None) is not None), None)
        if changed is not None:
            what = f"{changed.shown} changed after a call had read it"
        else:
            num_files = len(self._starts)
            what = f"{len(missing):,} of {plural(num_files, 'file')} are not read yet, such as {missing[0].shown}"
        return InvalidInputError(
            f"{what}; run executor.index={ranges(indices)} of executor.count={self.count} again, then this call (or "
            "executor=local, which encodes the rest itself)"
        )

    def note(self, work: WorkDirectory, file: InputFile, slices: Sequence[tuple[FileSlice, int]]) -> None:
        """Tell the other calls what a file is and how it is cut, once all of it was read."""
        state = self.looked.states[file.path]
        if state is None:
            return
        noted = {
            "path": file.shown,
            "size": file.size,
            "checksum": file.checksum,
            "carried": any(one.payload is not None for one, _ in slices),
            "slices": [[one.start, one.stop, one.first_record, num_bytes] for one, num_bytes in slices],
        }
        if work.receipt(_name(file), state) != noted:
            file.refuse_changed()
            work.write_receipt(_name(file), state, noted)

    def _noted(self, work: WorkDirectory, file: InputFile) -> dict[str, Any] | None:
        state = self.looked.states[file.path]
        if state is not None:
            return work.receipt(_name(file), state)
        return None


def _as_noted(file: InputFile, noted: dict[str, Any]) -> InputFile:
    return replace(file, size=noted["size"], checksum=noted["checksum"])


def _name(file: InputFile) -> str:
    return f"scan/{checksum(file.path.encode())[:16]}"


def _slices(file: InputFile, noted: dict[str, Any]) -> list[tuple[FileSlice, int]]:
    return [
        (FileSlice(file, number, start, stop, first_record), num_bytes)
        for number, (start, stop, first_record, num_bytes) in enumerate(noted["slices"])
    ]


def _size_and_state(file: InputFile) -> tuple[int, str | None]:
    """Return the stored bytes of an input, and what changes when it is written to."""
    if file.format == "hf_dataset":
        if is_url(file.path):
            return sum(info.size for info in list_objects(file.path).values()), None
        return sum(entry.stat().st_size for entry in os.scandir(file.path)), None
    if is_url(file.path):
        info = object_info(file.path)
        return (0, None) if info is None else (info.size, f"{info.size} {info.tag}" if info.tag else None)
    status = os.stat(file.path)
    return status.st_size, f"{status.st_size} {status.st_mtime_ns}"
