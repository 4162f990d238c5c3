"""The check of a memmap_v1 shard: structure, and at level `full` one pass that hashes and checks every byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.storage.bins import BinBlock, BlockTotals, find_violations, find_weight_violations
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.memmap_v1.manifest import (
    ARRAY_FILES,
    BIN_CHECKSUMS,
    FILES,
    INDEX_COLUMN,
    INPUT_IDS,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PACKED_LEN,
    SEQ_OFFSETS,
    SEQ_STARTS,
    checksums_of_block,
)
from megatron_packed_sft.storage.memmap_v1.reader import CheckedShard, checked_shard
from megatron_packed_sft.storage.validate import Finding, ValidationReport
from megatron_packed_sft.support.checked_files import CheckedFile, HashingReader
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.progress import Progress

# Bins are read, hashed and checked in blocks that stay in the processor's cache.
_BLOCK_BYTES = 1 << 20
_INDEX_FILES = (PACKED_LEN, SEQ_OFFSETS, SEQ_STARTS)


def validate_shard(path: Path, report: ValidationReport, bar: Progress) -> BinFigures | None:
    """Check one shard; return its figures unless it cannot be opened."""
    try:
        with checked_shard(path) as shard:
            report.add_strangers(path, {MANIFEST, *shard.files})
            if shard.manifest.vocab_size is None:
                report.notes.append(f"{path}: vocab_size was not recorded; ids are checked against the dtype only")
            report.num_bins += shard.manifest.num_bins
            report.num_bytes += sum(file.size for file in shard.files.values())
            if report.level == "full":
                _ContentCheck(path, shard, report, bar).run()
            return shard.manifest.figures
    except PackedSFTError as error:
        report.add_strangers(path, {MANIFEST, *ARRAY_FILES, LOSS_WEIGHTS})
        report.add(Finding(str(path), str(error)))
        return None


class _ContentCheck:
    """The full check of one open shard."""

    def __init__(self, path: Path, shard: CheckedShard, report: ValidationReport, bar: Progress) -> None:
        self._path = path
        self._shard = shard
        self._report = report
        self._bar = bar
        self._weight_sums: list[float] = []  # of each bin
        self._checksums: npt.NDArray[np.uint64] | None = None
        self._damaged: set[str] = set()  # files that do not match their checksum, of those that were read to the end

    def run(self) -> None:
        """Read, hash and check everything."""
        files = self._shard.files
        large = (INPUT_IDS, LOSS_MASK, LOSS_WEIGHTS)
        large_files = [files[name] for name in large if name in files]
        packed_len, seq_offsets, seq_starts = (self._read_index(files[name]) for name in _INDEX_FILES)
        self._checksums = self._read_checksums()
        if not self._csr_is_sound(seq_offsets, len(seq_starts)):
            for file in large_files:
                self._hash_only(file)
            return
        num_findings = self._report.num_findings
        totals = BlockTotals(0, 0, 0, 0, self._shard.manifest.pack_size)
        for start, ids, mask, *weights in self._bins(large_files):
            stop = start + len(ids)
            block = BinBlock(
                ids,
                mask,
                packed_len[start:stop],
                seq_offsets[start : stop + 1],
                seq_starts[int(seq_offsets[start]) : int(seq_offsets[stop])],
                *weights,
            )
            totals = totals.plus(self._check_block(start, block))
        self._report.num_sequences += len(seq_starts)
        self._report.num_tokens += totals.num_tokens
        self._report.num_loss_tokens += totals.num_loss_tokens
        if self._report.num_findings == num_findings:
            self._compare_totals(totals, len(seq_starts))

    def _check_block(self, start: int, block: BinBlock) -> BlockTotals:
        manifest = self._shard.manifest
        violations, totals = find_violations(block, vocab_size=manifest.id_limit, pad_id=manifest.pad_id)
        if block.loss_weights is not None:
            of_weights, sums = find_weight_violations(block)
            self._weight_sums += sums.tolist()
            listed = {found.bin for found in violations}
            violations += [found for found in of_weights if found.bin not in listed]
        for found in violations:
            name = f"{found.field}.npy"
            self._add(name, f"{found.field} {found.message}", bin=start + found.bin, field=found.field)
        if self._checksums is not None:
            self._compare_bins(start, block, {found.bin for found in violations})
        return totals

    def _read_checksums(self) -> npt.NDArray[np.uint64] | None:
        """Return the checksums of bins; None if that file is damaged itself."""
        num_findings = self._report.num_findings
        checksums = self._read_index(self._shard.files[BIN_CHECKSUMS])
        return checksums if self._report.num_findings == num_findings else None

    def _compare_bins(self, start: int, block: BinBlock, listed: set[int]) -> None:
        """Name the bins that do not match their checksums, except those that are listed already."""
        assert self._checksums is not None
        # A damaged length must not lead behind the arrays; the bin is listed already.
        sound = replace(block, packed_len=np.minimum(block.packed_len, np.uint32(block.input_ids.shape[1])))
        differs = checksums_of_block(sound) != self._checksums[start : start + len(block)]
        for index in np.flatnonzero(differs.any(axis=1)).tolist():
            if index in listed:
                continue
            columns = np.flatnonzero(differs[index]).tolist()
            if INDEX_COLUMN in columns:  # a wrong index leads to wrong tokens, too
                name = next((name for name in _INDEX_FILES if name in self._damaged), PACKED_LEN)
            else:
                name = FILES[columns[0]]
            self._add(name, "its content does not match the checksum of this bin", bin=start + index)

    def _csr_is_sound(self, seq_offsets: npt.NDArray[np.uint32], num_sequences: int) -> bool:
        backwards = np.flatnonzero(seq_offsets[1:] < seq_offsets[:-1])
        if seq_offsets[0] != 0:
            self._add(SEQ_OFFSETS, f"begins with {int(seq_offsets[0])}, not 0", bin=0, field="seq_offsets")
        elif backwards.size:
            self._add(SEQ_OFFSETS, "decreases after this bin", bin=int(backwards[0]), field="seq_offsets")
        elif seq_offsets[-1] != num_sequences:
            self._add(
                SEQ_OFFSETS,
                f"ends with {int(seq_offsets[-1])}, but there are {num_sequences} sequence starts",
                bin=len(seq_offsets) - 1,
                field="seq_offsets",
            )
        else:
            return True
        return False

    def _compare_totals(self, totals: BlockTotals, num_sequences: int) -> None:
        found: dict[str, Any] = {**totals._asdict(), "num_sequences": num_sequences}
        if self._weight_sums:
            found["sum_loss_weights"] = math.fsum(self._weight_sums)
        for name, value in found.items():
            recorded = getattr(self._shard.manifest, name)
            if recorded is not None and recorded != value:
                self._add(MANIFEST, f"{name} is {recorded}, the arrays say {value}", field=name)

    def _read_index(self, file: CheckedFile) -> npt.NDArray[Any]:
        reader = HashingReader(file, self._shard.manifest.checksum_algorithm, self._bar)
        data: npt.NDArray[Any] = np.empty(file.header.shape, file.header.dtype)
        reader.read_into(data)
        self._compare_checksum(file, reader)
        return data

    def _hash_only(self, file: CheckedFile) -> None:
        reader = HashingReader(file, self._shard.manifest.checksum_algorithm, self._bar)
        buffer = np.empty(_BLOCK_BYTES, np.uint8)
        while reader.remaining:
            reader.read_into(buffer[: min(reader.remaining, _BLOCK_BYTES)])
        self._compare_checksum(file, reader)

    def _bins(self, files: list[CheckedFile]) -> Iterator[tuple[Any, ...]]:
        """Yield the first bin of a block, and the block's part of each file."""
        num_bins, pack_size = files[0].header.shape
        readers = [HashingReader(file, self._shard.manifest.checksum_algorithm, self._bar) for file in files]
        bins_at_once = max(1, _BLOCK_BYTES // (pack_size * np.dtype(files[0].header.dtype).itemsize))
        arrays = [np.empty((min(bins_at_once, num_bins), pack_size), file.header.dtype) for file in files]
        for start in range(0, num_bins, bins_at_once):
            count = min(bins_at_once, num_bins - start)
            for reader, array in zip(readers, arrays, strict=True):
                reader.read_into(array[:count])
            yield start, *(array[:count] for array in arrays)
        for file, reader in zip(files, readers, strict=True):
            self._compare_checksum(file, reader)

    def _compare_checksum(self, file: CheckedFile, reader: HashingReader) -> None:
        if self._shard.manifest.files[file.name].checksum != reader.hexdigest():
            self._damaged.add(file.name)
            self._add(file.name, "its content does not match its checksum; restore it from the original shard")

    def _add(self, name: str, message: str, bin: int | None = None, field: str | None = None) -> None:
        self._report.add(Finding(str(self._path / name), message, bin, field))
