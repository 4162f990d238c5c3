"""Which samples a rank takes: the same global stream for any number of ranks, from any sample on.

    the stream (order.py)   . . . . . . . . | . . . . . . . . | . . .
    global batches of 8     └──── k = 0 ───┘ └──── k = 1 ───┘           always the same samples, whatever the ranks
    micro batches of 2       0 0 1 1 0 0 1 1                            rank 0 and 1 of 2, in turn
                             0 0 1 1 2 2 3 3                            ranks of 4

The stream goes over the edge of an epoch without a seam: no sample is dropped or repeated there, so the position in
the stream is all that a resume needs. Only the end of a pass can be short of a global batch: it is dropped, or filled
up with padding samples (index -1, whose loss is masked).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_packed_sft.data.order.sample_order import Int64Array
from megatron_packed_sft.data.order.stream import StreamSampler


class BatchSampler(StreamSampler):
    """A sampler that yields lists of indices, one per batch of this rank."""

    def __len__(self) -> int:
        """Batches of a whole pass for this rank."""
        return self._num_steps_per_pass()

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from `consumed_samples` to the end of the pass."""
        return self._take()


class MicroBatchSampler(BatchSampler):
    """Yields a rank's micro batches, one list of indices per forward pass; see `StreamSampler` for the arguments.

    Example:
        >>> list(MicroBatchSampler(8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2))
        [[2, 3], [6, 7]]
    """


class GlobalBatchSampler(BatchSampler):
    """Yields all that a rank takes of a global batch as one list: its micro batches, one after the other.

    For trainers that collate a global batch as a whole and split it on the first dimension afterwards; each micro
    batch is then the same as that of `MicroBatchSampler`. See `StreamSampler` for the arguments.

    Example:
        >>> list(GlobalBatchSampler(8, global_batch_size=4, data_parallel_rank=1, data_parallel_size=2))
        [[1, 3], [5, 7]]
    """

    def _layout(self) -> tuple[int, Int64Array]:
        samples_per_micro_batch, offsets = super()._layout()
        starts = np.arange(0, self.global_batch_size, samples_per_micro_batch)
        return self.global_batch_size, (starts[:, None] + offsets).reshape(-1)


class IndexSampler(StreamSampler):
    """Yields a rank's indices one by one, for a DataLoader's `sampler` with batch_size=micro_batch_size.

    `consumed_samples` moves on by whole micro batches of all ranks. See `StreamSampler` for the arguments.

    Example:
        >>> list(IndexSampler(8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2))
        [2, 3, 6, 7]
    """

    def __len__(self) -> int:
        """Indices of a whole pass for this rank."""
        num_indices = self._num_steps_per_pass() * self.micro_batch_size
        is_short = self.num_epochs is not None and not self.drop_last and not self.pad_samples_to_global_batch_size
        return self.total_samples * (self.num_epochs or 1) if is_short else num_indices

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from `consumed_samples` to the end of the pass."""
        for indices in self._take():
            yield from indices
