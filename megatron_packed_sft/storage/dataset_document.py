"""Parse and check dataset.json: names that become paths are plain names, and every number is in its range."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed_sft.errors import ManifestError, UnsupportedFormatError
from megatron_packed_sft.storage.figures import EXTREMES, SUM_OF_WEIGHTS, TOTALS, BinFigures
from megatron_packed_sft.storage.interface import Storage
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_NUM_BINS
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, storage_named
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.json_document import FileRecord

DATASET = "dataset.json"
CARD = "README.md"
FORMAT = "packed_sft_dataset_v1"
VERSION = "1.0"
MAX_DATASET_BYTES = 64 << 20
_MAX_NUMBER = (1 << 62) - 1
# Split and shard names become paths, so only plain names are allowed: no separator, no leading dot.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as dataset.json lists it; `num_bytes` is None where the shard's own manifest knows its size."""

    name: str
    num_bins: int
    checksum: str
    num_bytes: int | None = None


class DatasetDocument(NamedTuple):
    """The content of a dataset.json."""

    storage: Storage
    splits: dict[str, tuple[ShardEntry, ...]]
    figures: dict[str, BinFigures]
    provenance: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def parse_dataset(data: bytes, file: str) -> DatasetDocument:
    """Parse and check the bytes of a dataset.json; `file` is its name in messages."""
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    kind, version = values.text("format"), values.text("version")
    if (kind, version) != (FORMAT, VERSION):
        raise UnsupportedFormatError(
            f"{file}: format {kind!r} version {version!r} is not {FORMAT} {VERSION}; update megatron_packed_sft"
        )
    if json_document.SELF_CHECKSUM not in document:
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    listed = values.optional_object("splits")
    if not listed:
        raise values.error("splits", "is missing or empty")
    storage = storage_named(values.optional_text("storage") or DEFAULT_STORAGE)
    splits: dict[str, tuple[ShardEntry, ...]] = {}
    figures: dict[str, BinFigures] = {}
    for split, description in listed.items():
        splits[split], figures[split] = _parse_split(storage, split, description, file)
    provenance = values.optional_object("provenance") or {}
    files = _parse_files(values, splits)
    return DatasetDocument(storage, splits, figures, provenance, files)


def _parse_files(values: json_document.Fields, splits: Collection[str]) -> Mapping[str, FileRecord]:
    """Return the records of README.md and of the files beside shards."""
    listed = values.optional_object("files")
    if listed is None:
        return {}
    for name in listed:
        if name != CARD and not _is_beside_shards(name, splits):
            raise values.error("files", f"lists {name[:80]!r}, which is neither {CARD} nor a file beside shards")
    return json_document.parse_file_records(values, list(listed))[1]


def _is_beside_shards(path: str, splits: Collection[str]) -> bool:
    split, _, name = path.partition("/")
    return split in splits and PLAIN_NAME.fullmatch(name) is not None


def _parse_split(
    storage: Storage, split: str, description: Any, file: str
) -> tuple[tuple[ShardEntry, ...], BinFigures]:
    if not PLAIN_NAME.fullmatch(split):
        raise ManifestError(f"{file}: the split {split[:80]!r} is not a plain name; restore the file from the original")
    where = f"{file}: splits.{split[:80]}"
    shards = description.get("shards") if isinstance(description, dict) else None
    if not isinstance(shards, list) or not shards:
        raise ManifestError(f"{where} has no list of shards; restore the file from the original")
    entries = tuple(_parse_entry(storage, listed, f"{where}.shards[{number}]") for number, listed in enumerate(shards))
    if len({entry.name for entry in entries}) != len(entries):
        raise ManifestError(f"{where} lists a shard twice; restore the file from the original")
    fields = json_document.Fields(description, where)
    numbers: dict[str, Any] = {
        name: fields.optional_integer(name, 0, _MAX_NUMBER) for name in (*TOTALS, *EXTREMES, "vocab_size", "pad_id")
    }
    if numbers["pack_size"] is None:
        raise fields.error("pack_size", "is missing")
    numbers["num_bins"] = sum(entry.num_bins for entry in entries)
    return entries, BinFigures(
        **numbers,
        tokenizer=fields.optional_object("tokenizer"),
        chat_template_fingerprint=fields.optional_text("chat_template_fingerprint"),
        has_weights=SUM_OF_WEIGHTS in description,
        sum_loss_weights=fields.optional_number(SUM_OF_WEIGHTS),
    )


def _parse_entry(storage: Storage, listed: Any, place: str) -> ShardEntry:
    if not isinstance(listed, dict):
        raise ManifestError(f"{place} is not an object; restore the file from the original")
    fields = json_document.Fields(listed, place)
    key = checksum_key(storage)
    name, digest = fields.text("name"), fields.text(key)
    if not PLAIN_NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
        raise fields.error(f"name or {key}", "is malformed")
    num_bytes = fields.optional_integer("bytes", 0, _MAX_NUMBER)
    return ShardEntry(name, fields.integer("num_bins", 1, MAX_NUM_BINS), digest, num_bytes)


def checksum_key(storage: Storage) -> str:
    """Return the key of a shard's checksum."""
    return "manifest_checksum" if storage.has_manifest else "checksum"
