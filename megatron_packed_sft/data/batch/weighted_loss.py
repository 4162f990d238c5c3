"""The loss of a batch with weights, for trainers that compute it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from megatron_packed_sft.errors import InvalidInputError


def weighted_loss(
    logits: torch.Tensor, batch: Mapping[str, Any], denominator: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of an `hf` batch with weights: the sum of weight x loss, divided by the denominator.

    For `loss="per_token"` that is the weighted mean over trained tokens, for `per_conversation` the mean over
    conversations of each one's own.

    Args:
        logits: [1, L, vocabulary], of a causal language model for the batch's input_ids.
        batch: of contract `hf`, with `weighted_labels`, `loss_mask` and `loss_denominator`.
        denominator: divide by this instead of the batch's own: for a step of several batches, or on several ranks, the
            sum of `loss_denominator` over all of them.

    Example:
        >>> batch = {"weighted_labels": torch.tensor([[-100, 1, 0]]), "loss_mask": torch.tensor([[0.0, 0.5, 1.5]]),
        ...          "loss_denominator": torch.tensor([2.0], dtype=torch.float64)}
        >>> round(weighted_loss(torch.zeros(1, 3, 2), batch).item(), 4)  # log(2), whatever the weights
        0.6931
    """
    if "weighted_labels" not in batch:
        raise InvalidInputError(
            "the batch has no weighted_labels, so it has no weights; take the loss that the model returns"
        )
    # Position t - 1 predicts the token at t. Only what counts is cast to float32, not all logits.
    weights = batch["loss_mask"][:, 1:]
    counts = weights > 0
    predictions = logits[:, :-1][counts]
    wide = torch.promote_types(predictions.dtype, torch.float32)
    losses = cross_entropy(predictions.to(wide), batch["weighted_labels"][:, 1:][counts], reduction="none")
    total = torch.sum(losses * weights[counts])
    own = batch["loss_denominator"].sum() if denominator is None else torch.as_tensor(denominator)
    return total / torch.where(own > 0, own, 1).to(total)  # without a trained token the loss is 0
