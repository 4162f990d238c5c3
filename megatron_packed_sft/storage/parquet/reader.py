"""Megatron-Bridge's packed Parquet files (`input_ids`, `loss_mask`, `seq_start_id`), as a source for `convert`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.disk import npy
from megatron_packed_sft.errors import LegacyFormatError, MissingDependencyError
from megatron_packed_sft.storage.bins import BinBlock

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")
_ROWS_AT_ONCE = 256


class ParquetShard:
    """One packed Parquet file, read front to back in batches of rows; needs pyarrow (the `parquet` extra).

    Opening scans the file once for the figures a writer needs up front.

    Example:
        >>> ParquetShard("data.idx.parquet").pack_size  # doctest: +SKIP
        4096
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._num_bins = 0
        self.pack_size = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.vocab_bound = 0
        for ids, mask, starts in self._batches():
            self._check_lengths(ids, mask, starts)
            self._num_bins += len(ids.lengths)
            self.pack_size = max(self.pack_size, int(ids.lengths.max(initial=0)))
            self.num_sequences += len(starts.values)
            self.num_tokens += len(ids.values)
            self.vocab_bound = max(self.vocab_bound, int(ids.values.max(initial=0)) + 1)
        if self._num_bins == 0:
            raise LegacyFormatError(f"{self.path} holds no rows; there is nothing to convert")

    def __len__(self) -> int:
        return self._num_bins

    def blocks(self, width: int, pad_id: int) -> Iterator[BinBlock]:
        """All rows in order, padded to `width` with `pad_id`."""
        from megatron_packed_sft.storage import bin_kernel

        for ids, mask, starts in self._batches():
            shape = (len(ids.lengths), width)
            block = BinBlock(
                np.empty(shape, np.int32),
                np.empty(shape, np.uint8),
                ids.lengths.astype(npy.INDEX_DTYPE),
                starts.offsets.astype(npy.INDEX_DTYPE),
                starts.values.astype(npy.INDEX_DTYPE),
            )
            bin_kernel.pad_bins(
                ids.values.astype(np.int32),
                mask.values.astype(np.uint8),
                ids.offsets,
                np.int64(pad_id),
                block.input_ids,
                block.loss_mask,
            )
            yield block

    def _batches(self) -> Iterator[tuple[_Ragged, _Ragged, _Ragged]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingDependencyError(
                f"reading {self.path} needs pyarrow; install it with pip install 'megatron-packed-sft[parquet]'"
            ) from None
        try:
            with pq.ParquetFile(self.path) as file:
                absent = [name for name in COLUMNS if name not in file.schema_arrow.names]
                if absent:
                    raise LegacyFormatError(f"{self.path} has no column {absent[0]}; it is not packed SFT data")
                first_row = 0
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(COLUMNS)):
                    ids, mask, starts = (self._ragged(batch.column(name), name, first_row) for name in COLUMNS)
                    first_row += batch.num_rows
                    yield ids, mask, starts
        except (pa.ArrowException, OSError) as error:
            raise LegacyFormatError(f"{self.path} cannot be read as Parquet ({error}); restore the file") from None

    def _ragged(self, column: Any, name: str, first_row: int) -> _Ragged:
        import pyarrow as pa

        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise LegacyFormatError(f"{self.path}: column {name} is {column.type}, not lists of integers")
        values = column.flatten()
        if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
            raise LegacyFormatError(f"{self.path}: column {name} is {column.type}, not lists of integers")
        if column.null_count or values.null_count:
            raise LegacyFormatError(f"{self.path}: column {name} has empty (null) values after row {first_row}")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        limit = 2 if name == "loss_mask" else npy.ID_LIMITS[npy.ID_DTYPE]
        ragged = _Ragged(values.to_numpy(zero_copy_only=False), lengths, first_row)
        bad = np.flatnonzero((ragged.values < 0) | (ragged.values >= limit))
        if bad.size:
            raise LegacyFormatError(
                f"{self.path}, row {ragged.row_of(int(bad[0]))}: {name} holds {int(ragged.values[bad[0]])}, "
                f"not in 0..{limit - 1}"
            )
        return ragged

    def _check_lengths(self, ids: _Ragged, mask: _Ragged, starts: _Ragged) -> None:
        for problem, rows in (
            ("input_ids and loss_mask differ in length", ids.lengths != mask.lengths),
            ("input_ids is empty", ids.lengths == 0),
            ("seq_start_id is empty", starts.lengths == 0),
        ):
            if rows.any():
                raise LegacyFormatError(f"{self.path}, row {ids.first_row + int(np.argmax(rows))}: {problem}")


class _Ragged:
    """Rows of different lengths: flat values and the pointers between them."""

    def __init__(self, values: npt.NDArray[Any], lengths: npt.NDArray[Any], first_row: int) -> None:
        self.values = values.astype(np.uint8) if values.dtype == np.bool_ else values
        self.lengths = lengths.astype(np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        self.first_row = first_row

    def row_of(self, position: int) -> int:
        """The row that the flat value at `position` belongs to."""
        return self.first_row + int(np.searchsorted(self.offsets, position, side="right")) - 1
