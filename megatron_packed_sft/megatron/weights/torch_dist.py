"""Read the weights of a torch_dist checkpoint, of whatever parallel layout, one at a time and without Megatron-Core.

    .metadata            a pickle: tensor -> sizes and chunks, chunk -> file, offset, length
    __0_0.distcp, ...    the chunks, each as torch.save writes it

The pickle is read by an unpickler that knows the few classes a checkpoint needs and refuses all others by name, and
the chunks by torch's own (`weights_only`), so that a checkpoint from elsewhere cannot run anything. `common.pt` is not
read.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import ShardFileError, UnsupportedFormatError

METADATA: Final = ".metadata"
BACKEND: Final = "metadata.json"
_MAX_METADATA_BYTES: Final = 1 << 30
_CHECKPOINT: Final = "torch.distributed.checkpoint."
_CLASSES: Final = {
    f"{_CHECKPOINT}metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class _Chunk(NamedTuple):
    """A part of a tensor: where it begins, its sizes, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


class TorchDistCheckpoint:
    """The tensors of a checkpoint. Its files stay open, so that it can be read even if a run removes it meanwhile.

    Args:
        path: the folder with .metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_other_backend(path)
        metadata = _read_metadata(path / METADATA)
        self.tensors: dict[str, StoredTensor] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        try:
            places = {(index.fqn, tuple(index.offset or ())): place for index, place in metadata.storage_data.items()}
            for name, tensor in metadata.state_dict_metadata.items():
                if hasattr(tensor, "chunks"):
                    self.tensors[name] = StoredTensor(tuple(tensor.size), tensor.properties.dtype)
                    self._chunks[name] = _chunks(name, tensor, places, path)
        except (AttributeError, KeyError, TypeError) as error:
            raise ShardFileError(f"{path / METADATA} is damaged ({error}); restore the checkpoint") from None
        self._closing = ExitStack()
        self._files: dict[str, int] = {}
        try:
            for file in sorted({chunk.file for chunks in self._chunks.values() for chunk in chunks}):
                self._open(file)
        except BaseException:
            self._closing.close()
            raise

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a tensor, or one entry of its first axis.

        Args:
            name: of the tensor.
            index: which layer, when all layers are stacked in one tensor.
        """
        sizes, dtype = self.tensors[name]
        begin = [0] * len(sizes) if index is None else [index, *[0] * (len(sizes) - 1)]
        wanted = list(sizes) if index is None else [1, *sizes[1:]]
        result = torch.empty(wanted, dtype=dtype)  # no memory yet: the system gives it when it is written
        num_copied = 0
        for chunk in self._chunks[name]:
            first = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
            ends = zip(begin, wanted, chunk.offsets, chunk.sizes, strict=True)
            last = [min(start + size, offset + length) for start, size, offset, length in ends]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            stored = self._load(name, chunk)
            if first == begin and stored.shape == result.shape:  # the usual case, without a copy
                return stored if index is None else stored[0]
            result[_region(first, last, begin)] = stored[_region(first, last, chunk.offsets)]
            num_copied += math.prod(b - a for a, b in zip(first, last, strict=True))
        if num_copied != result.numel():
            raise ShardFileError(f"{self.path} holds only a part of {name}; restore the checkpoint")
        return result if index is None else result[0]

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

    def _load(self, name: str, chunk: _Chunk) -> torch.Tensor:
        path = self.path / chunk.file
        try:
            with os_errors("read", path):
                window = io.BufferedReader(_Window(self._files[chunk.file], chunk.at, chunk.length))
                tensor = torch.load(window, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ShardFileError(f"{path}: {name} is cut or damaged ({reason}); restore the checkpoint") from None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise ShardFileError(f"{path}: {name} does not have the sizes that {METADATA} gives; restore it")
        return tensor.detach()


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


class _Unpickler(pickle.Unpickler):
    """Reads nothing but the classes that describe a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | type(torch.strided)):
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _read_metadata(file: Path) -> Any:
    if not file.is_file():
        raise ShardFileError(f"{file} is missing; give the folder of a torch_dist checkpoint")
    with os_errors("read", file):
        if file.stat().st_size > _MAX_METADATA_BYTES:
            raise ShardFileError(f"{file} has more than {_MAX_METADATA_BYTES:,} bytes; restore the checkpoint")
        data = file.read_bytes()
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damage can make an unpickler raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShardFileError(f"{file} cannot be read ({reason}); restore the checkpoint") from None


def _chunks(name: str, tensor: Any, places: Mapping[tuple[str, tuple[int, ...]], Any], path: Path) -> list[_Chunk]:
    """Return the chunks of a tensor with their places."""
    chunks = []
    for chunk in tensor.chunks:
        place = places.get((name, tuple(chunk.offsets)))
        if place is None:
            raise ShardFileError(f"{path / METADATA} does not say where {name} is; restore the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedFormatError(f"{path}: {name} is stored compressed, which this release does not read")
        if place.relative_path != os.path.basename(place.relative_path):
            raise ShardFileError(f"{path / METADATA} puts {name} into {place.relative_path!r}, outside the checkpoint")
        chunks.append(_Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length))
    return chunks


def _region(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))


def _refuse_other_backend(path: Path) -> None:
    file = path / BACKEND
    if not file.is_file():
        return
    try:
        backend = json.loads(file.read_bytes()).get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        raise ShardFileError(f"{file} cannot be read; restore the checkpoint") from None
    if backend != "torch_dist":
        raise UnsupportedFormatError(
            f"{file}: the checkpoint was written by {backend!r}, and only torch_dist can be read; save it again with "
            "--ckpt-format torch_dist"
        )
