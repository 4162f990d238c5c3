"""Read a model from a Hugging Face folder: config.json and safetensors, checked against each other first.

    HuggingFaceFolder.open ─▶ load_pretrained    this rank's slices, into a model, tensor by tensor
                           └▶ FolderWeights      whole Megatron weights, one at a time, for an export

Only safetensors are opened. A pickle (`pytorch_model.bin`) can run code, and is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from megatron_packed_sft.errors import InvalidInputError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.families import Family, family_of
from megatron_packed_sft.megatron.weights.layout import (
    EMBEDDING,
    LAYERS,
    OUTPUT,
    ModelShape,
    Span,
    TensorShape,
    Weight,
    local_name,
)
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import checksum, file_checksum
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.paths import local_path

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_JSON_BYTES: Final = 1 << 26
_BLOCK_BYTES: Final = 1 << 24
_LARGEST_ITEM: Final = 8  # bytes of a number
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Buffers that old releases of transformers saved; they follow from config.json.
_IGNORED: Final = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model in a folder. `open` checks everything but the values of the weights.

    Args:
        path: of the folder.
        config: the parsed config.json.
        family: of the model.
        shape: the model's shape.
        files: safetensors file -> the names of its tensors that the model has.
        dtype: of the weights; if they differ, one that holds them all.
    """

    path: Path
    config: Mapping[str, Any]
    family: Family
    shape: ModelShape
    files: Mapping[str, tuple[str, ...]]
    dtype: torch.dtype

    @classmethod
    def open(cls, path: str | os.PathLike[str], name: str = "model.path") -> HuggingFaceFolder:
        """Read config.json and the headers of all safetensors files; refuse what does not fit together.

        Args:
            path: of the folder.
            name: the key or argument that the user set, for messages.
        """
        config, family, shape = read_config(path, name)
        folder = local_path(path, name)
        expected = {tensor.name: tensor for weight in family.weights(shape) for tensor in weight.tensors}
        files: dict[str, tuple[str, ...]] = {}
        dtypes: list[torch.dtype] = []
        for file, indexed in _files(folder, name).items():
            with open_safetensors(folder / file) as opened:
                found = tuple(opened.keys())
                _refuse_differing(folder / file, indexed, found)
                files[file] = tuple(one for one in found if not one.endswith(_IGNORED))
                for one in files[file]:
                    dtypes.append(_checked_dtype(opened.get_slice(one), one, expected, folder / file, shape))
        _refuse_missing(folder, expected, files)
        return cls(folder, config, family, shape, files, reduce(torch.promote_types, dtypes))

    @property
    def weights(self) -> Iterator[Weight]:
        """The weights of the model, from input to output."""
        return self.family.weights(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum((self.path / file).stat().st_size for file in self.files)

    def file_checksums(self, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
        """Return name -> checksum of this rank's share of the files that decide the model."""
        names = sorted([CONFIG, *self.files])[rank::num_ranks]
        return {name: file_checksum(self.path / name) for name in names}


def read_config(path: str | os.PathLike[str], name: str = "model.path") -> tuple[dict[str, Any], Family, ModelShape]:
    """Return the config.json of a folder, its family and the shape that it describes, or refuse them."""
    folder = local_path(path, name)
    file = folder / CONFIG
    if not file.is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise InvalidInputError(
            f"{name}={os.fspath(path)} {what}; give a local Hugging Face model folder (nothing is downloaded)"
        )
    config = _read_json(file)
    family = family_of(config, str(file))
    return config, family, family.shape(config, str(file))


def joint_checksum(checksums: Mapping[str, str]) -> str:
    """Return one checksum for all files of a model.

    Example:
        >>> joint_checksum({"a": "1", "b": "2"}) == joint_checksum({"b": "2", "a": "1"})
        True
    """
    return checksum("".join(f"{name}\0{checksums[name]}\n" for name in sorted(checksums)).encode())


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; a damaged one, or another kind of file, is one sentence."""
    safetensors = load("safetensors", "megatron", "reading pretrained weights")
    try:
        with os_errors("read", path):
            opened = safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ShardFileError(f"{path} is cut or damaged ({reason}); copy or download it again") from None
    with opened as entered:
        yield entered


def _read_json(file: Path) -> dict[str, Any]:
    with os_errors("read", file):
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise UnsupportedFormatError(f"{file} has more than {_MAX_JSON_BYTES:,} bytes; download it again")
        return json_document.parse(file.read_bytes(), str(file))


def _files(folder: Path, name: str) -> dict[str, set[str] | None]:
    """Return file -> its tensors according to the index; None when there is no index."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return {SINGLE: None}
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES)
        if pickles:
            raise UnsupportedFormatError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run anything; load it with "
                "transformers where you trust it and call save_pretrained, which writes safetensors"
            )
        raise InvalidInputError(
            f"{name}={folder} has neither {SINGLE} nor {INDEX}; give a folder that holds the weights"
        )
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ShardFileError(f"{folder / INDEX} has no weight_map; download it again")
    files: dict[str, set[str] | None] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise UnsupportedFormatError(
                f"{folder / INDEX} puts {tensor} into {file!r}, which is not a safetensors file of this folder; "
                "download it again"
            )
        indexed = files.setdefault(file, set())
        assert indexed is not None
        indexed.add(tensor)
    for file in sorted(files):
        if not (folder / file).is_file():
            raise ShardFileError(f"{folder / file} is missing, and {INDEX} names it; copy or download it again")
    return dict(sorted(files.items()))


def _refuse_differing(file: Path, indexed: set[str] | None, found: tuple[str, ...]) -> None:
    """Refuse a file with other tensors than the index lists."""
    if indexed is not None and indexed != set(found):
        one = min(indexed ^ set(found))
        where = "is in the index and not in the file" if one in indexed else "is in the file and not in the index"
        raise ShardFileError(f"{file}: {one} {where}; the files belong to different downloads, fetch them again")


def _checked_dtype(
    tensor: Any, name: str, expected: Mapping[str, TensorShape], file: Path, shape: ModelShape
) -> torch.dtype:
    """Return the dtype of a tensor that the model has, with the sizes that config.json gives."""
    if name not in expected:
        hint = "use another model"
        if name == "lm_head.weight" and shape.tie_embeddings:
            hint = "config.json ties the embeddings, so save the model again with transformers"
        raise UnsupportedFormatError(
            f"{file} has the tensor {name}, which a {shape.family} model does not have; {hint}"
        )
    sizes = tuple(tensor.get_shape())
    if sizes != expected[name].sizes:
        raise ShardFileError(
            f"{file}: {name} has the sizes {list(sizes)}, and config.json gives {list(expected[name].sizes)}; the "
            "files belong to different models"
        )
    if tensor.get_dtype() not in DTYPES:
        raise UnsupportedFormatError(
            f"{file}: {name} is stored as {tensor.get_dtype()}, and only {', '.join(DTYPES)} can be read; use weights "
            "that are not quantized"
        )
    return DTYPES[tensor.get_dtype()]


def _refuse_missing(folder: Path, expected: Mapping[str, TensorShape], files: Mapping[str, tuple[str, ...]]) -> None:
    there = {name for names in files.values() for name in names}
    missing = [name for name in expected if name not in there]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ShardFileError(
            f"{folder} lacks the tensor {missing[0]}{more}, which config.json asks for; copy or download the folder "
            "again"
        )


class FolderWeights:
    """The weights of a Hugging Face folder as Megatron has them, read one at a time.

    Args:
        folder: an opened folder.
    """

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self.shape = folder.shape
        self.dtype = folder.dtype
        self._folder = folder
        self._files = {name: file for file, names in folder.files.items() for name in names}

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of the model, from input to output."""
        return self._folder.weights

    def read(self, weight: Weight) -> torch.Tensor:
        """Return a whole weight."""
        result = torch.empty(weight.sizes, dtype=self.dtype)
        for tensor in weight.tensors:
            with open_safetensors(self._folder.path / self._files[tensor.name]) as opened:
                value = opened.get_tensor(tensor.name)
                for span in weight.spans:
                    if span.tensor == tensor.name:
                        size = span.stop - span.start
                        part = value.narrow(weight.axis, span.start, size)
                        result.narrow(weight.axis, span.at, size).copy_(part)
        return result


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
            f"the model has the weight {next(iter(parameters))}, which {folder.path} lacks; build it with the "
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
