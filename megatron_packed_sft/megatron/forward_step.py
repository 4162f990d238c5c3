"""One forward step over a packed batch, as Megatron-Core's pipeline schedules call it.

    batch (contract `mcore`) ─▶ packed_seq_params ─┐
                             ─▶ to_device ─────────┴▶ model ─▶ losses [1, T] ─▶ loss_function ─▶ sum, count, report

Each rank reads its own batches; the ranks of a tensor- or pipeline-parallel group read the same ones.

A loss mask of floats holds weights. The loss is then the sum of weight x loss over the global batch, divided by the sum
of the batches' `loss_denominator`: the sum of the weights, or with `loss="per_conversation"` the number of
conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from megatron_packed_sft.data.batch.collate import widen
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.megatron.parameters import divide_by

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_MODEL_KEYS: Final = ("tokens", "position_ids", "labels", "loss_mask")
Batch = dict[str, Any]
Loss = tuple[Tensor, Tensor, dict[str, Tensor]]


def packed_seq_params(
    batch: Mapping[str, Any], *, device: torch.device | None = None, context_parallel: int = 1
) -> PackedSeqParams:
    """Return the boundaries of a packed bin, as Megatron-Core's attention and rotary positions take them.

    Repeated last boundaries are dropped, and the padding at the end becomes a sequence of its own, because the last
    boundary must be the number of positions. The longest sequence is measured here: if it were given as long as the
    bin, Megatron-Core would run rotary positions through the whole bin.

    Args:
        batch: of one bin, made with the contract `mcore`, `bridge_main` or `bridge_0_6`; best still on the CPU.
        device: where to put the boundaries; by default they stay where they are.
        context_parallel: ranks that share the bin; sequence lengths must be multiples of twice this number.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    num_positions = _num_positions(batch)
    logical = batch["cu_seqlens_q"].flatten().tolist()
    has_gaps = batch.get("cu_seqlens_q_padded") is not None
    physical = batch["cu_seqlens_q_padded"].flatten().tolist() if has_gaps else logical
    if physical[0] != 0 or physical[-1] > num_positions or any(end < start for start, end in pairwise(physical)):
        raise InvalidInputError(
            f"the batch's boundaries {physical} do not rise from 0 to at most its {num_positions} positions; make it "
            "with a dataset or loader of this package"
        )
    num_boundaries = physical.index(physical[-1]) + 1
    logical, physical = logical[:num_boundaries], physical[:num_boundaries]
    if physical[-1] < num_positions:
        logical = [*logical, logical[-1] if has_gaps else num_positions]
        physical = [*physical, num_positions]
    lengths = [end - start for start, end in pairwise(physical)]
    if context_parallel > 1:
        _refuse_uneven(lengths, 2 * context_parallel)
    device = batch["cu_seqlens_q"].device if device is None else device
    ends = torch.tensor(logical, dtype=torch.int32, device=device)
    padded_ends = None
    if has_gaps or context_parallel > 1:
        padded_ends = torch.tensor(physical, dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded_ends,
        cu_seqlens_kv_padded=padded_ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def to_device(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Return the batch with its tensors on `device`, and a `compact` one widened to the int64 that models expect.

    Example:
        >>> to_device({"tokens": torch.zeros(1, 8, dtype=torch.int32)}, torch.device("cpu"))["tokens"].dtype
        torch.int64
    """
    return widen(
        {
            key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }
    )


def loss_function(loss_mask: Tensor, output: Tensor, denominator: Tensor | None = None) -> Loss:
    """Return the summed loss of the trained tokens; Megatron-Core divides by their number in the global batch.

    Args:
        loss_mask: [1, T], 1 where the prediction counts; or of floats, how much it counts.
        output: [1, T], the loss at each position, from a model built with `calculate_per_token_loss=True`.
        denominator: with weights, what this rank adds to the number that the loss is divided by; see `gradients.py`.

    Returns:
        The sum, the number of trained tokens, and a report for the log, as in Megatron-LM: `{"lm loss": tensor([sum,
        denominator]), "trained tokens": number}`. Sum these over micro batches and data-parallel ranks, then divide.
        Without weights the denominator is the number.

    Example:
        >>> total, num_tokens, _ = loss_function(torch.tensor([[0, 1, 1]]), torch.tensor([[9.0, 2.0, 4.0]]))
        >>> total.item(), num_tokens.item()
        (6.0, 2)
    """
    losses = output.flatten().float()
    mask = loss_mask.flatten()
    total = torch.sum(losses * mask)
    if denominator is None:
        num_tokens = mask.sum().to(torch.int)
        shown = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    else:
        num_tokens = torch.count_nonzero(mask).to(torch.int)
        shown = torch.stack([total.detach().to(torch.float64), denominator.to(total.device, torch.float64)])
    return total, num_tokens, {"lm loss": shown, "trained tokens": num_tokens}


def forward_step(
    data_iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Loss]]:
    """Run the model on the next batch: the `forward_step_func` of `get_forward_backward_func`.

    Args:
        data_iterator: batches of one packed bin each, or of several with a dense `attention_mask`.
        model: a GPT model of Megatron-Core, bare or wrapped for data parallelism.

    Returns:
        The model's output, and the function that turns the last stage's output into a loss.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    batch = next(data_iterator)
    device = next(model.parameters()).device
    own = to_device({key: batch[key] for key in _MODEL_KEYS}, device)
    dense_mask, boundaries = batch.get("attention_mask"), None
    if dense_mask is not None and dense_mask.dim() == 4:
        dense_mask = dense_mask.to(device, non_blocking=True)
    else:  # also in the middle stages of a pipeline, which need neither tokens nor labels
        dense_mask = None
        context_parallel = parallel_state.get_context_parallel_world_size()
        boundaries = packed_seq_params(batch, device=device, context_parallel=context_parallel)
        if context_parallel > 1:
            own = _of_this_context_rank(own, boundaries)
    output = model(
        own["tokens"],
        own["position_ids"],
        dense_mask,
        labels=own["labels"],
        packed_seq_params=boundaries,
    )
    if not own["loss_mask"].is_floating_point():
        return output, partial(loss_function, own["loss_mask"])
    denominator = _own_denominator(batch)
    is_last_stage = get_attr_wrapped_model(model, "post_process")  # only that one has a loss
    divide_by(denominator if is_last_stage else torch.zeros_like(denominator), output, model)
    return output, partial(loss_function, own["loss_mask"], denominator=denominator)


def _own_denominator(batch: Mapping[str, Any]) -> Tensor:
    """Return what this rank adds to the loss's denominator; of the ranks that share a bin, the first adds all of it."""
    from megatron.core import parallel_state

    if "loss_denominator" not in batch:
        raise InvalidInputError(
            "the loss mask holds weights, but the batch has no loss_denominator; make it with a dataset or loader of "
            "this package and contract='mcore'"
        )
    denominator: Tensor = batch["loss_denominator"].sum()
    is_first = parallel_state.get_context_parallel_rank() == 0
    return denominator if is_first else torch.zeros_like(denominator)


def _num_positions(batch: Mapping[str, Any]) -> int:
    """Return the positions of the batch's only bin."""
    if "cu_seqlens_q" not in batch:
        raise InvalidInputError(
            "the batch has no cu_seqlens_q, so its sequences have no boundaries; use contract='mcore'"
        )
    num_bins, num_positions = batch["tokens"].shape
    if num_bins != 1:
        raise InvalidInputError(
            f"the batch has {num_bins} packed bins, and Megatron-Core takes one; set the micro batch size to 1 and "
            "pack longer bins instead"
        )
    return int(num_positions)


def _refuse_uneven(lengths: list[int], multiple: int) -> None:
    uneven = next((length for length in lengths if length % multiple), None)
    if uneven is not None:
        raise InvalidInputError(
            f"a sequence of {uneven} positions cannot be split into {multiple} equal parts for context parallelism; "
            f"prepare the data with packing.pad_seq_to_mult={multiple}"
        )


def _of_this_context_rank(batch: Batch, boundaries: PackedSeqParams) -> Batch:
    """Return this rank's part of each sequence; Transformer Engine decides which.

    Megatron-Core's own function for this was renamed in 0.18 and again in 0.19, so its one call is made here.
    """
    from megatron.core import parallel_state, utils

    engine = getattr(utils, "tex", None)
    if engine is None:
        raise MissingDependencyError(
            "context parallelism needs Transformer Engine, which divides the sequences among the ranks; install "
            "transformer-engine[pytorch] 1.10 or later, or use one context-parallel rank"
        )
    rank, num_ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    ends = boundaries.cu_seqlens_q_padded
    index = engine.thd_get_partitioned_indices(ends, batch["tokens"].size(1), num_ranks, rank)
    return {key: value.index_select(1, index) for key, value in batch.items()}
