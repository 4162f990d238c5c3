"""Megatron-Bridge's packed Parquet: `input_ids`, `loss_mask` and `seq_start_id` as columns of lists, one bin per row.

Needs pyarrow (the `parquet` extra). Random reads of Parquet are slow, so a file is read into memory as a whole. What is
not packed SFT data is refused by column and bin. Files are written as Megatron-Bridge's own writer does: row groups of
500 bins, snappy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures
from megatron_packed_sft.storage.flat_files import FlatBins, FlatShard, OrderedShardWriter
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage
from megatron_packed_sft.support.array_files import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import local_path

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")
_DTYPES = (np.int32, np.uint8, np.uint32)
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
    absent = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if absent:
        raise LegacyFormatError(f"{path} has no column {absent[0]}; it is not packed SFT data")


def _unreadable(path: Path, error: Exception) -> LegacyFormatError:
    return LegacyFormatError(f"{path} cannot be read as Parquet ({error}); restore the file")


class _Ragged:
    """Values of different numbers per bin: flat values and their counts."""

    def __init__(self, values: npt.NDArray[Any], counts: npt.NDArray[Any], first_bin: int) -> None:
        self.values = values
        self.counts = counts.astype(np.int64)
        self.first_bin = first_bin

    def bin_of(self, position: int) -> int:
        """Return the bin that the flat value at `position` belongs to."""
        return self.first_bin + int(np.searchsorted(np.cumsum(self.counts), position, side="right"))


def _read(path: Path) -> FlatBins:
    batches = list(_batches(path))
    if not batches:
        raise LegacyFormatError(f"{path} holds no bins")
    values: list[npt.NDArray[Any]] = []
    counts = []
    for number, dtype in enumerate(_DTYPES):
        values.append(np.concatenate([batch[number].values.astype(dtype, copy=False) for batch in batches]))
        counts.append(np.concatenate([batch[number].counts for batch in batches]))
    bin_offsets, seq_offsets = (np.concatenate(([0], np.cumsum(counts[number]))) for number in (0, 2))
    flat = FlatBins(values[0], values[1], bin_offsets, values[2], seq_offsets)
    _check_starts(path, flat)
    return flat


def _batches(path: Path) -> Iterator[tuple[_Ragged, _Ragged, _Ragged]]:
    pa = load("pyarrow", "parquet", "packed Parquet files")
    pq = load("pyarrow.parquet", "parquet", "packed Parquet files")
    try:
        with pq.ParquetFile(path) as file:
            _require_columns(path, file)
            first_bin = 0
            for batch in file.iter_batches(batch_size=_BINS_AT_ONCE, columns=list(COLUMNS)):
                ids, mask, starts = (_ragged(path, batch.column(name), name, first_bin, pa) for name in COLUMNS)
                _check_counts(path, ids, mask, starts)
                first_bin += batch.num_rows
                if batch.num_rows:
                    yield ids, mask, starts
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _ragged(path: Path, column: Any, name: str, first_bin: int, pa: Any) -> _Ragged:
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise LegacyFormatError(f"{path}: column {name} is {column.type}, not lists of integers")
    flat = column.flatten()
    if not (pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type)):
        raise LegacyFormatError(f"{path}: column {name} is {column.type}, not lists of integers")
    if column.null_count or flat.null_count:
        raise LegacyFormatError(f"{path}: column {name} has empty (null) values after bin {first_bin}")
    values = flat.to_numpy(zero_copy_only=False)
    ragged = _Ragged(values, column.value_lengths().to_numpy(zero_copy_only=False), first_bin)
    limit = 2 if name == "loss_mask" else ID_LIMITS[ID_DTYPE]
    bad = np.flatnonzero((values < 0) | (values >= limit))
    if bad.size:
        raise LegacyFormatError(
            f"{path}, bin {ragged.bin_of(int(bad[0]))}: {name} holds {int(values[bad[0]])}, not in 0..{limit - 1}"
        )
    return ragged


def _check_counts(path: Path, ids: _Ragged, mask: _Ragged, starts: _Ragged) -> None:
    for problem, bins in (
        ("input_ids and loss_mask differ in length", ids.counts != mask.counts),
        ("input_ids is empty", ids.counts == 0),
        ("seq_start_id is empty", starts.counts == 0),
    ):
        if bins.any():
            raise LegacyFormatError(f"{path}, bin {ids.first_bin + int(np.argmax(bins))}: {problem}")


def _check_starts(path: Path, flat: FlatBins) -> None:
    """Refuse starts that do not rise from 0 inside their bin: batches are made of them without looking again."""
    starts = flat.seq_starts.astype(np.int64)
    first = flat.seq_offsets[:-1]
    steps = np.diff(starts, prepend=-1)
    steps[first] = np.where(starts[first] == 0, 1, 0)
    beyond = np.flatnonzero(starts[flat.seq_offsets[1:] - 1] >= np.diff(flat.bin_offsets))
    falling = np.flatnonzero(steps < 1)
    if falling.size:
        index = int(np.searchsorted(flat.seq_offsets, falling[0], side="right")) - 1
        raise LegacyFormatError(f"{path}, bin {index}: seq_start_id does not rise from 0")
    if beyond.size:
        raise LegacyFormatError(f"{path}, bin {int(beyond[0])}: seq_start_id ends beyond its input_ids")


_BINS_PER_GROUP = 500


class ParquetShardWriter(OrderedShardWriter):
    """Write bins in any order, each once, and publish the whole file at `finalize`; memory is one row group.

    The arguments are those of `OrderedShardWriter`.
    """

    _OUTPUT = "output.parquet"

    def __init__(self, output_path: str | os.PathLike[str], **options: Any) -> None:
        self._pa = load("pyarrow", "parquet", "packed Parquet")
        pq = load("pyarrow.parquet", "parquet", "packed Parquet")
        super().__init__(output_path, **options)
        types = zip(COLUMNS, (self._pa.int32(), self._pa.int8(), self._pa.int32()), strict=True)
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

    def create_writer(
        self,
        path: str | os.PathLike[str],
        *,
        num_bins: int,
        pack_size: int,
        vocab_size: int | None = None,
        pad_id: int = 0,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> PackedShardWriter:
        """Create a `ParquetShardWriter`."""
        from megatron_packed_sft.storage.parquet import ParquetShardWriter

        return ParquetShardWriter(
            path,
            num_bins=num_bins,
            pack_size=pack_size,
            vocab_size=vocab_size,
            pad_id=pad_id,
            overwrite=overwrite,
            provenance=provenance,
        )

    def stored_bytes(self, *, num_bins: int, width: int, num_tokens: int, vocab_size: int | None) -> int:
        """Return an estimate: ids take the bits of the vocabulary, and a mask compresses to almost nothing."""
        bits = ((vocab_size or 1 << 17) - 1).bit_length()
        return num_tokens * (bits + 1) // 8

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what the file's footer counts, and what Megatron-Bridge's metadata beside it says."""
        from megatron_packed_sft.storage.pack_metadata import PackMetadata
        from megatron_packed_sft.storage.parquet import read_footer

        return {**read_footer(path), **PackMetadata.recorded_beside(path)}

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return Megatron-Bridge's metadata file."""
        from megatron_packed_sft.storage.pack_metadata import PackMetadata

        return PackMetadata.file_beside(figures)


STORAGE = ParquetStorage()
