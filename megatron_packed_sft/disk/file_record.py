"""What a manifest says of its files: size and content checksum of each, under fixed names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron_packed_sft.disk.checksum import DIGEST_LENGTHS
from megatron_packed_sft.disk.json_document import Fields
from megatron_packed_sft.errors import ManifestError

_MAX_BYTES = (1 << 62) - 1


class FileRecord(NamedTuple):
    """Size and content checksum of one file."""

    bytes: int
    checksum: str


def parse_file_records(values: Fields, names: Sequence[str]) -> tuple[str | None, dict[str, FileRecord] | None]:
    """The checksum algorithm and the record of each file; (None, None) for a manifest that has neither.

    Names come from the caller and never from the document: a document that lists others is refused.

    Example:
        >>> record = {"bytes": 3, "checksum": "06b05ab6733a618578af5f94892f3950"}
        >>> fields = Fields({"checksum_algorithm": "xxh3_128", "files": {"a.npy": record}}, "manifest.json")
        >>> parse_file_records(fields, ["a.npy"])[1]["a.npy"].bytes
        3
    """
    algorithm = values.optional_text("checksum_algorithm")
    listed = values.optional_object("files")
    if algorithm is None and listed is None:
        return None, None
    if algorithm is None or listed is None:
        raise values.error("files" if listed is None else "checksum_algorithm", "is missing beside the other")
    if algorithm not in DIGEST_LENGTHS:
        raise values.error("checksum_algorithm", f"is {algorithm!r}, not one of {', '.join(sorted(DIGEST_LENGTHS))}")
    if set(listed) != set(names):
        odd = sorted(set(listed) ^ set(names))[0]
        raise values.error("files", f"must list exactly {', '.join(names)}, but not so {odd[:80]!r}")
    digest = re.compile(f"[0-9a-f]{{{DIGEST_LENGTHS[algorithm]}}}")
    records = {}
    for name in names:
        record = listed[name]
        if not isinstance(record, dict):
            raise values.error(f"files.{name}", "is not an object")
        size = Fields(record, f"files.{name}").integer("bytes", 0, _MAX_BYTES)
        text = record.get("checksum")
        if not isinstance(text, str) or not digest.fullmatch(text):
            raise ManifestError(f"files.{name}: checksum is not {digest.pattern} of {algorithm}; restore the manifest")
        records[name] = FileRecord(size, text)
    return algorithm, records
