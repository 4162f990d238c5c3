"""`make demo`: what this release can do, end to end, on rows it generates itself.

Training comes with a later release; until then the demo generates packed rows, publishes them as a dataset of
memmap_v1 shards, validates every byte, reads everything back, damages a copy to show that it is noticed, and compares
opening with the legacy pickle.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from megatron_packed_sft import (
    BinBlock,
    DatasetWriter,
    PackedSFTError,
    convert,
    open_dataset,
    open_shard,
    validate,
)

VOCAB_SIZE = 32_000


def generate_rows(num_bins: int, pack_size: int, seed: int) -> BinBlock:
    """Packed rows of chat-like lengths: whole sequences one after the other until the next would not fit."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((num_bins, pack_size), np.uint16)
    mask = np.zeros((num_bins, pack_size), np.uint8)
    packed_len = np.zeros(num_bins, np.uint32)
    starts: list[int] = []
    offsets = [0]
    for row in range(num_bins):
        filled = 0
        while True:
            length = int(np.clip(rng.lognormal(5.3, 0.8), 16, pack_size))
            if filled + length > pack_size:
                break
            starts.append(filled)
            ids[row, filled : filled + length] = rng.integers(4, VOCAB_SIZE, length)
            answer = length // 3  # the first part is the question; what follows is trained, next-token aligned
            mask[row, filled + answer : filled + length - 1] = 1
            filled += length
        packed_len[row] = filled
        offsets.append(len(starts))
    return BinBlock(ids, mask, packed_len, np.array(offsets, np.uint32), np.array(starts, np.uint32))


def say(step: str, text: str) -> None:
    """One line of the demo's story."""
    print(f"{step:<9} {text}", flush=True)


def publish(target: Path, splits: dict[str, list[BinBlock]], pack_size: int) -> None:
    """Write every block as a shard of its own, and publish them together."""
    with DatasetWriter(target, overwrite=True) as dataset:
        for split, blocks in splits.items():
            for number, block in enumerate(blocks):
                with dataset.shard_writer(
                    split, number, num_bins=len(block), pack_size=pack_size, vocab_size=VOCAB_SIZE
                ) as writer:
                    writer.write_block(0, block)
                    writer.finalize()
        dataset.finalize(provenance={"made_by": "recipes/demo.py"})


def read_back(target: Path, splits: dict[str, list[BinBlock]]) -> int:
    """Compare every bin with what was generated; return how many bins there were."""
    dataset = open_dataset(target)
    num_bins = 0
    for split, blocks in splits.items():
        for shard, block in zip(dataset.open_shards(split), blocks, strict=True):
            for index in range(len(shard)):
                for got, want in zip(shard[index], block[index], strict=True):
                    if not np.array_equal(got, want):
                        raise SystemExit(f"{shard.path}: bin {index} came back different; please report this")
            num_bins += len(shard)
    return num_bins


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    parser.add_argument("--bins", type=int, default=400, help="bins per shard")
    parser.add_argument("--pack-size", type=int, default=4096)
    arguments = parser.parse_args()
    home: Path = arguments.output
    shutil.rmtree(home, ignore_errors=True)
    target = home / "dataset"

    splits = {
        "train": [generate_rows(arguments.bins, arguments.pack_size, seed) for seed in (1, 2)],
        "validation": [generate_rows(max(arguments.bins // 10, 1), arguments.pack_size, 3)],
    }
    total = sum(int(block.packed_len.sum()) for blocks in splits.values() for block in blocks)
    say("generate", f"{total:,} tokens of made-up chats in packed rows of {arguments.pack_size:,}")

    publish(target, splits, arguments.pack_size)
    say("write", f"3 memmap_v1 shards in 2 splits, published by one rename: {target}")

    report = validate(target)
    for finding in report.findings:
        say("validate", str(finding))
    say("validate", f"{report.num_bytes:,} bytes against their checksums, {report.num_bins:,} bins: no findings")
    if not report.ok:
        sys.exit(1)

    say("read", f"{read_back(target, splits):,} bins read back, equal element by element")

    damaged = home / "damaged"
    shutil.copytree(target / "train" / "shard_000000", damaged)
    with open(damaged / "loss_mask.npy", "r+b") as file:
        file.seek(5000)
        value = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([value ^ 1]))
    findings = validate(damaged).findings
    say("damage", f"one bit flipped in a copy; validate says: {findings[0].message}")
    try:
        (damaged / "seq_starts.npy").write_bytes(b"")
        open_shard(damaged)
        sys.exit("an empty file was not noticed; please report this")
    except PackedSFTError as error:
        say("damage", f"one file emptied; open_shard says: {error}")
    shutil.rmtree(damaged)

    legacy = home / "legacy.npy"
    shard_path = target / "train" / "shard_000000"
    convert(shard_path, legacy, to="legacy")
    start = time.perf_counter()
    np.load(legacy, allow_pickle=True)  # our own file: nothing hostile in it
    legacy_seconds = time.perf_counter() - start
    start = time.perf_counter()
    open_shard(shard_path)
    memmap_seconds = time.perf_counter() - start
    say(
        "compare",
        f"the same shard opens in {memmap_seconds * 1e3:.1f} ms as memmap_v1, {legacy_seconds * 1e3:.0f} ms as legacy "
        f"pickle ({legacy_seconds / memmap_seconds:,.0f}x), and that grows with its size",
    )
    say("done", f"look around: {target}/dataset.json, packed-sft validate {target}")
    say("next", "training on these shards with torchrun comes with a later release; see CHANGELOG.md")


if __name__ == "__main__":
    main()
