"""Two processes on CPU, in each layout, train as one process does that gets the sequences one by one, unpacked.

First the loss per token; then weights and `loss="per_conversation"`, against conversations run one by one.
"""

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
from tests.megatron.context_ranks import RESULTS
from tests.megatron.conversations import RELATIVE_LIMIT, reference
from tests.megatron.tiny_gpt import Step, batch_of, build, load, run_of_one, sequences_of, train
from tests.megatron.two_ranks import CHECKPOINT, LAYOUTS, LOSSES, MODEL, NUM_STEPS, rows_of_loss, rows_of_step

pytestmark = [pytest.mark.filterwarnings(text) for text in tiny_gpt.WARNINGS]
PER_TOKEN_LIMIT = 5e-7


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


def shown(folder: Path, name: str, rank: int) -> list[Step]:
    return [Step(**step) for step in json.loads((folder / f"{name}_{rank}.json").read_text())]


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
        assert step.loss == pytest.approx(wanted.loss, rel=PER_TOKEN_LIMIT)
        assert step.gradient_norm == pytest.approx(wanted.gradient_norm, rel=PER_TOKEN_LIMIT)
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
        assert (gradient - wanted).abs().max() <= PER_TOKEN_LIMIT * wanted.abs().max(), name


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


@pytest.fixture(scope="module", params=LOSSES)
def by_definition(request: pytest.FixtureRequest, two_ranks: Path) -> tuple[str, float, dict[str, Tensor]]:
    """The first losses and gradients by the definition, from the checkpoint that two ranks trained from."""
    with run_of_one(seed=99):
        model = build(**MODEL)
        load(model, two_ranks / CHECKPOINT)
        per_conversation = "conversation" in request.param
        loss = reference(model, rows_of_loss(request.param, 0), per_conversation=per_conversation)
        loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return request.param, loss.item(), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_that_of_conversations_one_by_one(two_ranks: Path, by_definition: Any, layout: str) -> None:
    name, loss, gradients = by_definition
    first = shown(two_ranks, f"{name}_{layout}", 1)[0]
    assert first.loss == pytest.approx(loss, rel=RELATIVE_LIMIT)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert first.gradient_norm == pytest.approx(norm, rel=RELATIVE_LIMIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_data_parallel_ranks_that_accumulate_are_those_of_conversations_one_by_one(
    two_ranks: Path, by_definition: Any, rank: int
) -> None:
    name, _, gradients = by_definition
    found = torch.load(two_ranks / f"{name}_data_{rank}.pt")["gradients"]
    assert found.keys() == gradients.keys()
    for weight, gradient in found.items():
        wanted = gradients[weight]
        assert (gradient - wanted).abs().max() <= RELATIVE_LIMIT * wanted.abs().max(), weight


@pytest.mark.parametrize("name", LOSSES)
def test_all_steps_are_the_same_in_every_layout(two_ranks: Path, name: str) -> None:
    limit = 10 * RELATIVE_LIMIT  # Adam divides a tiny gradient by itself, so its noise makes a step of its own
    runs = [shown(two_ranks, f"{name}_{layout}", 1) for layout in LAYOUTS]
    for steps in zip(*runs, strict=True):
        for step in steps[1:]:
            assert step.loss == pytest.approx(steps[0].loss, rel=limit)
            assert step.gradient_norm == pytest.approx(steps[0].gradient_norm, rel=limit)
    assert len(runs[0]) == NUM_STEPS


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_context_parallel_ranks_divide_once(two_ranks: Path, name: str, rank: int) -> None:
    found = json.loads((two_ranks / RESULTS.format(name, rank)).read_text())
    assert found["loss"] == pytest.approx(found["expected_loss"], rel=RELATIVE_LIMIT)
    assert found["gradient_error"] <= RELATIVE_LIMIT


def test_the_losses_differ_so_the_comparison_can_fail(two_ranks: Path) -> None:
    losses = sorted(shown(two_ranks, f"{name}_data", 1)[0].loss for name in LOSSES)
    assert min(second - first for first, second in pairwise(losses)) > 1e-4
