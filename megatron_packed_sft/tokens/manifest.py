"""The documents of a token store, typed: manifest.json of a part, and store.json, which lists the parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_packed_sft.errors import ManifestError, UnsupportedFormatError
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.array_files import ID_LIMITS, MASK_DTYPE, SMALL_HEADER, WEIGHT_DTYPE, ArraySpec
from megatron_packed_sft.support.json_document import FileRecord, parse_file_records

FORMAT = "token_store_v1"
VERSION = "1.2"
IDS = "ids.npy"
TRAIN = "train.npy"
OFFSETS = "offsets.npy"
WEIGHTS = "weights.npy"
CHECKSUMS = "checksums.npy"
FILES = (IDS, TRAIN, OFFSETS, CHECKSUMS)  # of every part; WEIGHTS is optional
OFFSET_DTYPE = "<u8"
CHECKSUM_DTYPE = "<u4"
SEQUENCE_CHECKSUM_ALGORITHM = "xxh3_64_low32"  # see part.py
STORE = "store.json"
STORE_FORMAT = "token_store_index_v1"
STORE_VERSION = "1.0"
MAX_STORE_BYTES = 64 << 20
PART_NAME = re.compile(r"part_[0-9]{6,}")
_MAX_COUNT = (1 << 62) - 1
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPartManifest:
    """The manifest of a part of a token store.

    Example:
        >>> TokenPartManifest(num_sequences=1, num_tokens=3, dtype="<u2").to_json()["format"]
        'token_store_v1'
    """

    num_sequences: int
    num_tokens: int
    dtype: str
    num_trained_tokens: int = 0
    max_seq_len: int = 0
    has_weights: bool = False
    vocab_size: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    checksum_algorithm: str | None = None
    created_by: str | None = None

    @property
    def id_limit(self) -> int:
        """All ids are below this."""
        return self.vocab_size if self.vocab_size is not None else ID_LIMITS[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this manifest, without the keys whose value is None."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "max_seq_len": self.max_seq_len,
            "dtype": self.dtype,
            "weights_dtype": WEIGHT_DTYPE if self.has_weights else None,
            "sequence_checksum_algorithm": SEQUENCE_CHECKSUM_ALGORITHM,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "chat_template_fingerprint": self.chat_template_fingerprint,
            "files": {name: record._asdict() for name, record in self.files.items()},
            "checksum_algorithm": self.checksum_algorithm,
            "created_by": self.created_by,
        }
        return {key: value for key, value in document.items() if value is not None}


def parse_part_manifest(data: bytes, file: str) -> TokenPartManifest:
    """Parse and check the bytes of a part's manifest.json."""
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    found = values.text("format"), values.text("version")
    if found != (FORMAT, VERSION):
        raise UnsupportedFormatError(
            f"{file}: format {found[0]!r} version {found[1]!r} is not {FORMAT} {VERSION}, which this release reads; "
            "write the token store again with packed-sft prepare"
        )
    has_weights = document.get("weights_dtype") is not None
    for key, expected in (
        ("weights_dtype", WEIGHT_DTYPE if has_weights else None),
        ("sequence_checksum_algorithm", SEQUENCE_CHECKSUM_ALGORITHM),
    ):
        if values.optional_text(key) != expected:
            raise values.error(key, f"is {document.get(key)!r}, not {expected!r}")
    if json_document.SELF_CHECKSUM not in document:
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    dtype = values.text("dtype")
    if dtype not in ID_LIMITS:
        raise UnsupportedFormatError(f"{file}: dtype is {dtype!r}, not one of {', '.join(sorted(ID_LIMITS))}")
    algorithm, files = parse_file_records(values, (*FILES, WEIGHTS) if has_weights else FILES)
    if files is None:
        raise values.error("files", "is missing")
    num_tokens = values.integer("num_tokens", 1, _MAX_COUNT)
    return TokenPartManifest(
        num_sequences=values.integer("num_sequences", 1, num_tokens),
        num_tokens=num_tokens,
        num_trained_tokens=values.integer("num_trained_tokens", 0, num_tokens),
        max_seq_len=values.integer("max_seq_len", 1, num_tokens),
        has_weights=has_weights,
        dtype=dtype,
        vocab_size=values.optional_integer("vocab_size", 1, ID_LIMITS[dtype]),
        tokenizer=values.optional_object("tokenizer"),
        chat_template_fingerprint=values.optional_text("chat_template_fingerprint"),
        files=files,
        checksum_algorithm=algorithm,
        created_by=values.optional_text("created_by"),
    )


def part_arrays(manifest: TokenPartManifest) -> tuple[ArraySpec, ...]:
    """Return the array files of a part."""
    tokens, sequences = (manifest.num_tokens,), (manifest.num_sequences,)
    found = {
        IDS: (manifest.dtype, tokens),
        TRAIN: (MASK_DTYPE, tokens),
        OFFSETS: (OFFSET_DTYPE, (manifest.num_sequences + 1,)),
        CHECKSUMS: (CHECKSUM_DTYPE, sequences),
    }
    if manifest.has_weights:
        found[WEIGHTS] = (WEIGHT_DTYPE, tokens)
    return tuple(ArraySpec(name, *one, SMALL_HEADER) for name, one in found.items())


class ListedPart(NamedTuple):
    """A part as store.json lists it."""

    name: str
    manifest_checksum: str
    num_sequences: int | None = None


def parse_store(data: bytes, file: str) -> list[ListedPart]:
    """Return the parts that a store.json lists. Names become paths, so only part_NNNNNN is accepted.

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
        num_sequences = fields.optional_integer("num_sequences", 1, _MAX_COUNT)
        part = ListedPart(fields.text("name"), fields.text("manifest_checksum"), num_sequences)
        if not PART_NAME.fullmatch(part.name) or not _DIGEST.fullmatch(part.manifest_checksum):
            raise fields.error("name or manifest_checksum", "is malformed")
        parts.append(part)
    return parts
