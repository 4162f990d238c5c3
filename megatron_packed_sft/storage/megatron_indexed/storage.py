"""Indexed datasets as a storage: PREFIX.idx is a shard; its documents, or windows of its tokens, are the bins.

Every prediction in a document is trained, because the files keep no loss masks.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.storage.bins import IntArray, PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import Lengths, PackedShard, PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.megatron_indexed.index import INDEX, MAGIC, DocumentIndex, pair_of, read_index
from megatron_packed_sft.storage.token_stream.options import StreamMetadata, StreamOptions
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.support.array_files import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum, new_hasher
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

_NUM_SAMPLES = 64  # positions across the tokens that are part of the fingerprint
_SAMPLE_BYTES = 4096


def open_indexed_dataset(path: str | os.PathLike[str]) -> IndexedDocuments:
    """Open Megatron's PREFIX.bin and PREFIX.idx; the index is read and checked, tokens are mapped on first use.

    Args:
        path: the prefix, or either file.
    """
    return IndexedDocuments(read_index(local_path(path)))


class IndexedDocuments(PackedShard):
    """The non-empty documents, in order.

    Args:
        index: the checked index.

    Attributes:
        index: the checked index.
        lengths: tokens of each document, as `pack` takes them.
    """

    def __init__(self, index: DocumentIndex) -> None:
        self.index = index
        self.path = index.path
        self.lengths = np.diff(index.document_offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def pack_size(self) -> int:
        """The length of the longest document."""
        return int(self.lengths.max())

    @property
    def document_offsets(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the total number of tokens."""
        return self.index.document_offsets

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {self.index.path}, which has {len(self)}")
        ids = self.document(index)
        loss_mask = np.ones(len(ids), np.uint8)
        loss_mask[-1] = 0
        return PackedBin(ids, loss_mask, np.zeros(1, np.uint32))

    def document(self, index: int) -> IntArray:
        """Return the ids of a document; a value that cannot be an id is an error."""
        start, stop = self.index.document_offsets[index : index + 2].tolist()
        ids = self.index.tokens.tokens(start, stop)
        if ids.dtype.kind == "u":
            return ids
        outside = (ids < 0) | (ids >= ID_LIMITS[ID_DTYPE])
        if outside.any():
            place = int(np.argmax(outside))
            raise ShardFileError(
                f"{self.index.tokens.path}: the token at position {start + place:,} is {ids[place]}, which is no id; "
                "write the data again"
            )
        return ids.astype(ID_DTYPE, copy=False)

    def longest_input(self) -> int:
        """Return the number of predictions in the longest document."""
        return self.pack_size - 1

    def sequence_lengths(self) -> tuple[Lengths, Lengths]:
        """Return the lengths of the documents; each is one sequence."""
        return self.lengths, np.ones(len(self), np.int64)

    def advise(self, documents: Iterable[int]) -> None:
        """Ask the kernel to read these documents ahead."""
        for index in documents:
            self.index.tokens.advise(*self.index.document_offsets[index : index + 2].tolist())

    @property
    def figures(self) -> BinFigures:
        """The figures of all documents."""
        num_tokens = int(self.index.document_offsets[-1])
        return BinFigures(
            num_bins=len(self),
            pack_size=self.pack_size,
            num_sequences=len(self),
            num_tokens=num_tokens,
            num_loss_tokens=num_tokens - len(self),
            max_seqs_per_bin=1,
            max_seq_len=self.pack_size,
            min_packed_len=int(self.lengths.min()),
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """A checksum of the documents' lengths, the dtype and 64 samples of the tokens."""
        hasher = new_hasher(DEFAULT_ALGORITHM)
        tokens = self.index.tokens
        hasher.update(f"{tokens.dtype}\0{tokens.size}\n".encode())
        hasher.update(np.ascontiguousarray(self.index.document_offsets).view(np.uint8).data)
        for place in np.unique(np.linspace(0, max(tokens.size - _SAMPLE_BYTES, 0), _NUM_SAMPLES).astype(np.int64)):
            hasher.update(tokens.read(int(place), _SAMPLE_BYTES))
        return hasher.hexdigest()

    def __repr__(self) -> str:
        return f"IndexedDocuments({str(self.index.path)!r}, {len(self):,} documents of up to {self.pack_size:,})"


if TYPE_CHECKING:
    from megatron_packed_sft.storage.validate import ValidationReport
    from megatron_packed_sft.support.progress import Progress

# By name, as in the registry: only code in the megatron room may import megatron.core, and only writing needs it.
_WRITER = ("megatron_packed_sft.megatron.indexed_writer", "IndexedDatasetWriter")


class MegatronIndexedStorage(Storage):
    """Megatron's .bin and .idx.

    Args:
        options: how to read them as a stream; None, or with `documents`, gives one bin per document.
    """

    name = "megatron_indexed"
    aliases = ("indexed_dataset",)
    summary = "Megatron's indexed datasets, PREFIX.bin and PREFIX.idx: documents without loss masks"
    one_shard_per_split = True
    keeps_masks = False
    stream_options = frozenset(("pack_sequences", "documents"))

    def __init__(self, options: StreamOptions | None = None) -> None:
        self.options = options

    def configured(self, options: StreamOptions) -> MegatronIndexedStorage:
        """Return this storage with other options: windows or documents."""
        return MegatronIndexedStorage(options)

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return the figures that the index gives."""
        return vars(self.open(path).figures).copy()

    def recognises(self, path: Path) -> bool:
        """Return whether the path is an .idx file of Megatron, damaged or not."""
        if path.suffix != INDEX or not path.is_file():
            return False
        try:
            with open(path, "rb") as file:
                return file.read(len(MAGIC)) == MAGIC or pair_of(path)[1].exists()
        except OSError:
            return False

    def shard_name(self, number: int) -> str:
        """Return the name of an .idx file."""
        return f"shard_{number:06d}{INDEX}"

    def open(self, path: Path) -> PackedShard:
        """Read the index; the tokens are mapped when they are first needed."""
        index = read_index(path)
        if self.options is None or self.options.documents:
            return IndexedDocuments(index)
        return TokenStream(path, [index.tokens], self.options, StreamMetadata(index.path, index.tokens.dtype))

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create an `IndexedDatasetWriter`; with `drop_masks` it accepts untrained tokens, which readers train on."""
        module, name = _WRITER
        writer: PackedShardWriter = getattr(importlib.import_module(module), name)(path, options)
        return writer

    def stored_bytes(self, figures: BinFigures) -> int:
        """Return the bytes of the tokens and of the index, which takes 20 bytes per sequence."""
        width = 2 if figures.vocab_size is not None and figures.vocab_size < 65_500 else 4
        return figures.most_tokens * width + figures.least_sequences * 20

    def checksum(self, path: Path) -> str:
        """Return one checksum over both files."""
        hasher = new_hasher(DEFAULT_ALGORITHM)
        for file in pair_of(path):
            hasher.update(file_checksum(file, DEFAULT_ALGORITHM).encode())
        return hasher.hexdigest()

    def validate(
        self, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
    ) -> BinFigures | None:
        """Check every token; see `validate_indexed`."""
        return validate_indexed(path, self.options or StreamOptions(), report, bar)


STORAGE = MegatronIndexedStorage()


def validate_indexed(path: Path, options: StreamOptions, report: ValidationReport, bar: Progress) -> BinFigures | None:
    """Check that an indexed dataset opens and, with level `full`, every token, as for a stream.

    Args:
        path: the .idx file.
        options: the vocabulary and the EOS id to check against, and the length of windows.
        report: receives the findings, the counts, and how to train on the data.
        bar: shows the bytes read.
    """
    from megatron_packed_sft.storage.token_stream.validate import check_stream, fitted
    from megatron_packed_sft.storage.validate import Finding

    for name in ("dtype", "file_pattern"):
        if getattr(options, name) is not None:
            raise InvalidInputError(
                f"{options.spelled(name)} does not apply to {path}, whose index records it; leave it out"
            )
    try:
        documents = open_indexed_dataset(path)
        index = documents.index
        metadata = StreamMetadata(index.path, index.tokens.dtype)
        stream = TokenStream(path, [index.tokens], fitted(options, [index.tokens]), metadata)
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None
    report.num_bytes += path.stat().st_size
    num_findings = report.num_findings
    check_stream(stream, report, bar)
    empty = f"; {plural(index.num_empty, 'empty document')} left out" if index.num_empty else ""
    report.notes.append(
        f"{path}: {plural(len(documents), 'document')} of up to {plural(documents.pack_size, 'token')}{empty}"
    )
    if report.num_findings == num_findings:
        eos = "tokenizer" if stream.eos_id is None else stream.eos_id  # bins of different lengths are padded with it
        arguments = f"{str(path)!r}, {eos}, seq_length={documents.pack_size}, stream=StreamOptions(documents=True)"
        report.notes.append(f"python, by document: create_sft_dataset({arguments})")
    return documents.figures
