"""manifest.json of a token store's part, typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_packed_sft.errors import UnsupportedFormatError
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.array_files import ID_LIMITS, MASK_DTYPE, SMALL_HEADER, WEIGHT_DTYPE, ArraySpec
from megatron_packed_sft.support.json_document import FileRecord, parse_file_records

FORMAT = "token_store_v1"
FIRST_VERSION = "1.0"
WEIGHTED_VERSION = "1.1"  # a part with weights: a reader that does not know them must refuse it
VERSION = "1.2"  # a part with checksums of its sequences, and with weights if it says so
IDS = "ids.npy"
TRAIN = "train.npy"
OFFSETS = "offsets.npy"
WEIGHTS = "weights.npy"
CHECKSUMS = "checksums.npy"
FILES = (IDS, TRAIN, OFFSETS)
OFFSET_DTYPE = "<u8"
CHECKSUM_DTYPE = "<u4"
SEQUENCE_CHECKSUM_ALGORITHM = "xxh3_64_low32"  # see sequence_checksums.py
_VERSIONS = (FIRST_VERSION, WEIGHTED_VERSION, VERSION)
_MAX_COUNT = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPartManifest:
    """What a part of a token store says about itself.

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
    has_checksums: bool = True
    vocab_size: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    checksum_algorithm: str | None = None
    created_by: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id_limit(self) -> int:
        """Every id is below it."""
        return self.vocab_size if self.vocab_size is not None else ID_LIMITS[self.dtype]

    @property
    def version(self) -> str:
        """The oldest version that has what this part has."""
        if self.has_checksums:
            return VERSION
        return WEIGHTED_VERSION if self.has_weights else FIRST_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this manifest, without the keys whose value is None."""
        document: dict[str, Any] = {
            **self.extra,
            "format": FORMAT,
            "version": self.version,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "max_seq_len": self.max_seq_len,
            "dtype": self.dtype,
            "weights_dtype": WEIGHT_DTYPE if self.has_weights else None,
            "sequence_checksum_algorithm": SEQUENCE_CHECKSUM_ALGORITHM if self.has_checksums else None,
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
    version = values.text("version")
    if values.text("format") != FORMAT or version not in _VERSIONS:
        raise UnsupportedFormatError(
            f"{file}: format {document['format']!r} version {version!r} is not {FORMAT} {' or '.join(_VERSIONS)}; "
            "it is not a part of a token store, or it needs a newer megatron_packed_sft"
        )
    has_checksums = version == VERSION
    has_weights = version == WEIGHTED_VERSION or (has_checksums and document.get("weights_dtype") is not None)
    for key, expected in (
        ("weights_dtype", WEIGHT_DTYPE if has_weights else None),
        ("sequence_checksum_algorithm", SEQUENCE_CHECKSUM_ALGORITHM if has_checksums else None),
    ):
        if values.optional_text(key) != expected:
            raise values.error(key, f"is {document.get(key)!r}, which does not go with version {version}")
    if json_document.SELF_CHECKSUM not in document:
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    dtype = values.text("dtype")
    if dtype not in ID_LIMITS:
        raise UnsupportedFormatError(f"{file}: dtype is {dtype!r}, not one of {', '.join(sorted(ID_LIMITS))}")
    weights, checksums = (WEIGHTS,) if has_weights else (), (CHECKSUMS,) if has_checksums else ()
    algorithm, files = parse_file_records(values, (*FILES, *weights, *checksums))
    if files is None:
        raise values.error("files", "is missing")
    num_tokens = values.integer("num_tokens", 1, _MAX_COUNT)
    return TokenPartManifest(
        num_sequences=values.integer("num_sequences", 1, num_tokens),
        num_tokens=num_tokens,
        num_trained_tokens=values.integer("num_trained_tokens", 0, num_tokens),
        max_seq_len=values.integer("max_seq_len", 1, num_tokens),
        has_weights=has_weights,
        has_checksums=has_checksums,
        dtype=dtype,
        vocab_size=values.optional_integer("vocab_size", 1, ID_LIMITS[dtype]),
        tokenizer=values.optional_object("tokenizer"),
        chat_template_fingerprint=values.optional_text("chat_template_fingerprint"),
        files=files,
        checksum_algorithm=algorithm,
        created_by=values.optional_text("created_by"),
        extra={},
    )


def part_arrays(manifest: TokenPartManifest) -> tuple[ArraySpec, ...]:
    """Return the array files of a part, in the order of `FILES`; what not every part has comes last."""
    tokens, sequences = (manifest.num_tokens,), (manifest.num_sequences,)
    found = {
        IDS: (manifest.dtype, tokens),
        TRAIN: (MASK_DTYPE, tokens),
        OFFSETS: (OFFSET_DTYPE, (manifest.num_sequences + 1,)),
    }
    if manifest.has_weights:
        found[WEIGHTS] = (WEIGHT_DTYPE, tokens)
    if manifest.has_checksums:
        found[CHECKSUMS] = (CHECKSUM_DTYPE, sequences)
    return tuple(ArraySpec(name, *one, SMALL_HEADER) for name, one in found.items())
