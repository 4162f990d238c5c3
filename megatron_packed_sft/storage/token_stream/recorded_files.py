"""The files that the meta.json of a token cache lists, and whether they still have their sizes and checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.storage.validation_report import Finding, ValidationReport
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import Fields, FileRecord, parse, parse_file_records

_MAX_BYTES = 16 << 20


class RecordedFiles:
    """What a meta.json lists; nothing if it lists no files or is not there.

    Args:
        path: of the meta.json.

    Attributes:
        algorithm: of the checksums, or None.
        files: size and checksum by the path of each file.
    """

    def __init__(self, path: Path) -> None:
        self.algorithm: str | None = None
        self.files: dict[Path, FileRecord] = {}
        if not path.exists():
            return
        with os_errors("read", path), open(path, "rb") as file:
            document = parse(file.read(_MAX_BYTES), str(path))
        names = list(Fields(document, str(path)).optional_object("files") or {})
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ManifestError(f"{path}: files names {name!r}, which lies outside; restore the original")
        self.algorithm, records = parse_file_records(Fields(document, str(path)), names)
        self.files = {path.parent / name: record for name, record in (records or {}).items()}

    def inside(self, folder: Path) -> dict[Path, FileRecord]:
        """Return the files that lie directly in a folder."""
        return {path: record for path, record in self.files.items() if path.parent == folder}

    def findings(self, folder: Path, report: ValidationReport) -> Iterator[Finding]:
        """Yield what is wrong with the files of a folder: missing, of another size, or with other content."""
        for path, record in self.inside(folder).items():
            if not path.is_file():
                yield Finding(str(path), "is missing, but its meta.json lists it")
            elif (size := path.stat().st_size) != record.bytes:
                yield Finding(str(path), f"has {size:,} bytes, but its meta.json says {record.bytes:,}")
            elif report.level == "full" and self.algorithm is not None:
                found = file_checksum(path, self.algorithm)
                if found != record.checksum:
                    yield Finding(str(path), "its content does not match its checksum in meta.json; copy it again")
