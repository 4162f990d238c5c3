"""Gradients divided by what the loss is a mean over, also where that is not a number of tokens.

    micro batches ─ backward ─▶ gradients of the summed loss      ─┐
                            └─▶ denominators, summed in float64   ─┴─ finalize: over all ranks, then divide

Megatron-Core's schedules add the numbers of tokens up in an int32 and divide by the result. A sum of weights is no
integer, so `FinalizeGradients` carries it past the schedule and hands it to Megatron-Core's own last step, which adds
it up over the ranks and divides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_packed_sft.errors import InvalidInputError


class FinalizeGradients:
    """A model's `config.finalize_model_grads_func`: Megatron-Core's own, with denominators that need not be integers.

    Without weights it does what Megatron-Core's does. The micro batches of a step are of one kind: all with weights (or
    `loss="per_conversation"`), or none.

    Example:
        >>> finalize = FinalizeGradients()
        >>> finalize.add(torch.tensor(0.5)); finalize.add(torch.tensor(2))
        >>> finalize.take().item()
        2.5
    """

    def __init__(self) -> None:
        self._denominator: Tensor | None = None

    def add(self, denominator: Tensor) -> None:
        """Add what a micro batch's loss is a mean over; in the backward pass, so that an evaluation adds nothing."""
        amount = denominator.detach().to(torch.float64)
        self._denominator = amount if self._denominator is None else self._denominator + amount

    def take(self) -> Tensor | None:
        """Return the sum since the last call; None if no micro batch had a denominator of its own."""
        denominator, self._denominator = self._denominator, None
        return denominator

    def __call__(self, model: list[torch.nn.Module], num_tokens: Tensor | None = None, **arguments: Any) -> None:
        """Reduce the gradients over the ranks and divide them, as Megatron-Core's schedules ask for."""
        from megatron.core.distributed import finalize_model_grads

        denominator = self.take()
        finalize_model_grads(model, num_tokens if denominator is None else denominator, **arguments)


def divide_by(denominator: Tensor, output: Tensor, model: torch.nn.Module) -> None:
    """Have the gradients of `output` divided by `denominator`, summed over the micro batches and ranks of the step.

    Args:
        denominator: what this rank's part of the micro batch adds; 0 on ranks that share it with one that adds it.
        output: of the model, on any stage of a pipeline.
        model: a GPT model of Megatron-Core; its configuration says who divides.
    """
    from megatron.core.utils import get_model_config

    if not output.requires_grad:
        return
    config = get_model_config(model)
    finalize = config.finalize_model_grads_func
    if finalize is None:  # nobody divides
        return
    if not isinstance(finalize, FinalizeGradients) or not config.calculate_per_token_loss:
        raise InvalidInputError(
            "the loss mask holds weights, and Megatron-Core divides by an integer; build the model with "
            "calculate_per_token_loss=True and set config.finalize_model_grads_func to "
            "megatron_packed_sft.megatron.gradients.FinalizeGradients()"
        )
    amount = denominator.to(output.device, torch.float64)
    output.register_hook(lambda gradient: finalize.add(amount))  # type: ignore[no-untyped-call]
