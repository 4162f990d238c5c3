"""Write safetensors weight by weight, into files of a limited size, with an index when there are several.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, data_offsets | the tensors, one after the other

All sizes are known before, so the header is written first and memory holds one weight; `safetensors` itself writes a
file from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, WriterStateError
from megatron_packed_sft.megatron.weights.folder import DTYPES, INDEX, SINGLE
from megatron_packed_sft.megatron.weights.layout import TensorShape, Weight
from megatron_packed_sft.support.atomic import os_errors, preallocate, write_at, write_file

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT: Final = 8
_METADATA: Final = {"format": "pt"}  # transformers refuses a file without it


class WrittenWeights(NamedTuple):
    """The size of what was written."""

    num_parameters: int
    num_bytes: int
    num_files: int


def write_weights(
    directory: Path,
    weights: Iterable[Weight],
    read: Callable[[Weight], torch.Tensor],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    on_bytes: Callable[[int], object] | None = None,
) -> WrittenWeights:
    """Write all weights of a model into a directory, under the names that transformers expects.

    Memory: one weight at a time.

    Args:
        directory: an existing one, without safetensors files.
        weights: of the model.
        read: returns one of them, whole.
        dtype: of the files.
        max_shard_bytes: of a file's tensors; a weight that is larger has a file of its own.
        on_bytes: called with the bytes of each tensor that was written.
    """
    files = _files(list(weights), dtype, max_shard_bytes)
    places: dict[str, str] = {}
    for number, group in enumerate(files, start=1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = [tensor for weight in group for tensor in weight.tensors]
        with SafetensorsWriter(directory / name, tensors, dtype) as writer:
            for weight in group:
                for tensor, value in split_weight(weight, read(weight)):
                    _refuse_lost(tensor.name, value, dtype)
                    writer.write(tensor.name, value)
                    places[tensor.name] = name
                    if on_bytes is not None:
                        on_bytes(num_bytes(tensor, dtype))
            writer.finalize()
    total = sum(num_bytes(tensor, dtype) for group in files for weight in group for tensor in weight.tensors)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_file(directory / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return WrittenWeights(total // dtype.itemsize, total, len(files))


def split_weight(weight: Weight, value: torch.Tensor) -> Iterator[tuple[TensorShape, torch.Tensor]]:
    """Yield the Hugging Face tensors that a Megatron weight is made of.

    Example:
        >>> from megatron_packed_sft.megatron.weights.layout import Span
        >>> fused = Weight("fc1", (TensorShape("gate", (1,)), TensorShape("up", (1,))),
        ...                (Span("gate", 0, 1, 0), Span("up", 0, 1, 1)))
        >>> [(tensor.name, part.tolist()) for tensor, part in split_weight(fused, torch.tensor([3, 4]))]
        [('gate', [3]), ('up', [4])]
    """
    for tensor in weight.tensors:
        spans = [span for span in weight.spans if span.tensor == tensor.name]
        parts = [value.narrow(weight.axis, span.at, span.stop - span.start) for span in spans]
        yield tensor, parts[0] if len(parts) == 1 else torch.cat(parts, weight.axis)


def total_bytes(weights: Iterable[Weight], dtype: torch.dtype) -> int:
    """Return the bytes of all tensors of a model."""
    return sum(num_bytes(tensor, dtype) for weight in weights for tensor in weight.tensors)


def _files(weights: list[Weight], dtype: torch.dtype, limit: int) -> list[list[Weight]]:
    """Return the weights of each file; a weight is not divided between files."""
    groups: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        size = total_bytes([weight], dtype)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(weight)
        filled += size
    return groups


def _refuse_lost(name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse values that are not numbers, or are too large for the dtype."""
    low, high = (bound.item() for bound in torch.aminmax(value)) if value.numel() else (0.0, 0.0)
    largest = max(-low, high)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise PackedSFTError(f"{name} has values that are not finite; export an earlier checkpoint")
    if largest > torch.finfo(dtype).max:
        raise InvalidInputError(
            f"{name} has values up to {largest:.3g}, which do not fit into {dtype}; choose --dtype bf16 or fp32"
        )


def num_bytes(tensor: TensorShape, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor.

    Example:
        >>> num_bytes(TensorShape("a", (2, 3)), torch.bfloat16)
        12
    """
    return math.prod(tensor.sizes) * dtype.itemsize


class SafetensorsWriter:
    """A new file that is given its tensors one at a time, in any order.

    Args:
        path: of the file; its disk space is reserved at once.
        tensors: all that it will hold, in the order of the file.
        dtype: of all of them.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorShape], dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._shapes = {tensor.name: tensor.sizes for tensor in tensors}
        offsets = _offsets(tensors, dtype)
        header = _header(tensors, dtype, offsets)
        self._offsets = {name: len(header) + start for name, (start, _) in offsets.items()}
        size = len(header) + sum(num_bytes(tensor, dtype) for tensor in tensors)
        with os_errors("write", path, size):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                preallocate(self._fd, size)
                write_at(self._fd, header, 0)
            except BaseException:
                self._close()
                raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, converted to the file's dtype."""
        if name not in self._offsets:
            raise WriterStateError(f"{self._path} has no room for {name}, or it was written already")
        converted = tensor.to("cpu", self._dtype).contiguous()
        if tuple(converted.shape) != tuple(self._shapes[name]):
            raise InvalidInputError(f"{name} has the sizes {list(converted.shape)}, not {list(self._shapes[name])}")
        with os_errors("write", self._path, converted.nbytes):
            write_at(self._fd, converted.view(-1).view(torch.uint8).numpy().data, self._offsets.pop(name))

    def finalize(self) -> None:
        """Make the file durable."""
        if self._offsets:
            raise WriterStateError(f"{self._path} lacks {next(iter(self._offsets))}")
        with os_errors("write", self._path):
            os.fsync(self._fd)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _offsets(tensors: Sequence[TensorShape], dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    offsets, at = {}, 0
    for tensor in tensors:
        size = num_bytes(tensor, dtype)
        offsets[tensor.name] = (at, at + size)
        at += size
    return offsets


def _header(tensors: Sequence[TensorShape], dtype: torch.dtype, offsets: Mapping[str, tuple[int, int]]) -> bytes:
    entries = {
        tensor.name: {"dtype": _NAMES[dtype], "shape": tensor.sizes, "data_offsets": offsets[tensor.name]}
        for tensor in tensors
    }
    text = json.dumps({"__metadata__": _METADATA, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
