"""Kills a writer at every step, in processes of its own, and looks at what is left. Run by test_kill.py.

A separate program without threads, so that it can fork: each forked child writes, and is killed by SIGKILL before or
in the middle of its n-th disk-changing call.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_packed_sft import DatasetWriter, create_shard_writer, pack, validate
from megatron_packed_sft.caches import Message, build_pretrain_cache, build_sft_cache
from tests.caches.small_tokenizer import Letters
from tests.faults.injection import Injector
from tests.packed_bins import files_of, make_bins
from tests.storage.storage_checks import with_weights

PACK_SIZE = 16
BINS = make_bins(5, PACK_SIZE, seed=3)
ORDER = [3, 0, 1, 4, 2]


def write_shard(target: Path) -> None:
    """A shard whose bins arrive out of order."""
    with create_shard_writer("memmap_v1", target, num_bins=5, pack_size=PACK_SIZE, vocab_size=1000) as writer:
        for index in ORDER:
            writer.write_bin(index, *BINS[index])
        writer.finalize()


def write_weighted_shard(target: Path) -> None:
    """The same, with weights that begin in the middle: those of the bins before are filled in at the end."""
    with create_shard_writer("memmap_v1", target, num_bins=5, pack_size=PACK_SIZE, vocab_size=1000) as writer:
        for index in ORDER:
            writer.write_bin(index, *(with_weights(BINS[index]) if index == 4 else BINS[index]))
        writer.finalize()


def write_legacy(target: Path) -> None:
    """A legacy file, whose bins arrive in their order."""
    with create_shard_writer("legacy", target, num_bins=5, pack_size=PACK_SIZE, vocab_size=1000) as writer:
        for index in range(5):
            writer.write_bin(index, *BINS[index])
        writer.finalize()


def write_dataset(target: Path) -> None:
    """A dataset directory of two shards in two splits."""
    with DatasetWriter(target) as dataset:
        for split, index in (("train", 0), ("validation", 0)):
            with dataset.shard_writer(split, index, num_bins=1, pack_size=PACK_SIZE) as writer:
                writer.write_bin(0, *BINS[0])
                writer.finalize()
        dataset.finalize(card="# A dataset\n")


def write_plan(target: Path) -> None:
    """A pack plan."""
    pack([5, 3, 8, 2, 7, 1], pack_size=PACK_SIZE, shuffle_output=True).save(target)


def write_pretrain_cache(target: Path) -> None:
    """A token cache of several shards in two splits."""
    texts = [f"document {number}" for number in range(20)]
    build_pretrain_cache(
        texts,
        target,
        tokenizer=Letters(),
        max_train_tokens=100,
        max_val_tokens=50,
        shard_bytes=80,
        seed=42,
        shuffle_buffer=3,
        meta={"dataset_name": "documents"},
    )


def write_sft_cache(target: Path) -> None:
    """A cache of chats."""
    chats: list[list[Message]] = [
        [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}]
        for number in range(9)
    ]
    build_sft_cache(chats, target, tokenizer=Letters(), val_frac=0.3, seed=42, meta={"dataset_name": "chats"})


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "shard": write_shard,
    "weighted_shard": write_weighted_shard,
    "legacy": write_legacy,
    "dataset": write_dataset,
    "plan": write_plan,
    "pretrain_cache": write_pretrain_cache,
    "sft_cache": write_sft_cache,
}


def content(target: Path) -> object:
    """The published bytes, or None when nothing is there."""
    if not target.exists():
        return None
    return files_of(target) if target.is_dir() else target.read_bytes()


def main(scenario: str, home: Path) -> None:
    """Kill at every step, both before and in the middle of it; print what was seen as JSON."""
    write = SCENARIOS[scenario]
    target = home / ("reference.npy" if scenario == "legacy" else "reference")
    write(home / "warm_up.npy")  # the first call compiles, and caches the result on disk
    with Injector() as counter:
        write(target)
    reference = content(target)
    problems: list[str] = []
    outcomes = {"absent": 0, "whole": 0}
    for step in range(len(counter.calls)):
        for after in (False, True):
            place = home / f"step_{step}_{after}"
            place.mkdir()
            goal = place / ("result.npy" if scenario == "legacy" else "result")
            child = os.fork()
            if child == 0:
                with Injector(step, after=after):
                    write(goal)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            name = f"{counter.calls[step]} (step {step}, after={after})"
            if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                problems.append(f"{name}: the writer was not killed, status {status}")
            left = content(goal)
            outcomes["absent" if left is None else "whole"] += 1
            if left is not None:
                if left != reference:
                    problems.append(f"{name}: what is published is not whole")
                if goal.is_dir() and "cache" not in scenario and not validate(goal).ok:
                    problems.append(f"{name}: what is published does not validate")
                shutil.rmtree(goal) if goal.is_dir() else goal.unlink()
            write(goal)  # a dead writer's leftovers must not block the next one
            if content(goal) != reference:
                problems.append(f"{name}: a rerun gives other bytes")
            if [entry.name for entry in place.iterdir()] != [goal.name]:
                problems.append(f"{name}: leftovers stay: {sorted(entry.name for entry in place.iterdir())}")
            shutil.rmtree(place)
    print(json.dumps({"steps": counter.calls, "outcomes": outcomes, "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
