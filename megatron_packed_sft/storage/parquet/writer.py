"""Write the packed Parquet file that Megatron-Bridge reads: row groups of 500 bins, snappy, as its own writer does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.ordered_writer import OrderedShardWriter
from megatron_packed_sft.storage.parquet.reader import COLUMNS
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.imports import load

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
