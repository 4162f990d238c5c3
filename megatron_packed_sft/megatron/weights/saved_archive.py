"""Read what torch.save wrote, without torch.load: plain values and tensors, and nothing is imported or called.

    archive/data.pkl      a pickle: values, and tensors as calls of torch._utils._rebuild_tensor_v2
    archive/data/0, ...   the storages of the tensors, as they are in memory
    archive/byteorder     little or big

torch's own restricted reader (`weights_only`) does call what is on its list, which packages add to: `bytearray` with
any size, say. And it looks into the archive with another reader than Python's, so that a check of the archive in
Python would not hold for it. Here one reader does both, and memory stays below a multiple of the archive's size.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import sys
import zipfile
from typing import Any, Final, NamedTuple

import torch

from megatron_packed_sft.errors import PackedSFTError, ShardFileError
from megatron_packed_sft.megatron.weights.inert_pickle import Inert, Name, load_inert, refusal

_PICKLE: Final = "data.pkl"
_STORAGE_DTYPES: Final = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.storage.UntypedStorage": torch.uint8,
}
# With the dtype of the storage, or with one of its own: float8 has no storage class.
_REBUILD, _REBUILD_WITH_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_NAMES: Final = {*_STORAGE_DTYPES, _REBUILD, _REBUILD_WITH_DTYPE, "collections.OrderedDict"}
_HEADER_BYTES, _HEADER_LENGTHS_AT = 30, 26  # in front of each file in a zip archive


def load_saved(file: Any, num_bytes: int, where: str) -> Any:
    """Return what torch.save wrote: plain values and tensors.

    Args:
        file: a binary one, open for reading.
        num_bytes: its size; a compressed archive could unfold to much more, and torch writes none.
        where: the file, and what of it, for messages.

    Example:
        >>> import io
        >>> saved = io.BytesIO()
        >>> torch.save({"a": torch.arange(3)}, saved)
        >>> load_saved(saved, len(saved.getvalue()), "a file")
        {'a': tensor([0, 1, 2])}
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if (
                any(one.compress_type != zipfile.ZIP_STORED for one in members)
                or sum(one.file_size for one in members) > num_bytes
            ):
                raise ShardFileError(f"{where} is compressed, which torch.save never does; restore the checkpoint")
            return _Archive(archive, file).load()
    except PackedSFTError:
        raise
    except pickle.UnpicklingError as error:
        raise refusal(where, str(error)) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(error, where) from None
    except Exception as error:  # damage can make zipfile raise anything
        raise _damaged(error, where) from None


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of a name such as torch.float32; None if it is none.

    Example:
        >>> dtype_of("torch.float32"), dtype_of("torch.load")
        (torch.float32, None)
    """
    module, _, short = name.rpartition(".")
    found = vars(torch).get(short) if module == "torch" else None  # not getattr, which may import a submodule
    return found if isinstance(found, torch.dtype) else None


class _Storage(NamedTuple):
    """The bytes of one or more tensors, and the dtype that they were saved with."""

    data: torch.Tensor
    dtype: torch.dtype


class _Archive:
    """An open archive."""

    def __init__(self, archive: zipfile.ZipFile, file: Any) -> None:
        self._archive, self._file = archive, file
        [self._root] = [one.removesuffix(_PICKLE) for one in archive.namelist() if one.endswith(f"/{_PICKLE}")]
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        order = f"{self._root}byteorder"
        if order in self._archive.NameToInfo and self._archive.read(order) != sys.byteorder.encode():
            raise ValueError(f"its bytes are not in {sys.byteorder}-endian order")
        data = self._archive.read(f"{self._root}{_PICKLE}")
        value = load_inert(data, _is_allowed, self._tensor, self._storage)
        _refuse_repetition(value, len(data))
        return value

    def _storage(self, id: Any) -> _Storage:
        """Return a storage, which several tensors may share."""
        kind, storage_type, key, _, num_items = id
        dtype = _STORAGE_DTYPES.get(storage_type.name)
        if kind != "storage" or dtype is None or type(key) is not str or type(num_items) is not int:
            raise ValueError("it refers to something that is not a storage")
        if key not in self._storages:
            member = self._archive.getinfo(f"{self._root}data/{key}")
            if member.file_size != num_items * dtype.itemsize:
                raise ValueError(f"the storage {key[:20]} has {member.file_size} bytes instead of {num_items} items")
            self._storages[key] = _Storage(self._read(member), dtype)
        if self._storages[key].dtype != dtype:
            raise ValueError(f"the storage {key[:20]} has two dtypes")
        return self._storages[key]

    def _read(self, member: zipfile.ZipInfo) -> torch.Tensor:
        """Return the bytes of a storage, read to where they stay; zipfile would copy them three times."""
        data = torch.empty(member.file_size, dtype=torch.uint8)
        view: Any = data.numpy()
        self._file.seek(member.header_offset)
        header = self._file.read(_HEADER_BYTES)
        self._file.seek(sum(struct.unpack_from("<HH", header, _HEADER_LENGTHS_AT)), os.SEEK_CUR)  # name, extra field
        at = 0
        while at < len(view) and (num_read := self._file.readinto(view[at:])):
            at += num_read
        if at < len(view):
            raise ValueError(f"{member.filename[:200]} is cut")
        return data

    def _tensor(self, call: Inert) -> torch.Tensor:
        if call.name not in (_REBUILD, _REBUILD_WITH_DTYPE):
            raise pickle.UnpicklingError(f"it calls {call.name}")
        storage, offset, sizes, strides, *others = call.arguments
        if type(storage) is not _Storage:
            raise ValueError("it has a tensor without a storage")
        dtype = storage.dtype
        if call.name == _REBUILD_WITH_DTYPE:
            found = dtype_of(others[2].name) if type(others[2]) is Name else None
            if found is None:
                raise ValueError("it has a tensor without a dtype")
            dtype = found
        items = storage.data.view(dtype)
        # Strides of 0 would make much of little.
        if any(type(one) is not int or one < 0 for one in (*sizes, *strides)) or math.prod(sizes) > items.numel():
            raise ValueError(f"a tensor is larger than its storage of {items.numel()} items")
        return items.as_strided(sizes, strides, offset)  # refuses what is outside the storage


def _refuse_repetition(value: Any, num_values_left: int) -> None:
    """Refuse lists and dicts that hold each other, or the same values many times over: whoever walks there never ends.

    Args:
        value: what a pickle describes.
        num_values_left: how many there may be in it; each takes at least a byte of the pickle.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        num_values_left -= 1
        if num_values_left < 0:
            raise pickle.UnpicklingError("it repeats the same values too often")
        waiting.extend(one.values() if type(one) is dict else one if type(one) in (list, tuple) else ())


def _is_allowed(module: str, name: str) -> bool:
    full = f"{module}.{name}"
    return full in _NAMES or dtype_of(full) is not None


def _damaged(error: Exception, where: str) -> ShardFileError:
    reason = str(error).partition("\n")[0][:200] or type(error).__name__
    return ShardFileError(f"{where} is cut or damaged ({reason}); restore the checkpoint")
