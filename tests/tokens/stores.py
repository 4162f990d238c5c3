"""Token stores for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.tokens.store import publish_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path

Sequences = list[tuple[list[int], list[int]]]
Weights = list[npt.NDArray[np.float32]]


def make_sequences(count: int, seed: int = 0, vocab_size: int = 1000, longest: int = 40) -> Sequences:
    """Random ids and train values."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [(rng.integers(0, vocab_size, n).tolist(), rng.integers(0, 2, n).tolist()) for n in lengths]


def write_store(path: Path, parts: list[Sequences], **arguments: Any) -> None:
    """Write sequences as the parts of a store, and publish it."""
    for number, sequences in enumerate(parts):
        with TokenPartWriter(part_path(path, number), **arguments) as writer:
            for ids, train in sequences:
                writer.append(ids, train)
            writer.finalize()
    publish_store(path)


def make_weights(sequences: Sequences, seed: int = 0) -> Weights:
    """Random weights up to 3 where a token is trained; some of them are 1."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(np.array([0.1, 0.5, 1, 3], np.float32), len(train)) for _, train in sequences]
    return [weights * np.array(train, np.float32) for weights, (_, train) in zip(chosen, sequences, strict=True)]


def write_part(path: Path, sequences: Sequences, weights: Weights, plain: int = 0) -> None:
    """Write a part; the first `plain` sequences come without weights."""
    with TokenPartWriter(path, vocab_size=1000) as writer:
        for index, ((ids, train), own) in enumerate(zip(sequences, weights, strict=True)):
            writer.append(ids, train, None if index < plain else own)
        writer.finalize()
