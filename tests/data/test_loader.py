"""Our own loader: batches ahead of the step, exact state, threads that never outlive their use."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from typing import Any

import pytest

from megatron_packed_sft.data.loader import NUM_BATCHES_ADVISED, PackedLoader, Prefetcher, pinned
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.data.order.samplers import GlobalBatchSampler, IndexSampler, MicroBatchSampler
from megatron_packed_sft.errors import InvalidInputError


class Numbers:
    """A dataset of the numbers 0, 1, 2, ... with nothing but the least."""

    fingerprint = "numbers"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return -1 if index < 0 else index

    def collate_fn(self, samples: list[int]) -> dict[str, list[int]]:
        return {"samples": samples}


class NumbersAtOnce(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index for index in indices]


class NumbersInBatches(NumbersAtOnce):
    def fetch_batch(self, indices: list[int]) -> dict[str, list[int]]:
        return {"samples": [2000 + index for index in indices]}


class Failing(Numbers):
    """Sample 6 cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 6:
            raise OSError(5, "the disk is gone")
        return index


def samples_of(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch["samples"]]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "packed-sft-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Any:
    yield
    gc.collect()
    assert prefetch_threads() == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_batches_are_those_of_the_sampler_in_order(prefetch: int) -> None:
    loader = PackedLoader(Numbers(50), prefetch=prefetch, micro_batch_size=3, shuffle=True, seed=5)
    assert samples_of(loader) == SampleOrder(50, 5, "numbers").samples(0, 48).tolist()
    assert len(loader) == 16


@pytest.mark.parametrize(("dataset", "first"), [(Numbers(9), 0), (NumbersAtOnce(9), 1000), (NumbersInBatches(9), 2000)])
def test_the_quickest_way_that_a_dataset_has_is_taken(dataset: Numbers, first: int) -> None:
    assert samples_of(PackedLoader(dataset, micro_batch_size=3)) == list(range(first, first + 9))


def test_a_collate_function_of_ones_own_gets_the_samples() -> None:
    loader = PackedLoader(NumbersInBatches(4), micro_batch_size=2, collate_fn=tuple)
    assert list(loader) == [(1000, 1001), (1002, 1003)]


def test_a_whole_share_of_a_global_batch_can_be_loaded() -> None:
    sampler = GlobalBatchSampler(8, 0, 1, 4, data_parallel_rank=1, data_parallel_size=2)
    assert list(PackedLoader(Numbers(8), sampler)) == [{"samples": [1, 3]}, {"samples": [5, 7]}]


def test_padding_samples_reach_the_dataset() -> None:
    loader = PackedLoader(Numbers(5), micro_batch_size=2, drop_last=False)
    assert list(loader) == [{"samples": [0, 1]}, {"samples": [2, 3]}, {"samples": [4, -1]}]


def test_the_state_is_that_of_the_batches_handed_out_not_of_those_that_wait() -> None:
    loader = PackedLoader(Numbers(100), prefetch=8, micro_batch_size=2)
    iterator = iter(loader)
    for step in range(1, 6):
        next(iterator)
        time.sleep(0.01)  # the thread runs ahead
        assert loader.state_dict()["consumed_samples"] == loader.consumed_samples == 2 * step


def test_at_most_so_many_batches_are_made_ahead() -> None:
    made = []

    class Counted(Numbers):
        def fetch_batch(self, indices: list[int]) -> int:
            made.append(indices)
            return len(made)

    loader = PackedLoader(Counted(100), prefetch=3)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.1)
    assert len(made) <= 1 + 3 + 1  # handed out, waiting, and one in the thread's hands


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_goes_on_after_a_break_and_then_begins_the_next_pass(prefetch: int) -> None:
    loader = PackedLoader(Numbers(7), prefetch=prefetch, micro_batch_size=2)
    for batch in loader:
        if batch["samples"] == [2, 3]:
            break
    assert samples_of(loader) == [4, 5]
    assert samples_of(loader) == [0, 1, 2, 3, 4, 5]
    loader.seek(4)
    assert samples_of(loader) == [4, 5]


def test_epochs_are_shuffled_anew_and_cross_the_edge_when_there_is_no_end() -> None:
    loader = PackedLoader(Numbers(5), micro_batch_size=2, shuffle=True, num_epochs=None)
    order = SampleOrder(5, fingerprint="numbers")
    assert samples_of(itertools.islice(loader, 10)) == order.samples(0, 20).tolist()
    with pytest.raises(TypeError, match="never ends"):
        len(loader)


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("num_epochs", [1, 2, None])
def test_a_second_epoch_in_the_same_order_is_announced_once_when_it_begins(
    num_epochs: int | None, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = PackedLoader(Numbers(6), micro_batch_size=2, num_epochs=num_epochs, prefetch=prefetch)
    batches = itertools.chain.from_iterable(iter(lambda: loader, None))  # pass after pass
    first = samples_of(itertools.islice(batches, 3))
    assert caplog.messages == []
    assert samples_of(itertools.islice(batches, 1)) == first[:2]
    [message] = caplog.messages
    assert message.startswith("epoch 2 brings the 6 samples in the same order as the first; pass shuffle=True")
    samples_of(itertools.islice(batches, 8))
    assert len(caplog.messages) == 1
    loader._end_iteration()


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"shuffle": False}, {"data_parallel_rank": 1}], ids=str)
def test_an_order_that_was_asked_for_is_not_announced_and_nothing_by_other_ranks(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = PackedLoader(Numbers(6), data_parallel_size=2, **arguments)
    for _ in range(3):
        list(loader)
    assert caplog.messages == []


def test_a_resumed_second_epoch_and_one_of_a_sampler_alone_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    loader = PackedLoader(Numbers(6))
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 8})
    assert samples_of(itertools.islice(loader, 1)) == [2]
    sampler = IndexSampler(6)
    assert list(sampler) == list(sampler)
    assert [message.partition(" brings")[0] for message in caplog.messages] == ["epoch 2", "epoch 2"]


def test_a_saved_state_is_resumed_in_another_loader_with_other_ranks() -> None:
    loader = PackedLoader(Numbers(40), micro_batch_size=4, shuffle=True, num_epochs=2)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    state = loader.state_dict()
    rest = samples_of(iterator)
    loaders = [
        PackedLoader(
            Numbers(40), data_parallel_rank=rank, data_parallel_size=2, micro_batch_size=2, shuffle=True, num_epochs=2
        )
        for rank in range(2)
    ]
    for one in loaders:
        one.load_state_dict(state)
    pairs = zip(*loaders, strict=True)
    assert [sample for pair in pairs for batch in pair for sample in batch["samples"]] == rest


def test_a_state_of_other_data_tokenizer_or_template_is_refused_and_the_override_named() -> None:
    dataset = Numbers(10)
    dataset.tokenizer_fingerprint = "t1"  # type: ignore[attr-defined]
    dataset.chat_template_fingerprint = "c1"  # type: ignore[attr-defined]
    state = PackedLoader(dataset).state_dict()
    assert (state["fingerprint"], state["tokenizer"], state["chat_template"]) == ("numbers", "t1", "c1")
    other = Numbers(10)
    other.fingerprint = "other"
    other.tokenizer_fingerprint = "t2"  # type: ignore[attr-defined]
    other.chat_template_fingerprint = "c2"  # type: ignore[attr-defined]
    with pytest.raises(InvalidInputError) as caught:
        PackedLoader(other).load_state_dict(state)
    assert "allow_mismatch=('fingerprint', 'tokenizer', 'chat_template')" in str(caught.value)
    allowed = PackedLoader(other, allow_mismatch=("fingerprint", "tokenizer", "chat_template"))
    allowed.load_state_dict({**state, "consumed_samples": 7})
    assert samples_of(allowed) == [7, 8, 9]


def test_the_datasets_fingerprint_counts_when_the_sampler_has_none() -> None:
    state = PackedLoader(Numbers(10), MicroBatchSampler(10)).state_dict()
    assert state["fingerprint"] == "numbers"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_dataset_is_raised_in_the_caller_with_its_traceback(prefetch: int) -> None:
    loader = PackedLoader(Failing(10), prefetch=prefetch, micro_batch_size=2)
    taken: list[list[int]] = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        taken.extend(batch["samples"] for batch in loader)
    assert taken == [[0, 1], [2, 3], [4, 5]]  # everything before it came first
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))
    assert loader.consumed_samples == 6
    assert prefetch_threads() == []
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(loader))
    loader.seek(8)
    assert samples_of(loader) == [8, 9]


def test_a_stop_iteration_out_of_the_dataset_is_an_error_and_not_the_end() -> None:
    class Exhausted(Numbers):
        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(PackedLoader(Exhausted(4)))


def test_a_new_iteration_ends_the_one_before() -> None:
    loader = PackedLoader(Numbers(10), micro_batch_size=2)
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert len(prefetch_threads()) <= 1
    with pytest.raises(InvalidInputError, match=r"ended by a new iter\(\), seek\(\) or load_state_dict\(\)"):
        next(old)
    assert samples_of(new) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert list(new) == []


def test_the_thread_ends_when_the_loop_is_left_when_it_is_dropped_and_when_it_is_closed() -> None:
    loader = PackedLoader(Numbers(1000))
    for _ in loader:
        break
    assert prefetch_threads() == []
    iterator = iter(loader)
    next(iterator)
    assert len(prefetch_threads()) == 1
    del iterator
    assert prefetch_threads() == []
    iterator = iter(loader)
    next(iterator)
    loader.seek(0)
    assert prefetch_threads() == []


def test_a_loader_in_a_reference_cycle_is_collected_with_its_thread() -> None:
    loader = PackedLoader(Numbers(1000))
    loader.iterator = iter(loader)  # type: ignore[attr-defined]
    next(loader.iterator)  # type: ignore[attr-defined]
    assert len(prefetch_threads()) == 1
    del loader
    gc.collect()
    assert prefetch_threads() == []


def test_many_iterations_leave_no_thread_behind() -> None:
    loader = PackedLoader(Numbers(20), micro_batch_size=2)
    for _ in range(100):
        list(itertools.islice(loader, 3))
    gc.collect()
    assert prefetch_threads() == []


@pytest.mark.parametrize("how", ["pass", "sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), 2)"])
def test_the_interpreter_exits_at_once_in_the_middle_of_an_iteration(how: str) -> None:
    script = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
        from tests.data.test_loader import Numbers, PackedLoader
        class Slow(Numbers):
            def __getitem__(self, index):
                time.sleep(0.02)
                return index
        iterator = iter(PackedLoader(Slow(10**6), prefetch=4))
        print(next(iterator), flush=True)
        {how}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'samples': [0]}\n"
    assert "Fatal" not in done.stderr
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3, "raise KeyError": 1}.get(how, -2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fork_goes_on_by_itself_on_both_sides(prefetch: int) -> None:
    loader = PackedLoader(Numbers(20), prefetch=prefetch, micro_batch_size=2)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.02)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            running = samples_of(iterator)
            again = samples_of(loader)
            os.write(writer, repr((running, again)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        assert answer.read() == repr((list(range(2, 20)), list(range(20))))
    assert samples_of(iterator) == list(range(2, 20))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_after_the_last_batch_does_not_begin_another_pass() -> None:
    iterator = iter(PackedLoader(Numbers(4), micro_batch_size=2))
    assert samples_of(itertools.islice(iterator, 2)) == [0, 1, 2, 3]
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(0 if next(iterator, None) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(iterator, None) is None


def test_a_loader_survives_pickling_where_it_is() -> None:
    loader = PackedLoader(Numbers(10), micro_batch_size=2)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    assert samples_of(copy) == samples_of(loader) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_rows_are_announced_before_they_are_read_each_once_and_in_order() -> None:
    events: list[tuple[str, list[int]]] = []

    class Advised(Numbers):
        def advise(self, indices: list[int]) -> None:
            events.append(("advise", indices))

        def fetch_batch(self, indices: list[int]) -> dict[str, list[int]]:
            events.append(("fetch", indices))
            return {"samples": indices}

    expected = [[index, index + 1] for index in range(0, 20, 2)]
    list(PackedLoader(Advised(20), micro_batch_size=2))
    assert [indices for kind, indices in events if kind == "advise"] == expected
    assert [indices for kind, indices in events if kind == "fetch"] == expected
    for number, indices in enumerate(expected):
        first_fetch = events.index(("fetch", indices))
        advised = [seen for kind, seen in events[:first_fetch] if kind == "advise"]
        assert advised == expected[: number + NUM_BATCHES_ADVISED + 1]


def test_waiting_is_measured() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)
            return index

    waits = {}
    for prefetch in (0, 2):
        loader = PackedLoader(Slow(10), prefetch=prefetch)
        for _ in loader:
            time.sleep(0.04)  # a step that takes longer than a batch
        waits[prefetch] = loader.wait_seconds
    assert waits[0] >= 10 * 0.02
    assert waits[2] < waits[0]  # all but the first batch are made during the steps


def test_finished_batches_are_not_kept_alive() -> None:
    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    loader = PackedLoader(Numbers(50), collate_fn=lambda samples: Batch(), prefetch=2)
    for _ in loader:
        assert Batch.alive <= 1 + 2 + 1
    del _
    assert Batch.alive == 0


class Pinnable:
    """Stands in for a tensor: pinning gives another object."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned

    def pin_memory(self) -> Pinnable:
        return Pinnable(pinned=True)


def test_everything_that_can_be_pinned_in_a_batch_is() -> None:
    batch = {"a": Pinnable(), "b": [Pinnable(), 3], "c": (Pinnable(),), "d": None}
    out = pinned(batch)
    assert out["a"].pinned
    assert out["b"][0].pinned
    assert out["b"][1] == 3
    assert isinstance(out["c"], tuple)
    assert out["c"][0].pinned
    assert out["d"] is None


def test_batches_are_pinned_for_the_callers_device_when_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    used: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, threading.current_thread().name)))
    loader = PackedLoader(Numbers(2), collate_fn=lambda samples: {"tokens": Pinnable()})
    assert [batch["tokens"].pinned for batch in loader] == [True, True]
    assert used == [(3, "packed-sft-prefetch")]
    plain = PackedLoader(Numbers(2), collate_fn=lambda samples: {"tokens": Pinnable()}, pin_memory=False)
    assert [batch["tokens"].pinned for batch in plain] == [False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefetch": -1}, "prefetch is -1; give the number of batches"),
        ({"pin_memory": "yes"}, "pin_memory is 'yes'; use True, False or 'auto'"),
        ({"batch_sampler": MicroBatchSampler(10), "seed": 3}, "batch_sampler and seed were both given"),
        ({"batch_sampler": IndexSampler(10)}, "IndexSampler does not know where"),
        ({"batch_sampler": [[0], [1]]}, "list does not know where in the stream a batch ends"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PackedLoader(Numbers(10), **arguments)


def test_a_dataset_that_cannot_collate_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a range has no collate_fn and no fetch_batch; pass collate_fn"):
        PackedLoader(range(3))


def test_positions_before_the_start_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="consumed_samples is -1; it must be at least 0"):
        PackedLoader(Numbers(3)).seek(-1)


def test_a_prefetcher_raises_what_its_source_raises_even_an_exit() -> None:
    def leaving() -> Any:
        yield 1
        raise SystemExit(4)

    prefetcher = Prefetcher(leaving(), size=2)
    assert next(prefetcher) == 1
    with pytest.raises(SystemExit):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_a_closed_prefetcher_has_no_more_items() -> None:
    prefetcher = Prefetcher(iter(range(100)), size=2)
    next(prefetcher)
    prefetcher.close()
    assert list(prefetcher) == []
    prefetcher.close()
