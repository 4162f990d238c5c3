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
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.figures import BinFigures
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
VERSION = "1.1"
INPUT_IDS = "input_ids.npy"
LOSS_MASK = "loss_mask.npy"
PACKED_LEN = "packed_len.npy"
SEQ_OFFSETS = "seq_offsets.npy"
SEQ_STARTS = "seq_starts.npy"
LOSS_WEIGHTS = "loss_weights.npy"
BIN_CHECKSUMS = "bin_checksums.npy"
ARRAY_FILES = (INPUT_IDS, LOSS_MASK, PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS, BIN_CHECKSUMS)  # of every shard
BIN_CHECKSUM_ALGORITHM = "xxh3_64"
CREATED_BY = f"megatron_packed_sft {__version__}"
MAX_MANIFEST_BYTES = 1 << 20
MAX_PACK_SIZE = 1 << 28
MAX_NUM_BINS = INDEX_LIMIT - 2

# The columns of bin_checksums.npy.
IDS_COLUMN = 0
MASK_COLUMN = 1
INDEX_COLUMN = 2
WEIGHTS_COLUMN = 3
# The file that a column covers. The index is in three files.
FILES = {IDS_COLUMN: INPUT_IDS, MASK_COLUMN: LOSS_MASK, WEIGHTS_COLUMN: LOSS_WEIGHTS}
_NUM_INDEX_NUMBERS = 3  # before a bin's starts

Checksums = npt.NDArray[np.uint64]


def is_shard(path: Path) -> bool:
    """Return whether a directory has a manifest, or an array file of an incomplete shard."""
    return any(os.path.lexists(path / name) for name in (MANIFEST, *ARRAY_FILES, LOSS_WEIGHTS))


def shard_arrays(
    num_bins: int, pack_size: int, num_sequences: int, id_dtype: str, *, has_weights: bool
) -> dict[str, ArraySpec]:
    """Return the array files of a shard by name.

    Example:
        >>> shard_arrays(2, 8, 3, "<u2", has_weights=False)["input_ids.npy"]
        ArraySpec(name='input_ids.npy', dtype='<u2', shape=(2, 8), header_size=4096)
    """
    specs = [
        ArraySpec(INPUT_IDS, id_dtype, (num_bins, pack_size), PAGE),
        ArraySpec(LOSS_MASK, MASK_DTYPE, (num_bins, pack_size), PAGE),
        ArraySpec(PACKED_LEN, INDEX_DTYPE, (num_bins,), SMALL_HEADER),
        ArraySpec(SEQ_OFFSETS, INDEX_DTYPE, (num_bins + 1,), SMALL_HEADER),
        ArraySpec(SEQ_STARTS, INDEX_DTYPE, (num_sequences,), SMALL_HEADER),
        ArraySpec(BIN_CHECKSUMS, CHECKSUM_DTYPE, (num_bins, 4 if has_weights else 3), SMALL_HEADER),
    ]
    if has_weights:
        specs.append(ArraySpec(LOSS_WEIGHTS, WEIGHT_DTYPE, (num_bins, pack_size), PAGE))
    return {spec.name: spec for spec in specs}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """What a shard says of itself; None where its writer was not told.

    Fields can also be read by their names in manifest.json: `manifest["num_bins"]`.
    """

    num_bins: int
    pack_size: int
    dtype: str
    files: Mapping[str, FileRecord]
    checksum_algorithm: str
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    max_seqs_per_bin: int
    max_seq_len: int
    min_packed_len: int
    pad_id: int
    version: str = VERSION
    format: str = FORMAT
    loss_mask_dtype: str = MASK_DTYPE
    index_dtype: str = INDEX_DTYPE
    bin_checksum_algorithm: str = BIN_CHECKSUM_ALGORITHM
    loss_weights_dtype: str | None = None  # None: no weights
    sum_loss_weights: float | None = None  # with weights
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
    def figures(self) -> BinFigures:
        """What is recorded of all bins."""
        return BinFigures(**{f.name: getattr(self, f.name) for f in fields(BinFigures) if hasattr(self, f.name)})

    @property
    def id_limit(self) -> int:
        """Every id is below it: the vocabulary's size, or what the dtype can hold when that was not recorded."""
        return self.vocab_size if self.vocab_size is not None else ID_LIMITS[self.dtype]

    def arrays(self) -> list[ArraySpec]:
        """Return the array files of the shard."""
        found = shard_arrays(
            self.num_bins, self.pack_size, self.num_sequences, self.dtype, has_weights=self.has_weights
        )
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this manifest; what is None is left out."""
        document: dict[str, Any] = dict(self.extra)
        for name in _FIELD_NAMES:
            value = getattr(self, name)
            if value is not None:
                document[name] = value
        document["files"] = {name: record._asdict() for name, record in self.files.items()}
        document["bins_written"] = self.num_bins
        return document

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of manifest.json."""
        return json_document.render(self.to_json())


_FIELD_NAMES = tuple(f.name for f in fields(ShardManifest) if f.name != "extra")
_KNOWN_KEYS = {*_FIELD_NAMES, "bins_written"}


def parse_manifest(data: bytes, file: str) -> ShardManifest:
    """Parse and check the bytes of a manifest.json; keys that this release does not know are kept in `extra`."""
    document = json_document.parse(data, file)
    values = json_document.Fields(document, file)
    _check_format(values, file)
    dtype = values.text("dtype")
    if dtype not in ID_LIMITS:
        raise UnsupportedFormatError(
            f"{file}: dtype is {dtype!r}; this release reads {' and '.join(sorted(ID_LIMITS))}, so update "
            "megatron_packed_sft or write the shard again"
        )
    weights_dtype = values.optional_text("loss_weights_dtype")
    _check_constant(file, "loss_weights_dtype", weights_dtype, None, WEIGHT_DTYPE)
    num_bins = values.integer("num_bins", 1, MAX_NUM_BINS)
    pack_size = values.integer("pack_size", 1, MAX_PACK_SIZE)
    if values.integer("bins_written", 0, MAX_NUM_BINS) != num_bins:
        raise values.error("bins_written", f"is {document['bins_written']}, but num_bins is {num_bins}")
    if json_document.SELF_CHECKSUM not in document:
        # A bit of that key may have flipped, and the fingerprint, which decides the order of samples, depends on it.
        raise values.error(json_document.SELF_CHECKSUM, "is missing")
    algorithm, files = parse_file_records(values, [*ARRAY_FILES, *([LOSS_WEIGHTS] if weights_dtype else [])])
    return ShardManifest(
        num_bins=num_bins,
        pack_size=pack_size,
        dtype=dtype,
        files=files,
        checksum_algorithm=algorithm,
        num_sequences=values.integer("num_sequences", num_bins, INDEX_LIMIT - 1),
        num_tokens=values.integer("num_tokens", num_bins, num_bins * pack_size),
        num_loss_tokens=values.integer("num_loss_tokens", 0, num_bins * pack_size),
        max_seqs_per_bin=values.integer("max_seqs_per_bin", 1, pack_size),
        max_seq_len=values.integer("max_seq_len", 1, pack_size),
        min_packed_len=values.integer("min_packed_len", 1, pack_size),
        pad_id=values.integer("pad_id", 0, ID_LIMITS[dtype] - 1),
        loss_weights_dtype=weights_dtype,
        sum_loss_weights=values.optional_number("sum_loss_weights"),
        vocab_size=values.optional_integer("vocab_size", 1, ID_LIMITS[dtype]),
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
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{file}: version is {version!r}, and this release reads {VERSION!r}; update megatron_packed_sft, or write "
            "the shard again"
        )
    for key, known in (
        ("loss_mask_dtype", MASK_DTYPE),
        ("index_dtype", INDEX_DTYPE),
        ("bin_checksum_algorithm", BIN_CHECKSUM_ALGORITHM),
    ):
        _check_constant(file, key, values.text(key), known)


def _check_constant(file: str, key: str, value: str | None, *known: str | None) -> None:
    if value not in known:
        raise UnsupportedFormatError(
            f"{file}: {key} is {value!r}, not {known[-1]!r}; update megatron_packed_sft, or restore the manifest"
        )


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
    """Return all columns of one bin, without compiled code, which takes too long to load for a single bin.

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
