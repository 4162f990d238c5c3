"""From token store and plan to published shards, beside a plain memory copy of the same bytes.

python -m benchmarks.materialize --sequences 240000 --pack-size 4096
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import in_own_process, peak_megabytes, print_table, timed
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from megatron_packed_sft.tokens.materialize import materialize
from megatron_packed_sft.tokens.store import open_token_store, publish_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path

VOCAB_SIZE = 120_000


def make_store(path: str, num_sequences: int, pack_size: int) -> None:
    """Chat-like lengths, four parts."""
    rng = np.random.default_rng(0)
    for number in range(4):
        lengths = np.clip(rng.lognormal(5.5, 0.8, num_sequences // 4), 8, pack_size).astype(np.int64)
        with TokenPartWriter(part_path(path, number), vocab_size=VOCAB_SIZE) as writer:
            for some in np.array_split(lengths, 16):
                total = int(some.sum())
                writer.append_many(rng.integers(0, VOCAB_SIZE, total), rng.integers(0, 2, total), some)
            writer.finalize()
    publish_store(path)


def copy_case(num_bins: int, pack_size: int) -> dict[str, float]:
    """np.copyto of as many bytes, memory to memory."""
    source = np.ones((num_bins, pack_size, 5), np.uint8)
    target = np.zeros_like(source)
    return {"seconds": min(timed(lambda: np.copyto(target, source)) for _ in range(5)), "megabytes": float("nan")}


def ours_case(store_path: str, plan_path: str, target: str) -> dict[str, float]:
    """Materialize into a MemmapShardWriter: every check, checksum and write; and with finalize and its fsyncs."""
    store, plan = open_token_store(store_path), PackPlan.load(plan_path)

    def write(num_bins: int) -> tuple[float, float]:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        start = time.perf_counter()
        with MemmapShardWriter(target, num_bins, plan.pack_size, vocab_size=VOCAB_SIZE) as writer:
            materialize(plan, store, writer, bins=np.arange(num_bins))
            written = time.perf_counter() - start
            writer.finalize()
        return written, time.perf_counter() - start

    write(min(200, plan.num_bins))
    for part in store.parts:
        part.arrays.ids.max()  # the store is in the page cache and mapped
        part.arrays.train.max()
    before = peak_megabytes()
    runs = [write(plan.num_bins) for _ in range(5)]
    return {
        "seconds": min(written for written, _ in runs),
        "with_fsync": min(total for _, total in runs),
        "megabytes": peak_megabytes() - before,
    }


def loop_case(store_path: str, plan_path: str, target: str) -> dict[str, float]:
    """The obvious way: a NumPy copy per sequence into a row, a write_bin per row."""
    store, plan = open_token_store(store_path), PackPlan.load(plan_path)

    def write(num_bins: int) -> None:
        shutil.rmtree(target, ignore_errors=True)
        with MemmapShardWriter(target, num_bins, plan.pack_size, vocab_size=VOCAB_SIZE) as writer:
            ids = np.empty(plan.pack_size, np.int32)
            mask = np.empty(plan.pack_size, np.uint8)
            for number in range(num_bins):
                filled, starts = 0, []
                for unit in plan.bin(number).tolist():
                    tokens, train = store[unit]
                    starts.append(filled)
                    ids[filled : filled + len(tokens)] = tokens
                    mask[filled : filled + len(tokens) - 1] = train[1:]
                    mask[filled + len(tokens) - 1] = 0
                    filled += len(tokens)
                writer.write_bin(number, ids[:filled], mask[:filled], starts)
            writer.finalize()

    write(min(200, plan.num_bins))
    before = peak_megabytes()
    return {"seconds": timed(lambda: write(plan.num_bins)), "megabytes": peak_megabytes() - before}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=240_000)
    parser.add_argument("--pack-size", type=int, default=4_096)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="packed_sft_bench_") as home:
        make_store(f"{home}/store", arguments.sequences, arguments.pack_size)
        plan = pack(open_token_store(f"{home}/store").lengths, pack_size=arguments.pack_size)
        plan.save(f"{home}/plan.npz")
        num_tokens = int(plan.bin_tokens.sum())
        ours = in_own_process(ours_case, f"{home}/store", f"{home}/plan.npz", f"{home}/shard")
        results = {
            "plain memory copy": in_own_process(copy_case, plan.num_bins, arguments.pack_size),
            "materialize, written": ours,
            "materialize, written, fsynced and published": {**ours, "seconds": ours["with_fsync"]},
            "NumPy copy per sequence, written": in_own_process(
                loop_case, f"{home}/store", f"{home}/plan.npz", f"{home}/loop"
            ),
        }
        size = sum(path.stat().st_size for path in Path(home, "shard").iterdir())
        base = results["plain memory copy"]["seconds"]
        print_table(
            f"Materialize {arguments.sequences:,} sequences into {plan.num_bins:,} bins of {arguments.pack_size:,} "
            f"({size / 1e6:,.0f} MB)",
            ("", "seconds", "Mtok/s", "speed / memory copy", "peak memory added, MB"),
            [
                (
                    name,
                    f"{result['seconds']:.2f}",
                    f"{num_tokens / result['seconds'] / 1e6:.0f}",
                    f"{base / result['seconds']:.0%}",
                    "-" if np.isnan(result["megabytes"]) else f"{result['megabytes']:.0f}",
                )
                for name, result in results.items()
            ],
        )


if __name__ == "__main__":
    main()
