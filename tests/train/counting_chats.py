"""Chats whose prompts are noise and whose answers count upwards.

prompt: random ids out of 32, masked     answer: 3 4 5 6 7 0 1 2 ..., trained

The noise is out of few ids, so that whoever trains on it sees its loss fall from log(256) = 5.5 to log(32) = 3.5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_packed_sft import DatasetWriter, PackedBin, convert

PACK_SIZE = 256
VOCAB_SIZE = 256
NUM_COUNTED = 8
NUM_NOISE = 32


def counting_bin(rng: np.random.Generator, *, marks_answers: bool = True) -> PackedBin:
    """A bin full of such chats; or with the prompts marked instead of the answers."""
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    while len(ids) < PACK_SIZE - 60:
        length = int(rng.integers(20, 60))
        num_noise = length // 2
        answer = (np.arange(length - num_noise) + rng.integers(NUM_COUNTED)) % NUM_COUNTED
        train = [0] * num_noise + [1] * (length - num_noise)
        starts.append(len(ids))
        ids += rng.integers(NUM_COUNTED, NUM_COUNTED + NUM_NOISE, num_noise).tolist() + answer.tolist()
        mask += [int(bool(one) == marks_answers) for one in train[1:]] + [0]
    return PackedBin(np.array(ids, np.int32), np.array(mask, np.uint8), np.array(starts, np.uint32))


def write_dataset(path: Path, num_bins: int, *, marks_answers: bool = True, tokenizer: str = "counting") -> Path:
    """A dataset directory with a training and a validation split."""
    with DatasetWriter(path) as dataset:
        for seed, (split, count) in enumerate({"train": num_bins, "validation": 7}.items()):
            rng = np.random.default_rng(seed)
            with dataset.shard_writer(
                split,
                0,
                num_bins=count,
                pack_size=PACK_SIZE,
                vocab_size=VOCAB_SIZE,
                tokenizer={"name": tokenizer, "fingerprint": tokenizer},
            ) as writer:
                for index in range(count):
                    writer.write_bin(index, *counting_bin(rng, marks_answers=marks_answers))
                writer.finalize()
        dataset.finalize()
    return path


def write_legacy(dataset: Path, target: Path) -> Path:
    """The training split as a legacy .npy."""
    convert(dataset / "train" / "shard_000000", target, to="legacy")
    return target
