"""From a batch to what Megatron-Core takes: boundaries, devices, the loss, also with weights and by conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.megatron.forward_step import forward_step, loss_function, packed_seq_params, to_device
from megatron_packed_sft.megatron.parameters import FinalizeGradients
from tests.megatron import tiny_gpt
from tests.megatron.conversations import RELATIVE_LIMIT, reference
from tests.megatron.tiny_gpt import ALIGNMENT, batch_of, build, make_aligned_row, make_row, train, with_weights
from tests.megatron.two_ranks import LOSSES

pytestmark = [pytest.mark.usefixtures("one_rank"), *map(pytest.mark.filterwarnings, tiny_gpt.WARNINGS)]


def make_batch(num_positions: int, logical: list[int], physical: list[int] | None = None) -> dict[str, Any]:
    batch = {"tokens": torch.zeros(1, num_positions), "cu_seqlens_q": torch.tensor([logical], dtype=torch.int32)}
    if physical is not None:
        batch["cu_seqlens_q_padded"] = torch.tensor([physical], dtype=torch.int32)
    return batch


@pytest.mark.parametrize("contract", ["mcore", "bridge_main", "bridge_0_6"])
def test_boundaries_of_a_real_batch_end_at_the_rows_length(contract: str) -> None:
    batch = batch_of(make_row(0), multiple=64, contract=contract)
    params = packed_seq_params(batch)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 8, 24, 25, 54, 54, 65, 128]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert torch.equal(params.cu_seqlens_kv, params.cu_seqlens_q)
    assert params.cu_seqlens_q_padded is None
    assert params.max_seqlen_q == params.max_seqlen_kv == 128 - 65
    assert type(params.max_seqlen_q) is int


def test_boundaries_of_aligned_sequences_say_where_they_lie_and_how_long_they_are() -> None:
    params = packed_seq_params(batch_of(make_aligned_row(0), multiple=64, pad_seq_to_mult=ALIGNMENT))
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 24, 32, 64, 80, 128]
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_q_padded
    # A sequence that was padded keeps its last id as a token: it predicts the first EOS of the padding.
    assert params.cu_seqlens_q.tolist() == [0, 8, 24, 26, 56, 68, 68]
    assert params.max_seqlen_q == 48


@pytest.mark.parametrize(
    ("num_positions", "logical", "physical", "expected", "longest"),
    [
        (8, [0, 3, 8], None, ([0, 3, 8], None), 5),
        (8, [0, 3, 8, 8, 8], None, ([0, 3, 8], None), 5),
        (8, [0, 3, 6, 6], None, ([0, 3, 6, 8], None), 3),
        (8, [0, 8], None, ([0, 8], None), 8),
        (8, [0, 2, 3, 3], [0, 4, 8, 8], ([0, 2, 3], [0, 4, 8]), 4),
        (12, [0, 2, 3], [0, 4, 8], ([0, 2, 3, 3], [0, 4, 8, 12]), 4),
    ],
)
def test_repeats_are_dropped_and_the_tail_is_a_sequence(
    num_positions: int,
    logical: list[int],
    physical: list[int] | None,
    expected: tuple[list[int], list[int] | None],
    longest: int,
) -> None:
    params = packed_seq_params(make_batch(num_positions, logical, physical))
    padded = params.cu_seqlens_q_padded
    assert (params.cu_seqlens_q.tolist(), None if padded is None else padded.tolist()) == expected
    assert params.max_seqlen_q == longest


def test_boundaries_of_fixed_shape_for_cuda_graphs_are_understood() -> None:
    sizes = {"dataset_max_seqlen": 30, "max_samples_per_bin": 10, "min_packed_seqlen": 60}
    batch = batch_of(make_row(0), pad_to_max_length=True, pad_cu_seqlens=True, **sizes)
    assert batch["cu_seqlens_q"].shape == (1, 12)
    assert packed_seq_params(batch).cu_seqlens_q.tolist() == [0, 8, 24, 25, 54, 54, 65, 128]


def test_more_than_one_packed_row_is_refused() -> None:
    batch = {"tokens": torch.zeros(2, 8), "cu_seqlens_q": torch.zeros(2, 3, dtype=torch.int32)}
    with pytest.raises(InvalidInputError, match=r"2 packed bins.*set the micro batch size to 1"):
        packed_seq_params(batch)


def test_a_batch_without_boundaries_is_refused() -> None:
    batch = batch_of(make_row(0), contract="bridge_0_6", return_cu_seqlen=False)
    del batch["attention_mask"]
    with pytest.raises(InvalidInputError, match=r"no cu_seqlens_q.*contract='mcore'"):
        packed_seq_params(batch)
    with pytest.raises(InvalidInputError, match=r"no cu_seqlens_q.*contract='mcore'"):
        forward_step(iter([batch]), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("boundaries", [[1, 8], [0, 9], [0, 5, 3, 8]])
def test_boundaries_that_do_not_fit_the_row_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="do not rise from 0 to at most its 8 positions"):
        packed_seq_params(make_batch(8, boundaries))


def test_context_parallelism_needs_sequences_that_split_evenly() -> None:
    params = packed_seq_params(make_batch(16, [0, 4, 12]), context_parallel=2)
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 12, 16]
    with pytest.raises(InvalidInputError, match=r"6 positions.*4 equal parts.*packing.pad_seq_to_mult=4"):
        packed_seq_params(make_batch(16, [0, 4, 10]), context_parallel=2)


def test_context_parallelism_without_transformer_engine_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    batch = batch_of(make_aligned_row(0), multiple=64, pad_seq_to_mult=ALIGNMENT)
    with pytest.raises(MissingDependencyError, match=r"needs Transformer Engine.* 1\.10 or later"):
        forward_step(iter([batch]), torch.nn.Linear(1, 1))


def test_to_device_moves_tensors_and_widens_compact_ones() -> None:
    batch = batch_of(make_row(0), compact=True)
    moved = to_device(batch, torch.device("meta"))
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert moved[key].dtype == torch.int64
    assert moved["cu_seqlens_q"].dtype == torch.int32
    assert moved["token_count"] == batch["token_count"]


def test_the_loss_is_the_sum_over_trained_tokens() -> None:
    output = torch.tensor([[1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    total, num_tokens, report = loss_function(torch.tensor([[1, 0, 1, 0]]), output)
    total.backward()
    assert (total.item(), num_tokens.item(), num_tokens.dtype) == (5.0, 2, torch.int32)
    assert report["lm loss"].tolist() == [5.0, 2.0]
    assert not report["lm loss"].requires_grad
    assert output.grad is not None
    assert output.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_a_row_without_trained_tokens_has_no_loss() -> None:
    total, num_tokens, _ = loss_function(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4))
    assert (total.item(), num_tokens.item()) == (0.0, 0)


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
