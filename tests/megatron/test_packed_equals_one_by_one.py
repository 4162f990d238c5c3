"""A packed row gives the same losses, gradients and logits as its sequences one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_packed_sft.data.batch.contracts import Batch
from megatron_packed_sft.megatron.forward_step import forward_step, packed_seq_params
from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import ALIGNMENT, batch_of, build, make_aligned_row, make_row

pytestmark = [pytest.mark.usefixtures("one_rank"), *map(pytest.mark.filterwarnings, tiny_gpt.WARNINGS)]

ROWS: dict[str, Callable[[], Batch]] = {
    "full": lambda: batch_of(make_row(0)),
    "padded": lambda: batch_of(make_row(0), multiple=64),
    "aligned": lambda: batch_of(make_aligned_row(0), multiple=64, pad_seq_to_mult=ALIGNMENT),
    "one sequence": lambda: batch_of(make_row(0, lengths=(33,))),
}


class Limits(NamedTuple):
    """The largest absolute difference that is allowed; the loss is about 200, gradients go up to 5, logits to 0.7."""

    loss: float
    gradients: float
    logits: float


LIMITS = {torch.float64: Limits(1e-12, 1e-14, 1e-14), torch.float32: Limits(1e-4, 5e-6, 1e-6)}


class Result(NamedTuple):
    """What a model makes of some batches: the summed loss, all gradients, and the logits of real positions."""

    loss: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor


def pieces_of(batch: Batch) -> Iterator[slice]:
    """Where the sequences lie, the padding at the end left out."""
    lengths = [end - start for start, end in pairwise(batch["cu_seqlens_q"][0].tolist())]
    starts = batch.get("cu_seqlens_q_padded", batch["cu_seqlens_q"])[0].tolist()
    for start, length in zip(starts, lengths, strict=False):
        if length and start < batch["token_count"][0]:
            yield slice(start, start + length)


def run(model: Any, batches: list[Batch], logits_of: Callable[[Any, Batch], Tensor]) -> Result:
    """The loss is summed here and not by Megatron-Core, which does that in float32 whatever the model's type is."""
    model.zero_grad()
    loss = torch.zeros(())
    logits = []
    for batch in batches:
        found = logits_of(model, batch)[0]
        loss = loss + torch.sum(cross_entropy(found, batch["labels"][0], reduction="none") * batch["loss_mask"][0])
        logits += [found[piece] for piece in (pieces_of(batch) if "cu_seqlens_q" in batch else [slice(None)])]
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return Result(loss.detach(), gradients, torch.cat(logits).detach())


def packed_logits(model: Any, batch: Batch) -> Tensor:
    return model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed_seq_params(batch))


def plain_logits(model: Any, batch: Batch) -> Tensor:
    return model(batch["tokens"], batch["position_ids"], None)


def masked_logits(model: Any, batch: Batch) -> Tensor:
    """Megatron-Core's own attention makes its causal mask on CUDA, so it is given one."""
    length = batch["tokens"].shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(diagonal=1)
    return model(batch["tokens"], batch["position_ids"], hidden)


def one_by_one(batch: Batch) -> list[Batch]:
    keys = ("tokens", "position_ids", "labels", "loss_mask")
    return [{key: batch[key][:, piece] for key in keys} for piece in pieces_of(batch)]


def with_stock_attention(model: Any) -> Any:
    """The same weights in a model with Megatron-Core's own attention, which knows nothing of packed rows."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization=model.config.normalization)
    stock = GPTModel(model.config, spec, model.vocab_size, model.max_sequence_length, position_embedding_type="rope")
    stock.load_state_dict(model.state_dict())
    return stock.to(model.config.params_dtype)


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def assert_close(first: Result, second: Result, limits: Limits) -> None:
    assert (first.loss - second.loss).abs() <= limits.loss
    assert largest_difference(first.gradients, second.gradients) <= limits.gradients
    assert (first.logits - second.logits).abs().max() <= limits.logits


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_loss_gradients_and_logits_are_those_of_the_sequences_one_by_one(row: str, dtype: torch.dtype) -> None:
    model, batch = build(dtype=dtype), ROWS[row]()
    packed = run(model, [batch], packed_logits)
    alone = run(model, one_by_one(batch), plain_logits)
    assert_close(packed, alone, LIMITS[dtype])
    assert alone.loss > 50  # there was something to learn


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_they_are_those_of_megatrons_own_attention_one_by_one(dtype: torch.dtype) -> None:
    # Its softmax is in float32 unless told otherwise.
    model, batch = build(dtype=dtype, attention_softmax_in_fp32=False), ROWS["padded"]()
    packed = run(model, [batch], packed_logits)
    stock = run(with_stock_attention(model), one_by_one(batch), masked_logits)
    assert_close(packed, stock, LIMITS[dtype])


def test_the_comparison_can_fail_because_attention_over_the_whole_row_differs() -> None:
    model, batch = build(dtype=torch.float64), ROWS["padded"]()
    whole = run(model, [batch], plain_logits)
    alone = run(model, one_by_one(batch), plain_logits)
    assert (whole.loss - alone.loss).abs() > 1e-3
    assert largest_difference(whole.gradients, alone.gradients) > 1e-2
    assert (whole.logits - alone.logits).abs().max() > 1e-2


@pytest.mark.parametrize("row", ["padded", "aligned"])
def test_other_tokens_in_one_sequence_change_no_logit_of_another(row: str) -> None:
    model, batch = build(), ROWS[row]()
    before = packed_logits(model, batch).detach()
    changed = {**batch, "tokens": batch["tokens"].clone()}
    pieces = list(pieces_of(batch))
    changed["tokens"][:, pieces[1]] += 1
    difference = (packed_logits(model, changed).detach() - before).abs().amax(dim=(0, 2))
    assert difference[pieces[1]].min() > 0.01
    difference[pieces[1]] = 0.0
    assert difference.max() == 0.0


def test_rotary_positions_start_again_at_each_sequence() -> None:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    model, batch = build(), ROWS["padded"]()
    boundaries = packed_seq_params(batch)
    row_length = batch["tokens"].shape[1]
    vectors = torch.ones(row_length, 1, model.config.kv_channels)

    def rotated(longest: int) -> Tensor:
        angles = model.rotary_pos_emb(longest, packed_seq=True)
        return apply_rotary_pos_emb(vectors, angles, model.config, cu_seqlens=boundaries.cu_seqlens_q)

    by_position = apply_rotary_pos_emb(vectors[:, None], model.rotary_pos_emb(row_length), model.config)[:, 0]
    ours = rotated(boundaries.max_seqlen_q)
    for piece in pieces_of(batch):
        assert torch.equal(ours[piece], by_position[: piece.stop - piece.start])
    # What a careless max_seqlen does: the length of the row makes positions run through all of it.
    assert torch.equal(rotated(row_length), by_position)


@pytest.mark.parametrize("row", ["padded", "aligned"])
def test_the_forward_step_gives_the_loss_of_the_trained_tokens(row: str) -> None:
    model, batch = build(), ROWS[row]()
    output, loss_of = forward_step(iter([batch]), model)
    total, num_tokens, report = loss_of(output)
    expected = run(model, one_by_one(batch), plain_logits)
    assert num_tokens == batch["loss_mask"].sum()
    assert total.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert report["lm loss"].tolist() == [total.item(), num_tokens.item()]


def test_a_dense_mask_over_several_rows_gives_the_same_loss() -> None:
    model = build()
    rows = [make_row(0), make_row(1)]
    dense = [batch_of(row, multiple=128, return_cu_seqlen=False) for row in rows]
    keys = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")
    batch = {key: torch.cat([one[key] for one in dense]) for key in keys}
    output, loss_of = forward_step(iter([batch]), model)
    total, num_tokens, _ = loss_of(output)
    packed = [run(model, [batch_of(row)], packed_logits) for row in rows]
    assert total.item() == pytest.approx(sum(one.loss.item() for one in packed), rel=1e-6)
    assert num_tokens == sum(row["loss_mask"].sum() for row in rows)


def test_a_compact_batch_gives_the_same_loss() -> None:
    model = build()
    wide, compact = batch_of(make_row(0)), batch_of(make_row(0), compact=True)
    assert compact["tokens"].dtype == torch.int32
    losses = []
    for batch in (wide, compact):
        output, loss_of = forward_step(iter([batch]), model)
        losses.append(loss_of(output)[0].item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_query_groups": 4},
        {"num_query_groups": 1},
        {"qk_layernorm": True},
        {"rotary_percent": 0.5},
        {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True},
        {"kv_channels": 24},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=str,
)
def test_it_holds_for_other_models(arguments: dict[str, Any]) -> None:
    model, batch = build(dtype=torch.float64, **arguments), ROWS["aligned"]()
    packed = run(model, [batch], packed_logits)
    alone = run(model, one_by_one(batch), plain_logits)
    assert_close(packed, alone, LIMITS[torch.float64])
