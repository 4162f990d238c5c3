"""Full batches, read and collated in process: ours beside Megatron-Bridge's own path, NumPy, and bare copies of bins.

python -m benchmarks.collate --bins 20000 --pack-size 4096 --batch-size 8

Bins are picked in shuffled order. Every case that makes a batch is first checked to make the same one, bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.materialize import make_store
from benchmarks.measure import print_table
from benchmarks.storage import POOL, memmap_blocks, rows
from megatron_packed_sft import create_sft_dataset, open_shard, open_token_store, pack
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples, locate_in_shards
from megatron_packed_sft.data.options import BatchOptions, OpenOptions
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from tests.oracle.bridge import load, open_dataset

EOS = 2
NUM_SHARDS = 8
ROUNDS = 7
SECONDS_PER_ROUND = 0.25
SLOW_SECONDS_PER_ROUND = 1.0
PAIRED_BATCHES = 1000
STORE_TOKENS = 24_000_000  # more than the processor's cache holds
MEAN_LENGTH = 337  # of the sequences that make_store writes

Picked = npt.NDArray[np.int64]
Case = Callable[[Picked], Any]


def bare_copies(arrays: BinBlock, batch_size: int) -> Case:
    """`np.take` of the stored bins into reused memory: what reading alone costs."""
    shape = (batch_size, arrays.input_ids.shape[1])
    ids, mask = np.empty(shape, arrays.input_ids.dtype), np.empty(shape, np.uint8)

    def read(picked: Picked) -> None:
        np.take(arrays.input_ids, picked, axis=0, out=ids, mode="clip")  # "raise" would copy twice
        np.take(arrays.loss_mask, picked, axis=0, out=mask, mode="clip")

    return read


def numpy_slices(arrays: BinBlock, width: int) -> Case:
    """NumPy, one slice assignment per sequence and key."""

    def make(picked: Picked) -> dict[str, torch.Tensor]:
        batch = np.empty((4, len(picked), width), np.int64)
        for place, number in enumerate(picked.tolist()):
            length = int(arrays.packed_len[number])
            starts = arrays.seq_starts[arrays.seq_offsets[number] : arrays.seq_offsets[number + 1]].tolist()
            ids, mask = arrays.input_ids[number], arrays.loss_mask[number]
            tokens, labels, loss, positions = batch[:, place]
            offset = 0
            for start, end in zip(starts, [*starts[1:], length], strict=True):
                stop = offset + end - start - 1
                tokens[offset:stop] = ids[start : end - 1]
                labels[offset:stop] = ids[start + 1 : end]
                loss[offset:stop] = mask[start : end - 1]
                positions[offset:stop] = np.arange(stop - offset)
                offset = stop
            tokens[offset:] = labels[offset:] = EOS
            loss[offset:] = positions[offset:] = 0
        batch[2][batch[0] == EOS] = 0
        return _named(batch)

    return make


def numpy_whole_batch(arrays: BinBlock, width: int) -> Case:
    """NumPy without a loop: one index array for all tokens of the batch."""

    def make(picked: Picked) -> dict[str, torch.Tensor]:
        ids, mask = arrays.input_ids[picked], arrays.loss_mask[picked]
        first, last = arrays.seq_offsets[picked].astype(np.int64), arrays.seq_offsets[picked + 1].astype(np.int64)
        counts = last - first
        owner = np.repeat(np.arange(len(picked)), counts)
        chosen = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        starts = arrays.seq_starts[chosen].astype(np.int64)
        ends = np.append(starts[1:], 0)
        ends[np.cumsum(counts) - 1] = arrays.packed_len[picked]
        sizes = ends - starts - 1
        before = np.cumsum(sizes) - sizes
        positions = np.arange(sizes.sum()) - np.repeat(before, sizes)
        source = positions + np.repeat(starts + owner * ids.shape[1], sizes)
        row_start = np.repeat(before[np.cumsum(counts) - counts], counts)
        target = positions + np.repeat(before - row_start + owner * width, sizes)
        batch = np.zeros((4, len(picked), width), np.int64)
        batch[:2] = EOS
        flat = batch.reshape(4, -1)
        flat[0, target] = ids.reshape(-1)[source]
        flat[1, target] = ids.reshape(-1)[source + 1]
        flat[2, target] = mask.reshape(-1)[source]
        flat[3, target] = positions
        batch[2][batch[0] == EOS] = 0
        return _named(batch)

    return make


def bridge(version: str, directory: Path, pool: BinBlock, width: int, *, parquet: bool = False) -> Case:
    """Megatron-Bridge's own dataset and collate, over the bins that the shards repeat."""
    names = ("input_ids", "loss_mask", "seq_start_id")
    data = [dict(zip(names, (array.tolist() for array in pool[row]), strict=True)) for row in range(POOL)]
    dataset = open_dataset(
        load(version), directory, data, EOS, parquet=parquet, max_seq_length=width, pad_to_max_length=True
    )
    return lambda picked: dataset.collate_fn([dataset[row] for row in (picked % POOL).tolist()])


def ours(shards: Sequence[MemmapShard], width: int, **arguments: Any) -> Case:
    """`collate` of located bins; those of a batch come from as many shards as are given."""
    options = CollateOptions(
        **{"contract": "bridge_0_6", "eos_id": EOS, "max_seq_length": width, "pad_to_max_length": True, **arguments}
    )

    def make(picked: Picked) -> dict[str, Any]:
        owners = np.arange(len(picked)) % len(shards)
        return collate([locate_in_shards(shards, owners, picked % len(shards[0]))], len(picked), options)

    return make


def ours_from_samples(shard: MemmapShard, width: int) -> Case:
    """Samples one by one, then collate: how torch's own DataLoader works."""
    options = CollateOptions(contract="bridge_0_6", eos_id=EOS, max_seq_length=width, pad_to_max_length=True)

    def make(picked: Picked) -> dict[str, Any]:
        samples = []
        for number in picked.tolist():
            found = shard[number]
            boundaries = np.append(found.seq_start_id, len(found.input_ids))
            samples.append({"input_ids": found.input_ids, "loss_mask": found.loss_mask, "seq_boundaries": boundaries})
        return collate([locate_in_samples(samples)], len(picked), options)

    return make


def reread(path: Path, verify: str = "first_read") -> MemmapShard:
    """Open a shard once more, to be verified at other times."""
    shard = open_shard(path)
    assert isinstance(shard, MemmapShard)
    shard.read_with(ReadOptions(verify=verify))
    return shard


def print_ratios(directory: Path, pack_size: int, batches: list[Picked]) -> None:
    """Print the cost of verifying and of many shards."""
    whole, parts = directory / "whole", [directory / f"shard_{number}" for number in range(NUM_SHARDS)]
    cases = {
        "bins of one shard, never verified": ours([reread(whole, verify="never")], pack_size),
        "bins of one shard, verified now (first read)": ours([reread(whole, verify="always")], pack_size),
        "bins of one shard, verified before": ours([reread(whole)], pack_size),
        f"bins of {NUM_SHARDS} shards, never verified": ours([reread(one, verify="never") for one in parts], pack_size),
        f"bins of {NUM_SHARDS} shards, verified now": ours([reread(one, verify="always") for one in parts], pack_size),
    }
    print_in_turns(f"Bins of {pack_size:,}", cases, batches)


def print_store_ratios(directory: Path, pack_size: int, batch_size: int) -> None:
    """Print the cost of verifying where batches are made of a token store and a plan."""
    make_store(str(directory / "store"), STORE_TOKENS // MEAN_LENGTH, pack_size)
    plan = pack(open_token_store(directory / "store").lengths, pack_size=pack_size)
    names = {"never": "never verified", "always": "verified now (first read)", "first_read": "verified before"}
    cases: dict[str, Case] = {}
    for verify, name in names.items():
        dataset = create_sft_dataset(
            directory / "store",
            EOS,
            pack_size,
            plan=plan,
            contract=BatchOptions("bridge_0_6", pad_to_max_length=True),
            opening=OpenOptions(verify=verify),
        )
        cases[f"store and plan, {name}"] = lambda picked, dataset=dataset: dataset.fetch_batch(picked.tolist())
    order = np.random.default_rng(0).permutation(plan.num_bins)
    batches = list(order[: plan.num_bins // batch_size * batch_size].reshape(-1, batch_size))
    print_in_turns(f"A token store, {len(plan.item_lengths) / plan.num_bins:.0f} sequences per bin", cases, batches)


def print_in_turns(title: str, cases: dict[str, Case], batches: list[Picked]) -> None:
    """Measure cases batch by batch, in turns, so that noise affects all of them alike; print each beside the first."""
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for picked in batches:  # maps every page
        for case in cases.values():
            case(picked)
    for number in range(PAIRED_BATCHES):
        for place, name in enumerate(names):
            # Other bins than the case before, which left its own in the processor's cache.
            picked = batches[(number + place * (len(batches) // len(names))) % len(batches)]
            start = time.perf_counter()
            cases[name](picked)
            seconds[name].append(time.perf_counter() - start)
    base = np.array(seconds[names[0]])
    print_table(
        f"{title}, batches of {len(batches[0])} in turns: medians over {len(base):,}",
        ["", "us/batch", "of the first"],
        [
            [name, f"{np.median(took) * 1e6:,.0f}", f"{np.median(took) / np.median(base):.2f}"]
            for name, took in seconds.items()
        ],
    )


def _named(batch: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return {name: torch.from_numpy(array) for name, array in zip(names, batch, strict=True)}


def check(name: str, batch: Any, expected: dict[str, Any]) -> None:
    """Stop if a case does not make Bridge's batch; keys that Bridge does not have are not compared."""
    for key, value in batch.items() if isinstance(batch, dict) else ():
        if isinstance(value, torch.Tensor) and key in expected and not torch.equal(value, expected[key]):
            raise SystemExit(f"{name} makes a different {key} than Megatron-Bridge, so its speed means nothing")


def measure(cases: dict[str, Case], slow: set[str], batches: list[Picked]) -> dict[str, float]:
    """Seconds per batch of each case: the best of several rounds, the cases taking turns."""
    best = dict.fromkeys(cases, float("inf"))
    for round_number in range(ROUNDS):
        for name, case in cases.items():
            if name in slow and round_number > 1:
                continue
            budget = SLOW_SECONDS_PER_ROUND if name in slow else SECONDS_PER_ROUND
            start = time.perf_counter()
            done = 0
            while done < 2 or time.perf_counter() - start < budget:
                case(batches[(done + round_number * 101) % len(batches)])
                done += 1
            best[name] = min(best[name], (time.perf_counter() - start) / done)
    return best


def run(num_bins: int, pack_size: int, batch_size: int) -> None:
    """Measure one shape and print its table."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        pool = rows(pack_size)
        bins_per_shard = max(POOL, num_bins // NUM_SHARDS // POOL * POOL)  # whole pools: bin b is b % POOL there, too
        sizes = {"whole": num_bins, **{f"shard_{number}": bins_per_shard for number in range(NUM_SHARDS)}}
        shards = []
        for name, size in sizes.items():
            memmap_blocks(directory / name, pool, size)
            shard = open_shard(directory / name)
            assert isinstance(shard, MemmapShard)
            shards.append(shard)
        whole, parts = shards[0], shards[1:]
        order = np.random.default_rng(0).permutation(num_bins)
        batches = list(order[: num_bins // batch_size * batch_size].reshape(-1, batch_size))

        cases: dict[str, Case] = {
            "np.take copies": bare_copies(whole.arrays, batch_size),
            "Bridge 0.6.2, Parquet": bridge("0.6.2", directory, pool, pack_size, parquet=True),
            "Bridge 0.6.2, .npy": bridge("0.6.2", directory, pool, pack_size),
            "NumPy, slices": numpy_slices(whole.arrays, pack_size),
            "NumPy, whole batch": numpy_whole_batch(whole.arrays, pack_size),
            "ours, bridge_0_6": ours([whole], pack_size),
            "ours, bridge_0_6, compact": ours([whole], pack_size, compact=True),
            f"ours, bridge_0_6, bins of {NUM_SHARDS} shards": ours(parts, pack_size),
            "ours, bridge_0_6, from samples": ours_from_samples(whole, pack_size),
            "ours, mcore": ours([whole], pack_size, contract="mcore"),
            "ours, mcore, per conversation": ours([whole], pack_size, contract="mcore", loss="per_conversation"),
            "ours, hf": ours([whole], pack_size, contract="hf", pad_to_max_length=False),
        }
        slow = {name for name in cases if name.startswith("Bridge")}
        expected = cases["Bridge 0.6.2, .npy"](batches[0])
        for name, case in cases.items():
            made = case(batches[0])
            if "mcore" not in name and "hf" not in name and "compact" not in name:
                check(name, made, expected)
        seconds = measure(cases, slow, batches)
        print_ratios(directory, pack_size, batches)
        print_store_ratios(directory, pack_size, batch_size)

    tokens = batch_size * int(pool.packed_len[0])
    copies, theirs = seconds["np.take copies"], seconds["Bridge 0.6.2, .npy"]
    print_table(
        f"Full batches of {batch_size}, read and collate: {num_bins:,} bins of {pack_size:,}, shuffled",
        ["", "Mtok/s", "us/batch", "x Bridge", "of copies"],
        [
            [
                name,
                f"{tokens / seconds[name] / 1e6:,.1f}",
                f"{seconds[name] * 1e6:,.0f}",
                f"{theirs / seconds[name]:,.1f}",
                f"{copies / seconds[name]:.3f}",
            ]
            for name in cases
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; by default both shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bins", type=int)
    parser.add_argument("--pack-size", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args(argv)
    shapes = [(20_000, 4_096), (2_000, 32_768)]
    if arguments.bins or arguments.pack_size:
        shapes = [(arguments.bins or 20_000, arguments.pack_size or 4_096)]
    for num_bins, pack_size in shapes:
        run(num_bins, pack_size, arguments.batch_size)


if __name__ == "__main__":
    main()
