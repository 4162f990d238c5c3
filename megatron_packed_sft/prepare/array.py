"""A preparation in many calls, started by any scheduler: each encodes a share of the slices, the last one publishes.

    executor=array executor.index=0 executor.count=3      a third of the input
    executor=array executor.index=1 executor.count=3      another third, at any time, on any machine
    executor=array executor.index=2 executor.count=3      the last one
    executor=array                                        plan and publish

The calls meet in a work directory on a shared disk. Every slice has files and a receipt of its own, so the calls share
no writes but array.json, which says how many there are, and one receipt per input file.

All input files are put one after the other, in an order that mixes sources, and call I of N owns the I-th part of
their bytes: the slices whose first byte is in it. So a call reads only the files of its part. It notes the checksum and
the cuts of each, from which the last call knows all slices without reading any input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.prepare.counts import Counts
from megatron_packed_sft.prepare.sources import ScannedSource, Source, scan
from megatron_packed_sft.prepare.work_directory import WorkDirectory
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.slices import FileSlice
from megatron_packed_sft.remote.objects import list_objects, object_info
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url
from megatron_packed_sft.support.wording import plural

_RECEIPT = "array"


@dataclass(frozen=True)
class ArrayCall:
    """One call of an array.

    Args:
        index: of its share of the slices; None for the last call.
        count: of the shares; None in a last call that takes it from the others.
    """

    index: int | None
    count: int | None

    @classmethod
    def of(cls, config: PrepareConfig) -> ArrayCall | None:
        """Return the call of a configuration; None for another executor.

        Example:
            >>> from megatron_packed_sft.prepare.config import ExecutorConfig
            >>> ArrayCall.of(PrepareConfig(executor=ExecutorConfig("array", index=2, count=8)))
            ArrayCall(index=2, count=8)
        """
        index, count = config.executor.index, config.executor.count
        if config.executor.kind != "array":
            return None
        if count is not None and count < 1:
            raise InvalidInputError(f"executor.count is {count}; it must be at least 1")
        if index is not None and count is None:
            raise InvalidInputError(
                f"executor.index is {index}, but executor.count is missing; add the number of calls"
            )
        if index is not None and count is not None and not 0 <= index < count:
            raise InvalidInputError(
                f"executor.index is {index}; with executor.count={count} it must be from 0 to {count - 1}"
            )
        if config.limit is not None and not config.dry_run:
            raise InvalidInputError("limit takes one slice after the other; use executor=local for such a trial")
        return cls(index, count)

    def join(self, work: WorkDirectory, fingerprint: str) -> ArrayCall:
        """Agree with the other calls on how many there are, and return this one with that number.

        Args:
            work: where they meet.
            fingerprint: of the encode stage; calls with another input or other settings do not belong together.
        """
        with work.locked(_RECEIPT):
            noted = work.receipt(_RECEIPT, fingerprint)
            if noted is None:
                noted = self._begin(work, fingerprint)
        count = noted["count"]
        if self.count not in (None, count):
            raise InvalidInputError(
                f"executor.count is {self.count}, but earlier calls in {work.shown} had executor.count={count}; use "
                f"{count}, or remove {work.shown}/{_RECEIPT}.json while no call is running, to divide the slices anew"
            )
        if self.index is not None and not work.hold_lock(f"calls/{self.index}_of_{count}"):
            raise InvalidInputError(
                f"another call with executor.index={self.index} is working in {work.shown}; wait for it, or give every "
                "call an index of its own"
            )
        return replace(self, count=count)

    def _begin(self, work: WorkDirectory, fingerprint: str) -> dict[str, Any]:
        if self.index is None:
            others = " with this input and these settings" if work.receipt(_RECEIPT, None) else ""
            raise InvalidInputError(
                f"no call with executor.index has worked in {work.shown} yet{others}; run those first, or use "
                "executor=local"
            )
        if work.receipt(_RECEIPT, None) is not None and not work.exclude_others():
            raise InvalidInputError(
                f"calls with another input or other settings are working in {work.shown}; wait for them, or choose "
                "another output or work_dir"
            )
        noted = {"count": self.count}
        work.write_receipt(_RECEIPT, fingerprint, noted)
        work.admit_others()
        return noted


@dataclass(frozen=True)
class InputListing:
    """The files of all sources, before any byte of them was read.

    Args:
        sources: with the sizes of their files, and without checksums.
        states: path -> what changes when a file is written to; None where the file system or store does not tell.
    """

    sources: list[ScannedSource]
    states: dict[str, str | None]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> InputListing:
        """Find the files of all sources, and ask for their sizes."""
        states: dict[str, str | None] = {}
        found = []
        for one in scan(sources, with_checksums=False):
            files = []
            for file in one.files:
                size, states[file.path] = _size_and_state(file)
                files.append(replace(file, size=size))
            found.append(replace(one, files=tuple(files)))
        return cls(found, states)


@dataclass
class Share:
    """The part of the input that one call of an array owns.

    Args:
        listing: all files.
        count: of the calls.
        index: of this one; None owns everything.

    Example:
        >>> file = InputFile("a.jsonl", "jsonl", None, 100, "")
        >>> listing = InputListing([ScannedSource(Source("input", ("a.jsonl",)), (file,))], {})
        >>> share = Share(listing, count=4, index=1)
        >>> [share.owner(file, position) for position in (0, 30, 99)], share.owners_of(file)
        ([0, 1, 3], [0, 1, 2, 3])
    """

    listing: InputListing
    count: int
    index: int | None = None
    owners: dict[int, int] = field(init=False, default_factory=dict)  # slice -> call, of those that were asked for
    _starts: dict[str, int] = field(init=False, default_factory=dict)
    _sizes: dict[str, int] = field(init=False, default_factory=dict)
    _total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        files = [file for one in self.listing.sources for file in one.files]
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
        """Return whether any slice of a file may belong to this call."""
        return self.index is None or self.index in self.owners_of(file)

    def takes(self, number: int, file: InputFile, position: int) -> bool:
        """Return whether a slice belongs to this call, and remember its owner.

        Args:
            number: of the slice.
            file: that it is of.
            position: of its first byte.
        """
        owner = self.owners[number] = self.owner(file, position)
        return self.index in (None, owner)

    def scan_own(self, work: WorkDirectory, on_read: Callable[[int], None]) -> list[ScannedSource]:
        """Return the sources with the checksums of the files that this call reads, if possible as others noted them."""
        found = []
        for one in self.listing.sources:
            files, known = [], {}
            for file in one.files:
                if self.has_part_of(file):
                    noted = self._noted(work, file)
                    file = _with_checksum(file, noted) if noted else find_files(file.path, on_read)[0]
                    if noted and not noted["carried"]:
                        known[file.path] = _slices(file, noted)
                files.append(file)
            found.append(replace(one, files=tuple(files), known=known))
        return found

    def scanned_by_all(self, work: WorkDirectory) -> list[ScannedSource]:
        """Return the sources as the calls noted them; this reads only files that do not show when they change.

        Files that no call has read, and files that changed since, are an error.
        """
        missing: list[InputFile] = []
        found = []
        for one in self.listing.sources:
            files, known = [], {}
            for file in one.files:
                noted = self._noted(work, file)
                if self.listing.states[file.path] is None:
                    files.append(find_files(file.path)[0])
                elif noted is None:
                    missing.append(file)
                else:
                    files.append(_with_checksum(file, noted))
                    known[file.path] = _slices(files[-1], noted)
            found.append(replace(one, files=tuple(files), known=known))
        if missing:
            raise self._unread(work, missing)
        return found

    def _unread(self, work: WorkDirectory, missing: Sequence[InputFile]) -> InvalidInputError:
        calls = sorted({index for file in missing for index in self.owners_of(file)})
        changed = next((file for file in missing if work.receipt(_name(file), None) is not None), None)
        if changed is not None:
            problem = f"{changed.shown} changed after a call had read it"
        else:
            num_files = len(self._starts)
            problem = (
                f"{len(missing):,} of {plural(num_files, 'file')} have not been read yet, such as {missing[0].shown}"
            )
        return InvalidInputError(f"{problem}; {_run_again(calls, self.count)}")

    def note(self, work: WorkDirectory, file: InputFile, cuts: Sequence[Sequence[int]], *, carried: bool) -> None:
        """Write the receipt of a file for the other calls.

        Args:
            work: where receipts are.
            file: with its checksum.
            cuts: [start, stop, first record, bytes] of its slices.
            carried: workers cannot read its slices by themselves.
        """
        state = self.listing.states[file.path]
        if state is None:
            return
        noted = {"path": file.shown, "size": file.size, "checksum": file.checksum, "carried": carried, "slices": cuts}
        if work.receipt(_name(file), state) != noted:
            file.refuse_changed()
            work.write_receipt(_name(file), state, noted)

    def _noted(self, work: WorkDirectory, file: InputFile) -> dict[str, Any] | None:
        state = self.listing.states[file.path]
        return None if state is None else work.receipt(_name(file), state)


def not_encoded(missing: Sequence[int], num_slices: int, count: int) -> InvalidInputError:
    """Return the error for slices that no call has encoded yet, with what to run again.

    Args:
        missing: the call that each of them belongs to.
        num_slices: of all calls.
        count: of the calls.
    """
    slices = f"{len(missing):,} of {plural(num_slices, 'slice')} are not encoded"
    return InvalidInputError(f"{slices}; {_run_again(sorted(set(missing)), count)}")


def _run_again(calls: Sequence[int], count: int) -> str:
    return (
        f"run executor.index={ranges(calls)} of executor.count={count} again, then this call (or executor=local, which "
        "encodes the rest itself)"
    )


@dataclass(frozen=True)
class ShareReport:
    """What a call of an array did."""

    index: int
    count: int
    num_slices: int
    num_reused: int
    counts: Counts

    def lines(self) -> list[str]:
        """Return it as text."""
        num_encoded = self.num_slices - self.num_reused
        tokens = sum(one.num_tokens for one in self.counts.splits.values())
        return [
            f"encode   share {self.index} of {self.count}: {plural(self.num_slices, 'slice')}: "
            f"{self.num_reused:,} reused, {num_encoded:,} encoded",
            f"         {plural(self.counts.num_rows, 'record')}, {plural(tokens, 'token')}",
            "When all calls are done, run the same command without executor.index to plan and publish.",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {**vars(self), "counts": self.counts.to_json()}


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as schedulers take them.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _with_checksum(file: InputFile, noted: dict[str, Any]) -> InputFile:
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
