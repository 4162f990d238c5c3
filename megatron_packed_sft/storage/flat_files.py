"""Storages of one file per shard: read whole into flat arrays, and written from front to back (legacy and Parquet)."""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, LegacyFormatError, WriterStateError
from megatron_packed_sft.storage.bins import (
    BinBlock,
    BlockTotals,
    GatheredBins,
    IntArray,
    PackedBin,
    as_int_array,
    cannot_keep,
    cast_checked,
    find_violations,
    mask_and_weights,
)
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import (
    Lengths,
    PackedShard,
    PackedShardWriter,
    WriterOptions,
    lengths_of_index,
)
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import new_hasher

Scalar = TypeVar("Scalar", bound=np.generic)

FIELDS = ("input_ids", "loss_mask", "seq_start_id")
_DTYPES = (np.int32, np.uint8, np.uint32)
_LIMITS = (1 << 31, 2, 1 << 31)


class FlatBins(NamedTuple):
    """All bins end to end: bin b is [bin_offsets[b], bin_offsets[b + 1]) of the first two arrays."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    bin_offsets: npt.NDArray[np.int64]
    seq_starts: npt.NDArray[np.uint32]
    seq_offsets: npt.NDArray[np.int64]


class FlatBinsBuilder:
    """Collects bins that were read from a file into flat arrays, and checks all of their values.

    Args:
        path: the file, for messages.

    Example:
        >>> builder = FlatBinsBuilder(Path("packed.npy"))
        >>> builder.add([np.array([5, 6])], [np.array([1, 0])], [np.array([0])])
        >>> builder.build().bin_offsets.tolist()
        [0, 2]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: list[list[npt.NDArray[Any]]] = [[], [], []]
        self._counts: list[list[npt.NDArray[np.int64]]] = [[], [], []]
        self._num_bins = 0

    def add(self, *fields: Sequence[IntArray]) -> None:
        """Add consecutive bins: their ids, their loss masks and their starts."""
        self.add_flat(
            *((np.concatenate(arrays), np.array([len(one) for one in arrays], np.int64)) for arrays in fields)
        )

    def add_flat(self, *fields: tuple[IntArray, npt.NDArray[np.int64]]) -> None:
        """Add consecutive bins that lie end to end: the values of each field, and how many each bin has."""
        counts = [count for _, count in fields]
        for name, count in zip(FIELDS, counts, strict=True):
            if not count.all():
                raise self._error(int(np.argmin(count)), f"{name} is empty")
        if (counts[0] != counts[1]).any():
            index = int(np.argmax(counts[0] != counts[1]))
            raise self._error(index, f"loss_mask has {counts[1][index]} entries, but input_ids has {counts[0][index]}")
        for number, (values, count) in enumerate(fields):
            limit = _LIMITS[number]
            if int(values.min()) < 0 or int(values.max()) >= limit:
                place = int(np.argmax((values < 0) | (values >= limit)))
                index = int(np.searchsorted(np.cumsum(count), place, side="right"))
                inside = place - int(count[:index].sum())
                problem = f"{FIELDS[number]} is {int(values[place])} at position {inside}, not in 0..{limit - 1}"
                raise self._error(index, problem)
            self._values[number].append(values.astype(_DTYPES[number], copy=False))
            self._counts[number].append(count)
        self._num_bins += len(counts[0])

    def build(self) -> FlatBins:
        """Return all bins; starts that do not rise from 0 inside their bin are an error, and so are no bins at all."""
        if not self._num_bins:
            raise LegacyFormatError(f"{self._path} holds no bins")
        ids, mask, starts = (np.concatenate(parts) for parts in self._values)
        bin_offsets, seq_offsets = (
            np.concatenate(([0], np.cumsum(np.concatenate(self._counts[number])))) for number in (0, 2)
        )
        first, last = seq_offsets[:-1], seq_offsets[1:] - 1
        steps = np.diff(starts.astype(np.int64), prepend=-1)
        steps[first] = starts[first] == 0
        self._num_bins = 0
        if (steps < 1).any():
            index = int(np.searchsorted(seq_offsets, np.argmax(steps < 1), side="right")) - 1
            raise self._error(index, "seq_start_id does not rise from 0")
        beyond = starts[last] >= np.diff(bin_offsets)
        if beyond.any():
            raise self._error(int(np.argmax(beyond)), "seq_start_id ends beyond its input_ids")
        return FlatBins(ids, mask, bin_offsets, starts, seq_offsets)

    def _error(self, index: int, problem: str) -> LegacyFormatError:
        return LegacyFormatError(f"{self._path}: bin {self._num_bins + index}: {problem}")


class FlatShard(PackedShard):
    """Bins in memory, about 5 bytes per token, as read-only arrays.

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

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return int((self.packed_len.astype(np.int64) - np.diff(self.flat.seq_offsets)).max())

    def sequence_lengths(self) -> tuple[Lengths, Lengths]:
        """Return the lengths of all sequences and their number in each bin."""
        return lengths_of_index(self.packed_len, self.flat.seq_offsets, self.flat.seq_starts, self.path)

    def gather(self, bins: Sequence[int]) -> GatheredBins:
        """Return some bins where they lie; nothing is copied."""
        flat, numbers = self.flat, np.asarray(bins, np.int64)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise IndexError(f"bins {list(bins)} of {self.path}, which has {len(self)}")
        starts = flat.bin_offsets[numbers]
        return GatheredBins(
            flat.input_ids,
            flat.loss_mask,
            flat.seq_starts,
            starts,
            flat.bin_offsets[numbers + 1] - starts,
            flat.seq_offsets[numbers],
            flat.seq_offsets[numbers + 1],
        )

    def blocks(self, width: int, pad_id: int) -> Iterator[BinBlock]:
        """Yield all bins in order, in padded form."""
        return (self.block(start, stop, width, pad_id) for start, stop in self.block_ranges(width))

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
DEFAULT_OPTIONS = WriterOptions()
_FIGURES_FROM_CALLER = ("tokenizer", "chat_template_fingerprint", "pad_seq_to_mult")


class OrderedShardWriter(PackedShardWriter):
    """Writes one file from front to back: checks bins and hands them to `_append`; `finalize` publishes the file.

    Bins must come in the order of their numbers. With `num_bins` None the file holds as many bins as come, with
    `pack_size` None they may have any length.

    Args:
        output_path: the file to publish; the name is taken as it is.
        options: see `WriterOptions`. These files have no padding: `pad_id` and the provenance are only passed on in
            `figures`, for dataset.json.
    """

    _OUTPUT: str  # the file's name while it is staged

    def __init__(self, output_path: str | os.PathLike[str], options: WriterOptions = DEFAULT_OPTIONS) -> None:
        num_bins, vocab_size = options.num_bins, options.vocab_size
        if num_bins is not None and not 1 <= num_bins < _ID_LIMIT:
            raise InvalidInputError(f"num_bins is {num_bins}; a packed file holds at least one bin")
        if vocab_size is not None and not 1 <= vocab_size <= _ID_LIMIT:
            raise InvalidInputError(f"vocab_size is {vocab_size}; it must be in 1..{_ID_LIMIT}")
        self.options = options
        self.num_bins = num_bins
        self._id_limit = vocab_size or _ID_LIMIT
        self._totals = BlockTotals(0, 0, 0, 0, _ID_LIMIT)
        self._num_sequences = 0
        self._longest = 0
        self._next_bin = 0
        super().__init__(output_path, overwrite=options.overwrite)
        self.path = self.target

    @abc.abstractmethod
    def _append(self, first_bin: int, block: BinBlock) -> None:
        """Write the next bins."""

    @abc.abstractmethod
    def _complete(self, num_bins: int) -> int:
        """Write what comes after the last bin, make the file durable, and return its size."""

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Check and write the next bin, given as lists or integer arrays."""
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
            input_ids=cast_checked(ids, "<i4", self._id_limit, f"bin {bin_id}: input_ids")[np.newaxis],
            loss_mask=cast_checked(mask, "|u1", 2**8, f"bin {bin_id}: loss_mask")[np.newaxis],
            packed_len=np.array([len(ids)], np.uint32),
            seq_offsets=np.array([0, len(starts)], np.uint32),
            seq_starts=cast_checked(starts, "<u4", 2**32, f"bin {bin_id}: seq_start_id"),
        )
        self._write(bin_id, block)

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Check and write the next bins, the first of which is `first_bin`. One wrong bin keeps all of them out."""
        self._refuse_out_of_turn(first_bin, first_bin + len(block))
        if block.loss_weights is not None and not np.array_equal(block.loss_weights, block.loss_mask):
            raise cannot_keep(f"the block at bin {first_bin}", f"{self.path.name}, a file of 0/1 masks,")
        self._write(first_bin, _typed_block(block, f"block at bin {first_bin}"))

    def finalize(self) -> dict[str, Any]:
        """Publish the file and return its figures; a missing bin is an error, and nothing is published."""
        self._require_open()
        num_bins = self.num_bins or max(1, self._next_bin)
        if self._next_bin < num_bins:
            raise WriterStateError(
                f"{self.path}: bin {self._next_bin} was never written ({num_bins - self._next_bin} of {num_bins} bins "
                "are missing); write every bin before finalize"
            )
        with self._closing():
            size = self._complete(num_bins)
            self._staging.publish_file(self._OUTPUT)
        options = self.options
        from_caller: dict[str, Any] = {name: options.provenance.get(name) for name in _FIGURES_FROM_CALLER}
        self.figures = BinFigures(
            num_bins=num_bins,
            pack_size=options.pack_size or self._longest,
            num_sequences=self._num_sequences,
            **self._totals._asdict(),
            vocab_size=options.vocab_size,
            pad_id=options.pad_id,
            **from_caller,
        )
        return {**self.figures.numbers(), "num_bytes": size}

    def _refuse_out_of_turn(self, first: int, stop: int) -> None:
        """Refuse bins that are not the next ones."""
        self._require_open()
        limit = self.num_bins or _ID_LIMIT
        if not 0 <= first <= stop <= limit:
            raise InvalidInputError(f"{self.path}: bins {first}..{stop - 1} are not within 0..{limit - 1}")
        if first < self._next_bin:
            raise WriterStateError(f"{self.path}: bin {first} was written already; write each bin once")
        if first > self._next_bin:
            raise WriterStateError(
                f"{self.path}: bin {first} came before bin {self._next_bin}; write bins in their order, or use "
                "memmap_v1, which takes them in any order"
            )

    def _write(self, first_bin: int, block: BinBlock) -> None:
        longest, pack_size = int(block.packed_len.max(initial=0)), self.options.pack_size
        if pack_size is not None and longest > pack_size:
            index = int(np.argmax(block.packed_len > pack_size))
            raise InvalidInputError(
                f"bin {first_bin + index}: input_ids has {block.packed_len[index]} tokens, more than pack_size "
                f"{pack_size}"
            )
        violations, totals = find_violations(block, vocab_size=self._id_limit, pad_id=None)
        if violations:
            first = violations[0]
            raise InvalidInputError(f"bin {first_bin + first.bin}: {first.field} {first.message}")
        with self._aborting_on_error():  # part of the block may be on disk: there is no clean state to return to
            self._append(first_bin, block)
        self._next_bin += len(block)
        self._totals = self._totals.plus(totals)
        self._num_sequences += len(block.seq_starts)
        self._longest = max(self._longest, longest)

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
