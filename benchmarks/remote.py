"""Datasets in an object store: a cold cache against the client's raw download rate, a warm one against local data.

moto, a real S3 server, keeps the objects, and a fast server sends them: as fast as this machine can, where checksums
and the disk count, and at the rate of a network, where waiting counts. Each round runs every case once, in turn, and
ratios are taken inside a round, because the speed of a shared machine changes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import print_table

_NUM_THREADS = 8
_BUCKET = "bucket"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=200, help="of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=150, help="of the network, in megabytes per second")
    options = parser.parse_args(arguments)
    from tests.remote.object_store import moto_server

    home = Path(tempfile.mkdtemp(prefix="packed-sft-bench-"))
    try:
        with moto_server(home / "log") as port:
            local = _write(home / "data", options.shards, options.megabytes)
            _publish(local, port)
            size = sum(path.stat().st_size for path in local.rglob("*") if path.is_file()) / 1e6
            what = f"{options.shards} shards, {size:,.0f} MB"
            with _served(local, port, 0):
                cases = _download_cases(home, local) | _read_cases(home, local)
                _compare(home, f"remote: {what}, as fast as this machine can", cases, size, options.rounds)
            with _served(local, port, options.rate):
                cases = _download_cases(home, local, with_others=False) | _cold_passes(home)
                _compare(home, f"remote: {what}, over {options.rate:,.0f} MB/s", cases, size, options.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    _mixing(num_shards=256, bins_per_shard=512)


Cases = dict[str, tuple[Callable[[], object], str]]  # name -> what to run, and the case it is compared with
_RAW = "download by s3fs alone"
_LOCAL = "batches of local data"


def _download_cases(home: Path, local: Path, *, with_others: bool = True) -> Cases:
    import fsspec

    from megatron_packed_sft.remote.node_cache import node_cache
    from megatron_packed_sft.storage.remote_shard import fetch_dataset

    names = [str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()]

    def raw(system: Any) -> None:
        target = Path(tempfile.mkdtemp(prefix="raw_", dir=home))
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(lambda name: system.get_file(f"{_BUCKET}/data/{name}", str(target / name)), names))

    def cold() -> None:
        fetch_dataset(f"s3://{_BUCKET}/data", node_cache(tempfile.mkdtemp(prefix="cold_", dir=home)))

    cases: Cases = {
        _RAW: (lambda: raw(fsspec.filesystem("s3")), _RAW),
        "cold cache, prefetch: checked and durable": (cold, _RAW),
    }
    if with_others and importlib.util.find_spec("obstore"):
        from obstore.fsspec import FsspecStore

        system = FsspecStore(
            "s3",
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            access_key_id="anybody",
            secret_access_key="anything",
            region="us-east-1",
            client_options={"allow_http": True},
        )
        cases["download by obstore behind fsspec"] = (lambda: raw(system), _RAW)
    return cases


def _pass(path: str | Path, cache: Path | None, **sampling: Any) -> None:
    from megatron_packed_sft import PackedLoader, create_sft_dataset
    from megatron_packed_sft.data.options import OpenOptions

    dataset = create_sft_dataset(path, 0, opening=OpenOptions(cache_dir=cache))
    for _ in PackedLoader(dataset, micro_batch_size=4, **sampling):
        pass


def _read_cases(home: Path, local: Path) -> Cases:
    _pass(local, None)  # compiles
    _pass(f"s3://{_BUCKET}/data", home / "warm")
    return {
        _LOCAL: (lambda: _pass(local, None, shuffle=True), _LOCAL),
        "batches of a warm cache": (lambda: _pass(f"s3://{_BUCKET}/data", home / "warm", shuffle=True), _LOCAL),
    }


def _cold_passes(home: Path) -> Cases:
    def cold(**sampling: Any) -> None:
        _pass(f"s3://{_BUCKET}/data", Path(tempfile.mkdtemp(prefix="cold_", dir=home)), **sampling)

    return {
        "batches of a cold cache, shuffled": (lambda: cold(shuffle=True), _RAW),
        "batches of a cold cache, in stored order": (cold, _RAW),
    }


def _compare(home: Path, title: str, cases: Cases, size: float, num_rounds: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in cases}
    worked: dict[str, list[float]] = {name: [] for name in cases}  # CPU seconds, which other processes do not change
    for _ in range(num_rounds):
        for name, (run, _) in cases.items():
            os.sync()  # so that no case pays for the dirty pages of the one before
            start, start_of_work = time.perf_counter(), time.process_time()
            run()
            taken[name].append(time.perf_counter() - start)
            worked[name].append(time.process_time() - start_of_work)
            for scratch in [*home.glob("raw_*"), *home.glob("cold_*")]:
                shutil.rmtree(scratch, ignore_errors=True)
    rows = []
    for name, (_, other) in cases.items():
        ratios = np.array(taken[other]) / np.array(taken[name])
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        work = np.median(worked[other]) / np.median(worked[name])
        rate = size / np.median(taken[name])
        rows.append([name, f"{rate:,.0f}", f"{np.median(ratios):.2f}", spread, f"{work:.2f}"])
    titles = ["case", "MB/s", "ratio", "spread", "ratio of CPU time"]
    print_table(f"{title}; medians of {num_rounds} rounds", titles, rows)


def _publish(local: Path, port: int) -> None:
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    import fsspec

    from megatron_packed_sft.remote.uploads import upload

    fsspec.filesystem("s3").mkdir(_BUCKET)
    upload(local, f"s3://{_BUCKET}/data")


@contextlib.contextmanager
def _served(local: Path, moto_port: int, rate: float) -> Iterator[None]:
    """Run a fast server for the objects while the block runs; its address is in the environment."""
    import s3fs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [str(local), f"{_BUCKET}/data", str(moto_port), str(port), str(rate)]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.static_server", *options]) as server:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
            s3fs.S3FileSystem.clear_instance_cache()
            yield
        finally:
            server.kill()


def _mixing(num_shards: int, bins_per_shard: int) -> None:
    """Print the cost of shuffling by windows: how many of all shards are mixed in 512 consecutive samples."""
    from megatron_packed_sft.data.order.sample_order import SampleOrder, ShardOrder

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
    from megatron_packed_sft.storage.bins import BinBlock
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
