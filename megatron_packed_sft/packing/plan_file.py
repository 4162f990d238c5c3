"""A plan as one file: an uncompressed .npz that NumPy reads, checked in full before it becomes a plan again.

    plan.json        uint8, JSON: version, options, accounting, fingerprints
    bin_offsets, indices, unit_lengths
    order, held_back                                                     when there are any
    chunk_sequence, chunk_start, chunk_masked_prefix                     when sequences were cut

It is not pickled, nothing in it is compressed, and names, types and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import PackedSFTError, ShardFileError, StorageIOError, UnsupportedFormatError
from megatron_packed_sft.packing.accounting import REASONS, Accounting
from megatron_packed_sft.packing.items import Chunks
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.plan_check import check_plan
from megatron_packed_sft.packing.sizes import MEASURES

_VERSION = 1
_HEADER = "plan.json"
_LARGEST_HEADER = 1 << 20
_TYPES = {
    "bin_offsets": "<i8",
    "indices": "<i4",
    "unit_lengths": "<i4",
    "order": "<i4",
    "held_back": "<i4",
    "chunk_sequence": "<i4",
    "chunk_start": "<i4",
    "chunk_masked_prefix": "<i4",
}
_REQUIRED = ("bin_offsets", "indices", "unit_lengths")
_CHUNKS = ("chunk_sequence", "chunk_start", "chunk_masked_prefix")


def save_plan(plan: PackPlan, path: str | os.PathLike[str]) -> None:
    """See `PackPlan.save`."""
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "bin_offsets": plan.bin_offsets,
        "indices": plan.indices,
        "unit_lengths": plan.unit_lengths,
        "order": plan.order,
        "held_back": plan.held_back,
    }
    if plan.chunks is not None:
        chunks = plan.chunks
        arrays |= dict(zip(_CHUNKS, (chunks.sequence, chunks.start, chunks.masked_prefix), strict=True))
    header = {
        "version": _VERSION,
        "pack_size": plan.pack_size,
        "strategy": plan.strategy,
        "method": plan.method,
        "measure": plan.measure,
        "pad_seq_to_mult": plan.pad_seq_to_mult,
        "global_batch": plan.global_batch,
        "lower_bound": plan.lower_bound,
        "accounting": plan.accounting.as_dict(),
        "fingerprint": plan.fingerprint,
        "order_fingerprint": plan.order_fingerprint,
    }
    target = os.path.abspath(path)
    # A sibling of the target, so that the rename stays inside one file system.
    temporary = f"{target}.staging-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            with open(temporary, "xb") as file:
                _write(file, json.dumps(header, sort_keys=True).encode(), arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        directory = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise _os_error("write", target, error) from error


def _write(file: io.BufferedWriter, header: bytes, arrays: dict[str, npt.NDArray[Any] | None]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        entries = {_HEADER: np.frombuffer(header, np.uint8)} | {
            name: array.astype(_TYPES[name], copy=False) for name, array in arrays.items() if array is not None
        }
        for name, array in entries.items():
            # A fixed date, so that equal plans are equal files.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)


def _os_error(action: str, path: str, error: OSError) -> StorageIOError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    translated = StorageIOError(f"cannot {action} the plan {path}: {reason}; check the path and its permissions")
    translated.errno = error.errno
    return translated


def load_plan(path: str | os.PathLike[str]) -> PackPlan:
    """See `PackPlan.load`."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(archive, name, size)
            arrays = {key: _read_array(archive, key, name, size) for key in _array_names(archive, name)}
    except PackedSFTError:
        raise
    except OSError as error:
        raise _os_error("read", name, error) from error
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _broken(name, f"it is no whole .npz file ({error})") from None
    plan = _assemble(header, arrays, name)
    check_plan(plan, name)
    for key, found in (("fingerprint", plan.fingerprint), ("order_fingerprint", plan.order_fingerprint)):
        if header[key] != found:
            raise _broken(name, f"its {key} is {found}, not {header[key]} as noted inside")
    return plan


def _broken(name: str, what: str) -> ShardFileError:
    return ShardFileError(f"{name} is not a sound pack plan: {what}; make it again with PackPlan.save")


def _array_names(archive: zipfile.ZipFile, name: str) -> list[str]:
    found = [entry.filename for entry in archive.infolist() if entry.filename != f"{_HEADER}.npy"]
    names = [entry.removesuffix(".npy") for entry in found]
    if len(set(names)) < len(names) or not {f"{key}.npy" for key in _TYPES} >= set(found):
        raise _broken(name, f"it holds {', '.join(sorted(found))}")
    missing = [key for key in _REQUIRED if key not in names]
    if missing or len([key for key in _CHUNKS if key in names]) not in (0, len(_CHUNKS)):
        raise _broken(name, f"arrays are missing; it holds {', '.join(sorted(names))}")
    return names


def _read_array(archive: zipfile.ZipFile, key: str, name: str, file_size: int) -> npt.NDArray[Any]:
    """Read one array, after its header was found to agree with the bytes that are really there."""
    entry = archive.getinfo(f"{key}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > file_size or entry.flag_bits & 1:
        raise _broken(name, f"{key} is compressed, encrypted or longer than the file")
    with archive.open(entry) as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise _broken(name, f"{key} has .npy version {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        expected = _TYPES.get(key, "|u1")
        if dtype.str != expected or len(shape) != 1 or fortran:
            raise _broken(name, f"{key} is {dtype.str} with shape {shape}, not {expected} with one dimension")
        data = member.read()
    if len(data) != shape[0] * dtype.itemsize:
        raise _broken(name, f"{key} says {shape[0]} values and has {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _read_header(archive: zipfile.ZipFile, name: str, file_size: int) -> dict[str, Any]:
    try:
        entry = archive.getinfo(f"{_HEADER}.npy")
    except KeyError:
        raise _broken(name, f"{_HEADER} is missing") from None
    if entry.file_size > _LARGEST_HEADER:
        raise _broken(name, f"{_HEADER} has {entry.file_size:,} bytes")
    header = json.loads(_read_array(archive, _HEADER, name, file_size).tobytes())
    if not isinstance(header, dict):
        raise _broken(name, f"{_HEADER} is no JSON object")
    if header.get("version") != _VERSION:
        raise UnsupportedFormatError(
            f"{name} is a pack plan of version {header.get('version')!r}; this release reads version {_VERSION}"
        )
    return header


def _assemble(header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], name: str) -> PackPlan:
    try:
        accounting = header["accounting"]
        counts: dict[str, Any] = {
            key: _count(value) for key, value in accounting.items() if not key.startswith("dropped_")
        }
        counts |= {
            key: {reason: _count(value) for reason, value in accounting[key].items() if reason in REASONS}
            for key in ("dropped_sequences", "dropped_tokens")
        }
        chunks = None
        if "chunk_sequence" in arrays:
            chunks = Chunks(
                sequence=arrays["chunk_sequence"],
                start=arrays["chunk_start"],
                masked_prefix=arrays["chunk_masked_prefix"],
            )
        if header["measure"] not in MEASURES:
            raise ValueError(f"measure {header['measure']!r}")
        return PackPlan(
            bin_offsets=arrays["bin_offsets"],
            indices=arrays["indices"],
            unit_lengths=arrays["unit_lengths"],
            pack_size=_count(header["pack_size"]),
            strategy=str(header["strategy"]),
            method=str(header["method"]),
            measure=header["measure"],
            pad_seq_to_mult=_count(header["pad_seq_to_mult"]),
            accounting=Accounting(**counts),
            lower_bound=_count(header["lower_bound"]),
            chunks=chunks,
            order=arrays.get("order"),
            global_batch=None if header["global_batch"] is None else _count(header["global_batch"]),
            held_back=arrays.get("held_back"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(name, f"{_HEADER} does not fit ({error!r})") from None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value
