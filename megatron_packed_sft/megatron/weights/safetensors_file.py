"""Write safetensors in constant memory: the header first, because all sizes are known, then tensor after tensor.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, data_offsets | the tensors, one after the other

`safetensors` itself writes a file from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from megatron_packed_sft.errors import InvalidInputError, WriterStateError
from megatron_packed_sft.megatron.weights.folder import DTYPES
from megatron_packed_sft.megatron.weights.layout import TensorShape
from megatron_packed_sft.support.atomic import os_errors, preallocate, write_at

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT: Final = 8
_METADATA: Final = {"format": "pt"}  # transformers refuses a file without it


def num_bytes(tensor: TensorShape, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor.

    Example:
        >>> num_bytes(TensorShape("a", (2, 3)), torch.bfloat16)
        12
    """
    return math.prod(tensor.sizes) * dtype.itemsize


class SafetensorsWriter:
    """A new file whose tensors are given one at a time, in any order; complete when all were.

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
