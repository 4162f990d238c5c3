"""Shuffled reads, cold reads, opening many shards, and what DataLoader workers cost; beside the peers that install.

    python -m benchmarks.datasets --bins 20000 --pack-size 4096

Peers: megatron-core's IndexedDataset and Hugging Face datasets, when installed (`pip install '.[peers]'`); legacy and
Parquet are in benchmarks.storage, Megatron-Bridge's collate in benchmarks.collate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import in_own_process, print_table, private_megabytes, timed
from benchmarks.storage import POOL, VOCAB_SIZE, memmap_blocks, part, rows
from megatron_packed_sft import DatasetWriter, PackedLoader, create_sft_dataset
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.data.order.sample_order import SampleOrder

NUM_READS = 20_000


def shuffled(num_bins: int, count: int = NUM_READS) -> list[int]:
    """Return random bin numbers."""
    return np.random.default_rng(1).integers(0, num_bins, count).tolist()


def ours_case(path: str, num_bins: int) -> dict[str, float]:
    """Bins of our dataset, copied out."""
    dataset = create_sft_dataset(path, 2, seq_length=1 << 20)
    order = shuffled(num_bins)

    def read() -> None:
        for index in order:
            packed = dataset[index]
            packed["input_ids"].copy()
            packed["loss_mask"].copy()

    read()
    return {"rate": NUM_READS / min(timed(read) for _ in range(3))}


def source_case(path: str, num_bins: int) -> dict[str, float]:
    """Bins of the shard itself, copied out: what other readers are compared with."""
    source = create_sft_dataset(path, 2, seq_length=1 << 20).source
    order = shuffled(num_bins)

    def read() -> None:
        for index in order:
            packed = source.bin(index)
            packed.input_ids.copy()
            packed.loss_mask.copy()

    read()
    return {"rate": NUM_READS / min(timed(read) for _ in range(3))}


def indexed_case(path: str, num_bins: int, pack_size: int) -> dict[str, float]:
    """megatron-core: one IndexedDataset for ids and one for masks."""
    try:
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    except ImportError:
        return {"rate": float("nan")}
    pool = rows(pack_size)
    for name, dtype in (("ids", np.int32), ("mask", np.uint8)):
        builder = IndexedDatasetBuilder(f"{path}_{name}.bin", dtype=dtype)
        for index in range(num_bins):
            packed = pool[index % POOL]
            builder.add_item(torch.from_numpy(packed.input_ids if name == "ids" else packed.loss_mask))
            builder.end_document()
        builder.finalize(f"{path}_{name}.idx")
    ids, mask = IndexedDataset(f"{path}_ids"), IndexedDataset(f"{path}_mask")
    order = shuffled(num_bins)

    def read() -> None:
        for index in order:
            ids.get(index).copy()
            mask.get(index).copy()

    read()
    return {"rate": NUM_READS / min(timed(read) for _ in range(3))}


def paired_case(path: str, indexed: str, num_bins: int) -> dict[str, float]:
    """dataset[i] and IndexedDataset on the same bins in turns; both give arrays of the caller's own."""
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    except ImportError:
        return {"first_read": float("nan"), "always": float("nan")}
    ids, mask = IndexedDataset(f"{indexed}_ids"), IndexedDataset(f"{indexed}_mask")
    order = shuffled(num_bins, 4_000)

    def theirs() -> None:
        for index in order:
            ids.get(index).copy()
            mask.get(index).copy()

    ratios = {}
    for verify in ("first_read", "always"):
        dataset = create_sft_dataset(path, 2, seq_length=1 << 20, opening=OpenOptions(verify=verify))

        def ours(dataset: Any = dataset) -> None:
            for index in order:
                dataset[index]

        ours(), theirs()
        ratios[verify] = float(np.median([timed(theirs) / timed(ours) for _ in range(15)]))
    return ratios


def arrow_case(path: str, num_bins: int, pack_size: int) -> dict[str, float]:
    """Hugging Face datasets: Arrow on disk, NumPy out."""
    try:
        import datasets
    except ImportError:
        return {"rate": float("nan")}
    pool = rows(pack_size)

    def generate() -> Any:
        for index in range(num_bins):
            packed = pool[index % POOL]
            yield {"input_ids": packed.input_ids, "loss_mask": packed.loss_mask, "seq_start_id": packed.seq_start_id}

    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "loss_mask": datasets.Sequence(datasets.Value("uint8")),
            "seq_start_id": datasets.Sequence(datasets.Value("uint32")),
        }
    )
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_generator(generate, features=features, cache_dir=path).with_format("numpy")
    order = shuffled(num_bins, 2_000)
    return {"rate": len(order) / timed(lambda: [dataset[index] for index in order])}


def evict(path: Path) -> None:
    """Drop our own files out of the page cache."""
    for file in path.rglob("*.npy"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cold_case(path: str, num_bins: int, way: str) -> dict[str, float]:
    """Random bins from a cold cache: the default map, and ours with bins announced ahead."""
    # Few for the default: it reads ahead so much that after a few hundred bins the whole file is in memory.
    order = shuffled(num_bins, 50 if way == "default" else 2_000)
    evict(Path(path))
    if way == "default":
        ids = np.load(f"{path}/input_ids.npy", mmap_mode="r")
        mask = np.load(f"{path}/loss_mask.npy", mmap_mode="r")
        seconds = timed(lambda: [(np.array(ids[index]), np.array(mask[index])) for index in order])
    else:
        dataset = create_sft_dataset(path, 2, seq_length=1 << 20)

        def read() -> None:
            ahead = 128
            dataset.advise(order[:ahead])
            for number in range(0, len(order), 8):
                dataset.advise(order[number + ahead : number + ahead + 8])
                for index in order[number : number + 8]:
                    packed = dataset[index]
                    packed["input_ids"].copy()
                    packed["loss_mask"].copy()

        seconds = timed(read)
    return {"rate": len(order) / seconds}


def make_many(path: str, num_shards: int, pack_size: int) -> None:
    """A dataset directory of many small shards."""
    pool = rows(pack_size)
    with DatasetWriter(path) as dataset:
        for number in range(num_shards):
            with dataset.shard_writer(
                "train", number, num_bins=8, pack_size=pack_size, vocab_size=VOCAB_SIZE
            ) as writer:
                writer.write_block(0, part(pool, (number * 8) % (POOL - 8), 8))
                writer.finalize()
        dataset.finalize()


def open_case(path: str) -> dict[str, float]:
    """Open the dataset directory, and read one bin of every shard."""
    create_sft_dataset(path, 2, seq_length=1 << 20)
    dataset: Any = None

    def open_it() -> None:
        nonlocal dataset
        dataset = create_sft_dataset(path, 2, seq_length=1 << 20)

    seconds = min(timed(open_it) for _ in range(5))
    first_pass = timed(lambda: [dataset[index] for index in range(0, len(dataset), 8)])
    SampleOrder(10, seed=1).samples(0, 8)  # loads the compiled kernel
    start = time.perf_counter()
    SampleOrder(10**9, seed=1, fingerprint="x").samples(10**8, 8)
    return {"open": seconds, "first_pass": first_pass, "order": time.perf_counter() - start}


def wait_case(path: str, prefetch: int) -> dict[str, float]:
    """What a training loop of 10 ms steps waits for batches of 8 bins, made of the real shard by the real collate."""
    dataset = create_sft_dataset(path, 2, seq_length=1 << 20, contract="bridge_0_6")
    loader = PackedLoader(dataset, micro_batch_size=8, prefetch=prefetch, num_epochs=None, shuffle=True)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    before, steps = loader.wait_seconds, 200
    for _ in range(steps):
        time.sleep(0.01)  # a GPU's step: the interpreter is free meanwhile
        next(batches)
    return {"milliseconds": (loader.wait_seconds - before) / steps * 1e3}


class _Probe:
    """A dataset whose samples also tell what the worker holds for itself."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.before: float | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> float:
        if self.before is None:
            self.before = private_megabytes()
        packed = self.dataset[index]
        packed["input_ids"].sum()
        return private_megabytes() - self.before if index % 50 == 0 else 0.0


def worker_case(path: str) -> dict[str, float]:
    """Return the most private memory that reading everything adds to one of two DataLoader workers."""
    import torch

    dataset = create_sft_dataset(path, 2, seq_length=1 << 20)
    loader = torch.utils.data.DataLoader(
        _Probe(dataset), batch_size=8, num_workers=2, shuffle=True, collate_fn=max, multiprocessing_context="spawn"
    )
    return {"megabytes": max(loader)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int, default=20_000)
    parser.add_argument("--pack-size", type=int, default=4_096)
    parser.add_argument("--shards", type=int, default=1_000)
    arguments = parser.parse_args(argv)
    bins, pack_size = arguments.bins, arguments.pack_size
    with tempfile.TemporaryDirectory(prefix="packed_sft_bench_") as home:
        shard = f"{home}/shard"
        memmap_blocks(Path(shard), rows(pack_size), bins)
        cases: dict[str, tuple[Callable[..., dict[str, float]], tuple[Any, ...]]] = {
            "memmap_v1, bins as arrays": (source_case, (shard, bins)),
            "memmap_v1, dataset[i] as Bridge's dict": (ours_case, (shard, bins)),
            "megatron-core IndexedDataset x2": (indexed_case, (f"{home}/indexed", bins, pack_size)),
            "Hugging Face datasets, NumPy format": (arrow_case, (f"{home}/arrow", bins, pack_size)),
        }
        rates = {name: in_own_process(case, *given)["rate"] for name, (case, given) in cases.items()}
        base = rates["memmap_v1, bins as arrays"]
        print_table(
            f"Shuffled bins, warm, copied out ({bins:,} bins of {pack_size:,})",
            ("", "bins/s", "relative"),
            [
                (
                    name,
                    "not installed" if np.isnan(rate) else f"{rate:,.0f}",
                    "" if np.isnan(rate) else f"{rate / base:.2f}",
                )
                for name, rate in rates.items()
            ],
        )
        paired = in_own_process(paired_case, shard, f"{home}/indexed", bins)
        print_table(
            "dataset[i] beside megatron-core's IndexedDataset x2, in turns: how many times its rate",
            ("", ""),
            [
                ("bins that were verified before", f"{paired['first_read']:.2f}"),
                ("bins verified at every read", f"{paired['always']:.2f}"),
            ],
        )
        cold = {way: in_own_process(cold_case, shard, bins, way)["rate"] for way in ("default", "ours")}
        print_table(
            "Random bins, cold cache (own files evicted)",
            ("", "bins/s", "relative"),
            [
                ("np.load(mmap_mode='r')", f"{cold['default']:,.0f}", "1.0"),
                (
                    "MADV_RANDOM + bins announced 128 ahead",
                    f"{cold['ours']:,.0f}",
                    f"{cold['ours'] / cold['default']:.1f}",
                ),
            ],
        )
        waits = {prefetch: in_own_process(wait_case, shard, prefetch)["milliseconds"] for prefetch in (2, 0)}
        print_table(
            "PackedLoader, batches of 8 bins, steps of 10 ms",
            ("", "mean wait, ms"),
            [
                ("prefetch thread (prefetch=2)", f"{waits[2]:.3f}"),
                ("without (prefetch=0)", f"{waits[0]:.3f}"),
            ],
        )
        shutil.rmtree(shard)
        many = f"{home}/many"
        make_many(many, arguments.shards, 512)
        opened = in_own_process(open_case, many)
        worker = in_own_process(worker_case, many)
        print_table(
            f"A dataset directory of {arguments.shards:,} shards",
            ("", ""),
            [
                ("open, ms", f"{opened['open'] * 1e3:.1f}"),
                ("first bin of every shard (opens and maps each), ms", f"{opened['first_pass'] * 1e3:.0f}"),
                ("order of 10^9 samples: open and draw 8, ms", f"{opened['order'] * 1e3:.2f}"),
                ("private memory a DataLoader worker adds by reading all, MB", f"{worker['megabytes']:.1f}"),
            ],
        )


if __name__ == "__main__":
    main()
