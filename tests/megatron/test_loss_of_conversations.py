"""Weights and `loss="per_conversation"`: equal to conversations run one by one, for any layout of two ranks."""

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
from tests.megatron.tiny_gpt import Step, build, load, run_of_one
from tests.megatron.two_ranks import CHECKPOINT, LAYOUTS, LOSSES, MODEL, NUM_STEPS, rows_of_loss

pytestmark = [pytest.mark.filterwarnings(text) for text in tiny_gpt.WARNINGS]


@pytest.fixture(scope="module", params=LOSSES)
def expected(request: pytest.FixtureRequest, two_ranks: Path) -> tuple[str, float, dict[str, Tensor]]:
    """The first losses and gradients by the definition, from the checkpoint that two ranks trained from."""
    with run_of_one(seed=99):
        model = build(**MODEL)
        load(model, two_ranks / CHECKPOINT)
        per_conversation = "conversation" in request.param
        loss = reference(model, rows_of_loss(request.param, 0), per_conversation=per_conversation)
        loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return request.param, loss.item(), gradients


def shown(folder: Path, name: str, layout: str, rank: int) -> list[Step]:
    return [Step(**step) for step in json.loads((folder / f"{name}_{layout}_{rank}.json").read_text())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_that_of_conversations_one_by_one(two_ranks: Path, expected: Any, layout: str) -> None:
    name, loss, gradients = expected
    first = shown(two_ranks, name, layout, 1)[0]
    assert first.loss == pytest.approx(loss, rel=RELATIVE_LIMIT)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert first.gradient_norm == pytest.approx(norm, rel=RELATIVE_LIMIT)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_data_parallel_ranks_that_accumulate_are_those_of_conversations_one_by_one(
    two_ranks: Path, expected: Any, rank: int
) -> None:
    name, _, gradients = expected
    found = torch.load(two_ranks / f"{name}_data_{rank}.pt")["gradients"]
    assert found.keys() == gradients.keys()
    for weight, gradient in found.items():
        wanted = gradients[weight]
        assert (gradient - wanted).abs().max() <= RELATIVE_LIMIT * wanted.abs().max(), weight


@pytest.mark.parametrize("name", LOSSES)
def test_all_steps_are_the_same_in_every_layout(two_ranks: Path, name: str) -> None:
    limit = 10 * RELATIVE_LIMIT  # Adam divides a tiny gradient by itself, so its noise makes a step of its own
    runs = [shown(two_ranks, name, layout, 1) for layout in LAYOUTS]
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
    losses = sorted(shown(two_ranks, name, "data", 1)[0].loss for name in LOSSES)
    assert min(second - first for first, second in pairwise(losses)) > 1e-4
