"""The inputs of a preparation: named sources, their files found and fingerprinted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import basename
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.splits import SPLITS
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.slices import FileSlice, scan_slices

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS_PER_FILE = 256 << 10, 32 << 20, 64


@dataclass(frozen=True)
class Source:
    """One named source of rows.

    Args:
        name: in statistics and provenance.
        paths: files, globs, URLs, or directories saved by Hugging Face `datasets`.
        schema: a name that `records.schemas` knows, or auto.
        mapping: dotted keys, for schema `mapping`.
        weight: how often its training rows are packed.
        split: where all of its rows go, or None to go by content.
    """

    name: str
    paths: tuple[str, ...]
    schema: str = "auto"
    mapping: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    split: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(f"sources.{self.name}: a source's name is letters, digits, '_', '.' and '-'")
        if not self.paths:
            raise InvalidInputError(f"sources.{self.name}.path names no file; give a path, a glob or a list")
        if not 0 < self.weight <= 1000:
            raise InvalidInputError(f"sources.{self.name}.weight is {self.weight}; it must be above 0 and at most 1000")
        if self.split is not None and self.split not in SPLITS:
            raise InvalidInputError(f"sources.{self.name}.split is {self.split!r}; choose one of {', '.join(SPLITS)}")


@dataclass(frozen=True)
class ScannedSource:
    """A source and the files it stands for."""

    source: Source
    files: tuple[InputFile, ...]

    def units(self) -> Iterator[tuple[FileSlice, int]]:
        """Its work, cut independently of how many processes there are; with each unit's share of its file's bytes."""
        for file in self.files:
            yield from _with_shares(file)

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """What decides its rows; files by name and content, so that the result does not depend on where they lie."""
        return {
            "schema": self.source.schema,
            "mapping": dict(self.source.mapping),
            "weight": self.source.weight,
            "split": self.source.split,
            "files": [
                {"name": basename(file.path), "size": file.size, "checksum": file.checksum} for file in self.files
            ],
        }


def slice_bytes(file: InputFile) -> int:
    """How much of a file is one unit: small enough to share among many processes, large enough to be worth a part."""
    return min(max(file.size // _UNITS_PER_FILE, _SMALLEST_UNIT), _LARGEST_UNIT)


def _with_shares(file: InputFile) -> Iterator[tuple[FileSlice, int]]:
    """Share a file's stored bytes among its units, for progress: nearly right for each, exact for all together."""
    num_read = num_given = 0

    def read(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    units = ((unit, num_read) for unit in scan_slices(file, slice_bytes(file), read))
    current = next(units, None)
    while current is not None:
        following = next(units, None)
        unit, num_read_for_it = current
        num_now = file.size if following is None else min(num_read_for_it, file.size)
        yield unit, num_now - num_given
        num_given = num_now
        current = following


def scan(sources: Sequence[Source], on_read: Callable[[int], None] | None = None) -> list[ScannedSource]:
    """Find and fingerprint the files of all sources; a file in two sources is an error."""
    scanned = [ScannedSource(source, tuple(find_files(source.paths, on_read))) for source in sources]
    owners: dict[str, str] = {}
    for one in scanned:
        for file in one.files:
            other = owners.setdefault(file.path, one.source.name)
            if other != one.source.name:
                raise InvalidInputError(
                    f"{file.path} belongs to the sources {other} and {one.source.name}; name it in one of them "
                    "(weight repeats its rows)"
                )
    return scanned
