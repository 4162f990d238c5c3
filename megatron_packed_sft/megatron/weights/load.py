"""Hugging Face weights into this rank's part of a model, tensor by tensor; nothing else is read or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder, open_safetensors
from megatron_packed_sft.megatron.weights.layout import EMBEDDING, LAYERS, OUTPUT, Span, Weight, local_name

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


_BLOCK_BYTES: Final = 1 << 24
_LARGEST_ITEM: Final = 8


class Place(NamedTuple):
    """Where a range of a tensor goes."""

    parameter: torch.Tensor
    axis: int
    span: Span


def load_pretrained(
    model: GPTModel, folder: HuggingFaceFolder, *, on_tensor: Callable[[str], None] | None = None
) -> None:
    """Copy this rank's part of the weights into a model, whatever its tensor- and pipeline-parallel sizes.

    Memory: the model itself and 16 MB.

    Args:
        model: from `build_gpt_model` with the folder's `shape.model_arguments()`, or one of the same shape.
        folder: an opened folder.
        on_tensor: called with the name of each tensor that was read.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    places: dict[str, list[Place]] = {}
    for name, weight in _names_of_rank(model, folder, parameters):
        parameter = parameters.pop(name)
        length = _checked_length(name, parameter, weight, num_ranks)
        if weight.is_padded:
            parameter.zero_()
        for span in weight.spans_of_rank(rank, num_ranks, length):
            places.setdefault(span.tensor, []).append(Place(parameter, weight.axis, span))
    if parameters:
        raise InvalidInputError(
            f"the model has the weight {next(iter(parameters))}, which {folder.path} has not; build it with the "
            "folder's shape"
        )
    for file, names in folder.files.items():
        wanted = [name for name in names if name in places]
        if wanted:
            _copy_file(folder, file, wanted, places, on_tensor)


def _copy_file(
    folder: HuggingFaceFolder,
    file: str,
    names: list[str],
    places: dict[str, list[Place]],
    on_tensor: Callable[[str], None] | None,
) -> None:
    with open_safetensors(folder.path / file) as opened:
        for name in names:
            tensor = opened.get_slice(name)
            for place in places.pop(name):
                _copy(tensor, place)
            if on_tensor is not None:
                on_tensor(name)


def _copy(tensor: Any, place: Place) -> None:
    """Copy a range of a tensor in blocks of rows: an embedding as a whole can be larger than all layers of a rank."""
    parameter, axis, span = place
    part = parameter.narrow(axis, span.at, span.stop - span.start)
    num_rows = part.shape[0]
    step = max(1, _BLOCK_BYTES // max(1, part[:1].numel() * _LARGEST_ITEM))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        first = span.start if axis == 0 else 0
        rows = slice(first + start, first + stop)
        part[start:stop].copy_(tensor[rows] if axis == 0 else tensor[rows, span.start : span.stop])


def _names_of_rank(
    model: GPTModel, folder: HuggingFaceFolder, parameters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Weight]]:
    """Yield the weights that this rank has, under the names of its layer spec."""
    layers = {layer.layer_number - 1: index for index, layer in enumerate(model.decoder.layers)}
    is_local = any(name.endswith(".input_layernorm.weight") for name in parameters)
    for weight in folder.weights:
        if weight.layer is None:
            if weight.name in parameters:
                yield weight.name, weight
            # The last of several stages has a copy of tied embeddings.
            if weight.name == EMBEDDING and folder.shape.tie_embeddings and OUTPUT in parameters:
                yield OUTPUT, weight
        elif weight.layer in layers:
            inner = local_name(weight.name) if is_local else weight.name
            yield f"{LAYERS}{layers[weight.layer]}.{inner}", weight


def _checked_length(name: str, parameter: torch.Tensor, weight: Weight, num_ranks: int) -> int:
    """Return the length of the whole weight along its axis, padding included."""
    sizes = list(weight.sizes)
    length = parameter.shape[weight.axis] * (num_ranks if weight.is_shared else 1)
    if weight.is_padded:
        sizes[weight.axis] = max(length, weight.length)
    if weight.is_shared:
        sizes[weight.axis] //= num_ranks
    if list(parameter.shape) != sizes:
        raise InvalidInputError(
            f"the model's {name} has the sizes {list(parameter.shape)}, and the weights have {sizes}; build it with "
            "the folder's shape"
        )
    return length
