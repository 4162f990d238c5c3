"""Read a packed Parquet file into flat arrays; everything that is not packed SFT data is refused by column and bin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.flat_shard import FlatBins, FlatShard
from megatron_packed_sft.support import npy
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
    limit = 2 if name == "loss_mask" else npy.ID_LIMITS[npy.ID_DTYPE]
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
