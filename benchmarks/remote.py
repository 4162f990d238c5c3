"""Datasets in an object store: a warm cache against local data, and a cold one against the client's raw download rate.

A real S3 server (moto's) runs on loopback, so the rates are those of this machine; only their ratios mean something.
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

from benchmarks.measure import print_table

_NUM_ROUNDS = 3
_CASES = (
    "download by s3fs alone",
    "cold cache: fetched, checked, durable",
    "batches of local data",
    "batches of a warm cache",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64, help="of a shard")
    options = parser.parse_args(arguments)
    from tests.remote.object_store import BUCKET, moto_server

    home = Path(tempfile.mkdtemp(prefix="packed-sft-bench-"))
    try:
        with moto_server(home / "log") as port:
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "anybody",
                "AWS_SECRET_ACCESS_KEY": "anything",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            import fsspec

            fsspec.filesystem("s3").mkdir(BUCKET)
            _measure(home, f"s3://{BUCKET}/data", options.shards, options.megabytes)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _measure(home: Path, url: str, num_shards: int, megabytes: int) -> None:
    import fsspec

    from megatron_packed_sft import PackedLoader, create_sft_dataset
    from megatron_packed_sft.remote.node_cache import node_cache
    from megatron_packed_sft.remote.uploads import upload
    from megatron_packed_sft.storage.remote_shard import fetch_dataset

    local = _write(home / "data", num_shards, megabytes)
    upload(local, url)
    system = fsspec.filesystem("s3")
    raw, cold, here, warm = [], [], [], []

    def read(path: str | Path) -> float:
        loader = PackedLoader(create_sft_dataset(path, 0, cache_dir=home / "warm"), micro_batch_size=4, shuffle=True)
        start = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - start

    read(local), read(url)  # compile, and fill the cache
    for number in range(_NUM_ROUNDS):
        start = time.perf_counter()
        system.get(url, str(home / f"raw_{number}"), recursive=True)
        raw.append(time.perf_counter() - start)
        start = time.perf_counter()
        fetch_dataset(url, node_cache(home / f"cold_{number}"), (), lambda: None)
        cold.append(time.perf_counter() - start)
        shutil.rmtree(home / f"raw_{number}")
        shutil.rmtree(home / f"cold_{number}")
        here.append(read(local))
        warm.append(read(url))
    times = [float(np.median(one)) for one in (raw, cold, here, warm)]
    size = sum(path.stat().st_size for path in local.rglob("*") if path.is_file()) / 1e6
    print_table(
        f"remote: {num_shards} shards, {size:,.0f} MB, medians of {_NUM_ROUNDS} rounds",
        ["case", "MB/s", "ratio"],
        [
            [case, f"{size / taken:,.0f}", f"{times[first] / taken:.2f}"]
            for case, taken, first in zip(_CASES, times, (0, 0, 2, 2), strict=True)
        ],
    )  # fmt: skip
    _mixing(num_shards=256, bins_per_shard=512)


def _mixing(num_shards: int, bins_per_shard: int) -> None:
    """Print what shuffling by windows gives up: how many of all shards meet in 512 consecutive samples."""
    from megatron_packed_sft.data.order.sample_order import SampleOrder
    from megatron_packed_sft.data.order.shard_order import ShardOrder

    count = num_shards * bins_per_shard
    rows = []
    for window in (1, 4, 16, 64, num_shards, None):
        order = SampleOrder(count) if window is None else ShardOrder((bins_per_shard,) * num_shards, window)
        samples = order.at(np.arange(count))
        shards = samples // bins_per_shard
        met = np.mean([len(np.unique(shards[first : first + 512])) for first in range(0, count - 512, 4096)])
        first_epoch, second = np.argsort(samples), np.argsort(order.at(np.arange(count, 2 * count)))
        rows.append([
            "all samples" if window is None else f"window of {window}",
            "all" if window is None else str(window),
            f"{met:.1f}",
            f"{np.mean(np.abs(first_epoch - second)) / count:.3f}",
        ])  # fmt: skip
    print_table(
        f"shuffling {num_shards} shards of {bins_per_shard} bins: what meets in 512 consecutive samples",
        ["shuffle", "shards to hold", "shards met", "mean move between epochs"],
        rows,
    )


def _write(path: Path, num_shards: int, megabytes: int) -> Path:
    from megatron_packed_sft import BinBlock
    from megatron_packed_sft.storage.dataset_directory import DatasetWriter

    width = 4096
    num_bins = max(megabytes * 1_000_000 // (width * 5), 1)
    generator = np.random.default_rng(0)
    with DatasetWriter(path) as dataset:
        for number in range(num_shards):
            with dataset.shard_writer(
                "train", number, num_bins=num_bins, pack_size=width, vocab_size=100_000
            ) as writer:
                ids = generator.integers(0, 100_000, (num_bins, width), np.int32)
                mask = np.ones((num_bins, width), np.uint8)
                mask[:, -1] = 0
                lengths = np.full(num_bins, width, np.uint32)
                offsets = np.arange(num_bins + 1, dtype=np.uint32)
                writer.write_block(0, BinBlock(ids, mask, lengths, offsets, np.zeros(num_bins, np.uint32)))
                writer.finalize()
        dataset.finalize()
    return path


if __name__ == "__main__":
    main()
