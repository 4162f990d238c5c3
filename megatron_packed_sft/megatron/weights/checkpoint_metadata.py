"""What the `.metadata` of a torch_dist checkpoint says: its tensors, their chunks, and where those are.

The file is a pickle. It is read without running or importing anything (`inert_pickle`), and every number in it is
checked before it is used, so that a checkpoint from elsewhere can be read by whoever does not trust it.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from megatron_packed_sft.errors import PackedSFTError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.inert_pickle import Inert, Name, load_inert, refusal
from megatron_packed_sft.megatron.weights.saved_archive import dtype_of

_CHECKPOINT: Final = "torch.distributed.checkpoint."
_METADATA: Final = f"{_CHECKPOINT}metadata."
_PLACE: Final = f"{_CHECKPOINT}filesystem._StorageInfo"
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
# What torch.distributed.checkpoint and Megatron-Core write, now and in earlier releases.
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
    f"{_CHECKPOINT}filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    _MEGATRON: {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
_LARGEST: Final = 1 << 62


class Place(NamedTuple):
    """Where something is stored."""

    file: str
    at: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor: where it begins, its sizes, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()


class CheckpointMetadata(NamedTuple):
    """The tensors of a checkpoint, and its other objects, by name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place]


def parse_metadata(data: bytes, name: str = ".metadata") -> CheckpointMetadata:
    """Return what the bytes of a `.metadata` file say, or raise `ShardFileError` or `UnsupportedFormatError`.

    Nothing that the bytes name is imported or called, and memory is bounded by a multiple of their number.

    Args:
        data: the whole file.
        name: of the file, for messages.

    Example:
        >>> parse_metadata(pickle.dumps(eval))
        Traceback (most recent call last):
        megatron_packed_sft.errors.ShardFileError: .metadata cannot be read: it names builtins.eval, which no \
checkpoint needs; it was damaged, or made to run something, so restore the checkpoint from a source you trust
    """
    try:
        root = load_inert(data, _is_allowed)
        return _Converter(num_items_left=len(data), where=name).metadata(root)
    except PackedSFTError:
        raise
    except pickle.UnpicklingError as error:
        raise refusal(name, str(error)) from None
    except (LookupError, TypeError, ValueError) as error:
        raise ShardFileError(f"{name} is damaged ({_short(error)}); restore the checkpoint") from None


def _is_allowed(module: str, name: str) -> bool:
    return name in _CLASSES.get(module, ()) or dtype_of(f"{module}.{name}") is not None


class _Converter:
    """Turns inert records into checked values.

    Args:
        num_items_left: how many chunks and places there may be; a pickle can repeat one list without end.
        where: the file, for messages.
    """

    def __init__(self, *, num_items_left: int, where: str) -> None:
        self._num_items_left = num_items_left
        self._where = where

    def metadata(self, root: Any) -> CheckpointMetadata:
        described = _of_class(root, f"{_METADATA}Metadata", f"{_MEGATRON}.MCoreMetadata")
        places = self._places(described.field("storage_data"))
        tensors, objects = {}, {}
        for name, entry in _of_type(described.field("state_dict_metadata"), dict).items():
            _of_type(name, str)
            kind = _of_class(entry, f"{_METADATA}TensorStorageMetadata", f"{_METADATA}BytesStorageMetadata")
            if kind.name.endswith(".TensorStorageMetadata"):
                tensors[name] = self._tensor(name, kind, places)
            elif (name, ()) in places:
                objects[name] = places[name, ()]
        return CheckpointMetadata(tensors, objects)

    def _places(self, stored: Any) -> dict[tuple[str, tuple[int, ...]], Place]:
        places = {}
        for key, value in _of_type(stored, dict).items():
            self._count()
            index, info = _of_class(key, f"{_METADATA}MetadataIndex"), _of_class(value, _PLACE)
            name = _of_type(index.field("fqn"), str)
            state = _of_type(info.state, dict)
            if state.get("transform_descriptors"):
                raise UnsupportedFormatError(
                    f"{self._where}: {_quoted(name)} is stored compressed, which this release does not read"
                )
            file = _of_type(state["relative_path"], str)
            is_name = file == os.path.basename(file) and 0 < len(file) < 256 and file.isprintable()
            if not is_name or file in (".", ".."):
                raise ShardFileError(
                    f"{self._where} puts {_quoted(name)} into {ascii(file)[:200]}, outside the checkpoint"
                )
            offset = index.state.get("offset")
            position = () if offset is None else _sizes(offset)
            places[name, position] = Place(file, _number(state["offset"]), _number(state["length"]))
        return places

    def _tensor(self, name: str, entry: Inert, places: Mapping[Any, Place]) -> StoredTensor:
        sizes = _sizes(entry.field("size"))
        properties = _of_class(entry.field("properties"), f"{_METADATA}TensorProperties").state
        dtype = _dtype(properties["dtype"] if isinstance(properties, dict) else _of_type(properties, tuple)[0])
        chunks = []
        for part in _of_type(entry.field("chunks"), list):
            self._count()
            found = _of_class(part, f"{_METADATA}ChunkStorageMetadata")
            offsets, lengths = _sizes(found.field("offsets")), _sizes(found.field("sizes"))
            place = places.get((name, offsets))
            if place is None:
                raise ShardFileError(f"{self._where} does not say where {_quoted(name)} is; restore the checkpoint")
            inside = len(offsets) == len(lengths) == len(sizes) and all(
                offset + length <= size for offset, length, size in zip(offsets, lengths, sizes, strict=True)
            )
            # As torch.save writes it, uncompressed: the file cannot ask for more memory than it has bytes.
            if not inside or place.length < math.prod(lengths) * dtype.itemsize:
                raise ShardFileError(f"{self._where} gives {_quoted(name)} impossible sizes; restore the checkpoint")
            chunks.append(Chunk(offsets, lengths, place))
        return StoredTensor(sizes, dtype, tuple(chunks))

    def _count(self) -> None:
        self._num_items_left -= 1
        if self._num_items_left < 0:
            raise ValueError("it repeats the same values too often")


def _of_class(value: Any, *names: str) -> Inert:
    if not isinstance(value, Inert) or value.name not in names:
        raise TypeError(f"{_kind(value)} instead of {names[0].rpartition('.')[2]}")
    return value


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{_kind(value)} instead of {kind.__name__}")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a torch.Size, which is pickled as a call with one tuple."""
    if isinstance(value, Inert) and value.name == "torch.Size" and len(value.arguments) == 1:
        [value] = value.arguments
    if type(value) not in (tuple, list) or len(value) > 64:
        raise TypeError(f"{_kind(value)} instead of sizes")
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{str(value)[:30] if type(value) is int else _kind(value)} instead of a size")
    return value


def _dtype(value: Any) -> torch.dtype:
    found = dtype_of(value.name) if isinstance(value, Name) else None
    if found is None:
        raise TypeError(f"{_kind(value)} instead of a dtype")
    return found


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Inert | Name) else type(value).__name__


def _quoted(name: str) -> str:
    return name[:200] if name.isprintable() else ascii(name)[:200]


def _short(error: Exception) -> str:
    text = str(error).partition("\n")[0][:200]
    return f"no {text}" if isinstance(error, KeyError) else text
