"""The order, the blend, and how long a training step waits for its batch.

python -m benchmarks.loader --bins 4000 --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import in_own_process, peak_megabytes, print_table, timed
from benchmarks.storage import memmap_blocks, rows
from megatron_packed_sft import open_shard
from megatron_packed_sft.data.loader import PackedLoader
from megatron_packed_sft.data.order.blend import Blend
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.data.order.samplers import MicroBatchSampler

STEP_SECONDS = 0.010
MICRO_BATCH = 8
SIZES = (10**3, 10**6, 10**9)


class PackedRows:
    """Rows of a shard, copied out into the four int64 arrays of a batch: a stand-in for the packed datasets."""

    def __init__(self, path: str) -> None:
        self.shard = open_shard(path)
        self.fingerprint = self.shard.fingerprint

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, index: int) -> int:
        return index

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Tokens, labels, mask and positions as tensors."""
        import torch

        arrays = self.shard.arrays
        tokens = np.take(arrays.input_ids, indices, axis=0).astype(np.int64)
        batch = {
            "tokens": tokens[:, :-1].copy(),
            "labels": tokens[:, 1:].copy(),
            "loss_mask": np.take(arrays.loss_mask, indices, axis=0).astype(np.int64),
            "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy(),
        }
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    collate_fn = fetch_batch


def sleep_step() -> None:
    """A step on an accelerator: the host waits."""
    time.sleep(STEP_SECONDS)


def compute_step() -> None:
    """A step on this processor: one core is busy and the GIL is free."""
    import torch

    end = time.perf_counter() + STEP_SECONDS
    square = torch.ones(256, 256)
    while time.perf_counter() < end:
        square @ square


STEPS: dict[str, Callable[[], None]] = {"sleeping": sleep_step, "computing": compute_step}
LOADERS: dict[str, Callable[[PackedRows], Iterator[Any]]] = {}


def loader(name: str) -> Callable[[Callable[[PackedRows], Iterator[Any]]], Callable[[PackedRows], Iterator[Any]]]:
    """List a way to load under a name."""

    def add(function: Callable[[PackedRows], Iterator[Any]]) -> Callable[[PackedRows], Iterator[Any]]:
        LOADERS[name] = function
        return function

    return add


def sampler(dataset: PackedRows) -> MicroBatchSampler:
    """The same shuffled, endless stream for every loader."""
    return MicroBatchSampler(len(dataset), 0, MICRO_BATCH, shuffle=True, num_epochs=None)


@loader("PackedLoader, prefetch=2")
def prefetching(dataset: PackedRows) -> Iterator[Any]:
    """Ours."""
    return iter(PackedLoader(dataset, sampler(dataset)))


@loader("PackedLoader, prefetch=0")
def inline(dataset: PackedRows) -> Iterator[Any]:
    """Ours without the thread."""
    return iter(PackedLoader(dataset, sampler(dataset), prefetch=0))


@loader("torch DataLoader, 0 workers")
def torch_inline(dataset: PackedRows) -> Iterator[Any]:
    """Theirs, in process."""
    return torch_workers(dataset, 0)


@loader("torch DataLoader, 2 workers")
def torch_workers(dataset: PackedRows, num_workers: int = 2) -> Iterator[Any]:
    """Theirs, with worker processes."""
    from torch.utils.data import DataLoader

    # Samples are indices; the collate function does all of the reading, so that torch fetches a batch at once.
    return iter(
        DataLoader(
            dataset,
            batch_sampler=sampler(dataset),
            collate_fn=dataset.collate_fn,
            num_workers=num_workers,
        )
    )


def wait_case(name: str, step: str, path: str, num_steps: int) -> dict[str, float]:
    """Return how long each step waits for its batch."""
    import torch

    torch.set_num_threads(1)
    batches = LOADERS[name](PackedRows(path))
    run_step = STEPS[step]
    for _ in range(5):  # compilation, page faults and the start of workers are not measured
        next(batches)
        run_step()
    waits = np.empty(num_steps)
    batch = None
    for number in range(num_steps):
        start = time.perf_counter()
        following = next(batches)
        waits[number] = time.perf_counter() - start
        batch = following  # the batch before is freed here, as in a training loop, and not while time is measured
        run_step()
    del batch
    return {"mean": waits.mean() * 1e3, "median": float(np.median(waits)) * 1e3, "p99": np.quantile(waits, 0.99) * 1e3}


def rate_case(name: str, path: str, num_batches: int) -> dict[str, float]:
    """Batches per second when nothing else runs."""
    batches = LOADERS[name](PackedRows(path))
    for _ in range(5):
        next(batches)
    return {"rate": num_batches / timed(lambda: [next(batches) for _ in range(num_batches)])}


def order_case(num_samples: int) -> dict[str, float]:
    """Opening, first sample and throughput of our order."""
    SampleOrder(7).samples(0, 1)  # the import of the compiled kernel is reported by itself
    before = peak_megabytes()
    result = {}
    opened = []
    for seed in range(100):
        start = time.perf_counter()
        order = SampleOrder(num_samples, seed, "data")
        middle = time.perf_counter()
        order[num_samples // 2]
        opened.append((middle - start, time.perf_counter() - middle))
    result["open"], result["first"] = np.median(opened, axis=0) * 1e3
    result["megabytes"] = peak_megabytes() - before
    order = SampleOrder(num_samples, 1, "data")
    result["small_blocks"] = 1024e-6 / min(timed(lambda: order.samples(5, 1024)) for _ in range(5))
    result["large_blocks"] = 1 / min(timed(lambda: order.samples(5, 1_000_000)) for _ in range(5))
    return result


def table_case(num_samples: int) -> dict[str, float]:
    """What others do: an array of shuffled indices."""
    before = peak_megabytes()
    seconds = timed(lambda: np.random.default_rng(0).permutation(num_samples))
    return {"open": seconds * 1e3, "megabytes": peak_megabytes() - before}


def kernel_case() -> dict[str, float]:
    """The very first sample of a process: numba is imported and the cached kernel loaded."""
    return {"milliseconds": timed(lambda: SampleOrder(10**9)[0]) * 1e3}


def blend_case(num_sources: int) -> dict[str, float]:
    """Choices per second, one after the other and after a resume far into the stream."""
    weights = np.random.default_rng(0).random(num_sources).tolist()
    blend = Blend(weights, [1000] * num_sources)
    blend.choose(0, 1)
    count = 1_000_000
    start = iter(range(0, 5 * count, count))
    seconds = min(timed(lambda: blend.choose(next(start), count)) for _ in range(3))
    state = blend.state(3 * count)
    resumed = Blend(weights, [1000] * num_sources)

    def resume() -> None:
        resumed.load_state(3 * count, state)
        resumed.choose(3 * count, 1)

    return {"rate": count / seconds / 1e6, "resume": timed(resume) * 1e6}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int, default=4_000)
    parser.add_argument("--pack-size", type=int, default=4_096)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args(argv)
    orders = {size: in_own_process(order_case, size) for size in SIZES}
    print_table(
        f"The order; a process's first sample takes {in_own_process(kernel_case)['milliseconds']:.0f} ms for numba",
        ("samples", "open ms", "first sample ms", "M samples/s by 1,024", "by 10^6", "memory added, MB"),
        [
            (
                f"{size:,}",
                f"{result['open']:.4f}",
                f"{result['first']:.3f}",
                f"{result['small_blocks']:.1f}",
                f"{result['large_blocks']:.1f}",
                f"{result['megabytes']:.0f}",
            )
            for size, result in orders.items()
        ],
    )
    tables = {size: in_own_process(table_case, size) for size in (10**6, 10**7)}
    print_table(
        "For comparison: numpy's permutation as a table",
        ("samples", "open ms", "memory added, MB"),
        [(f"{size:,}", f"{result['open']:.0f}", f"{result['megabytes']:.0f}") for size, result in tables.items()],
    )
    blends = {count: in_own_process(blend_case, count) for count in (2, 10, 100)}
    print_table(
        "The blend",
        ("sources", "M choices/s", "resume at 3*10^6, us"),
        [(str(count), f"{result['rate']:.1f}", f"{result['resume']:.0f}") for count, result in blends.items()],
    )
    with tempfile.TemporaryDirectory(prefix="packed_sft_bench_") as home:
        path = f"{home}/shard"
        memmap_blocks(Path(path), rows(arguments.pack_size), arguments.bins)
        for step in STEPS:
            waits = {name: in_own_process(wait_case, name, step, path, arguments.steps) for name in LOADERS}
            print_table(
                f"Waiting per {step} step of {STEP_SECONDS * 1e3:.0f} ms, {MICRO_BATCH} bins of "
                f"{arguments.pack_size:,}",
                ("", "mean ms", "median ms", "99 % ms"),
                [
                    (name, f"{result['mean']:.3f}", f"{result['median']:.3f}", f"{result['p99']:.3f}")
                    for name, result in waits.items()
                ],
            )
        rates = {name: in_own_process(rate_case, name, path, arguments.steps)["rate"] for name in LOADERS}
        print_table(
            "Batches as fast as they come",
            ("", "batches/s", "ratio"),
            [(name, f"{rate:,.0f}", f"{rate / max(rates.values()):.2f}") for name, rate in rates.items()],
        )


if __name__ == "__main__":
    main()
