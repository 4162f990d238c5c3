"""manifest.json of a shard, typed: what the array files are, and what they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_packed_sft._version import __version__
from megatron_packed_sft.errors import UnsupportedFormatError
from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.support import json_document, npy
from megatron_packed_sft.support.json_document import FileRecord, parse_file_records

CREATED_BY = f"megatron_packed_sft {__version__}"
MAX_MANIFEST_BYTES = 1 << 20
MAX_PACK_SIZE = 1 << 28
MAX_NUM_BINS = npy.INDEX_LIMIT - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """What a shard says of itself. Fields that are None were not recorded (shards of the first, seed-only kind).

    Fields can also be read by their names in manifest.json: `manifest["num_bins"]`.
    """

    num_bins: int
    pack_size: int
    dtype: str
    version: str = layout.FIRST_VERSION
    format: str = layout.FORMAT
    loss_mask_dtype: str = npy.MASK_DTYPE
    index_dtype: str = npy.INDEX_DTYPE
    files: Mapping[str, FileRecord] | None = None
    checksum_algorithm: str | None = None
    num_sequences: int | None = None
    num_tokens: int | None = None
    num_loss_tokens: int | None = None
    max_seqs_per_bin: int | None = None
    max_seq_len: int | None = None
    min_packed_len: int | None = None
    loss_weights_dtype: str | None = None  # None: no weights
    bin_checksum_algorithm: str | None = None  # None: bins cannot be verified one by one
    sum_loss_weights: float | None = None
    pad_id: int | None = None
    vocab_size: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None
    plan_fingerprint: str | None = None
    pad_seq_to_mult: int | None = None
    created_by: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    @property
    def has_weights(self) -> bool:
        """Whether some weight is neither 0 nor 1, so that there is an array of them."""
        return self.loss_weights_dtype is not None

    @property
    def has_bin_checksums(self) -> bool:
        """Whether there is an array of checksums, so that bins are verified as they are read."""
        return self.bin_checksum_algorithm is not None

    @property
    def verification_note(self) -> str | None:
        """What to say of a shard whose bins cannot be verified as they are read; None for the others."""
        if self.has_bin_checksums:
            return None
        return (
            f"format {self.version} without checksums of bins, so bins are not verified as they are read; `packed-sft "
            "convert` writes a shard that has them"
        )

    @property
    def figures(self) -> BinFigures:
        """What is recorded of all bins."""
        return BinFigures(**{f.name: getattr(self, f.name) for f in fields(BinFigures) if hasattr(self, f.name)})

    @property
    def id_limit(self) -> int:
        """Every id is below it: the vocabulary's size, or what the dtype can hold when that was not recorded."""
        return self.vocab_size if self.vocab_size is not None else npy.ID_LIMITS[self.dtype]

    @property
    def is_self_checked(self) -> bool:
        """Whether the manifest carries its own checksum."""
        return json_document.SELF_CHECKSUM in self.extra

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this manifest; what is None is left out.

        Example:
            >>> ShardManifest(num_bins=2, pack_size=8, dtype="<i4").to_json()["bins_written"]
            2
        """
        document: dict[str, Any] = dict(self.extra)
        for name in _FIELD_NAMES:
            value = getattr(self, name)
            if value is not None:
                document[name] = value
        if self.files is not None:
            document["files"] = {name: record._asdict() for name, record in self.files.items()}
        document["bins_written"] = self.num_bins
        return document

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of manifest.json."""
        return json_document.render(self.to_json())


_FIELD_NAMES = tuple(f.name for f in fields(ShardManifest) if f.name != "extra")
_KNOWN_KEYS = {*_FIELD_NAMES, "bins_written"}


def parse_manifest(data: bytes, file: str) -> ShardManifest:
    """Parse and check the bytes of a manifest.json; keys this release does not know are kept in `extra`.

    Example:
        >>> parse_manifest(ShardManifest(num_bins=2, pack_size=8, dtype="<i4").to_bytes(), "manifest.json").num_bins
        2
    """
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    _check_format(values, file)
    dtype = values.text("dtype")
    if dtype not in npy.ID_LIMITS:
        raise UnsupportedFormatError(
            f"{file}: dtype is {dtype!r}; this release reads {' and '.join(sorted(npy.ID_LIMITS))}, so convert the "
            "shard or update megatron_packed_sft"
        )
    mask_dtype = values.text("loss_mask_dtype")
    if mask_dtype not in (npy.MASK_DTYPE, "<u1"):  # the seed wrote "<u1"; a byte has no byte order
        raise UnsupportedFormatError(f"{file}: loss_mask_dtype is {mask_dtype!r}, not '|u1'; convert the shard")
    index_dtype = values.text("index_dtype")
    if index_dtype != npy.INDEX_DTYPE:
        raise UnsupportedFormatError(f"{file}: index_dtype is {index_dtype!r}, not '<u4'; convert the shard")
    num_bins = values.integer("num_bins", 1, MAX_NUM_BINS)
    pack_size = values.integer("pack_size", 1, MAX_PACK_SIZE)
    if values.integer("bins_written", 0, MAX_NUM_BINS) != num_bins:
        raise values.error("bins_written", f"is {document['bins_written']}, but num_bins is {num_bins}")
    weights_dtype, bin_algorithm = _optional_arrays(values, document["version"], file)
    if bin_algorithm is not None and json_document.SELF_CHECKSUM not in document:
        # A bit of its name may have flipped: all rows would be sound, in an order that is shuffled in another way.
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    names = [*layout.ARRAY_FILES]
    names += [] if weights_dtype is None else [layout.LOSS_WEIGHTS]
    names += [] if bin_algorithm is None else [layout.BIN_CHECKSUMS]
    algorithm, files = parse_file_records(values, names)
    vocab_size = values.optional_integer("vocab_size", 1, npy.ID_LIMITS[dtype])
    return ShardManifest(
        num_bins=num_bins,
        pack_size=pack_size,
        dtype=dtype,
        version=document["version"],
        files=files,
        checksum_algorithm=algorithm,
        num_sequences=values.optional_integer("num_sequences", num_bins, npy.INDEX_LIMIT - 1),
        num_tokens=values.optional_integer("num_tokens", num_bins, num_bins * pack_size),
        num_loss_tokens=values.optional_integer("num_loss_tokens", 0, num_bins * pack_size),
        max_seqs_per_bin=values.optional_integer("max_seqs_per_bin", 1, pack_size),
        max_seq_len=values.optional_integer("max_seq_len", 1, pack_size),
        min_packed_len=values.optional_integer("min_packed_len", 1, pack_size),
        loss_weights_dtype=weights_dtype,
        bin_checksum_algorithm=bin_algorithm,
        sum_loss_weights=values.optional_number("sum_loss_weights"),
        pad_id=values.optional_integer("pad_id", 0, npy.ID_LIMITS[dtype] - 1),
        vocab_size=vocab_size,
        tokenizer=values.optional_object("tokenizer"),
        chat_template_fingerprint=values.optional_text("chat_template_fingerprint"),
        plan_fingerprint=values.optional_text("plan_fingerprint"),
        pad_seq_to_mult=values.optional_integer("pad_seq_to_mult", 1, MAX_PACK_SIZE),
        created_by=values.optional_text("created_by"),
        extra={key: value for key, value in document.items() if key not in _KNOWN_KEYS},
    )


def _check_format(values: json_document.Fields, file: str) -> None:
    name = values.text("format")
    if name != layout.FORMAT:
        raise UnsupportedFormatError(
            f"{file}: format is {name!r}, not {layout.FORMAT!r}; this is not a memmap_v1 shard"
        )
    version = values.text("version")
    if version not in (layout.FIRST_VERSION, layout.VERSION):
        raise UnsupportedFormatError(
            f"{file}: version is {version!r}; this release reads {layout.FIRST_VERSION!r} and {layout.VERSION!r}, "
            "so update megatron_packed_sft"
        )


def _optional_arrays(values: json_document.Fields, version: str, file: str) -> tuple[str | None, str | None]:
    """Return the dtype of the weights and the algorithm of the checksums of bins, each None if the shard has none."""
    found = []
    for key, known in (
        ("loss_weights_dtype", npy.WEIGHT_DTYPE),
        ("bin_checksum_algorithm", layout.BIN_CHECKSUM_ALGORITHM),
    ):
        value = values.optional_text(key)
        if value is not None and version == layout.FIRST_VERSION:
            raise UnsupportedFormatError(
                f"{file}: version is {version!r}, but {key}, which came with version {layout.VERSION!r}, is {value!r}; "
                "restore the manifest"
            )
        if value not in (None, known):
            raise UnsupportedFormatError(
                f"{file}: {key} is {value!r}, not {known!r}; update megatron_packed_sft, or restore the manifest"
            )
        found.append(value)
    if version != layout.FIRST_VERSION and found == [None, None]:
        raise UnsupportedFormatError(
            f"{file}: version is {version!r}, but neither loss_weights_dtype nor bin_checksum_algorithm is there; "
            "restore the manifest"
        )
    return found[0], found[1]
