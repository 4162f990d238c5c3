"""Write Megatron's indexed datasets with megatron-core's own builder: every sequence of a bin becomes a document.

The format has no loss masks: a reader trains on every token. So untrained tokens are refused unless `drop_masks` is on.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.errors import TargetExistsError
from megatron_packed_sft.storage.bins import BinBlock, masks_would_be_lost
from megatron_packed_sft.storage.flat_files import DEFAULT_OPTIONS, OrderedShardWriter
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.storage.megatron_indexed.index import pair_of
from megatron_packed_sft.support.atomic import fsync_directory, os_errors
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import local_path


class IndexedDatasetWriter(OrderedShardWriter):
    """Write bins in their order; `finalize` publishes PREFIX.bin and then PREFIX.idx.

    Args:
        output_path: the prefix, or either file.
        options: see `WriterOptions`; `vocab_size` decides the dtype, as in megatron-core, and `drop_masks` accepts
            untrained tokens, which readers of the files will train.
    """

    _OUTPUT = "output.idx"
    _TOKENS = "output.bin"

    def __init__(self, output_path: str | os.PathLike[str], options: WriterOptions = DEFAULT_OPTIONS) -> None:
        index, self._tokens_path = pair_of(local_path(output_path, "output"))
        self._overwrite = options.overwrite
        self._num_untrained = 0
        self._num_predictions = 0
        self._has_tokens = False
        self._refuse_existing_tokens()
        indexed_dataset = _megatron_core()
        super().__init__(index, options)
        with self._aborting_on_error(), os_errors("write", self._tokens_path):
            self._builder = indexed_dataset.IndexedDatasetBuilder(
                str(self._staging.path / self._TOKENS),
                dtype=indexed_dataset.DType.optimal_dtype(options.vocab_size),
            )
            self._cleanup.callback(self._builder.data_file.close)

    def _append(self, first_bin: int, block: BinBlock) -> None:
        base = int(block.seq_offsets[0])
        for index in range(len(block)):
            first, last = (int(offset) - base for offset in block.seq_offsets[index : index + 2])
            edges = [*block.seq_starts[first:last].tolist(), int(block.packed_len[index])]
            for start, stop in itertools.pairwise(edges):
                with os_errors("write", self._tokens_path):
                    self._builder.add_document(block.input_ids[index, start:stop], [stop - start])
                self._num_predictions += stop - start - 1
                self._num_untrained += int(np.count_nonzero(block.loss_mask[index, start : stop - 1] == 0))

    def _complete(self, num_bins: int) -> int:
        if self._num_untrained and not self.options.drop_masks:
            raise masks_would_be_lost(self.path.name, self._num_untrained, self._num_predictions)
        tokens, index = self._staging.path / self._TOKENS, self._staging.path / self._OUTPUT
        with os_errors("write", self._tokens_path):
            self._builder.finalize(str(index))
            for file in (tokens, index):
                _make_durable(file)
            size = tokens.stat().st_size + index.stat().st_size
        self._publish_tokens(tokens)
        return size

    def _publish_tokens(self, staged: Path) -> None:
        """Put the tokens in place; the index, which makes them a dataset, follows. Old files step aside before."""
        self._cleanup.callback(self._undo)
        with os_errors("publish", self._tokens_path):
            if self._overwrite:
                for path in (self.path, self._tokens_path):
                    if os.path.lexists(path):
                        os.rename(path, self._aside(path))
                os.rename(staged, self._tokens_path)
            else:
                try:
                    os.link(staged, self._tokens_path)  # unlike rename, never replaces another writer's file
                except FileExistsError:
                    raise self._exists() from None
            self._has_tokens = True
            fsync_directory(self._tokens_path.parent)

    def _undo(self) -> None:
        """Unless the index was published, take the tokens back and put the old files where they were."""
        if os.path.lexists(self.path):
            return
        if self._has_tokens:
            os.unlink(self._tokens_path)
        for path in (self._tokens_path, self.path):
            if os.path.lexists(self._aside(path)):
                os.rename(self._aside(path), path)

    def _aside(self, path: Path) -> Path:
        return self._staging.path / f"old{path.suffix}"

    def _refuse_existing_tokens(self) -> None:
        if not self._overwrite and os.path.lexists(self._tokens_path):
            raise self._exists()

    def _exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"{self._tokens_path} exists already; choose another name, or add --overwrite (overwrite=True)"
        )


def _megatron_core() -> Any:
    with warnings.catch_warnings():  # about Apex, Transformer Engine and torch, which a writer does not need to know
        warnings.simplefilter("ignore")
        return load("megatron.core.datasets.indexed_dataset", "megatron", "writing an indexed dataset of Megatron")


def _make_durable(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
