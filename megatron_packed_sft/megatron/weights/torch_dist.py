"""Read a torch_dist checkpoint, of whatever parallel layout, one tensor at a time and without Megatron-Core.

    .metadata            a pickle: tensor -> sizes and chunks, chunk -> file, offset, length
    __0_0.distcp, ...    the chunks and other objects, each as torch.save writes it
    common.pt            what all ranks share, as torch.save writes it
    metadata.json        the format's name

All readers of checkpoints go through here, so that one from elsewhere cannot run anything: the pickle is read by
`parse_metadata`, and what torch.save wrote by `load_saved`.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.errors import ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.checkpoint_metadata import Chunk, Place, StoredTensor, parse_metadata
from megatron_packed_sft.megatron.weights.saved_archive import load_saved
from megatron_packed_sft.support.atomic import os_errors

METADATA: Final = ".metadata"
BACKEND: Final = "metadata.json"
COMMON: Final = "common.pt"
_MAX_METADATA_BYTES: Final = 1 << 30
_MAX_COMMON_BYTES: Final = 1 << 28
_MAX_BACKEND_BYTES: Final = 1 << 16
_BACKEND_FIELDS: Final = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}


class TorchDistCheckpoint:
    """The content of a checkpoint. Its files stay open, so that it can be read even if a run removes it meanwhile.

    Args:
        path: the folder with .metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_other_backend(path)
        self.tensors, self._objects = parse_metadata(
            _read_whole(path / METADATA, _MAX_METADATA_BYTES), str(path / METADATA)
        )
        self._closing = ExitStack()
        self._files: dict[str, int] = {}
        self._bounds: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        places = [chunk.place for tensor in self.tensors.values() for chunk in tensor.chunks]
        try:
            for place in (*places, *self._objects.values()):
                if place.file not in self._files:
                    self._open(place.file)
        except BaseException:
            self._closing.close()
            raise

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a tensor, or one entry of its first axis.

        Args:
            name: of the tensor.
            index: which layer, when all layers are stacked in one tensor.
        """
        sizes = self.tensors[name].sizes
        if index is None:
            return self.read_region(name, [0] * len(sizes), sizes)
        return self.read_region(name, [index, *[0] * (len(sizes) - 1)], [1, *sizes[1:]])[0]

    def read_region(self, name: str, begin: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Return a part of a tensor.

        Args:
            name: of the tensor.
            begin: where the part begins on each axis.
            wanted: its sizes.
        """
        stored = self.tensors[name]
        chunks = list(self._overlapping(name, begin, wanted))
        if sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(wanted):
            raise ShardFileError(f"{self.path} holds only a part of {name}; restore the checkpoint")
        result = torch.empty(tuple(wanted), dtype=stored.dtype)  # no memory yet: it comes when it is written
        num_copied = 0
        for chunk in chunks:
            first = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
            ends = zip(begin, wanted, chunk.offsets, chunk.sizes, strict=True)
            last = [min(start + size, offset + length) for start, size, offset, length in ends]
            loaded = self._load_chunk(name, stored, chunk)
            if first == list(begin) and loaded.shape == result.shape:  # the usual case, without a copy
                return loaded
            result[_region(first, last, begin)] = loaded[_region(first, last, chunk.offsets)]
            num_copied += math.prod(b - a for a, b in zip(first, last, strict=True))
        if num_copied != result.numel():
            raise ShardFileError(f"{self.path} holds only a part of {name}; restore the checkpoint")
        return result

    def _overlapping(self, name: str, begin: Sequence[int], wanted: Sequence[int]) -> Iterator[Chunk]:
        """Yield the chunks that hold something of a region; there may be one per layer and rank."""
        chunks = self.tensors[name].chunks
        if name not in self._bounds:
            offsets = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(begin))
            sizes = np.array([chunk.sizes for chunk in chunks], np.int64).reshape(len(chunks), len(begin))
            self._bounds[name] = offsets, offsets + sizes
        starts, stops = self._bounds[name]
        ends = [at + size for at, size in zip(begin, wanted, strict=True)]
        for number in np.flatnonzero(((starts < ends) & (stops > begin)).all(axis=1)):
            yield chunks[number]

    def read_object(self, name: str) -> Any:
        """Return an object that is not a tensor; one that would run something is refused."""
        if name not in self._objects:
            raise ShardFileError(f"{self.path} does not hold {name}; restore the checkpoint")
        return self._load(name, self._objects[name])

    def close(self) -> None:
        """Close the files."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, file: str) -> None:
        path = self.path / file
        if not path.is_file():
            raise ShardFileError(f"{path} is missing; restore the checkpoint")
        with os_errors("read", path):
            self._files[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._closing.callback(os.close, self._files[file])

    def _load_chunk(self, name: str, stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
        tensor = self._load(name, chunk.place)
        expected = (chunk.sizes, stored.dtype, "cpu", torch.strided)
        if not isinstance(tensor, torch.Tensor) or expected != (
            tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.layout,
        ):  # fmt: skip
            path = self.path / chunk.place.file
            raise ShardFileError(f"{path}: {name} does not have the sizes that {METADATA} gives; restore it")
        return tensor.detach()

    def _load(self, name: str, place: Place) -> Any:
        path = self.path / place.file
        with os_errors("read", path):
            window = io.BufferedReader(_Window(self._files[place.file], place.at, place.length))
            return load_saved(window, place.length, f"{path}: {name}")


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd = fd
        self._start, self._length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        num_read = os.preadv(self._fd, [view], self._start + self._at) if len(view) else 0
        self._at += num_read
        return num_read


def refuse_unreadable(path: Path) -> None:
    """Refuse a checkpoint whose descriptions are damaged or would run something, before any tensor is read."""
    TorchDistCheckpoint(path).close()
    read_common(path)


def read_common(path: Path) -> dict[str, Any]:
    """Return what `common.pt` of a checkpoint holds: what all ranks share, such as the optimizer's settings."""
    file = path / COMMON
    data = _read_whole(file, _MAX_COMMON_BYTES)
    common = load_saved(io.BytesIO(data), len(data), str(file))
    if not isinstance(common, dict):
        raise ShardFileError(f"{file} holds a {type(common).__name__} instead of a dict; restore the checkpoint")
    return common


def _read_whole(file: Path, most: int) -> bytes:
    if not file.is_file():
        raise ShardFileError(f"{file} is missing; give the folder of a torch_dist checkpoint")
    with os_errors("read", file):
        if file.stat().st_size > most:
            raise ShardFileError(f"{file} has more than {most:,} bytes; restore the checkpoint")
        return file.read_bytes()


def _region(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))


def refuse_other_backend(path: Path) -> None:
    """Refuse a checkpoint of another format than torch_dist, or one whose description is damaged."""
    file = path / BACKEND
    if not file.is_file():
        return
    try:
        with open(file, "rb") as opened:
            described = json.loads(opened.read(_MAX_BACKEND_BYTES))
        if not described.keys() <= _BACKEND_FIELDS or described.get("common_backend", "torch") != "torch":
            raise ValueError
        backend = described.get("sharded_backend")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ShardFileError(f"{file} cannot be read; restore the checkpoint") from None
    if backend != "torch_dist":
        raise UnsupportedFormatError(
            f"{file}: the checkpoint was written by {backend!r}, and only torch_dist can be read; save it again with "
            "--ckpt-format torch_dist"
        )
