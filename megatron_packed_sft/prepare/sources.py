"""The inputs of a preparation: named sources with their files, and which split each record goes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.record import MAX_RECORD_BYTES
from megatron_packed_sft.records.schemas.registry import TAKES
from megatron_packed_sft.records.slices import FileSlice, scan_slices

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
_RANGE = 1 << 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SMALLEST_SLICE, _LARGEST_SLICE, _SLICES_PER_FILE = 1 << 20, 32 << 20, 64


@dataclass(frozen=True)
class Source:
    """One named source of records.

    Args:
        name: in statistics and provenance.
        paths: files, globs, URLs, or directories saved by Hugging Face `datasets`.
        schema: a name that `records.schemas` knows, or auto.
        mapping: dotted keys, for schema `mapping`.
        weight: how often its training records are packed.
        split: the split of all its records, or None to go by content.
        take: the side of preference data that is taken, or None to refuse such data.
        max_record_bytes: records with more are errors, and are not parsed.
    """

    name: str
    paths: tuple[str, ...]
    schema: str = "auto"
    mapping: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    split: str | None = None
    take: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"sources.{self.name}: the name of a source may have letters, digits, '_', '.' and '-'"
            )
        if self.max_record_bytes < 1:
            raise InvalidInputError(f"max_record_bytes is {self.max_record_bytes}; it must be a positive integer")
        if not self.paths:
            raise InvalidInputError(f"sources.{self.name}.path names no file; give a path, a glob or a list")
        if not 0 < self.weight <= 1000:
            raise InvalidInputError(f"sources.{self.name}.weight is {self.weight}; it must be above 0 and at most 1000")
        if self.split is not None and self.split not in SPLITS:
            raise InvalidInputError(f"sources.{self.name}.split is {self.split!r}; choose one of {', '.join(SPLITS)}")
        if self.take is not None and self.take not in TAKES:
            raise InvalidInputError(f"sources.{self.name}.take is {self.take!r}; choose {', '.join(TAKES)} or null")
        if self.take is not None and (self.schema != "auto" or self.mapping):
            raise InvalidInputError(
                f"sources.{self.name}.take goes with schema auto, since a schema or a mapping says what is taken; "
                "set one of them"
            )

    @property
    def unusual(self) -> dict[str, Any]:
        """The options that decide its records, without those that have their defaults."""
        return {
            **({"take": self.take} if self.take else {}),
            **({} if self.max_record_bytes == MAX_RECORD_BYTES else {"max_record_bytes": self.max_record_bytes}),
        }


@dataclass(frozen=True)
class ScannedSource:
    """A source and the files it stands for.

    Args:
        source: as it is configured.
        files: with their checksums, unless only looked at.
        known: path -> the slices of files that another call of an array has cut, without their content.
    """

    source: Source
    files: tuple[InputFile, ...]
    known: Mapping[str, Sequence[tuple[FileSlice, int]]] = field(default_factory=dict)

    def slices_of(self, file: InputFile) -> Iterator[tuple[FileSlice, int]]:
        """Yield the slices of a file, each with its share of the bytes; the cuts depend on the file alone."""
        return (
            iter(self.known[file.path]) if file.path in self.known else _with_shares(file, self.source.max_record_bytes)
        )

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return everything that decides its records; files by name and content, whatever their directory."""
        return {
            "schema": self.source.schema,
            "mapping": dict(self.source.mapping),
            "weight": self.source.weight,
            "split": self.source.split,
            **self.source.unusual,
            "files": [{"name": file.name, "size": file.size, "checksum": file.checksum} for file in self.files],
        }


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Held-out shares, drawn by a hash of a record's content: adding or reordering records moves no other one.

    Args:
        validation_fraction: share of the records that go to the validation split.
        test_fraction: share of the records that go to the test split.

    Example:
        >>> rule = SplitRule(validation_fraction=0.5)
        >>> rule.split_of(b"one record") == rule.split_of(b"one record")
        True
    """

    validation_fraction: float = 0.0
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInputError(f"split.{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.validation_fraction + self.test_fraction >= 1:
            raise InvalidInputError("split.validation_fraction and split.test_fraction leave nothing to train on")

    @property
    def holds_out(self) -> bool:
        """Whether any record is held out by this rule."""
        return self.validation_fraction + self.test_fraction > 0

    def split_of(self, content: bytes) -> str:
        """Return the split of the record with this content hash."""
        draw = self._draw(content, 0)
        if draw < self.validation_fraction:
            return VALIDATION
        return TEST if draw < self.validation_fraction + self.test_fraction else TRAIN

    def num_copies(self, content: bytes, weight: float) -> int:
        """Return how often a training record of a source with this weight is packed."""
        whole = int(weight)
        return whole + (self._draw(content, 1) < weight - whole)

    def _draw(self, content: bytes, purpose: int) -> float:
        """Return a number from 0 to 1 that depends on the content and on what it is for."""
        return xxhash.xxh3_64_intdigest(content + bytes([purpose])) / _RANGE


def slice_bytes(file: InputFile) -> int:
    """Return the size of a file's slices: small enough to divide among processes, large enough for a part each."""
    return min(max(file.size // _SLICES_PER_FILE, _SMALLEST_SLICE), _LARGEST_SLICE)


def _with_shares(file: InputFile, max_record_bytes: int) -> Iterator[tuple[FileSlice, int]]:
    """Yield the slices of a file with about their shares of its stored bytes, which add up exactly, for progress."""
    num_read = num_given = 0

    def read(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    found = scan_slices(file, slice_bytes(file), read, max_record_bytes=max_record_bytes)
    slices = ((one, num_read) for one in found)
    current = next(slices, None)
    while current is not None:
        following = next(slices, None)
        file_slice, num_read_for_it = current
        num_now = file.size if following is None else min(num_read_for_it, file.size)
        yield file_slice, num_now - num_given
        num_given = num_now
        current = following


def scan(
    sources: Sequence[Source], on_read: Callable[[int], None] | None = None, *, with_checksums: bool = True
) -> list[ScannedSource]:
    """Return the sources with their files and checksums; a file in two sources is an error."""
    scanned = [
        ScannedSource(source, tuple(find_files(source.paths, on_read, with_checksums=with_checksums)))
        for source in sources
    ]
    owners: dict[str, str] = {}
    for one in scanned:
        for file in one.files:
            other = owners.setdefault(file.path, one.source.name)
            if other != one.source.name:
                raise InvalidInputError(
                    f"{file.shown} belongs to the sources {other} and {one.source.name}; name it in one of them "
                    "(weight repeats its records)"
                )
    return scanned
