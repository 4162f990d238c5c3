"""Two processes on CPU, in each layout, train as one process does that gets the sequences one by one, unpacked."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import Step, batch_of, build, load, run_of_one, sequences_of, train
from tests.megatron.two_ranks import CHECKPOINT, LAYOUTS, MODEL, NUM_STEPS, rows_of_step

pytestmark = [pytest.mark.filterwarnings(text) for text in tiny_gpt.WARNINGS]

# Weights are float64, but Megatron-Core computes the loss and its gradient at the logits in float32.
RELATIVE_LIMIT = 5e-7


@pytest.fixture(scope="module")
def expected(two_ranks: Path) -> tuple[list[Step], dict[str, Tensor]]:
    """One process, from the checkpoint that two have written; each sequence is a micro batch of its own."""
    steps = [
        [batch_of(alone) for row in rows_of_step(step) for alone in sequences_of(row)] for step in range(NUM_STEPS)
    ]
    with run_of_one(seed=99):
        model = build(**MODEL)
        load(model, two_ranks / CHECKPOINT)
        return train(model, steps)


def saved(folder: Path, layout: str, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{layout}_{rank}.pt")
    return loaded


def shown(folder: Path, layout: str, rank: int) -> list[Step]:
    return [Step(**step) for step in json.loads((folder / f"{layout}_{rank}.json").read_text())]


def part_of(whole: Tensor, split: tuple[int, int] | None, rank: int) -> Tensor:
    """What one of two tensor-parallel ranks has of a weight."""
    if split is None:
        return whole
    dimension, num_joined = split
    return torch.cat(whole.chunk(2 * num_joined, dimension)[rank::2], dimension)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_all_steps_are_equal(
    two_ranks: Path, expected: tuple[list[Step], dict[str, Tensor]], layout: str
) -> None:
    last_rank = shown(two_ranks, layout, 1)
    assert len(last_rank) == NUM_STEPS
    for step, wanted in zip(last_rank, expected[0], strict=True):
        assert step.loss == pytest.approx(wanted.loss, rel=RELATIVE_LIMIT)
        assert step.gradient_norm == pytest.approx(wanted.gradient_norm, rel=RELATIVE_LIMIT)
    for step, other in zip(last_rank, shown(two_ranks, layout, 0), strict=True):
        assert step.gradient_norm == other.gradient_norm
        # Only the last stage of a pipeline has a loss.
        assert math.isnan(other.loss) if layout == "pipeline" else step.loss == other.loss


@pytest.mark.parametrize("layout", ["data", "tensor"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_gradient_of_the_first_step_is_equal(
    two_ranks: Path, expected: tuple[list[Step], dict[str, Tensor]], layout: str, rank: int
) -> None:
    found = saved(two_ranks, layout, rank)
    assert found["gradients"].keys() == expected[1].keys()
    for name, gradient in found["gradients"].items():
        split = found["splits"][name] if layout == "tensor" else None
        wanted = part_of(expected[1][name], split, rank)
        assert (gradient - wanted).abs().max() <= RELATIVE_LIMIT * wanted.abs().max(), name


def test_tensor_parallel_ranks_share_the_weights(two_ranks: Path) -> None:
    splits = saved(two_ranks, "tensor", 0)["splits"]
    assert {name.split(".")[-2] for name, split in splits.items() if split is not None} == {
        "word_embeddings",
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }


def test_pipeline_stages_share_the_layers(two_ranks: Path) -> None:
    for rank in (0, 1):
        names = saved(two_ranks, "pipeline", rank)["gradients"]
        assert {name.split(".")[2] for name in names if name.startswith("decoder.layers")} == {"0"}


def test_the_steps_differ_so_the_comparison_can_fail(expected: tuple[list[Step], dict[str, Tensor]]) -> None:
    losses = [step.loss for step in expected[0]]
    assert min(abs(first - second) for first, second in pairwise(losses)) > 1e-3
    assert min(step.gradient_norm for step in expected[0]) > 0.5  # above the bound at which they are clipped
