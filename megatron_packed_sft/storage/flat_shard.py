"""Shards that are read whole: flat arrays in memory, as the legacy and the Parquet storage hold them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
from megatron_packed_sft.support.checksum import new_hasher

Scalar = TypeVar("Scalar", bound=np.generic)


class FlatBins(NamedTuple):
    """All bins end to end: bin b is [bin_offsets[b], bin_offsets[b + 1]) of the first two arrays."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    bin_offsets: npt.NDArray[np.int64]
    seq_starts: npt.NDArray[np.uint32]
    seq_offsets: npt.NDArray[np.int64]


class FlatShard:
    """Bins in memory, about 5 bytes per token. Arrays that come out are read-only.

    Megatron-Bridge writes a loss mask of 1 at the last token of sequences that are not chats, where nothing is
    predicted. The mask is kept as it is; `num_masks_at_sequence_end` counts these places, and `convert` clears them.
    """

    def __init__(self, path: Path, flat: FlatBins) -> None:
        self.path = path
        self.flat = flat
        self.packed_len = _read_only(np.diff(flat.bin_offsets).astype(np.uint32))

    def __len__(self) -> int:
        return len(self.packed_len)

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of {self.path}, which has {len(self)}")
        flat = self.flat
        first, last = flat.bin_offsets[index : index + 2].tolist()
        first_start, last_start = flat.seq_offsets[index : index + 2].tolist()
        return PackedBin(
            _read_only(flat.input_ids[first:last]),
            _read_only(flat.loss_mask[first:last]),
            _read_only(flat.seq_starts[first_start:last_start]),
        )

    def __iter__(self) -> Iterator[PackedBin]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self)} bins of up to {self.pack_size})"

    @property
    def pack_size(self) -> int:
        """The length of the longest bin."""
        return int(self.packed_len.max())

    @property
    def num_sequences(self) -> int:
        """The number of sequences in all bins."""
        return len(self.flat.seq_starts)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all bins."""
        return len(self.flat.input_ids)

    @functools.cached_property
    def vocab_bound(self) -> int:
        """The largest token id plus one: the smallest vocabulary that these bins fit."""
        return int(self.flat.input_ids.max()) + 1

    @functools.cached_property
    def num_masks_at_sequence_end(self) -> int:
        """How many sequences have a loss mask of 1 at their last token, where nothing is predicted."""
        flat = self.flat
        first_token = np.repeat(flat.bin_offsets[:-1], np.diff(flat.seq_offsets))
        return int(np.count_nonzero(flat.loss_mask[first_token + self._sequence_ends() - 1]))

    @functools.cached_property
    def figures(self) -> BinFigures:
        """What is known of all bins."""
        flat = self.flat
        return BinFigures(
            num_bins=len(self),
            pack_size=self.pack_size,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            num_loss_tokens=int(np.count_nonzero(flat.loss_mask)),
            max_seqs_per_bin=int(np.diff(flat.seq_offsets).max()),
            max_seq_len=int((self._sequence_ends() - flat.seq_starts).max()),
            min_packed_len=int(self.packed_len.min()),
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the content."""
        hasher = new_hasher("xxh3_128")
        for array in self.flat:
            hasher.update(np.ascontiguousarray(array).view(np.uint8).data)
        return hasher.hexdigest()

    def block(self, start: int, stop: int, width: int | None = None, pad_id: int = 0) -> BinBlock:
        """Return bins start..stop-1 in padded form, `width` (default: `pack_size`) wide, in arrays of their own."""
        from megatron_packed_sft.storage import bin_kernel

        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"bins {start}:{stop} of {self.path}, which has {len(self)}")
        if not 0 <= pad_id < 2**31:
            raise InvalidInputError(f"pad_id is {pad_id}; it must be a token id in 0..{2**31 - 1}")
        width = self.pack_size if width is None else width
        lengths = self.packed_len[start:stop]
        if len(lengths) and int(lengths.max()) > width:
            index = start + int(np.argmax(lengths > width))
            raise InvalidInputError(
                f"{self.path}: bin {index} has {self.packed_len[index]} tokens, more than the width {width}; "
                f"use a width of at least {self.pack_size}"
            )
        flat = self.flat
        bins = flat.bin_offsets[start : stop + 1]
        sequences = flat.seq_offsets[start : stop + 1]
        input_ids = np.empty((stop - start, width), np.int32)
        loss_mask = np.empty((stop - start, width), np.uint8)
        bin_kernel.pad_bins(
            flat.input_ids[bins[0] : bins[-1]],
            flat.loss_mask[bins[0] : bins[-1]],
            bins,
            np.int64(pad_id),
            input_ids,
            loss_mask,
        )
        return BinBlock(
            input_ids=input_ids,
            loss_mask=loss_mask,
            packed_len=lengths,
            seq_offsets=(sequences - sequences[0]).astype(np.uint32),
            seq_starts=flat.seq_starts[sequences[0] : sequences[-1]],
        )

    def _sequence_ends(self) -> npt.NDArray[np.int64]:
        """Return where each sequence ends inside its bin."""
        ends = np.append(self.flat.seq_starts[1:].astype(np.int64), 0)
        ends[self.flat.seq_offsets[1:] - 1] = self.packed_len  # a bin's last sequence ends with the bin
        return ends


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
