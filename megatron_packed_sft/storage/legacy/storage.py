r"""The pickled .npy of Megatron-Bridge and NeMo as a storage: one file per split, read into memory, never executed.

    \x93NUMPY 1 0 {'descr': '|O', 'fortran_order': False, 'shape': (2000,), }      the header, parsed as a literal
    \x80\x04 ... ndarray of dicts {input_ids, loss_mask, seq_start_id} ... .       the pickle

A pickle names the functions that rebuild its objects, and Python would call any of them. Here `_BinsUnpickler` finds
only the names that NumPy writes into such files, and gives stand-ins for them: they check their arguments, and build
arrays of integers and the array of bins, and nothing else.
"""

from __future__ import annotations

import ast
import os
import pickle
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.figures import BinFigures, PackMetadata
from megatron_packed_sft.storage.flat_files import FIELDS, FlatBins, FlatBinsBuilder, FlatShard
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.token_stream.files import is_stream
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.truncated_files import ends_early

if TYPE_CHECKING:
    from megatron_packed_sft.storage.bins import IntArray

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4096
_HEADER_KEYS = {"descr", "fortran_order", "shape"}
_BINS_AT_ONCE = 256
_INTEGERS = {"b1": "u1"} | {code: code for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")}
_OBJECTS = "O8"
_LARGEST_SHORT_VOCABULARY = 1 << 16  # pickled ids below it take three bytes, others five; a mask entry takes two


class LegacyStorage(Storage):
    """Megatron-Bridge's and NeMo's pickled .npy."""

    name = "legacy"
    aliases = ("legacy_npy_pickle",)
    summary = "Megatron-Bridge's and NeMo's pickled .npy files"
    in_memory = True
    one_shard_per_split = True

    def recognises(self, path: Path) -> bool:
        """Return whether the path has the suffix .npy, unless it is a flat array of integers: a token stream."""
        return path.suffix == ".npy" and not path.is_dir() and not is_stream(path)

    def shard_name(self, number: int) -> str:
        """Return the name of a file."""
        return f"shard_{number:06d}.npy"

    def open(self, path: Path) -> LegacyShard:
        """Read a file into memory; its pickle is never executed."""
        return LegacyShard(path)

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create a `LegacyPickleWriter`."""
        from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter

        return LegacyPickleWriter(path, options)

    def stored_bytes(self, figures: BinFigures) -> int:
        """Return about what the pickle takes; bins are not padded."""
        is_short = figures.vocab_size is not None and figures.vocab_size <= _LARGEST_SHORT_VOCABULARY
        return figures.most_tokens * (5 if is_short else 7) + figures.least_sequences * 3

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return the number of bins in the file's header, and what Megatron-Bridge's metadata beside it says."""
        with _opened(path) as file:
            return {"num_bins": _read_header(path, file), **PackMetadata.recorded_beside(path)}

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return Megatron-Bridge's metadata file."""
        return PackMetadata.file_beside(figures)


STORAGE = LegacyStorage()


class LegacyShard(FlatShard):
    """A packed `.npy` file, read into memory; its pickle is never executed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        location = local_path(path)
        super().__init__(location, _read(location))


def _read(path: Path) -> FlatBins:
    with _opened(path) as file:
        before = os.fstat(file.fileno())
        num_bins = _read_header(path, file)
        pickled = _unpickled(path, file)
        after = os.fstat(file.fileno())
    if len(pickled) != num_bins:
        raise LegacyFormatError(f"{path}: its header says {num_bins:,} bins, and its pickle has {len(pickled):,}")
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise LegacyFormatError(f"{path} was changed while it was read; open it again when its writer is done")
    builder = FlatBinsBuilder(path)
    for first in range(0, num_bins, _BINS_AT_ONCE):
        bins = [_fields(path, index, pickled[index]) for index in range(first, min(first + _BINS_AT_ONCE, num_bins))]
        pickled[first : first + len(bins)] = [None] * len(bins)  # free its lists, which take many times the memory
        builder.add(*zip(*bins, strict=True))
    return builder.build()


def _opened(path: Path) -> BinaryIO:
    """Open a regular file; a pipe under that name must not hang the reader."""

    def opener(name: str, flags: int) -> int:
        fd = os.open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise LegacyFormatError(f"{path} is not a file; pass a packed .npy file")
        return fd

    try:
        with os_errors("open", path):
            return open(path, "rb", opener=opener)
    except ValueError:
        raise LegacyFormatError(f"{str(path)!r} is not a path; check it for odd characters") from None


def _read_header(path: Path, file: BinaryIO) -> int:
    """Read the header of a .npy file; return how many bins it promises."""
    with os_errors("read", path):
        begin = file.read(_MAX_HEADER + 16)
    if begin[:6] != _MAGIC or len(begin) < 12:
        raise LegacyFormatError(f"{path} is not an .npy file: it does not begin with the bytes that NumPy writes")
    version = (begin[6], begin[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise LegacyFormatError(f"{path} has .npy version {version[0]}.{version[1]}; 1.0 to 3.0 are known")
    start = 10 if version == (1, 0) else 12
    length = int.from_bytes(begin[8:start], "little")
    if length > _MAX_HEADER:
        raise LegacyFormatError(f"{path}: its .npy header has {length} bytes, more than the {_MAX_HEADER} allowed")
    if start + length > len(begin):
        raise ends_early(path, "inside its .npy header", LegacyFormatError)
    header = _parsed_header(path, begin[start : start + length])
    if header["descr"] != "|O":
        raise LegacyFormatError(
            f"{path} holds values of type {header['descr']!r:.80}, not packed bins (object dtype '|O'); "
            "pass the .npy file of packed sequences"
        )
    shape = header["shape"]
    if not (isinstance(shape, tuple) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0):
        raise LegacyFormatError(f"{path} has shape {shape!r:.80}; packed bins are a one-dimensional array")
    if shape[0] == 0:
        raise LegacyFormatError(f"{path} holds no bins")
    file.seek(start + length)
    return shape[0]


def _parsed_header(path: Path, text: bytes) -> dict[str, object]:
    try:
        # Python warns of unknown escapes in literals; no header has any.
        header = None if b"\\" in text else ast.literal_eval(text.decode("utf-8"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        header = None
    if not isinstance(header, dict) or set(header) != _HEADER_KEYS:
        raise LegacyFormatError(f"{path}: its .npy header is damaged: {text[:80]!a}")
    return header


def _fields(path: Path, index: int, packed: Any) -> list[IntArray]:
    """Return the three arrays of one unpickled bin."""
    if type(packed) is not dict or set(packed) != set(FIELDS):
        keys = list(packed)[:5] if type(packed) is dict else [packed]
        found = ", ".join(ascii(key[:40]) if type(key) is str else type(key).__name__ for key in keys)
        raise LegacyFormatError(f"{path}: bin {index}: has {found}; a packed bin has exactly {', '.join(FIELDS)}")
    return [_integers(f"{path}: bin {index}: {name}", packed[name]) for name in FIELDS]


def _integers(where: str, value: Any) -> IntArray:
    """Return a list, a tuple or an unpickled array as an array of integers."""
    if type(value) is _Array and value.integers is not None:
        return value.integers
    if type(value) not in (list, tuple):
        raise LegacyFormatError(f"{where} is not a list or an array of integers")
    if not value:
        return np.empty(0, np.int64)
    try:
        array: npt.NDArray[Any] = np.array(value)
    except (ValueError, OverflowError, TypeError, RecursionError):
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise LegacyFormatError(f"{where} holds something other than integers of up to 64 bits")
    return array.view(np.uint8) if array.dtype.kind == "b" else array


def _unpickled(path: Path, file: BinaryIO) -> list[Any]:
    """Return the bins of the pickle that follows the header."""
    try:
        found = _BinsUnpickler(file).load()
        if file.read(1):
            raise _refused("has bytes behind its end")
    except _RefusedError as error:
        raise LegacyFormatError(f"{path}: refused: the pickle {error}; nothing was executed") from None
    except EOFError:
        raise ends_early(path, "inside its pickle", LegacyFormatError) from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        if "truncated" in str(error):
            raise ends_early(path, "inside its pickle", LegacyFormatError) from None
        reason = ascii(" ".join(str(error).split())[:200])[1:-1]
        raise LegacyFormatError(
            f"{path}: refused: the pickle is damaged, or not packed SFT data ({reason}); nothing was executed"
        ) from None
    if type(found) is not _Array or found.bins is None:
        raise LegacyFormatError(f"{path}: refused: the pickle is not an object array of bins; nothing was executed")
    return found.bins


class _RefusedError(Exception):
    """What a pickle asks for that packed bins do not need."""


def _refused(what: str) -> _RefusedError:
    return _RefusedError(what)


class _BinsUnpickler(pickle.Unpickler):
    """Builds packed bins; every name in the pickle that is not in `_STAND_INS` is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        make = _STAND_INS.get((module.replace("numpy._core.", "numpy.core.").replace("__builtin__", "builtins"), name))
        if make is None:
            shown = ascii(f"{module}.{name}")[1:-1]
            raise _refused(f"calls {shown[:160]}, which is not part of packed SFT data")
        return _StandIn(make)


class _StandIn:
    """A callable that a pickle can call and nothing else: it has no attributes to be set, and is no class."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _refused("changes a function")


class _Dtype:
    """A dtype, as a pickle makes it: its code first, then a state with the byte order."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|"):
            raise _refused("holds an array that is not little-endian")


class _Array:
    """An array, as a pickle makes it: integers of one dimension, or the bins of the outermost array."""

    __slots__ = ("bins", "integers")

    def __init__(self) -> None:
        self.integers: IntArray | None = None
        self.bins: list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise _refused("builds an array as NumPy never does")
        _, shape, dtype, _, data = state
        self.fill(shape, dtype, data)

    def fill(self, shape: Any, dtype: Any, data: Any) -> _Array:
        """Take the content; its size must be that of the shape."""
        if type(shape) is not tuple or len(shape) != 1 or type(shape[0]) is not int or type(dtype) is not _Dtype:
            raise _refused("holds an array that is not one-dimensional")
        if dtype.code == _OBJECTS:
            if type(data) is not list or len(data) != shape[0]:
                raise _refused("holds an array whose content does not fit its shape")
            self.bins = data
            return self
        width = int(_INTEGERS[dtype.code][1])
        if type(data) not in (bytes, bytearray) or len(data) != shape[0] * width:
            raise _refused("holds an array whose content does not fit its shape")
        self.integers = np.frombuffer(data, _INTEGERS[dtype.code]) if data else np.empty(0, np.int64)
        return self


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if type(kind) is not _StandIn or shape != (0,):
        raise _refused("builds an array as NumPy never does")
    return _Array()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None) -> _Array:
    return _Array().fill(shape, dtype, data)


def _dtype(code: Any, align: Any = False, copy: Any = False) -> _Dtype:
    if type(code) is not str or (code != _OBJECTS and code not in _INTEGERS):
        shown = ascii(code[:40]) if type(code) is str else type(code).__name__
        raise _refused(f"holds an array that is not of integers ({shown})")
    return _Dtype(code)


def _encode(text: Any, encoding: Any) -> bytes:
    """Return bytes: protocol 2 has no way to write them but this call."""
    if type(text) is not str or encoding != "latin1":
        raise _refused("encodes text as NumPy never does")
    return text.encode("latin1")


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise _refused("makes bytes as NumPy never does")
    return b""


def _never_called(*arguments: Any) -> Any:
    raise _refused("calls numpy.ndarray as NumPy never does")


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _never_called,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _no_bytes,
}
