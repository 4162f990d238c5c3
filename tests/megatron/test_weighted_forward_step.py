"""The forward step with weights and with `loss="per_conversation"`, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.megatron.parameters import FinalizeGradients
from tests.megatron import tiny_gpt
from tests.megatron.conversations import RELATIVE_LIMIT, reference
from tests.megatron.tiny_gpt import ALIGNMENT, batch_of, build, make_aligned_row, make_row, train, with_weights
from tests.megatron.two_ranks import LOSSES

pytestmark = [pytest.mark.usefixtures("one_rank"), *map(pytest.mark.filterwarnings, tiny_gpt.WARNINGS)]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("options", list(LOSSES.values())[1:], ids=str)
def test_the_forward_step_gives_sum_and_denominator(options: dict[str, Any], aligned: bool) -> None:
    row = make_aligned_row(0) if aligned else make_row(0)
    row = with_weights(row) if options.get("weighted") else row
    batch = batch_of(row, multiple=64, pad_seq_to_mult=ALIGNMENT if aligned else 1, **options)
    model = build(dtype=torch.float64)
    output, loss_of = forward_step(iter([batch]), model)
    total, num_tokens, report = loss_of(output)
    wanted = reference(model, [row], per_conversation="loss" in options)
    found_sum, denominator = report["lm loss"].tolist()
    assert found_sum / denominator == pytest.approx(wanted.item(), rel=RELATIVE_LIMIT)
    assert total.item() == pytest.approx(found_sum)
    assert num_tokens.dtype == torch.int32
    assert num_tokens == report["trained tokens"] == int((row["loss_mask"] > 0).sum())


def test_weights_of_0_and_1_give_the_bits_of_a_mask() -> None:
    results = []
    for options in ({}, {"weighted": True}):
        model = build()
        torch.manual_seed(0)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        batches = [batch_of(make_row(seed), **options) for seed in range(3)]
        results.append(train(model, [batches], finalize=FinalizeGradients()))
    (first, first_gradients), (second, second_gradients) = results
    assert first[0].loss == pytest.approx(second[0].loss, rel=RELATIVE_LIMIT)  # the log's sums: float32 and float64
    assert first[0].gradient_norm == second[0].gradient_norm
    assert all(torch.equal(first_gradients[name], second_gradients[name]) for name in first_gradients)


def test_an_evaluation_between_steps_adds_nothing_to_the_denominator() -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, finalize = build(), FinalizeGradients()
    model.config.finalize_model_grads_func = finalize
    batch = batch_of(with_weights(make_row(0)), weighted=True)
    arguments = {"forward_step_func": forward_step, "model": [model], "num_microbatches": 1, "micro_batch_size": 1}
    schedule = get_forward_backward_func()
    schedule(data_iterator=iter([batch]), seq_length=128, forward_only=True, **arguments)
    assert finalize.take() is None
    output, loss_of = forward_step(iter([batch]), model)
    loss_of(output)[0].backward()
    assert finalize.take() == batch["loss_denominator"].sum()


def test_a_sum_of_weights_below_1_is_divided_by_exactly() -> None:
    row = make_row(0, lengths=(6,))
    row["loss_mask"] = np.array([0, 0, 1e-3, 0, 0, 0], np.float32)
    model = build(dtype=torch.float64)
    reference(model, [row], per_conversation=False).backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    _, gradients = train(model, [[batch_of(row, weighted=True)]], finalize=FinalizeGradients())
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).abs().max() <= RELATIVE_LIMIT * wanted[name].abs().max(), name
    assert max(gradient.abs().max() for gradient in wanted.values()) > 0.1


@pytest.mark.parametrize("arguments", [{}, {"calculate_per_token_loss": False}], ids=str)
def test_megatrons_own_integer_denominator_is_refused(arguments: dict[str, Any]) -> None:
    from megatron.core.distributed import finalize_model_grads

    model = build(**arguments)
    model.config.finalize_model_grads_func = FinalizeGradients() if arguments else finalize_model_grads
    batch = batch_of(make_row(0), loss="per_conversation")
    with pytest.raises(InvalidInputError, match=r"Megatron-Core divides by an integer.*FinalizeGradients\(\)"):
        forward_step(iter([batch]), model)
    with torch.no_grad():  # an evaluation divides by nothing
        forward_step(iter([batch]), model)


def test_a_batch_without_its_denominator_is_refused() -> None:
    batch = batch_of(make_row(0), loss="per_conversation")
    del batch["loss_denominator"]
    with pytest.raises(InvalidInputError, match="no loss_denominator"):
        forward_step(iter([batch]), build())
