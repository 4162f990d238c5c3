"""The format of memmap_v1: file names, dtypes, shapes and headers; manifest.json; and the checksums of bins.

    shard_000000/
      input_ids.npy     <i4 or <u2  [num_bins, pack_size]   header of 4,096 bytes: bins start on page borders
      loss_mask.npy     |u1         [num_bins, pack_size]   header of 4,096 bytes
      packed_len.npy    <u4         [num_bins]
      seq_offsets.npy   <u4         [num_bins + 1]
      seq_starts.npy    <u4         [num_sequences]
      loss_weights.npy  <f4         [num_bins, pack_size]   only if a weight is neither 0 nor 1; header of 4,096 bytes
      bin_checksums.npy <u8         [num_bins, 3 or 4]      header of 128 bytes
      manifest.json                                          written last

    column of bin_checksums.npy
      0   input_ids     the bytes of input_ids[bin, :packed_len]
      1   loss_mask     the bytes of loss_mask[bin, :packed_len]
      2   index         packed_len, the two entries of seq_offsets and the bin's seq_starts, each as <u4
      3   loss_weights  the bytes of loss_weights[bin, :packed_len]; only in a shard with weights

Each checksum is XXH3-64 with seed 0. Together they cover everything that decides a bin: a wrong length changes all
columns. File names are never taken from a manifest, and headers are matched against one exact form, never evaluated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft._version import __version__
from megatron_packed_sft.errors import UnsupportedFormatError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.array_files import (
    CHECKSUM_DTYPE,
    ID_LIMITS,
    INDEX_DTYPE,
    INDEX_LIMIT,
    MASK_DTYPE,
    PAGE,
    SMALL_HEADER,
    WEIGHT_DTYPE,
    ArraySpec,
)
from megatron_packed_sft.support.checksum import span_checksums
from megatron_packed_sft.support.json_document import MANIFEST, FileRecord, parse_file_records

FORMAT = "memmap_padded_v1"
VERSION = "1.1"  # with checksums of bins and perhaps weights: a reader that does not know these must refuse it
FIRST_VERSION = "1.0"
INPUT_IDS = "input_ids.npy"
LOSS_MASK = "loss_mask.npy"
PACKED_LEN = "packed_len.npy"
SEQ_OFFSETS = "seq_offsets.npy"
SEQ_STARTS = "seq_starts.npy"
LOSS_WEIGHTS = "loss_weights.npy"
BIN_CHECKSUMS = "bin_checksums.npy"
ARRAY_FILES = (INPUT_IDS, LOSS_MASK, PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS)  # of every shard
OPTIONAL_FILES = (LOSS_WEIGHTS, BIN_CHECKSUMS)
BIN_CHECKSUM_ALGORITHM = "xxh3_64"


def is_shard(path: Path) -> bool:
    """Return whether a directory has a manifest, or an array of a shard that is not complete."""
    return any(os.path.lexists(path / name) for name in (MANIFEST, *ARRAY_FILES, *OPTIONAL_FILES))


def shard_arrays(
    num_bins: int, pack_size: int, num_sequences: int, id_dtype: str
) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec, ArraySpec]:
    """Return the five array files of a shard, in the order of `ARRAY_FILES`.

    Example:
        >>> shard_arrays(2, 8, 3, "<u2")[0]
        ArraySpec(name='input_ids.npy', dtype='<u2', shape=(2, 8), header_size=4096)
    """
    return (
        ArraySpec(INPUT_IDS, id_dtype, (num_bins, pack_size), PAGE),
        ArraySpec(LOSS_MASK, MASK_DTYPE, (num_bins, pack_size), PAGE),
        ArraySpec(PACKED_LEN, INDEX_DTYPE, (num_bins,), SMALL_HEADER),
        ArraySpec(SEQ_OFFSETS, INDEX_DTYPE, (num_bins + 1,), SMALL_HEADER),
        ArraySpec(SEQ_STARTS, INDEX_DTYPE, (num_sequences,), SMALL_HEADER),
    )


def weights_array(num_bins: int, pack_size: int) -> ArraySpec:
    """Return the array file that a shard with weights has besides."""
    return ArraySpec(LOSS_WEIGHTS, WEIGHT_DTYPE, (num_bins, pack_size), PAGE)


def checksums_array(num_bins: int, *, has_weights: bool) -> ArraySpec:
    """Return the array file of the checksums of bins; see bin_checksums.py for its columns."""
    return ArraySpec(BIN_CHECKSUMS, CHECKSUM_DTYPE, (num_bins, 4 if has_weights else 3), SMALL_HEADER)


CREATED_BY = f"megatron_packed_sft {__version__}"
MAX_MANIFEST_BYTES = 1 << 20
MAX_PACK_SIZE = 1 << 28
MAX_NUM_BINS = INDEX_LIMIT - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """What a shard says of itself. Fields that are None were not recorded (shards of the first, seed-only kind).

    Fields can also be read by their names in manifest.json: `manifest["num_bins"]`.
    """

    num_bins: int
    pack_size: int
    dtype: str
    version: str = FIRST_VERSION
    format: str = FORMAT
    loss_mask_dtype: str = MASK_DTYPE
    index_dtype: str = INDEX_DTYPE
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
        return self.vocab_size if self.vocab_size is not None else ID_LIMITS[self.dtype]

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
    if dtype not in ID_LIMITS:
        raise UnsupportedFormatError(
            f"{file}: dtype is {dtype!r}; this release reads {' and '.join(sorted(ID_LIMITS))}, so convert the "
            "shard or update megatron_packed_sft"
        )
    mask_dtype = values.text("loss_mask_dtype")
    if mask_dtype not in (MASK_DTYPE, "<u1"):  # the seed wrote "<u1"; a byte has no byte order
        raise UnsupportedFormatError(f"{file}: loss_mask_dtype is {mask_dtype!r}, not '|u1'; convert the shard")
    index_dtype = values.text("index_dtype")
    if index_dtype != INDEX_DTYPE:
        raise UnsupportedFormatError(f"{file}: index_dtype is {index_dtype!r}, not '<u4'; convert the shard")
    num_bins = values.integer("num_bins", 1, MAX_NUM_BINS)
    pack_size = values.integer("pack_size", 1, MAX_PACK_SIZE)
    if values.integer("bins_written", 0, MAX_NUM_BINS) != num_bins:
        raise values.error("bins_written", f"is {document['bins_written']}, but num_bins is {num_bins}")
    weights_dtype, bin_algorithm = _optional_arrays(values, document["version"], file)
    if bin_algorithm is not None and json_document.SELF_CHECKSUM not in document:
        # A bit of its name may have flipped: all rows would be sound, in an order that is shuffled in another way.
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    names = [*ARRAY_FILES]
    names += [] if weights_dtype is None else [LOSS_WEIGHTS]
    names += [] if bin_algorithm is None else [BIN_CHECKSUMS]
    algorithm, files = parse_file_records(values, names)
    vocab_size = values.optional_integer("vocab_size", 1, ID_LIMITS[dtype])
    return ShardManifest(
        num_bins=num_bins,
        pack_size=pack_size,
        dtype=dtype,
        version=document["version"],
        files=files,
        checksum_algorithm=algorithm,
        num_sequences=values.optional_integer("num_sequences", num_bins, INDEX_LIMIT - 1),
        num_tokens=values.optional_integer("num_tokens", num_bins, num_bins * pack_size),
        num_loss_tokens=values.optional_integer("num_loss_tokens", 0, num_bins * pack_size),
        max_seqs_per_bin=values.optional_integer("max_seqs_per_bin", 1, pack_size),
        max_seq_len=values.optional_integer("max_seq_len", 1, pack_size),
        min_packed_len=values.optional_integer("min_packed_len", 1, pack_size),
        loss_weights_dtype=weights_dtype,
        bin_checksum_algorithm=bin_algorithm,
        sum_loss_weights=values.optional_number("sum_loss_weights"),
        pad_id=values.optional_integer("pad_id", 0, ID_LIMITS[dtype] - 1),
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
    if name != FORMAT:
        raise UnsupportedFormatError(f"{file}: format is {name!r}, not {FORMAT!r}; this is not a memmap_v1 shard")
    version = values.text("version")
    if version not in (FIRST_VERSION, VERSION):
        raise UnsupportedFormatError(
            f"{file}: version is {version!r}; this release reads {FIRST_VERSION!r} and {VERSION!r}, "
            "so update megatron_packed_sft"
        )


def _optional_arrays(values: json_document.Fields, version: str, file: str) -> tuple[str | None, str | None]:
    """Return the dtype of the weights and the algorithm of the checksums of bins, each None if the shard has none."""
    found = []
    for key, known in (
        ("loss_weights_dtype", WEIGHT_DTYPE),
        ("bin_checksum_algorithm", BIN_CHECKSUM_ALGORITHM),
    ):
        value = values.optional_text(key)
        if value is not None and version == FIRST_VERSION:
            raise UnsupportedFormatError(
                f"{file}: version is {version!r}, but {key}, which came with version {VERSION!r}, is {value!r}; "
                "restore the manifest"
            )
        if value not in (None, known):
            raise UnsupportedFormatError(
                f"{file}: {key} is {value!r}, not {known!r}; update megatron_packed_sft, or restore the manifest"
            )
        found.append(value)
    if version != FIRST_VERSION and found == [None, None]:
        raise UnsupportedFormatError(
            f"{file}: version is {version!r}, but neither loss_weights_dtype nor bin_checksum_algorithm is there; "
            "restore the manifest"
        )
    return found[0], found[1]


Checksums = npt.NDArray[np.uint64]
IDS_COLUMN = 0
MASK_COLUMN = 1
INDEX_COLUMN = 2
WEIGHTS_COLUMN = 3
_NUM_INDEX_NUMBERS = 3  # before a bin's starts

# Which file a column vouches for. The index is kept in three.
FILES = {IDS_COLUMN: INPUT_IDS, MASK_COLUMN: LOSS_MASK, WEIGHTS_COLUMN: LOSS_WEIGHTS}


def checksums_of_array(padded: npt.NDArray[Any], packed_len: npt.NDArray[np.uint32]) -> Checksums:
    """Return the checksums of bins in one of the large arrays, without their padding."""
    addresses = padded.ctypes.data + np.arange(len(padded)) * padded.strides[0]
    return span_checksums(addresses, packed_len.astype(np.int64) * padded.itemsize)


def checksums_of_index(
    packed_len: npt.NDArray[np.uint32], seq_offsets: npt.NDArray[np.integer[Any]], seq_starts: npt.NDArray[np.uint32]
) -> Checksums:
    """Return the checksums of the index of consecutive bins.

    Args:
        packed_len: of these bins.
        seq_offsets: one entry more, as in the whole shard.
        seq_starts: of these bins.
    """
    num_bins = len(packed_len)
    offsets = seq_offsets.astype(np.int64)
    counts = np.diff(offsets)
    places = offsets[:-1] - offsets[0] + np.arange(num_bins) * _NUM_INDEX_NUMBERS
    message = np.empty(len(seq_starts) + num_bins * _NUM_INDEX_NUMBERS, "<u4")
    message[places] = packed_len
    message[places + 1] = offsets[:-1]
    message[places + 2] = offsets[1:]
    message[np.arange(len(seq_starts)) + np.repeat(np.arange(1, num_bins + 1) * _NUM_INDEX_NUMBERS, counts)] = (
        seq_starts
    )
    return span_checksums(message.ctypes.data + places * 4, (counts + _NUM_INDEX_NUMBERS) * 4)


def checksums_of_block(block: BinBlock) -> Checksums:
    """Return all columns of consecutive bins; the offsets of the block are those of the whole shard."""
    columns = [
        checksums_of_array(block.input_ids, block.packed_len),
        checksums_of_array(block.loss_mask, block.packed_len),
        checksums_of_index(block.packed_len, block.seq_offsets, block.seq_starts),
    ]
    if block.loss_weights is not None:
        columns.append(checksums_of_array(block.loss_weights, block.packed_len))
    return np.stack(columns, axis=1)


def checksums_of_bin(
    ids: npt.NDArray[Any],
    mask: npt.NDArray[np.uint8],
    weights: npt.NDArray[np.float32] | None,
    first: int,
    starts: npt.NDArray[np.uint32],
) -> list[int]:
    """Return all columns of one bin, without compiled code: for the first bin that somebody looks at.

    Args:
        ids, mask, weights: of the bin, without padding.
        first: the bin's entry of seq_offsets.
        starts: of its sequences.

    Example:
        >>> checksums = checksums_of_bin(np.array([5, 6], "<i4"), np.array([1, 0], "u1"), None, 0, np.array([0], "<u4"))
        >>> [f"{one:016x}" for one in checksums]
        ['e2d593246baa1915', 'ab94ac0ace7276c0', 'fb54cb6322be3888']
    """
    numbers = np.array([len(ids), first, first + len(starts)], "<u4")
    index = numbers.tobytes() + starts.tobytes()
    parts: list[Any] = [ids, mask, index] if weights is None else [ids, mask, index, weights]
    return [xxhash.xxh3_64_intdigest(part) for part in parts]
