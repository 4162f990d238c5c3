"""Storages of one file per shard: read whole into flat arrays, and written from front to back (legacy and Parquet)."""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, WriterStateError
from megatron_packed_sft.storage.bins import (
    BinBlock,
    BinFigures,
    BlockTotals,
    PackedBin,
    as_int_array,
    cast_checked,
    find_violations,
)
from megatron_packed_sft.storage.interface import PackedShardWriter
from megatron_packed_sft.storage.loss_weights import cannot_keep, mask_and_weights
from megatron_packed_sft.support.atomic import os_errors, write_at
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


_ID_LIMIT = 2**31
_SPOOL = "spool"
_FIGURES_FROM_CALLER = ("tokenizer", "chat_template_fingerprint", "pad_seq_to_mult")


class _Spooled(NamedTuple):
    """Where bins that came early wait: the place of their arrays in the spool, and the arrays' sizes."""

    place: int
    num_bins: int
    num_starts: int
    num_tokens: int


class OrderedShardWriter(PackedShardWriter):
    """Checks bins, puts them in order and hands them to `_append`; `finalize` publishes one file.

    Args:
        output_path: the file to publish; the name is taken as it is.
        num_bins: how many bins the file will hold; None takes as many as come.
        pack_size: no bin may be longer; None for no limit.
        vocab_size: ids must be below it; None for what an int32 holds.
        pad_id: recorded, for storages with dataset.json; these files have no padding.
        overwrite: replace a published file.
        provenance: recorded likewise.
    """

    _OUTPUT: str  # the file's name while it is staged

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        *,
        num_bins: int | None = None,
        pack_size: int | None = None,
        vocab_size: int | None = None,
        pad_id: int | None = None,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        if num_bins is not None and not 1 <= num_bins < _ID_LIMIT:
            raise InvalidInputError(f"num_bins is {num_bins}; a packed file holds at least one bin")
        if vocab_size is not None and not 1 <= vocab_size <= _ID_LIMIT:
            raise InvalidInputError(f"vocab_size is {vocab_size}; it must be in 1..{_ID_LIMIT}")
        self.num_bins = num_bins
        self._pack_size = pack_size
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._provenance = provenance or {}
        self._totals = BlockTotals(0, 0, 0, 0, _ID_LIMIT)
        self._num_sequences = 0
        self._longest = 0
        self._is_written = np.zeros(num_bins or 1024, np.bool_)
        self._next_bin = 0
        self._spool: dict[int, _Spooled] = {}  # by their first bin
        self._spool_fd = -1
        self._spool_size = 0
        super().__init__(output_path, overwrite=overwrite)
        self.path = self.target

    @abc.abstractmethod
    def _append(self, first_bin: int, block: BinBlock) -> None:
        """Write bins whose turn it is."""

    @abc.abstractmethod
    def _complete(self, num_bins: int) -> int:
        """Write what comes after the last bin, make the file durable, and return its size."""

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Check and write one bin, given as lists or integer arrays."""
        self._refuse_out_of_turn(bin_id, bin_id + 1)
        mask, weights = mask_and_weights(loss_mask, f"bin {bin_id}: loss_mask")
        if weights is not None:
            raise cannot_keep(f"bin {bin_id}", f"{self.path.name}, a file of 0/1 masks,")
        given = {"input_ids": input_ids, "seq_start_id": seq_start_id}
        ids, starts = (as_int_array(values, f"bin {bin_id}: {name}") for name, values in given.items())
        if not (len(ids) and len(starts)):
            raise InvalidInputError(f"bin {bin_id}: {'seq_start_id' if len(ids) else 'input_ids'} is empty")
        if len(ids) != len(mask):
            raise InvalidInputError(f"bin {bin_id}: loss_mask has {len(mask)} entries, but input_ids has {len(ids)}")
        block = BinBlock(
            input_ids=cast_checked(ids, "<i4", self._vocab_size or _ID_LIMIT, f"bin {bin_id}: input_ids")[np.newaxis],
            loss_mask=cast_checked(mask, "|u1", 2**8, f"bin {bin_id}: loss_mask")[np.newaxis],
            packed_len=np.array([len(ids)], np.uint32),
            seq_offsets=np.array([0, len(starts)], np.uint32),
            seq_starts=cast_checked(starts, "<u4", 2**32, f"bin {bin_id}: seq_start_id"),
        )
        self._write(bin_id, block)

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Check and write consecutive bins, the first of which is `first_bin`. One wrong bin keeps all of them out."""
        self._refuse_out_of_turn(first_bin, first_bin + len(block))
        if block.loss_weights is not None and not np.array_equal(block.loss_weights, block.loss_mask):
            raise cannot_keep(f"the block at bin {first_bin}", f"{self.path.name}, a file of 0/1 masks,")
        self._write(first_bin, _typed_block(block, f"block at bin {first_bin}"))

    def finalize(self) -> dict[str, Any]:
        """Publish the file and return its figures; a missing bin is an error, and nothing is published."""
        self._refuse_out_of_turn(0, 0)
        num_written = int(np.count_nonzero(self._is_written))
        num_bins = self.num_bins or max(1, int(np.flatnonzero(self._is_written).max(initial=-1)) + 1)
        if num_written < num_bins:
            raise WriterStateError(
                f"{self.path}: bin {int(np.argmin(self._is_written))} was never written ({num_bins - num_written} of "
                f"{num_bins} bins are missing); write every bin before finalize"
            )
        with self._closing():
            size = self._complete(num_bins)
            self._staging.publish_file(self._OUTPUT)
        from_caller: dict[str, Any] = {name: self._provenance.get(name) for name in _FIGURES_FROM_CALLER}
        self.figures = BinFigures(
            num_bins=num_bins,
            pack_size=self._pack_size or self._longest,
            num_sequences=self._num_sequences,
            **self._totals._asdict(),
            vocab_size=self._vocab_size,
            pad_id=self._pad_id,
            **from_caller,
        )
        return {**self.figures.numbers(), "num_bytes": size}

    def _refuse_out_of_turn(self, first: int, stop: int) -> None:
        self._require_open()
        if self.num_bins is None and 0 <= first <= stop < _ID_LIMIT and stop > len(self._is_written):
            self._is_written = np.concatenate((self._is_written, np.zeros(stop, np.bool_)))
        if not 0 <= first <= stop <= len(self._is_written):
            raise InvalidInputError(
                f"{self.path}: bins {first}..{stop - 1} are not within 0..{len(self._is_written) - 1}"
            )
        if self._is_written[first:stop].any():
            taken = first + int(np.argmax(self._is_written[first:stop]))
            raise WriterStateError(f"{self.path}: bin {taken} was written already; write each bin once")

    def _write(self, first_bin: int, block: BinBlock) -> None:
        longest = int(block.packed_len.max(initial=0))
        if self._pack_size is not None and longest > self._pack_size:
            index = int(np.argmax(block.packed_len > self._pack_size))
            raise InvalidInputError(
                f"bin {first_bin + index}: input_ids has {block.packed_len[index]} tokens, more than pack_size "
                f"{self._pack_size}"
            )
        violations, totals = find_violations(block, vocab_size=self._vocab_size or _ID_LIMIT, pad_id=None)
        if violations:
            first = violations[0]
            raise InvalidInputError(f"bin {first_bin + first.bin}: {first.field} {first.message}")
        with self._aborting_on_error():  # part of the block may be on disk: there is no clean state to return to
            self._put(first_bin, block)
        self._is_written[first_bin : first_bin + len(block)] = True
        self._totals = self._totals.plus(totals)
        self._num_sequences += len(block.seq_starts)
        self._longest = max(self._longest, longest)

    def _put(self, first_bin: int, block: BinBlock) -> None:
        if first_bin != self._next_bin:
            self._spool_block(first_bin, block)
            return
        self._append(first_bin, block)
        self._next_bin += len(block)
        while (waiting := self._spool.pop(self._next_bin, None)) is not None:
            self._append(self._next_bin, self._read_spooled(waiting))
            self._next_bin += waiting.num_bins

    def _spool_block(self, first_bin: int, block: BinBlock) -> None:
        if self._spool_fd < 0:
            self._spool_fd = self._create(_SPOOL)
        is_token = np.arange(block.input_ids.shape[1]) < block.packed_len[:, np.newaxis]
        ids, mask = block.input_ids[is_token].astype("<i4", copy=False), block.loss_mask[is_token]
        arrays = (block.packed_len, block.seq_offsets - block.seq_offsets[0], block.seq_starts, ids, mask)
        data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        with os_errors("write the spool of", self.path, self._spool_size + len(data)):
            write_at(self._spool_fd, data, self._spool_size)
        self._spool[first_bin] = _Spooled(self._spool_size, len(block), len(block.seq_starts), len(ids))
        self._spool_size += len(data)

    def _read_spooled(self, waiting: _Spooled) -> BinBlock:
        counts = (waiting.num_bins, waiting.num_bins + 1, waiting.num_starts, waiting.num_tokens)
        size = 4 * sum(counts) + waiting.num_tokens
        data = bytearray()
        with os_errors("read the spool of", self.path):
            while len(data) < size:
                some = os.pread(self._spool_fd, size - len(data), waiting.place + len(data))
                if not some:
                    raise WriterStateError(f"{self.path}: its spool file was cut by another process")
                data += some
        numbers = np.frombuffer(data, "<u4", sum(counts))
        lengths, offsets, starts, ids = np.split(numbers, np.cumsum(counts)[:-1])
        is_token = np.arange(int(lengths.max())) < lengths[:, np.newaxis]
        block = BinBlock(np.zeros(is_token.shape, "<i4"), np.zeros(is_token.shape, "|u1"), lengths, offsets, starts)
        block.input_ids[is_token] = ids
        block.loss_mask[is_token] = np.frombuffer(data, "|u1", waiting.num_tokens, numbers.nbytes)
        return block

    def _create(self, name: str) -> int:
        with os_errors("create a file for", self.path):
            fd = os.open(self._staging.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._cleanup.callback(os.close, fd)
        return fd


def _typed_block(block: BinBlock, where: str) -> BinBlock:
    """Return a block as the kernels take it; a block whose arrays do not fit each other is an error."""
    ids = as_int_array(block.input_ids, f"{where}: input_ids", ndim=2)
    mask = as_int_array(block.loss_mask, f"{where}: loss_mask", ndim=2)
    lengths, offsets, starts = (
        cast_checked(as_int_array(getattr(block, name), f"{where}: {name}"), "<u4", 2**32, f"{where}: {name}")
        for name in ("packed_len", "seq_offsets", "seq_starts")
    )
    if ids.shape != mask.shape or len(lengths) != len(ids) or len(offsets) != len(ids) + 1:
        raise InvalidInputError(
            f"{where}: input_ids {ids.shape}, loss_mask {mask.shape}, packed_len {lengths.shape} and seq_offsets "
            f"{offsets.shape} do not belong together"
        )
    if ids.dtype.str not in ("<i4", "<u2"):
        ids = cast_checked(ids, "<i4", _ID_LIMIT, f"{where}: input_ids")
    return BinBlock(
        input_ids=np.ascontiguousarray(ids, "<i4"),
        loss_mask=np.ascontiguousarray(cast_checked(mask, "|u1", 2**8, f"{where}: loss_mask")),
        packed_len=lengths,
        seq_offsets=offsets,
        seq_starts=starts,
    )
