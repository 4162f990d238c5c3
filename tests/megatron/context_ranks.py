"""Context parallelism on two CPU ranks, as far as it goes there: everything but attention and Transformer Engine.

The schedule, the forward step, the groups and the reductions are Megatron-Core's and ours. The model looks at each
position alone, because attention over ranks needs CUDA, and Transformer Engine's rule for who gets which positions is
written out: 2 x ranks equal parts of every sequence, the r-th from either end to rank r.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_packed_sft.data.batch.contracts import Batch
from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.megatron.parameters import FinalizeGradients
from tests.megatron.tiny_gpt import ALIGNMENT, VOCAB_SIZE, batch_of, make_aligned_row, with_weights

NUM_RANKS = 2
RESULTS = "context_{}_{}.json"


class PositionModel(torch.nn.Module):
    """Predicts the next token from the token alone; takes what a GPT model of Megatron-Core takes."""

    def __init__(self, config: Any) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.post_process = True
        torch.manual_seed(7)
        self.logits = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """There is one stage only."""

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: Any, *, labels: Tensor, **_: Any) -> Tensor:
        """Return the loss at each position."""
        losses = cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape)


def partitioned_indices(ends: Tensor, num_positions: int, num_ranks: int, rank: int) -> Tensor:
    """Which positions a rank gets."""
    chosen = []
    for start, end in pairwise(ends.tolist()):
        if end > start:
            parts = torch.arange(start, end).chunk(2 * num_ranks)
            chosen += [parts[rank], parts[-1 - rank]]
    return torch.cat(chosen)


def batches_of_loss(options: dict[str, Any]) -> list[Batch]:
    """Two micro batches, which all ranks share."""
    rows = [make_aligned_row(seed) for seed in range(2)]
    if options.get("weighted"):
        rows = [with_weights(row, seed) for seed, row in enumerate(rows)]
    return [batch_of(row, multiple=64, pad_seq_to_mult=ALIGNMENT, **options) for row in rows]


def whole(batches: list[Batch], config: Any) -> tuple[float, Tensor]:
    """Loss and gradient of the same batches in one process."""
    model = PositionModel(config)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        total = total + torch.sum(losses * batch["loss_mask"])
    if "loss_denominator" in batches[0]:
        denominator = sum(float(batch["loss_denominator"].sum()) for batch in batches)
    else:
        denominator = sum(int(batch["loss_mask"].sum()) for batch in batches)
    loss = total / denominator
    loss.backward()
    assert model.logits.weight.grad is not None
    return loss.item(), model.logits.weight.grad


def run_context_parallel(name: str, options: dict[str, Any], folder: Path) -> None:
    """One step; writes how far loss and gradient are from those of one process."""
    from megatron.core import parallel_state, utils
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    start_distributed(
        replace(choose_backend(), uses_transformer_engine=True), context_parallel=NUM_RANKS, timeout_minutes=2
    )
    utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        context_parallel_size=NUM_RANKS,
        calculate_per_token_loss=True,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        cuda_graph_scope=[],
    )
    config.finalize_model_grads_func = FinalizeGradients()
    model = PositionModel(config)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    batches = batches_of_loss(options)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[wrapped],
        num_microbatches=len(batches),
        seq_length=batches[0]["tokens"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    shown = sum(report["lm loss"].to(torch.float64) for report in reports)
    assert isinstance(shown, Tensor)
    torch.distributed.all_reduce(shown, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    loss, gradient = whole(batches, config)
    found: Any = model.logits.weight
    result = {
        "loss": float(shown[0] / shown[1]),
        "expected_loss": loss,
        "gradient_error": float((found.main_grad - gradient).abs().max() / gradient.abs().max()),
    }
    rank = torch.distributed.get_rank()
    (folder / RESULTS.format(name, rank)).write_text(json.dumps(result))
    stop_distributed()
