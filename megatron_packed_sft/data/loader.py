"""The loader: batches are made in this process, by a thread that stays ahead of the training step.

    sampler ─ indices ─▶ advise ─▶ ... ─▶ fetch, collate ─▶ pin ─▶ [ finished batches ] ─▶ the training loop
                         bins needed      └────── prefetch thread ──────┘  at most `prefetch`
                         a little later

No worker processes: collate is compiled and releases the GIL, so they would only add the cost of sending batches.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, Unpack

from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.order.sample_order import ShardOrder
from megatron_packed_sft.data.order.samplers import BatchSampler, MicroBatchSampler, SamplerArguments, Step
from megatron_packed_sft.data.order.state import LoaderState
from megatron_packed_sft.data.shard_readers import shortage
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.imports import require_torch

logger = logging.getLogger(__name__)

# The bins of a batch are announced to the kernel this many batches before it is made.
NUM_BATCHES_ADVISED: Final = 4

Fetch = Callable[[list[int]], Any]
Collate = Callable[[list[Any]], Any]
_JOIN_SECONDS = 10.0

Item = TypeVar("Item")


class PackedLoader:
    """Batches of a map-style dataset, made ahead by a thread, with a state that is exact to the sample.

    A loader is a stream: `iter` resumes after the last batch that was handed out, even after a `break`; after the last
    batch of a pass it begins the next one. `seek(0)` starts over. A new `iter` ends the previous one. Training wants
    `shuffle=True`, a different order in every epoch; a second epoch in the same order logs a warning.

    The dataset needs `__len__`, `__getitem__` and `collate_fn(samples)`. These are used if it has them:
    `fetch_batch(indices)` returns a finished batch; `__getitems__(indices)` returns many samples at once;
    `advise(indices)` announces samples that are needed soon, `num_batches_advised` batches ahead; `fingerprint`,
    `tokenizer_fingerprint` and `chat_template_fingerprint` are strings for the state. The thread calls them, one call
    at a time.

    Args:
        dataset: what to load.
        batch_sampler: which samples come when; by default a `MicroBatchSampler` made of `sampling`.
        collate_fn: makes a batch of a list of samples, instead of the dataset's own.
        prefetch: how many finished batches may wait; 0 makes each batch on demand, without a thread.
        pin_memory: put tensors into page-locked memory; "auto" does so if CUDA is available.
        sampling: the arguments of `StreamSampler`, such as micro_batch_size, data_parallel_rank and shuffle.

    Example:
        >>> loader = PackedLoader(range(6), micro_batch_size=2, collate_fn=list)
        >>> next(iter(loader)), loader.state_dict()["consumed_samples"], list(loader)
        ([0, 1], 2, [[2, 3], [4, 5]])
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: BatchSampler | None = None,
        *,
        collate_fn: Collate | None = None,
        prefetch: int = 2,
        pin_memory: bool | Literal["auto"] = "auto",
        **sampling: Unpack[SamplerArguments],
    ) -> None:
        require_torch("PackedLoader")
        if batch_sampler is None:
            num_samples = len(dataset)  # a pass over a blend is as long as the dataset was asked to be
            blend_order = getattr(dataset, "sampling_order", None)
            if blend_order is not None and sampling.get("order") is None:
                # A blend: the sampler draws in its order, so that the state says how much of each source was seen.
                dataset, sampling["order"] = dataset.in_stored_order(), blend_order
            fingerprint = str(getattr(dataset, "fingerprint", ""))
            batch_sampler = MicroBatchSampler(num_samples, fingerprint=fingerprint, **sampling)
        elif sampling:
            raise InvalidInputError(
                f"batch_sampler and {', '.join(sampling)} were both given; pass the latter to the sampler"
            )
        elif not isinstance(batch_sampler, BatchSampler):
            raise InvalidInputError(
                f"batch_sampler {type(batch_sampler).__name__} does not know where in the stream a batch ends; "
                "use MicroBatchSampler or GlobalBatchSampler, or torch's DataLoader with this one"
            )
        if prefetch < 0:
            raise InvalidInputError(f"prefetch is {prefetch}; give the number of batches to make ahead, at least 0")
        cuda_device_to_pin_for(pin_memory)  # refuse a wrong value here rather than at the first batch
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.collate_fn = collate_fn
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.wait_seconds = 0.0  # how long all steps so far have waited for their batches
        self._fetch = _fetch_function(dataset, collate_fn)
        self._iteration: weakref.ref[_Iteration] | None = None
        _announce_shortage(dataset, batch_sampler)

    def __len__(self) -> int:
        """Return the number of batches of a whole pass."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from here to the end of the pass."""
        self._end_iteration()
        iteration = _Iteration(self)
        self._iteration = weakref.ref(iteration)
        return iteration

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks and epochs: the position in the stream."""
        return self.batch_sampler.consumed_samples

    def seek(self, consumed_samples: int) -> None:
        """Go to a position of the stream; a running iteration ends.

        Example:
            >>> loader = PackedLoader(range(6), micro_batch_size=2, collate_fn=list)
            >>> loader.seek(4); list(loader)
            [[4, 5]]
        """
        if consumed_samples < 0:
            raise InvalidInputError(f"consumed_samples is {consumed_samples}; it must be at least 0")
        self._end_iteration()
        self.batch_sampler.consumed_samples = operator.index(consumed_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was handed out; prefetched ones do not count."""
        return self._of_dataset(self.batch_sampler.state(self.consumed_samples)).to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state, on any number of ranks; one of other data or another order is refused.

        Example:
            >>> loader = PackedLoader(range(6), collate_fn=list)
            >>> loader.load_state_dict({**loader.state_dict(), "consumed_samples": 5}); list(loader)
            [[5]]
        """
        state = LoaderState.from_dict(state_dict)
        state.check(self._of_dataset(self.batch_sampler.identity()), self.batch_sampler.allow_mismatch)
        self._end_iteration()
        self.batch_sampler.load_state(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None, "_fetch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fetch = _fetch_function(self.dataset, self.collate_fn)

    def _end_iteration(self) -> None:
        running = self._iteration() if self._iteration is not None else None
        if running is not None:
            running.end()

    def _of_dataset(self, state: LoaderState) -> LoaderState:
        """Return a sampler's state, completed with the fingerprints that only the dataset knows."""
        return replace(
            state,
            fingerprint=state.fingerprint or str(getattr(self.dataset, "fingerprint", "")),
            tokenizer=getattr(self.dataset, "tokenizer_fingerprint", None),
            chat_template=getattr(self.dataset, "chat_template_fingerprint", None),
        )

    def _make_batches(self) -> Iterator[_Made]:
        # The generator must not hold the loader: its thread would keep it alive.
        steps = self.batch_sampler.steps(self.consumed_samples)
        advise = getattr(self.dataset, "advise", None)
        num_advised = getattr(self.dataset, "num_batches_advised", None) or NUM_BATCHES_ADVISED
        if advise is not None:
            steps = _advised(steps, advise, num_advised)
        return _make_batches(steps, self._fetch, cuda_device_to_pin_for(self.pin_memory))


def _announce_shortage(dataset: Any, sampler: BatchSampler) -> None:
    """Log a warning if the node's cache is too small for the order in which a remote dataset will be read."""
    order = getattr(sampler, "order", None)
    if isinstance(dataset, PackedDataset) and order is not None and order.seed is not None:
        found = shortage(dataset.source, order.window if isinstance(order, ShardOrder) else None)
        if found is not None:
            logger.warning("%s", found)


class _Made(NamedTuple):
    batch: Any
    consumed_samples: int
    is_last: bool


class _Iteration(Iterator[Any]):
    """One iteration over a loader, from where it is to the end of the pass."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader
        self._is_over = False
        self._was_ended = False
        self._batches = self._start()

    def __next__(self) -> Any:
        if self._was_ended:
            raise InvalidInputError(
                "this iteration was ended by a new iter(), seek() or load_state_dict() of its loader; "
                "use the new iterator"
            )
        if self._is_over:
            raise StopIteration
        if isinstance(self._batches, Prefetcher) and self._batches.process != os.getpid():
            self._batches = self._start()  # a fork does not copy threads
        start = time.perf_counter()
        try:
            batch, consumed_samples, is_last = next(self._batches)
        finally:
            self._loader.wait_seconds += time.perf_counter() - start
        self._loader.batch_sampler.advance(consumed_samples)
        self._is_over = is_last
        return batch

    def end(self) -> None:
        """Stop the thread and hand out no more batches."""
        self._was_ended = not self._is_over
        self._is_over = True
        if isinstance(self._batches, Prefetcher):
            self._batches.close()

    def _start(self) -> Iterator[_Made]:
        batches = self._loader._make_batches()
        return Prefetcher(batches, self._loader.prefetch) if self._loader.prefetch else batches


def _make_batches(steps: Iterator[Step], fetch: Fetch, device: int | None) -> Iterator[_Made]:
    if device is not None:
        use_cuda_device(device)
    for step in steps:
        batch = fetch(step.indices)
        yield _Made(batch if device is None else pinned(batch), step.consumed_samples, step.is_last)
        del batch  # or it would live here while the next one is made


def _advised(steps: Iterator[Step], advise: Callable[[list[int]], None], num_ahead: int) -> Iterator[Step]:
    """Yield the same steps, each announced a few steps earlier."""
    ahead: deque[Step] = deque()
    for step in steps:
        advise(step.indices)
        ahead.append(step)
        if len(ahead) > num_ahead:
            yield ahead.popleft()
    yield from ahead


def _fetch_function(dataset: Any, collate_fn: Collate | None) -> Fetch:
    if collate_fn is None and hasattr(dataset, "fetch_batch"):
        fetch: Fetch = dataset.fetch_batch
        return fetch
    collate = collate_fn or getattr(dataset, "collate_fn", None)
    if collate is None:
        raise InvalidInputError(
            f"a {type(dataset).__name__} has no collate_fn and no fetch_batch; pass collate_fn to the loader"
        )
    if hasattr(dataset, "__getitems__"):
        return lambda indices: collate(dataset.__getitems__(indices))
    return lambda indices: collate([dataset[index] for index in indices])


class _Queue(Generic[Item]):
    """The state shared by the thread and its owner. The thread holds nothing else, so the owner can be collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.finished = False  # by the thread: no more items will come
        self.closed = False  # by the owner: no more items are wanted


def _fill(queue: _Queue[Item], items: Iterator[Item]) -> None:
    error: BaseException | None = None
    try:
        while not queue.closed:
            try:
                item = next(items)
            except StopIteration:
                break
            with queue.changed:
                queue.changed.wait_for(lambda: queue.closed or len(queue.items) < queue.size)
                if not queue.closed:
                    queue.items.append(item)
                    queue.changed.notify_all()
            del item  # or it would live here until the next one is made
    except BaseException as caught:  # even SystemExit: the caller waits for this item
        error = caught
    with queue.changed:
        queue.error, queue.finished = error, True
        queue.changed.notify_all()


def _stop(queue: _Queue[Item], thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:  # after a fork the thread is gone, and its lock may be held forever
        return
    with queue.changed:
        queue.closed = True
        queue.items.clear()
        queue.changed.notify_all()
    if thread is not threading.current_thread():  # the garbage collector runs in any thread
        thread.join(_JOIN_SECONDS)


class Prefetcher(Generic[Item]):
    """Iterate over `items` in a thread, at most `size` items ahead.

    The thread ends when the items do, on `close`, when this object is collected, and at interpreter exit. An error of
    the iterator is raised here, with its own traceback, after the items before it.

    Args:
        items: used by the thread only.
        size: finished items to keep waiting, at least one.

    Example:
        >>> list(Prefetcher(iter("abc"), size=2))
        ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[Item], size: int) -> None:
        self.process = os.getpid()
        self._queue: _Queue[Item] = _Queue(size)
        thread = threading.Thread(target=_fill, args=(self._queue, items), name="packed-sft-prefetch", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue, thread, self.process)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        queue = self._queue
        with queue.changed:
            queue.changed.wait_for(lambda: queue.items or queue.finished or queue.closed)
            if queue.items:
                item = queue.items.popleft()
                queue.changed.notify_all()
                return item
            error, queue.error = queue.error, None
        self.close()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame, which would hold it
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; finished items are dropped."""
        self._finalizer()


def cuda_device_to_pin_for(pin_memory: bool | Literal["auto"]) -> int | None:
    """Return the CUDA device of this thread, or None if nothing is to be pinned."""
    if pin_memory not in (True, False, "auto"):
        raise InvalidInputError(f"pin_memory is {pin_memory!r}; use True, False or 'auto'")
    torch = sys.modules.get("torch")  # without torch there are no tensors to pin
    has_cuda = torch is not None and torch.cuda.is_available()
    if pin_memory is True and not has_cuda:
        raise InvalidInputError("pin_memory=True needs torch with CUDA, which is not available; use 'auto'")
    return torch.cuda.current_device() if torch is not None and has_cuda and pin_memory else None


def use_cuda_device(device: int) -> None:
    """Make this thread lock pages for the right device: a new thread starts with device 0."""
    sys.modules["torch"].cuda.set_device(device)


def pinned(value: Any) -> Any:
    """Return the same batch with everything that can be pinned in page-locked memory.

    Example:
        >>> pinned({"token_count": [3, 4]})
        {'token_count': [3, 4]}
    """
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pinned(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pinned, value))
    if isinstance(value, list | tuple):
        return type(value)(map(pinned, value))
    return value
