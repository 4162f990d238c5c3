"""`MemmapShardWriter`: bins in, in any order, each exactly once; a whole published shard out, or nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, WriterStateError
from megatron_packed_sft.storage.bins import (
    BinBlock,
    BlockTotals,
    as_int_array,
    cast_checked,
    find_violations,
    find_weight_violations,
    mask_and_weights,
)
from megatron_packed_sft.storage.interface import PackedShardWriter
from megatron_packed_sft.storage.memmap_v1.manifest import (
    BIN_CHECKSUMS,
    CREATED_BY,
    IDS_COLUMN,
    INDEX_COLUMN,
    INPUT_IDS,
    LOSS_MASK,
    LOSS_WEIGHTS,
    MASK_COLUMN,
    MAX_NUM_BINS,
    MAX_PACK_SIZE,
    PACKED_LEN,
    SEQ_OFFSETS,
    SEQ_STARTS,
    WEIGHTS_COLUMN,
    ShardManifest,
    checksums_of_array,
    checksums_of_index,
    shard_arrays,
)
from megatron_packed_sft.storage.memmap_v1.write_buffers import PendingBins, StartsSpool
from megatron_packed_sft.support.array_files import (
    CHECKSUM_DTYPE,
    ID_DTYPE,
    ID_LIMITS,
    INDEX_DTYPE,
    INDEX_LIMIT,
    MASK_DTYPE,
    WEIGHT_DTYPE,
    ArrayFileWriter,
    ArraySpec,
    id_dtype_for,
)
from megatron_packed_sft.support.atomic import write_file
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import MANIFEST

_BLOCK_BYTES = 1 << 20


class MemmapShardWriter(PackedShardWriter):
    """Writes one memmap_v1 shard.

    Memory is 1 MB of bins (`write_bin`) or nothing of its own (`write_block` writes the caller's arrays), plus 48 bytes
    of bookkeeping per bin (56 with weights). Every invariant of the format is checked before a byte is written. As a
    context manager it leaves nothing behind unless `finalize` was reached.

    A loss mask of floats is one of weights. They are stored only if some weight is neither 0 nor 1. Every bin gets
    checksums of its own, which readers compare it with.

    Args:
        output_dir: where the shard appears; an existing path is refused unless it is an empty directory or `overwrite`.
        num_bins: how many bins will be written.
        pack_size: the width of the arrays; no bin is longer.
        total_seq_starts: how many sequences there may be in all; more are an error.
        dtype: of the stored ids, int32 or uint16; when not given, what `vocab_size` needs.
        vocab_size: ids must be below it; up to 65,536 they are stored as `<u2`, else (or when unknown) as `<i4`.
        pad_id: fills the arrays behind each bin.
        tokenizer: name and fingerprint of the tokenizer, kept in the manifest.
        chat_template_fingerprint, plan_fingerprint, pad_seq_to_mult: kept in the manifest.
        checksum_algorithm: `xxh3_128` or `sha256`.
        overwrite: replace whatever is published under that name, in one step.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with MemmapShardWriter(f"{home}/shard_000000", num_bins=1, pack_size=8, vocab_size=100) as writer:
        ...     writer.write_bin(0, input_ids=[5, 6, 7], loss_mask=[0, 1, 0], seq_start_id=[0])
        ...     manifest = writer.finalize()
        >>> manifest.num_tokens, manifest.dtype
        (3, '<u2')
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        num_bins: int,
        pack_size: int,
        total_seq_starts: int | None = None,
        dtype: npt.DTypeLike | None = None,
        *,
        vocab_size: int | None = None,
        pad_id: int = 0,
        tokenizer: Mapping[str, Any] | None = None,
        chat_template_fingerprint: str | None = None,
        plan_fingerprint: str | None = None,
        pad_seq_to_mult: int = 1,
        checksum_algorithm: str = DEFAULT_ALGORITHM,
        overwrite: bool = False,
    ) -> None:
        _check_argument("num_bins", num_bins, 1, MAX_NUM_BINS)
        _check_argument("pack_size", pack_size, 1, MAX_PACK_SIZE)
        if vocab_size is not None:
            _check_argument("vocab_size", vocab_size, 1, ID_LIMITS[ID_DTYPE])
        self.num_bins = int(num_bins)
        self.pack_size = int(pack_size)
        self.dtype = id_dtype_for(vocab_size) if dtype is None else _id_dtype(dtype, vocab_size)
        self.id_limit = int(vocab_size) if vocab_size is not None else ID_LIMITS[self.dtype]
        _check_argument("pad_id", pad_id, 0, self.id_limit - 1)
        _check_argument("pad_seq_to_mult", pad_seq_to_mult, 1, self.pack_size)
        self.pad_id = int(pad_id)
        self._provenance: dict[str, Any] = {
            "vocab_size": None if vocab_size is None else int(vocab_size),
            "tokenizer": tokenizer,
            "chat_template_fingerprint": chat_template_fingerprint,
            "plan_fingerprint": plan_fingerprint,
            "pad_seq_to_mult": int(pad_seq_to_mult),
        }
        self._total_seq_starts = total_seq_starts
        self._algorithm = checksum_algorithm
        self._packed_len = np.zeros(self.num_bins, np.uint32)  # 0 = not written yet
        self._totals = BlockTotals(0, 0, 0, 0, self.pack_size)
        self._pending = PendingBins(self.pack_size, self.dtype, self.id_limit, self.pad_id)
        self._files: list[ArrayFileWriter] = []
        self._weights_file: ArrayFileWriter | None = None
        self._checksums = np.zeros((self.num_bins, 4), CHECKSUM_DTYPE)
        self._weight_sums = np.empty(0)  # with weights, one per bin; NaN: the bin's weights are not in the file
        super().__init__(output_dir, overwrite=overwrite)
        with self._aborting_on_error():
            specs = shard_arrays(self.num_bins, self.pack_size, self.num_bins, self.dtype, has_weights=True)
            self._weights_spec = specs[LOSS_WEIGHTS]
            self._ids_file = self._new_file(specs[INPUT_IDS])
            self._mask_file = self._new_file(specs[LOSS_MASK])
            self._starts = StartsSpool(self._staging.path, self.num_bins)
            self._cleanup.callback(self._starts.close)

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Write one bin.

        Args:
            bin_id: its number in the shard; any order, each once.
            input_ids: 1 to `pack_size` token ids.
            loss_mask: as many 0/1 values, next-token aligned (0 at each sequence's last token); or as floats, how much
                each prediction counts.
            seq_start_id: where each sequence starts: 0 first, then strictly increasing.
        """
        name = f"bin {bin_id}: "
        _check_argument("bin_id", bin_id, 0, self.num_bins - 1)
        ids = as_int_array(input_ids, name + "input_ids")
        mask, weights = mask_and_weights(loss_mask, name + "loss_mask")
        starts = as_int_array(seq_start_id, name + "seq_start_id")
        length = len(ids)
        if not 1 <= length <= self.pack_size:
            raise InvalidInputError(f"{name}input_ids holds {length} tokens, a bin holds 1 to {self.pack_size}")
        if len(mask) != length:
            raise InvalidInputError(f"{name}loss_mask has {len(mask)} values for {length} input_ids; give one each")
        self._require_open()
        if weights is not None or not self._pending.accepts(bin_id):  # pending bins have no weights
            self._flush()
        staged = self._pending.stage(bin_id, ids, mask, starts)
        if weights is None:
            self._admit(bin_id, staged)
            self._pending.keep(bin_id, staged)
            return
        padded = np.zeros(staged.loss_mask.shape, WEIGHT_DTYPE)
        padded[0, :length] = weights
        staged = replace(staged, loss_weights=padded)
        self._admit(bin_id, staged)
        self._store(bin_id, staged)

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Write consecutive bins in padded form, in one vectorised call.

        Arrays that have the shard's dtype and are C-contiguous are written as they are, without a copy.

        Args:
            first_bin: the number of the block's first bin; blocks may come in any order.
            block: bins padded to `pack_size` with `pad_id` and mask 0.
        """
        self._require_open()
        block = self._normalised(first_bin, block)
        self._flush()
        self._admit(first_bin, block)
        self._store(first_bin, block)

    def finalize(self) -> ShardManifest:
        """Check that every bin is there, make everything durable, and publish by one rename."""
        self._require_open()
        with self._closing():
            manifest = self._complete()
            self._staging.publish()
        self.figures = manifest.figures
        return manifest

    def _admit(self, first_bin: int, block: BinBlock) -> None:
        """Refuse what is outside, twice or unsound; count the rest in."""
        last_bin = first_bin + len(block)
        if not 0 <= first_bin < last_bin <= self.num_bins:
            raise InvalidInputError(
                f"bin {first_bin} (a block of {len(block)}) is outside this shard's bins 0..{self.num_bins - 1}"
            )
        taken = np.flatnonzero(self._packed_len[first_bin:last_bin])
        if taken.size:
            raise WriterStateError(f"bin {first_bin + int(taken[0])} was written already; write each bin once")
        violations, totals = find_violations(block, vocab_size=self.id_limit, pad_id=self.pad_id)
        if violations:
            first = violations[0]
            raise InvalidInputError(f"bin {first_bin + first.bin}: {first.field} {first.message}")
        if block.loss_weights is not None:
            violations, sums = find_weight_violations(block)
            if violations:
                first = violations[0]
                raise InvalidInputError(f"bin {first_bin + first.bin}: {first.field} {first.message}")
            if not self._weight_sums.size:
                self._weight_sums = np.full(self.num_bins, np.nan)
            self._weight_sums[first_bin:last_bin] = sums
        self._packed_len[first_bin:last_bin] = block.packed_len
        self._totals = self._totals.plus(totals)

    def _store(self, first_bin: int, block: BinBlock) -> None:
        # After a failure the bins count as written while some of their bytes may be missing.
        with self._aborting_on_error():
            self._ids_file.write(first_bin, block.input_ids)
            self._mask_file.write(first_bin, block.loss_mask)
            own = self._checksums[first_bin : first_bin + len(block)]
            own[:, IDS_COLUMN] = checksums_of_array(block.input_ids, block.packed_len)
            own[:, MASK_COLUMN] = checksums_of_array(block.loss_mask, block.packed_len)
            self._starts.append(first_bin, block.seq_offsets, block.seq_starts)
            if block.loss_weights is not None:
                self._store_weights(first_bin, block.loss_weights)

    def _store_weights(self, first_bin: int, weights: npt.NDArray[np.float32]) -> None:
        if self._weights_file is None:
            self._weights_file = self._new_file(self._weights_spec)
        self._weights_file.write(first_bin, weights)
        last_bin = first_bin + len(weights)
        self._checksums[first_bin:last_bin, WEIGHTS_COLUMN] = checksums_of_array(
            weights, self._packed_len[first_bin:last_bin]
        )

    def _fill_in_weights(self) -> None:
        """Write the weights of bins that came without: 1 where their mask is 1."""
        bins = np.flatnonzero(np.isnan(self._weight_sums))
        at_once = max(1, _BLOCK_BYTES // self.pack_size)
        for run in np.split(bins, np.flatnonzero(np.diff(bins) != 1) + 1):
            for start in range(0, len(run), at_once):
                first, count = int(run[start]), min(at_once, len(run) - start)
                mask = self._mask_file.read(first, count)
                self._store_weights(first, mask.astype(WEIGHT_DTYPE))
                self._weight_sums[first : first + count] = mask.sum(axis=1, dtype=np.float64)

    def _flush(self) -> None:
        if len(self._pending):
            self._store(*self._pending.take())

    def _complete(self) -> ShardManifest:
        self._flush()
        missing = np.flatnonzero(self._packed_len == 0)
        if missing.size:
            raise WriterStateError(
                f"{missing.size} of {self.num_bins} bins were never written, the first is bin {int(missing[0])}; "
                "write them before finalize"
            )
        if self._weights_file is not None:
            self._fill_in_weights()
        offsets = self._starts.offsets()
        num_sequences = int(offsets[-1])
        if self._total_seq_starts is not None and num_sequences > self._total_seq_starts:
            raise WriterStateError(
                f"total_seq_starts is {self._total_seq_starts}, but {num_sequences} sequences were written; raise it"
            )
        if num_sequences >= INDEX_LIMIT:
            raise InvalidInputError(f"{num_sequences} sequences do not fit one shard; split it into smaller shards")
        has_weights = self._weights_file is not None
        specs = shard_arrays(self.num_bins, self.pack_size, num_sequences, self.dtype, has_weights=has_weights)
        self._new_file(specs[PACKED_LEN]).write(0, self._packed_len)
        self._new_file(specs[SEQ_OFFSETS]).write(0, offsets.astype(INDEX_DTYPE))
        starts_file = self._new_file(specs[SEQ_STARTS])
        for position, starts in self._starts.in_bin_order():
            starts_file.write(position, starts)
            first, last = np.searchsorted(offsets, (position, position + len(starts)))
            self._checksums[first:last, INDEX_COLUMN] = checksums_of_index(
                self._packed_len[first:last], offsets[first : last + 1], starts
            )
        self._starts.remove()
        checksums = specs[BIN_CHECKSUMS]
        self._new_file(checksums).write(0, np.ascontiguousarray(self._checksums[:, : checksums.shape[1]]))
        manifest = ShardManifest(
            num_bins=self.num_bins,
            pack_size=self.pack_size,
            dtype=self.dtype,
            files={file.spec.name: file.finish() for file in self._files},
            checksum_algorithm=self._algorithm,
            num_sequences=num_sequences,
            **self._totals._asdict(),
            **self._weight_fields(),
            pad_id=self.pad_id,
            created_by=CREATED_BY,
            **self._provenance,
        )
        write_file(self._staging.path / MANIFEST, manifest.to_bytes())
        return manifest

    def _weight_fields(self) -> dict[str, Any]:
        if self._weights_file is None:
            return {}
        return {
            "loss_weights_dtype": WEIGHT_DTYPE,
            "sum_loss_weights": math.fsum(self._weight_sums.tolist()),
        }

    def _new_file(self, spec: ArraySpec) -> ArrayFileWriter:
        file = ArrayFileWriter(self._staging.path / spec.name, spec, self._algorithm)
        self._cleanup.callback(file.close)
        self._files.append(file)
        return file

    def _normalised(self, first_bin: int, block: BinBlock) -> BinBlock:
        """Return the block in the shard's own dtypes, its shapes checked."""
        num_bins = len(block.packed_len)
        name = f"block at bin {first_bin}: "
        shape = (num_bins, self.pack_size)
        weights = block.loss_weights
        for field, array in (("input_ids", block.input_ids), ("loss_mask", block.loss_mask), ("loss_weights", weights)):
            if array is not None and array.shape != shape:
                raise InvalidInputError(f"{name}{field} has shape {array.shape}, not {shape}")
        if block.seq_offsets.shape != (num_bins + 1,) or block.seq_starts.ndim != 1:
            raise InvalidInputError(
                f"{name}seq_offsets has shape {block.seq_offsets.shape}, not ({num_bins + 1},), "
                "or seq_starts is not one-dimensional"
            )

        def cast(array: npt.NDArray[Any], dtype: str, limit: int, field: str) -> npt.NDArray[Any]:
            if array.dtype.str == dtype and array.flags.c_contiguous:
                return array  # its values are checked by find_violations
            return cast_checked(as_int_array(array, name + field, array.ndim), dtype, limit, name + field)

        block = BinBlock(
            cast(block.input_ids, self.dtype, self.id_limit, "input_ids"),
            cast(block.loss_mask, MASK_DTYPE, 2, "loss_mask"),
            cast(block.packed_len, INDEX_DTYPE, INDEX_LIMIT, "packed_len"),
            cast(block.seq_offsets, INDEX_DTYPE, INDEX_LIMIT, "seq_offsets"),
            cast(block.seq_starts, INDEX_DTYPE, INDEX_LIMIT, "seq_starts"),
        )
        if weights is not None and not np.array_equal(weights, block.loss_mask):
            block = replace(block, loss_weights=np.ascontiguousarray(weights, WEIGHT_DTYPE))
        if int(block.seq_offsets[-1]) - int(block.seq_offsets[0]) != len(block.seq_starts):
            raise InvalidInputError(
                f"{name}seq_offsets span {int(block.seq_offsets[-1]) - int(block.seq_offsets[0])} sequences, "
                f"but seq_starts has {len(block.seq_starts)}"
            )
        return block


def _check_argument(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise InvalidInputError(f"{name} is {value!r}; it must be an integer in {low}..{high}")


def _id_dtype(dtype: npt.DTypeLike, vocab_size: int | None) -> str:
    name = np.dtype(dtype).str
    if name not in ID_LIMITS:
        raise InvalidInputError(f"dtype is {np.dtype(dtype)}; ids are stored as int32 or uint16")
    if vocab_size is not None and vocab_size > ID_LIMITS[name]:
        raise InvalidInputError(f"dtype {np.dtype(dtype)} does not hold a vocabulary of {vocab_size}; use int32")
    return name
