"""store.json: which parts a token store has, in order."""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.support import json_document

STORE = "store.json"
STORE_FORMAT = "token_store_index_v1"
MAX_STORE_BYTES = 64 << 20
PART_NAME = re.compile(r"part_[0-9]{6,}")
_MOST = (1 << 62) - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ListedPart(NamedTuple):
    """A part as store.json lists it."""

    name: str
    manifest_checksum: str
    num_sequences: int | None = None


def parse_store(data: bytes, file: str) -> list[ListedPart]:
    """Return the parts that a store.json lists; names become paths, so only plain ones pass.

    Args:
        data: its bytes.
        file: its name, for messages.
    """
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    listed = document.get("parts")
    if values.text("format") != STORE_FORMAT or json_document.SELF_CHECKSUM not in document:
        raise ManifestError(f"{file} is not the index of a token store; restore it or write the store again")
    if not isinstance(listed, list) or not listed:
        raise values.error("parts", "is not a list of parts")
    parts = []
    for number, entry in enumerate(listed):
        fields = json_document.Fields(entry if isinstance(entry, dict) else {}, f"{file}: parts[{number}]")
        part = ListedPart(
            fields.text("name"), fields.text("manifest_checksum"), fields.optional_integer("num_sequences", 1, _MOST)
        )
        if not PART_NAME.fullmatch(part.name) or not _DIGEST.fullmatch(part.manifest_checksum):
            raise fields.error("name or manifest_checksum", "is not of the right form")
        parts.append(part)
    return parts
