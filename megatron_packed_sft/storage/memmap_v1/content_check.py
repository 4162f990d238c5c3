"""The full check of a shard's content: one pass that reads, hashes and checks every byte and every row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron_packed_sft.disk.checked_files import CheckedFile
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.disk.hashing_reader import HashingReader
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.storage.bins import BinBlock, BlockTotals, find_violations
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.reader import CheckedShard
from megatron_packed_sft.storage.validation_report import Finding, ValidationReport

# Rows are read, hashed and checked in pieces that stay in the processor's cache.
_PIECE_BYTES = 1 << 20


class ShardContent:
    """The full check of one shard.

    Example:
        >>> with checked_shard(path) as shard:  # doctest: +SKIP
        ...     ShardContent(path, shard, report, bar).check()
    """

    def __init__(self, path: Path, shard: CheckedShard, report: ValidationReport, bar: tqdm[Any]) -> None:
        self._path = path
        self._shard = shard
        self._report = report
        self._bar = bar

    def check(self) -> None:
        """Read, hash and check everything."""
        ids_file, mask_file, *index_files = self._shard.files
        packed_len, seq_offsets, seq_starts = (self._read_index(file) for file in index_files)
        if not self._csr_is_sound(seq_offsets, len(seq_starts)):
            for file in (ids_file, mask_file):
                self._hash_only(file)
            return
        num_findings = self._report.num_findings
        totals = BlockTotals(0, 0, 0, 0, self._shard.manifest.pack_size)
        for start, ids, mask in self._rows(ids_file, mask_file):
            stop = start + len(ids)
            block = BinBlock(
                ids,
                mask,
                packed_len[start:stop],
                seq_offsets[start : stop + 1],
                seq_starts[int(seq_offsets[start]) : int(seq_offsets[stop])],
            )
            totals = _added(totals, self._check_block(start, block))
        self._report.num_sequences += len(seq_starts)
        self._report.num_tokens += totals.num_tokens
        self._report.num_loss_tokens += totals.num_loss_tokens
        if self._report.num_findings == num_findings:
            self._compare_totals(totals, len(seq_starts))

    def _check_block(self, start: int, block: BinBlock) -> BlockTotals:
        manifest = self._shard.manifest
        violations, totals = find_violations(block, vocab_size=manifest.id_limit, pad_id=manifest.pad_id)
        for found in violations:
            name = f"{found.field}.npy"
            self._add(name, f"{found.field} {found.message}", row=start + found.row, field=found.field)
        return totals

    def _csr_is_sound(self, seq_offsets: npt.NDArray[np.uint32], num_sequences: int) -> bool:
        backwards = np.flatnonzero(seq_offsets[1:] < seq_offsets[:-1])
        if seq_offsets[0] != 0:
            self._add(layout.SEQ_OFFSETS, f"begins with {int(seq_offsets[0])}, not 0", row=0, field="seq_offsets")
        elif backwards.size:
            self._add(layout.SEQ_OFFSETS, "decreases after this row", row=int(backwards[0]), field="seq_offsets")
        elif seq_offsets[-1] != num_sequences:
            self._add(
                layout.SEQ_OFFSETS,
                f"ends with {int(seq_offsets[-1])}, but there are {num_sequences} sequence starts",
                row=len(seq_offsets) - 1,
                field="seq_offsets",
            )
        else:
            return True
        return False

    def _compare_totals(self, totals: BlockTotals, num_sequences: int) -> None:
        for name, value in {**totals._asdict(), "num_sequences": num_sequences}.items():
            recorded = getattr(self._shard.manifest, name)
            if recorded is not None and recorded != value:
                self._add(MANIFEST, f"{name} is {recorded}, the arrays say {value}", field=name)

    def _read_index(self, file: CheckedFile) -> npt.NDArray[np.uint32]:
        reader = HashingReader(file, self._algorithm(), self._bar)
        data = np.empty(file.header.shape, file.header.dtype)
        reader.read_into(data)
        self._compare_checksum(file, reader)
        return data

    def _hash_only(self, file: CheckedFile) -> None:
        reader = HashingReader(file, self._algorithm(), self._bar)
        buffer = np.empty(_PIECE_BYTES, np.uint8)
        while reader.remaining:
            reader.read_into(buffer[: min(reader.remaining, _PIECE_BYTES)])
        self._compare_checksum(file, reader)

    def _rows(
        self, ids_file: CheckedFile, mask_file: CheckedFile
    ) -> Iterator[tuple[int, npt.NDArray[Any], npt.NDArray[np.uint8]]]:
        num_bins, pack_size = ids_file.header.shape
        ids_reader, mask_reader = (HashingReader(file, self._algorithm(), self._bar) for file in (ids_file, mask_file))
        rows_at_once = max(1, _PIECE_BYTES // (pack_size * np.dtype(ids_file.header.dtype).itemsize))
        ids = np.empty((min(rows_at_once, num_bins), pack_size), ids_file.header.dtype)
        mask = np.empty(ids.shape, np.uint8)
        for start in range(0, num_bins, rows_at_once):
            count = min(rows_at_once, num_bins - start)
            ids_reader.read_into(ids[:count])
            mask_reader.read_into(mask[:count])
            yield start, ids[:count], mask[:count]
        self._compare_checksum(ids_file, ids_reader)
        self._compare_checksum(mask_file, mask_reader)

    def _algorithm(self) -> str:
        return self._shard.manifest.checksum_algorithm or DEFAULT_ALGORITHM

    def _compare_checksum(self, file: CheckedFile, reader: HashingReader) -> None:
        records = self._shard.manifest.files
        if records is not None and records[file.name].checksum != reader.hexdigest():
            self._add(file.name, "its content does not match its checksum; restore it from the original shard")

    def _add(self, name: str, message: str, row: int | None = None, field: str | None = None) -> None:
        self._report.add(Finding(str(self._path / name), message, row, field))


def _added(left: BlockTotals, right: BlockTotals) -> BlockTotals:
    return BlockTotals(
        left.num_tokens + right.num_tokens,
        left.num_loss_tokens + right.num_loss_tokens,
        max(left.max_seqs_per_bin, right.max_seqs_per_bin),
        max(left.max_seq_len, right.max_seq_len),
        min(left.min_packed_len, right.min_packed_len),
    )
