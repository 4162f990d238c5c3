"""Parameters of a GPT model by name, frozen or without weight decay; and gradients with denominators of any kind.

    norms, biases, embeddings, output, first_4_layers     words that every model understands
    decoder.layers.0.mlp.*                                patterns of Megatron-Core's names

Each pipeline stage counts its own layers from 0. Names here count over the whole model, so that a setting means the
same in every parallel layout.

    micro batches ─ backward ─▶ gradients of the summed loss      ─┐
                            └─▶ denominators, summed in float64   ─┴─ finalize: over all ranks, then divide

Megatron-Core's schedules add the numbers of tokens up in an int32 and divide by the result. A sum of weights is not an
integer, so `FinalizeGradients` carries it past the schedule and hands it to Megatron-Core's own last step, which adds
it up over the ranks and divides.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from megatron_packed_sft.errors import InvalidInputError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_FIRST_LAYERS = re.compile(r"first_(\d+)_layers")
# With tied embeddings the last stage has a copy of the first stage's weight, under another name.
_TIED: Final = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
_WORDS: Final[Mapping[str, Callable[[str], bool]]] = {
    "norms": lambda name: "layernorm." in name or "layer_norm_" in name,
    "biases": lambda name: name.endswith("bias"),
    "embeddings": lambda name: name.startswith("embedding."),
    "output": lambda name: name.startswith("output_layer."),
}


def named_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by names whose layers are counted from 0 over the whole model."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]

    def in_whole_model(name: str) -> str:
        return _LAYER.sub(lambda found: f"decoder.layers.{numbers[int(found[1])]}.", name)

    return {in_whole_model(name): parameter for name, parameter in model.named_parameters()}


def is_chosen(name: str, choice: str) -> bool:
    """Return whether a word or a pattern means a parameter.

    Example:
        >>> is_chosen("decoder.layers.3.mlp.linear_fc1.weight", "first_4_layers")
        True
        >>> is_chosen("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.self_attention.*")
        False
    """
    if choice in _WORDS:
        return _WORDS[choice](name)
    if first := _FIRST_LAYERS.fullmatch(choice):
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) < int(first[1])
    return fnmatch.fnmatchcase(name, choice)


def choose_parameters(model: GPTModel, choices: Sequence[str], key: str) -> set[str]:
    """Return the names of this rank's parameters that any of the choices means; a collective call.

    Args:
        model: this rank's part of it.
        choices: words and patterns.
        key: where the user wrote them, for messages.
    """
    own = list(named_parameters(model))
    found = {choice: {name for name in own if is_chosen(name, choice)} for choice in choices}
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, found)
    chosen = {choice: set().union(*(one[choice] for one in everywhere)) for choice in choices}
    for choice, names in chosen.items():
        if not names and choice not in ("norms", "biases"):  # not every model has these
            remedy = "use embeddings, which are tied to it" if choice == "output" else f"the first is {own[0]}"
            raise InvalidInputError(
                f"{key} has {choice!r}, which matches no parameter; choose from {', '.join(_WORDS)}, "
                f"first_N_layers, or a pattern of names ({remedy})"
            )
        if (first := _FIRST_LAYERS.fullmatch(choice)) and int(first[1]) > model.config.num_layers:
            raise InvalidInputError(f"{key} has {choice!r}, but the model has {model.config.num_layers} layers")
    together = set().union(*chosen.values())
    if model.share_embeddings_and_output_weights and together & _TIED:
        together |= _TIED
    return together & set(own)


def freeze(model: GPTModel, choices: Sequence[str], key: str = "model.freeze") -> int:
    """Leave parameters out of training; call it before the model is wrapped. A collective call.

    Returns:
        How many numbers of this rank's part are frozen.
    """
    parameters = named_parameters(model)
    frozen = choose_parameters(model, choices, key)
    for name in frozen:
        parameters[name].requires_grad_(False)
    num_trained = torch.tensor([sum(one.numel() for one in parameters.values() if one.requires_grad)])
    num_trained = num_trained.to(next(iter(parameters.values())).device)
    torch.distributed.all_reduce(num_trained)
    if not num_trained.item():
        raise InvalidInputError(f"{key} {list(choices)} freezes the whole model; leave something to train")
    keep_gradients_when_recomputing(model)
    return sum(parameters[name].numel() for name in frozen)


def keep_gradients_when_recomputing(model: GPTModel) -> None:
    """Give recomputed layers above frozen embeddings their gradients; call it after freezing.

    Without it a recomputed layer whose inputs need no gradient silently gives none to its weights either.
    """
    if model.config.recompute_granularity is None or not model.pre_process:
        return
    if not any(parameter.requires_grad for parameter in model.embedding.parameters()):
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def without_weight_decay(model: GPTModel, choices: Sequence[str], key: str = "optimizer.no_weight_decay") -> Any:
    """Return the `config_overrides` of `get_megatron_optimizer` that exempt parameters; a collective call."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    parameters = named_parameters(model)
    exempt = {id(parameters[name]) for name in choose_parameters(model, choices, key)}
    predicate = ParamWithNamePredicate(name="no_weight_decay", fn=lambda parameter, _: id(parameter) in exempt)
    return {ParamKey(with_name_predicate=predicate): {"wd_mult": 0.0}}


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
        """Add the denominator of a micro batch; called in the backward pass, so that an evaluation adds nothing."""
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
        model: a GPT model of Megatron-Core, with `FinalizeGradients` in its configuration.
    """
    from megatron.core.utils import get_model_config

    if not output.requires_grad:
        return
    config = get_model_config(model)
    finalize = config.finalize_model_grads_func
    if finalize is None:  # the caller divides
        return
    if not isinstance(finalize, FinalizeGradients) or not config.calculate_per_token_loss:
        raise InvalidInputError(
            "the loss mask holds weights, and Megatron-Core divides by an integer; build the model with "
            "calculate_per_token_loss=True and set config.finalize_model_grads_func to "
            "megatron_packed_sft.megatron.parameters.FinalizeGradients()"
        )
    amount = denominator.to(output.device, torch.float64)
    output.register_hook(lambda gradient: finalize.add(amount))  # type: ignore[no-untyped-call]
