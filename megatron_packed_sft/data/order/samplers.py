"""Samplers: which samples each rank takes. The global stream is the same for any number of ranks.

    the stream (order)      . . . . . . . . | . . . . . . . . | . . .
    global batches of 8     └──── k = 0 ───┘ └──── k = 1 ───┘           always the same samples, whatever the ranks
    micro batches of 2       0 0 1 1 0 0 1 1                            ranks 0 and 1 of 2, in turn
                             0 0 1 1 2 2 3 3                            ranks of 4

No sample is dropped or repeated between two epochs, so the position in the stream is all that a resume needs. Only the
end of a pass can be short of a global batch: those samples are dropped, or the batch is filled with padding samples
(index -1, whose loss is masked).
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np

from megatron_packed_sft.data.order.blend import BlendOrder
from megatron_packed_sft.data.order.sample_order import Int64Array, Order, SampleOrder
from megatron_packed_sft.data.order.state import BlendState, LoaderState, refuse_unknown
from megatron_packed_sft.errors import InvalidInputError

_log = logging.getLogger(__name__)

PADDING = -1
_DEFAULT_SEED = 1234
_INDICES_AT_ONCE = 1024  # one call per batch would cost more than computing the order


class Step(NamedTuple):
    """One batch of a rank, the position in the stream after it, and whether it is the last of the pass."""

    indices: list[int]
    consumed_samples: int
    is_last: bool


class SamplerArguments(TypedDict, total=False):
    """The arguments that every sampler takes, except the number of samples."""

    consumed_samples: int
    micro_batch_size: int
    global_batch_size: int | None
    data_parallel_rank: int
    data_parallel_size: int
    drop_last: bool
    pad_samples_to_global_batch_size: bool | None
    num_epochs: int | None
    shuffle: bool | None
    seed: int | None
    order: Order | None
    allow_mismatch: Collection[str]


class StreamSampler:
    """A rank's part of the stream, starting at `consumed_samples`: what all samplers share.

    `consumed_samples` advances with every batch that is taken. The next `iter` resumes there; after the last batch of
    a pass that is the start of the next one. Global batches are counted from where an `iter` begins, as trainers do.

    Args:
        total_samples: samples in the dataset: one epoch.
        consumed_samples: samples already trained on, over all ranks and epochs.
        micro_batch_size: samples per rank and forward pass.
        global_batch_size: samples per optimizer step, over all ranks; by default one micro batch per rank.
        data_parallel_rank: the number of this rank.
        data_parallel_size: the number of ranks.
        drop_last: drop the samples at the end of the pass that do not fill a global batch.
        pad_samples_to_global_batch_size: fill up the last global batch with padding samples (index -1); by default
            whenever it is not dropped.
        num_epochs: epochs in a pass; None never ends, so that a trainer's own sample count is always the position in
            the stream.
        shuffle: True gives every epoch an order of its own, as training needs; False keeps the stored order, for
            validation; None keeps it, too, and logs a warning when a second epoch begins.
        seed: the seed of the shuffle, by default 1234; refused with shuffle=None, which would ignore it.
        fingerprint: identifies the dataset.
        order: the order to use, such as that of a blend, instead of one made from shuffle, seed and fingerprint.
        allow_mismatch: names of fields in which a loaded state may differ, such as ("seed",).

    Example:
        >>> [step.indices for step in StreamSampler(6, micro_batch_size=2).steps(2)]
        [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int = 0,
        micro_batch_size: int = 1,
        global_batch_size: int | None = None,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        drop_last: bool = True,
        pad_samples_to_global_batch_size: bool | None = None,
        *,
        num_epochs: int | None = 1,
        shuffle: bool | None = None,
        seed: int | None = None,
        fingerprint: str = "",
        order: Order | None = None,
        allow_mismatch: Collection[str] = (),
    ) -> None:
        refuse_unknown(allow_mismatch)
        if seed is not None and order is not None:
            raise InvalidInputError(
                f"seed is {seed}, but the order of the samples is given, such as that of a blend, and has its own "
                "seed; leave it out here, and pass seed to create_sft_dataset"
            )
        if seed is not None and shuffle is None:
            raise InvalidInputError(
                f"seed is {seed}, but nothing is shuffled; pass shuffle=True as well, or shuffle=False if the stored "
                "order is meant"
            )
        self.total_samples = operator.index(total_samples)
        self.consumed_samples = operator.index(consumed_samples)  # trainers may count in NumPy's or torch's integers
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = (
            micro_batch_size * data_parallel_size if global_batch_size is None else global_batch_size
        )
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.drop_last = drop_last
        self.pad_samples_to_global_batch_size = (
            not drop_last if pad_samples_to_global_batch_size is None else pad_samples_to_global_batch_size
        )
        self.num_epochs = num_epochs
        self.allow_mismatch = tuple(allow_mismatch)
        self._check()
        self.order: Order = order or SampleOrder(
            total_samples, _DEFAULT_SEED if seed is None else seed, fingerprint, bool(shuffle)
        )
        self._warns_of_repetition = shuffle is None and order is None and data_parallel_rank == 0
        self._samples_per_step, self._offsets = self._layout()

    def _layout(self) -> tuple[int, Int64Array]:
        """Return how many samples one batch of all ranks takes, and which of them are this rank's."""
        first = self.data_parallel_rank * self.micro_batch_size
        return self.micro_batch_size * self.data_parallel_size, np.arange(first, first + self.micro_batch_size)

    def _check(self) -> None:
        for name in ("total_samples", "micro_batch_size", "data_parallel_size", "global_batch_size", "num_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} is {value}; it must be at least 1")
        if self.consumed_samples < 0:
            raise InvalidInputError(f"consumed_samples is {self.consumed_samples}; it must be at least 0")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise InvalidInputError(
                f"data_parallel_rank {self.data_parallel_rank} is not in 0..{self.data_parallel_size - 1}; "
                "ranks count from 0 and data_parallel_size is their number"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel_size):
            raise InvalidInputError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} times data_parallel_size {self.data_parallel_size}; change one of them"
            )
        if self.drop_last and self.pad_samples_to_global_batch_size:
            raise InvalidInputError("drop_last and pad_samples_to_global_batch_size cannot both be on; choose one")
        if not self.drop_last and not self.pad_samples_to_global_batch_size and self.data_parallel_size > 1:
            raise InvalidInputError(
                "drop_last=False without padding leaves some ranks without a last batch, and the others would wait "
                "for them forever; set pad_samples_to_global_batch_size=True"
            )
        if self.drop_last and self.num_epochs and self.total_samples * self.num_epochs < self.global_batch_size:
            raise InvalidInputError(
                f"{self.total_samples * self.num_epochs} samples are fewer than one global batch of "
                f"{self.global_batch_size}, so drop_last drops all of them; set drop_last=False, or use more epochs or "
                "a smaller batch"
            )

    def steps(self, consumed_samples: int) -> Iterator[Step]:
        """Yield the batches from a position of the stream to the end of the pass, without moving the sampler.

        Example:
            >>> next(StreamSampler(10, micro_batch_size=2).steps(4))
            Step(indices=[4, 5], consumed_samples=6, is_last=False)
        """
        start, end, num_steps = self._rest_of_pass(consumed_samples)
        most = max(1, _INDICES_AT_ONCE // len(self._offsets))
        done = 0
        while num_steps is None or done < num_steps:
            some = min(done + 1, most)  # few at first, so that the first batch comes soon
            some = some if num_steps is None else min(some, num_steps - done)
            first = start + done * self._samples_per_step
            positions = first + self._samples_per_step * np.arange(some)[:, None] + self._offsets
            for indices in self._indices(positions, end):
                done += 1
                is_last = done == num_steps
                consumed = start + done * self._samples_per_step
                if end is not None:
                    # The last batch consumes what is dropped, too: a resume right after it begins the next pass.
                    consumed = end if is_last else min(consumed, end)
                yield Step(indices, consumed, is_last)

    def _indices(self, positions: Int64Array, end: int | None) -> list[list[int]]:
        real = np.ones(positions.shape, np.bool_) if end is None else positions < end
        indices = np.full(positions.shape, PADDING, np.int64)
        indices[real] = self.order.at(positions[real])
        if not self.pad_samples_to_global_batch_size:
            return [batch[keep].tolist() for batch, keep in zip(indices, real, strict=True)]
        return [batch.tolist() for batch in indices]

    def _take(self) -> Iterator[list[int]]:
        for step in self.steps(self.consumed_samples):
            self.advance(step.consumed_samples)
            yield step.indices

    def advance(self, consumed_samples: int) -> None:
        """Move to `consumed_samples` after a batch was handed out.

        Log a warning once when a second epoch begins in the same order, unless `shuffle=False` asked for that order.
        """
        self.consumed_samples = consumed_samples
        if self._warns_of_repetition and consumed_samples > self.total_samples:
            self._warns_of_repetition = False
            _log.warning(
                "epoch %s brings the %s samples in the same order as the first; pass shuffle=True to the loader or "
                "sampler for a new order in every epoch, or shuffle=False if this one is meant",
                -(-consumed_samples // self.total_samples),
                f"{self.total_samples:,}",
            )

    def _num_steps_per_pass(self) -> int:
        if self.num_epochs is None:
            raise TypeError("a sampler with num_epochs=None never ends, so it has no length")
        return self._num_steps(self.total_samples * self.num_epochs)

    def _rest_of_pass(self, consumed_samples: int) -> tuple[int, int | None, int | None]:
        """Return where to begin, the end of the pass, and the batches until then; the last two are None if endless."""
        if self.num_epochs is None:
            return consumed_samples, None, None
        samples_per_pass = self.total_samples * self.num_epochs
        end = (consumed_samples // samples_per_pass + 1) * samples_per_pass
        num_steps = self._num_steps(end - consumed_samples)
        if num_steps == 0:  # less than a global batch is left of this pass, and it is dropped
            return end, end + samples_per_pass, self._num_steps(samples_per_pass)
        return consumed_samples, end, num_steps

    def _num_steps(self, num_samples: int) -> int:
        if not self.drop_last and not self.pad_samples_to_global_batch_size:
            return -(-num_samples // self._samples_per_step)
        rounded = num_samples if self.drop_last else num_samples + self.global_batch_size - 1
        return rounded // self.global_batch_size * (self.global_batch_size // self._samples_per_step)

    def identity(self) -> LoaderState:
        """Return the state at the start of the stream: what a loaded state is compared with."""
        blend = self.order.blend if isinstance(self.order, BlendOrder) else None
        return LoaderState(
            consumed_samples=0,
            fingerprint=self.order.fingerprint,
            num_samples=self.order.num_samples,
            shuffle=self.order.seed is not None,
            seed=self.order.seed,
            blend=None
            if blend is None
            else BlendState(weights=blend.weights, counts=(0,) * len(blend.weights), annealing=blend.annealing),
        )

    def state(self, consumed_samples: int) -> LoaderState:
        """Return the state after `consumed_samples` samples of the stream."""
        blend = self.order.blend.state(consumed_samples) if isinstance(self.order, BlendOrder) else None
        return dataclasses.replace(self.identity(), consumed_samples=consumed_samples, blend=blend)

    def load_state(self, state: LoaderState) -> None:
        """Resume from a state that has passed `LoaderState.check`."""
        if isinstance(self.order, BlendOrder) and state.blend is not None:
            self.order.blend.load_state(state.consumed_samples, state.blend)
        self.consumed_samples = state.consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken from this sampler.

        A DataLoader with workers takes batches before they are trained on. With one, create the sampler with the
        trainer's own `consumed_samples`, or use `PackedLoader`, whose state is exact.
        """
        return self.state(self.consumed_samples).to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state; one of other data, another seed or other weights is refused.

        Example:
            >>> sampler = StreamSampler(6)
            >>> sampler.load_state_dict(StreamSampler(6, consumed_samples=2).state_dict()); sampler.consumed_samples
            2
        """
        state = LoaderState.from_dict(state_dict)
        state.check(self.identity(), self.allow_mismatch)
        self.load_state(state)


class BatchSampler(StreamSampler):
    """A sampler that yields lists of indices, one per batch of this rank."""

    def __len__(self) -> int:
        """Return the number of batches of a whole pass for this rank."""
        return self._num_steps_per_pass()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from `consumed_samples` to the end of the pass."""
        return self._take()


class MicroBatchSampler(BatchSampler):
    """Yields a rank's micro batches, one list of indices per forward pass; see `StreamSampler` for the arguments.

    Example:
        >>> list(MicroBatchSampler(8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2))
        [[2, 3], [6, 7]]
    """


class GlobalBatchSampler(BatchSampler):
    """Yields a rank's share of a global batch as one list: its micro batches, one after the other.

    For trainers that collate a global batch as a whole and then split it on the first dimension; each micro batch is
    the same as with `MicroBatchSampler`. See `StreamSampler` for the arguments.

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

    `consumed_samples` advances by whole micro batches of all ranks. See `StreamSampler` for the arguments.

    Example:
        >>> list(IndexSampler(8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2))
        [2, 3, 6, 7]
    """

    def __len__(self) -> int:
        """Return the number of indices of a whole pass for this rank."""
        num_indices = self._num_steps_per_pass() * self.micro_batch_size
        is_short = self.num_epochs is not None and not self.drop_last and not self.pad_samples_to_global_batch_size
        return self.total_samples * (self.num_epochs or 1) if is_short else num_indices

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices from `consumed_samples` to the end of the pass."""
        for indices in self._take():
            yield from indices
