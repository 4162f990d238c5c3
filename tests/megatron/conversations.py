"""The loss of a global batch by its definition: conversation after conversation, without packing or masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.megatron.tiny_gpt import Row, sequences_of

# Weights are float64, but Megatron-Core computes the loss and its gradient at the logits in float32, and so are masks.
RELATIVE_LIMIT = 1e-6


def loss_of_conversation(model: Any, row: Row) -> tuple[Tensor, float]:
    """The summed loss of one conversation, its tokens' weights applied in float64, and the sum of its weights."""
    ids = torch.tensor(row["input_ids"])
    weights = torch.tensor(row["loss_mask"], dtype=torch.float64)[:-1]
    positions = torch.arange(len(ids) - 1)[None]
    logits = model(ids[None, :-1], positions, None)[0]
    losses = cross_entropy(logits.to(torch.float64), ids[1:], reduction="none")
    return torch.sum(losses * weights), float(weights.sum())


def reference(model: Any, rows: list[Row], *, per_conversation: bool) -> Tensor:
    """The loss of a global batch by its definition: conversation after conversation, without packing or masks."""
    sums, weights = [], []
    for row in rows:
        for alone in sequences_of(row):
            total, weight = loss_of_conversation(model, alone)
            if weight > 0:
                sums.append(total / weight if per_conversation else total)
                weights.append(1.0 if per_conversation else weight)
    return torch.stack(sums).sum() / math.fsum(weights)
