"""A memmap_v1 shard of an object store of which a few bins are wanted: range requests fetch these and nothing else."""

from __future__ import annotations

import contextlib
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_packed_sft.errors import PackedSFTError, ShardFileError
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.dataset_directory import ShardEntry, open_listed_shard
from megatron_packed_sft.storage.memmap_v1.manifest import checksums_array, shard_arrays, weights_array
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.registry import storage_named
from megatron_packed_sft.support.array_files import ArraySpec

_NUM_THREADS = 4


class RangeShard:
    """Opens a shard by its manifest and the headers of its files. A bin that is asked for is fetched then.

    Args:
        url: of the shard.
        entry: what a dataset.json lists; another shard is refused.
    """

    def __init__(self, url: str, entry: ShardEntry | None = None) -> None:
        with contextlib.ExitStack() as resources:
            self._outline = resources.enter_context(Outline.of(url))
            path = self._outline.path
            storage = storage_named("memmap_v1")
            shard = storage.open(path) if entry is None else open_listed_shard(storage, path, entry)
            assert isinstance(shard, MemmapShard)
            self.shard = shard
            weakref.finalize(self, resources.pop_all().close)  # the scratch directory; also when the process ends

    def __getitem__(self, index: int) -> PackedBin:
        """Fetch a bin; its arrays are the caller's own."""
        try:
            self._fetch(index)
            try:
                return self.shard.bin(index, copy=True)
            except ShardFileError:
                self._fetch_small_files()  # which of them is damaged shows only if they are there as a whole
                return self.shard.bin(index, copy=True)
        except PackedSFTError as error:
            error.args = (self._outline.at_home(str(error)),)
            raise

    def _fetch(self, index: int) -> None:
        manifest = self.shard.manifest
        pack_size, num_sequences = manifest.pack_size, len(self.shard.arrays.seq_starts)
        ids, mask, lengths, offsets, starts = self._specs()
        by_bin = [ids, mask]
        if manifest.has_weights:
            by_bin.append(weights_array(manifest.num_bins, pack_size))
        by_bin += self._checksums()
        self._fill((lengths, index, index + 1), (offsets, index, index + 2))
        first, last = self.shard.arrays.seq_offsets[index : index + 2].tolist()
        # Damaged pointers would name any bytes; whoever reads the bin refuses them.
        last = min(last, first + pack_size, num_sequences)
        self._fill((starts, first, last), *((spec, index, index + 1) for spec in by_bin))

    def _fetch_small_files(self) -> None:
        self._fill(*((spec, 0, spec.shape[0]) for spec in (*self._specs()[2:], *self._checksums())))

    def _checksums(self) -> list[ArraySpec]:
        """Return the file of the bins' checksums, if the shard has one."""
        manifest = self.shard.manifest
        if not manifest.has_bin_checksums:
            return []
        return [checksums_array(manifest.num_bins, has_weights=manifest.has_weights)]

    def _specs(self) -> tuple[ArraySpec, ...]:
        manifest = self.shard.manifest
        num_sequences = len(self.shard.arrays.seq_starts)
        return shard_arrays(manifest.num_bins, manifest.pack_size, num_sequences, manifest.dtype)

    def _fill(self, *wanted: tuple[ArraySpec, int, int]) -> None:
        """Fetch entries [first, last) of some files at the same time."""

        def fill(one: tuple[ArraySpec, int, int]) -> None:
            spec, first, last = one
            width = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape[1:], dtype=np.int64))
            if first < last:
                self._outline.fill(spec.name, spec.header_size + first * width, spec.header_size + last * width)

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(fill, wanted))
