"""The documents of an indexed dataset as bins: each is one sequence, and every prediction in it is trained."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.storage.bins import BinFigures, IntArray, PackedBin
from megatron_packed_sft.storage.megatron_indexed.index import DocumentIndex, read_index
from megatron_packed_sft.storage.read_options import ReadOptions
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, new_hasher
from megatron_packed_sft.support.npy import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.support.paths import local_path

_NUM_SAMPLES = 64  # places all over the tokens that are part of the fingerprint
_SAMPLE_BYTES = 4096


def open_indexed_dataset(path: str | os.PathLike[str]) -> IndexedDocuments:
    """Open Megatron's PREFIX.bin and PREFIX.idx; the index is read and checked, the tokens are mapped later.

    Args:
        path: the prefix, or either file.
    """
    return IndexedDocuments(read_index(local_path(path)))


class IndexedDocuments:
    """The documents that are not empty, in their order.

    Args:
        index: the index, checked.

    Attributes:
        index: likewise.
        lengths: tokens of each document, as `pack` takes them.
    """

    def __init__(self, index: DocumentIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.document_offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def pack_size(self) -> int:
        """The length of the longest document."""
        return int(self.lengths.max())

    @property
    def document_offsets(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the number of all tokens."""
        return self.index.document_offsets

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {self.index.path}, which has {len(self)}")
        ids = self.document(index)
        loss_mask = np.ones(len(ids), np.uint8)
        loss_mask[-1] = 0
        return PackedBin(ids, loss_mask, np.zeros(1, np.uint32))

    def __iter__(self) -> Iterator[PackedBin]:
        return (self[index] for index in range(len(self)))

    def document(self, index: int) -> IntArray:
        """Return the ids of a document; one that cannot be an id is an error."""
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

    def read_with(self, options: ReadOptions) -> None:
        """Choose how the tokens are read from now on. There are no checksums to verify documents with."""
        self.index.tokens.access = options.access

    def advise(self, documents: Iterable[int]) -> None:
        """Have the kernel read these documents ahead: they are needed soon."""
        for index in documents:
            self.index.tokens.advise(*self.index.document_offsets[index : index + 2].tolist())

    @property
    def figures(self) -> BinFigures:
        """What is known of all documents."""
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
        """Identifies the documents' lengths, the dtype and 64 samples of the tokens, not all of them."""
        hasher = new_hasher(DEFAULT_ALGORITHM)
        tokens = self.index.tokens
        hasher.update(f"{tokens.dtype}\0{tokens.size}\n".encode())
        hasher.update(np.ascontiguousarray(self.index.document_offsets).view(np.uint8).data)
        for place in np.unique(np.linspace(0, max(tokens.size - _SAMPLE_BYTES, 0), _NUM_SAMPLES).astype(np.int64)):
            hasher.update(tokens.read(int(place), _SAMPLE_BYTES))
        return hasher.hexdigest()

    def __repr__(self) -> str:
        return f"IndexedDocuments({str(self.index.path)!r}, {len(self):,} documents of up to {self.pack_size:,})"
