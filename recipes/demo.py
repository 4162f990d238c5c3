"""`make demo`: what this release can do, end to end, on data it generates itself.

Made-up sequences become a token store, a packing plan and a dataset of memmap_v1 shards; every byte is validated,
batches are loaded, the loader is stopped and resumed with another number of ranks, a copy is damaged to show that it is
noticed, and opening is compared with the legacy pickle. Reading chat files and training come with later releases.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft import (
    DatasetWriter,
    PackedLoader,
    PackedSFTError,
    TokenPartWriter,
    convert,
    create_sft_dataset,
    materialize_shards,
    open_dataset,
    open_shard,
    open_token_store,
    pack,
    publish_store,
    validate,
)

VOCAB_SIZE = 32_000
EOS = 2
GLOBAL_BATCH = 8


def write_store(path: Path, num_sequences: int, pack_size: int) -> None:
    """Sequences of chat-like lengths, in two parts; the last two thirds of each are the answer, which is trained."""
    rng = np.random.default_rng(1)
    for number in range(2):
        lengths = np.clip(rng.lognormal(5.3, 0.9, num_sequences // 2), 16, pack_size).astype(np.int64)
        total = int(lengths.sum())
        inside = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        with TokenPartWriter(path / f"part_{number:06d}", vocab_size=VOCAB_SIZE) as writer:
            train = inside >= np.repeat(lengths // 3, lengths)
            writer.append_many(rng.integers(4, VOCAB_SIZE, total), train, lengths)
            writer.finalize()
    publish_store(path)


def say(step: str, text: str) -> None:
    """One line of the demo's story."""
    print(f"{step:<9} {text}", flush=True)


def stream(dataset: Any, world_size: int, state: dict[str, Any] | None, num_steps: int) -> tuple[list[int], Any]:
    """The first token of every sample that all ranks see in some steps, in global order; and where they stand then."""
    seen: list[list[int]] = []
    for rank in range(world_size):
        loader = PackedLoader(
            dataset,
            micro_batch_size=1,
            global_batch_size=GLOBAL_BATCH,
            data_parallel_rank=rank,
            data_parallel_size=world_size,
        )
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        seen.append([int(next(batches)["tokens"][0, 0]) for _ in range(num_steps * GLOBAL_BATCH // world_size)])
        after = loader.state_dict()
    # Micro batch k of all ranks together are the stream's next world_size samples.
    return [token for together in zip(*seen, strict=True) for token in together], after


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    parser.add_argument("--sequences", type=int, default=12_000)
    parser.add_argument("--pack-size", type=int, default=4096)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    home: Path = arguments.output
    shutil.rmtree(home, ignore_errors=True)
    target = home / "dataset"

    write_store(home / "tokens", arguments.sequences, arguments.pack_size)
    store = open_token_store(home / "tokens")
    say("generate", f"{len(store):,} made-up sequences, {store.num_tokens:,} tokens: {store.path}")

    times = []
    for _ in range(2):
        start = time.perf_counter()
        plan = pack(store.lengths, pack_size=arguments.pack_size, shuffle_output=True, seed=1)
        times.append(time.perf_counter() - start)
    stats = plan.stats()
    say(
        "pack",
        f"{plan.num_bins:,} bins of {plan.pack_size:,}, {stats.utilization:.3%} full, in {times[1] * 1e3:.0f} ms "
        f"(the first call took {times[0]:.1f} s: kernels are compiled once per machine, then loaded)",
    )

    with DatasetWriter(target) as dataset_writer:
        paths = [dataset_writer.shard_path("train", number) for number in range(3)]
        materialize_shards(plan, store, paths, num_workers=2, pad_id=EOS)
        dataset_writer.finalize(provenance={"made_by": "recipes/demo.py", "plan": plan.order_fingerprint})
    say("write", f"3 memmap_v1 shards by 2 processes, published together by one rename: {target}")

    report = validate(target)
    for finding in report.findings:
        say("validate", str(finding))
    if not report.ok:
        sys.exit(1)
    say("validate", f"{report.num_bytes:,} bytes against their checksums, {report.num_bins:,} bins: no findings")

    dataset = create_sft_dataset(target, EOS, seq_length=arguments.pack_size)
    planned = create_sft_dataset(store.path, EOS, seq_length=arguments.pack_size, plan=plan)
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        if not np.array_equal(dataset[index]["input_ids"], planned[index]["input_ids"]):
            sys.exit(f"row {index} of the shards differs from the plan's; please report this")
    batch = dataset.fetch_batch(range(GLOBAL_BATCH))
    say("read", f"batches with {', '.join(batch)}; tokens {tuple(batch['tokens'].shape)}")

    whole, _ = stream(dataset, 2, None, 6)
    first, state = stream(dataset, 2, None, 2)
    rest, _ = stream(dataset, 4, state, 4)
    if first + rest != whole:
        sys.exit("the resumed stream differs; please report this")
    say(
        "resume",
        f"stopped after {len(first)} samples on 2 ranks, resumed on 4: the same stream of {len(whole)} samples",
    )

    damaged = home / "damaged"
    shutil.copytree(target / "train" / "shard_000000", damaged)
    with open(damaged / "loss_mask.npy", "r+b") as file:
        file.seek(5000)
        value = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([value ^ 1]))
    say("damage", f"one bit flipped in a copy; validate says: {validate(damaged).findings[0].message}")
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
    totals = open_dataset(target).figures["train"]
    say(
        "done", f"{totals['num_tokens']:,} tokens, {totals['num_loss_tokens']:,} of them trained; look around: {target}"
    )
    say("next", f"packed-sft validate {target}; reading chat files and training with torchrun come with later releases")


if __name__ == "__main__":
    main()
