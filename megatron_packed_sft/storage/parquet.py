"""Megatron-Bridge's packed Parquet: `input_ids`, `loss_mask` and `seq_start_id` as columns of lists, one bin per row.

Needs pyarrow (the `parquet` extra). Random reads of Parquet are slow, so a file is read into memory as a whole. What is
not packed SFT data is refused by column and bin. Files are written as Megatron-Bridge's own writer does: row groups of
500 bins, snappy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.flat_files import (
    DEFAULT_OPTIONS,
    FIELDS,
    FlatBins,
    FlatBinsBuilder,
    FlatShard,
    OrderedShardWriter,
)
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import local_path

_BINS_AT_ONCE = 256


class ParquetShard(FlatShard):
    """A packed Parquet file, read into memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        location = local_path(path)
        super().__init__(location, _read(location))


def read_footer(path: Path) -> dict[str, int]:
    """Return how many bins, tokens and sequences a file holds, by its footer; nothing else is read."""
    pa = load("pyarrow", "parquet", "packed Parquet files")
    pq = load("pyarrow.parquet", "parquet", "packed Parquet files")
    try:
        with pq.ParquetFile(path) as file:
            _require_columns(path, file)
            footer = file.metadata
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    counts = {"num_bins": footer.num_rows, "num_tokens": 0, "num_sequences": 0}
    names = {"input_ids": "num_tokens", "seq_start_id": "num_sequences"}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if name := names.get(column.path_in_schema.partition(".")[0]):
                counts[name] += column.num_values
    return counts


def _require_columns(path: Path, file: Any) -> None:
    absent = [name for name in FIELDS if name not in file.schema_arrow.names]
    if absent:
        raise LegacyFormatError(f"{path} has no column {absent[0]}; it is not packed SFT data")


def _unreadable(path: Path, error: Exception) -> LegacyFormatError:
    return LegacyFormatError(f"{path} cannot be read as Parquet ({error}); restore the file")


def _read(path: Path) -> FlatBins:
    pa = load("pyarrow", "parquet", "packed Parquet files")
    pq = load("pyarrow.parquet", "parquet", "packed Parquet files")
    builder = FlatBinsBuilder(path)
    first_bin = 0
    try:
        with pq.ParquetFile(path) as file:
            _require_columns(path, file)
            for batch in file.iter_batches(batch_size=_BINS_AT_ONCE, columns=list(FIELDS)):
                if batch.num_rows:
                    builder.add_flat(*(_flat(path, batch.column(name), name, first_bin, pa) for name in FIELDS))
                first_bin += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    return builder.build()


def _flat(path: Path, column: Any, name: str, first_bin: int, pa: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return the values of a column, and how many each bin has."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise LegacyFormatError(f"{path}: column {name} is {column.type}, not lists of integers")
    flat = column.flatten()
    if not (pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type)):
        raise LegacyFormatError(f"{path}: column {name} is {column.type}, not lists of integers")
    if column.null_count or flat.null_count:
        raise LegacyFormatError(f"{path}: column {name} has empty (null) values after bin {first_bin}")
    counts = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return flat.to_numpy(zero_copy_only=False), counts


_BINS_PER_GROUP = 500


class ParquetShardWriter(OrderedShardWriter):
    """Write bins in their order, and publish the whole file at `finalize`; memory is one row group.

    The arguments are those of `OrderedShardWriter`.
    """

    _OUTPUT = "output.parquet"

    def __init__(self, output_path: str | os.PathLike[str], options: WriterOptions = DEFAULT_OPTIONS) -> None:
        self._pa = load("pyarrow", "parquet", "packed Parquet")
        pq = load("pyarrow.parquet", "parquet", "packed Parquet")
        super().__init__(output_path, options)
        types = zip(FIELDS, (self._pa.int32(), self._pa.int8(), self._pa.int32()), strict=True)
        self._schema = self._pa.schema([(name, self._pa.list_(kind)) for name, kind in types])
        self._pending: list[Any] = []  # record batches of the row group to come
        self._num_pending = 0
        with self._aborting_on_error(), os_errors("write", self.path):
            self._file = pq.ParquetWriter(self._staging.path / self._OUTPUT, self._schema)
            self._cleanup.callback(self._file.close)

    def _append(self, first_bin: int, block: BinBlock) -> None:
        start = 0
        while start < len(block):
            stop = min(len(block), start + _BINS_PER_GROUP - self._num_pending)
            self._pending.append(self._record_batch(block, start, stop))
            self._num_pending += stop - start
            start = stop
            if self._num_pending == _BINS_PER_GROUP:
                self._write_group()

    def _complete(self, num_bins: int) -> int:
        if self._pending:
            self._write_group()
        output = self._staging.path / self._OUTPUT
        with os_errors("write", self.path):
            self._file.close()
            fd = os.open(output, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return output.stat().st_size

    def _write_group(self) -> None:
        table = self._pa.Table.from_batches(self._pending, self._schema)
        with os_errors("write", self.path):
            self._file.write_table(table, row_group_size=_BINS_PER_GROUP)
        self._pending, self._num_pending = [], 0

    def _record_batch(self, block: BinBlock, start: int, stop: int) -> Any:
        lengths = block.packed_len[start:stop]
        is_token = np.arange(block.input_ids.shape[1]) < lengths[:, np.newaxis]
        base = int(block.seq_offsets[0])
        offsets = block.seq_offsets[start : stop + 1].astype(np.int64) - base
        token_offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        starts = block.seq_starts[offsets[0] : offsets[-1]]
        columns = (
            (token_offsets, block.input_ids[start:stop][is_token].astype(np.int32, copy=False)),
            (token_offsets, block.loss_mask[start:stop][is_token].astype(np.int8)),
            (offsets - offsets[0], starts.astype(np.int32)),
        )
        arrays = [
            self._pa.ListArray.from_arrays(self._pa.array(positions.astype(np.int32)), self._pa.array(values))
            for positions, values in columns
        ]
        return self._pa.RecordBatch.from_arrays(arrays, schema=self._schema)


if TYPE_CHECKING:
    from megatron_packed_sft.storage.parquet import ParquetShard


class ParquetStorage(Storage):
    """Megatron-Bridge's packed Parquet."""

    name = "parquet"
    summary = "Megatron-Bridge's packed Parquet files"
    in_memory = True

    def recognises(self, path: Path) -> bool:
        """Return whether the path has one of Parquet's suffixes."""
        return path.suffix in (".parquet", ".pq") and not path.is_dir()

    def shard_name(self, number: int) -> str:
        """Return the name of a file; Megatron-Bridge looks for `.idx.parquet`."""
        return f"shard_{number:06d}.idx.parquet"

    def open(self, path: Path) -> ParquetShard:
        """Read a file into memory."""
        from megatron_packed_sft.storage.parquet import ParquetShard

        return ParquetShard(path)

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create a `ParquetShardWriter`."""
        return ParquetShardWriter(path, options)

    def stored_bytes(self, figures: BinFigures) -> int:
        """Return an estimate: ids take the bits of the vocabulary, starts those of a bin, and a mask almost nothing."""
        bits = ((figures.vocab_size or 1 << 17) - 1).bit_length()
        return (figures.most_tokens * (bits + 1) + figures.least_sequences * figures.pack_size.bit_length()) // 8

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what the file's footer counts, and what Megatron-Bridge's metadata beside it says."""
        from megatron_packed_sft.storage.figures import PackMetadata
        from megatron_packed_sft.storage.parquet import read_footer

        return {**read_footer(path), **PackMetadata.recorded_beside(path)}

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return Megatron-Bridge's metadata file."""
        from megatron_packed_sft.storage.figures import PackMetadata

        return PackMetadata.file_beside(figures)


STORAGE = ParquetStorage()
