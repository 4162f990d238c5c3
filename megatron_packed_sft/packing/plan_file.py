"""A plan as one file: an uncompressed .npz that NumPy reads, checked completely before it becomes a plan again.

    plan.json        uint8, JSON: version, options, accounting, fingerprints
    bin_offsets, indices, unit_lengths               (unit_lengths: `item_lengths` of the plan)
    order, held_back                                 if the plan has them
    chunk_sequence, chunk_start, chunk_masked_prefix if sequences were cut

Nothing is pickled or compressed, and names, types and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ShardFileError, UnsupportedFormatError
from megatron_packed_sft.packing.items import MEASURES, REASONS, Accounting, Chunks
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.remote.uploads import uploading
from megatron_packed_sft.support.atomic import Staging, os_errors, write_at
from megatron_packed_sft.support.paths import is_url, local_path, redacted

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
_NPY_HEADER = 128  # bytes, of a one-dimensional array of version 1.0
_REQUIRED = ("bin_offsets", "indices", "unit_lengths")
_CHUNKS = ("chunk_sequence", "chunk_start", "chunk_masked_prefix")


def save_plan(plan: PackPlan, path: str | os.PathLike[str]) -> None:
    """See `PackPlan.save`."""
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "bin_offsets": plan.bin_offsets,
        "indices": plan.indices,
        "unit_lengths": plan.item_lengths,
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
    if is_url(path):
        with uploading(os.fspath(path), overwrite=True) as local:
            save_plan(plan, local)
        return
    with Staging(local_path(path, "the plan's path"), overwrite=True) as staging:
        _write(staging.path / "plan.npz", json.dumps(header, sort_keys=True).encode(), arrays, staging.target)
        staging.publish_file("plan.npz")


def _write(path: Path, header: bytes, arrays: dict[str, npt.NDArray[Any] | None], target: Path) -> None:
    entries = {_HEADER: np.frombuffer(header, np.uint8)} | {
        name: array.astype(_TYPES[name], copy=False) for name, array in arrays.items() if array is not None
    }
    with os_errors("write the plan", target, sum(array.nbytes for array in entries.values())):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with zipfile.ZipFile(cast("IO[bytes]", _PositionedFile(fd)), "w", zipfile.ZIP_STORED) as archive:
                for name, array in entries.items():
                    # A fixed date, so that equal plans are equal files.
                    entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                    with archive.open(entry, "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            os.fsync(fd)
        finally:
            os.close(fd)


class _PositionedFile:
    """The methods of a file that zipfile uses, on `write_at`; writes are few and large, so no buffer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0

    def write(self, data: bytes) -> int:
        write_at(self._fd, data, self._position)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        self._position = base + position
        return self._position

    def flush(self) -> None:
        """Nothing is buffered."""


def load_plan(path: str | os.PathLike[str]) -> PackPlan:
    """See `PackPlan.load`."""
    with _opened(path) as (archive, name, size):
        header = _read_header(archive, name, size)
        arrays = {key: _read_array(archive, key, name, size) for key in _array_names(archive, name)}
    plan = _assemble(header, arrays, name)
    _check(plan, name)
    for key, found in (("fingerprint", plan.fingerprint), ("order_fingerprint", plan.order_fingerprint)):
        if header[key] != found:
            raise _broken(name, f"its {key} is {found}, but the file records {header[key]}")
    return plan


def read_plan_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the header of a plan's file with its number of bins and items; its arrays are not read."""
    with _opened(path) as (archive, name, size):
        header = _read_header(archive, name, size)
        counts = {
            key: (archive.getinfo(f"{key}.npy").file_size - _NPY_HEADER) // int(_TYPES[key][2])
            for key in _array_names(archive, name)
        }
    return {
        **header,
        "num_bins": counts["bin_offsets"] - 1,
        "num_items": counts["indices"],
        "has_order": "order" in counts,
    }


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[zipfile.ZipFile, str, int]]:
    """Open a plan's file, or the cached copy of a URL; yield it with its name for messages and its size."""
    name = redacted(os.fspath(path))
    local = copy_of(os.fspath(path), kind="a plan") if is_url(path) else Path(path)
    try:
        with os_errors("read the plan", local), open(local, "rb") as file, zipfile.ZipFile(file) as archive:
            yield archive, name, os.fstat(file.fileno()).st_size
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _broken(name, f"it is not a whole .npz file ({error})") from None


def _broken(name: str, what: str) -> ShardFileError:
    return ShardFileError(f"{name} is not a valid pack plan: {what}; make the plan again")


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
    """Read one array whose header agrees with its bytes."""
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
        raise _broken(name, f"{key} should have {shape[0]} values and has {len(data)} bytes")
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
        raise _broken(name, f"{_HEADER} is not a JSON object")
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
            item_lengths=arrays["unit_lengths"],
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
        raise ValueError(f"{value!r} is not a count")
    return value


def _check(plan: PackPlan, name: str) -> None:
    """Refuse a plan that breaks a rule; `name` is its file."""
    # Each check relies on the ones before it.
    for check in (_arrays, _canonical_order, _capacity, _chunks, _extras, _counts):
        what = check(plan)
        if what:
            raise _broken(name, what)


def _arrays(plan: PackPlan) -> str:
    offsets = plan.bin_offsets
    if offsets.size < 2 or offsets[0] != 0 or offsets[-1] != plan.indices.size or (np.diff(offsets) < 1).any():
        return "bin_offsets does not cut indices into bins with at least one item each"
    if plan.item_lengths.size == 0 or plan.item_lengths.min() < 1:
        return "an item has no tokens"
    if plan.indices.min() < 0 or plan.indices.max() >= plan.item_lengths.size:
        return "indices names an item that is not there"
    if (np.bincount(plan.indices) > 1).any():
        return "an item is in two bins"
    if plan.pack_size < 1 or plan.pad_seq_to_mult < 1 or not 1 <= plan.lower_bound <= plan.num_bins + _held_back(plan):
        return "pack_size, pad_seq_to_mult or lower_bound is out of range"
    return ""


def _held_back(plan: PackPlan) -> int:
    """The most bins that can have been held back: each had at least one item."""
    return 0 if plan.held_back is None else plan.held_back.size


def _canonical_order(plan: PackPlan) -> str:
    firsts = plan.indices[plan.bin_offsets[:-1]]
    is_rising = np.diff(plan.indices) > 0
    is_rising[plan.bin_offsets[1:-1] - 1] = True  # between bins
    if not is_rising.all() or (np.diff(firsts) <= 0).any():
        return "items or bins are not in canonical order"
    return ""


def _capacity(plan: PackPlan) -> str:
    is_single = np.diff(plan.bin_offsets) == 1
    over = plan.bin_room > plan.pack_size
    if (over & ~is_single).any():
        return f"bin {int(np.argmax(over & ~is_single))} holds more than pack_size"
    if int(over.sum()) > plan.accounting.num_oversized:
        return f"bin {int(np.argmax(over))} holds a sequence longer than pack_size"
    return ""


def _chunks(plan: PackPlan) -> str:
    chunks = plan.chunks
    num_sequences = plan.accounting.num_sequences
    if chunks is None:
        return "" if plan.item_lengths.size == num_sequences else "unit_lengths does not have one entry per sequence"
    sizes = {chunks.sequence.size, chunks.start.size, chunks.masked_prefix.size, plan.item_lengths.size}
    if len(sizes) > 1:
        return "the arrays of chunks differ in length"
    if chunks.sequence.min() < 0 or chunks.sequence.max() >= num_sequences:
        return "a chunk belongs to a sequence that is not there"
    if (np.diff(chunks.sequence) < 0).any() or chunks.start.min() < 0:
        return "chunks are not ordered by sequence and start"
    same = np.diff(chunks.sequence) == 0
    if (np.diff(chunks.start)[same] <= 0).any():
        return "chunks are not ordered by sequence and start"
    if chunks.masked_prefix.min() < 0 or (chunks.masked_prefix >= plan.item_lengths).any():
        return "a chunk trains nothing: masked_prefix is as long as the chunk"
    return ""


def _extras(plan: PackPlan) -> str:
    if plan.order is not None and not np.array_equal(np.sort(plan.order), np.arange(plan.num_bins)):
        return "order does not hold each bin once"
    if plan.global_batch is not None and plan.global_batch < 1:
        return "global_batch is below 1"
    held_back = plan.held_back
    if held_back is not None:
        if held_back.size and (held_back.min() < 0 or held_back.max() >= plan.item_lengths.size):
            return "held_back names an item that is not there"
        if np.isin(held_back, plan.indices).any() or np.unique(held_back).size < held_back.size:
            return "held_back names an item twice, or one that is in a bin"
    return ""


def _counts(plan: PackPlan) -> str:
    accounting = plan.accounting
    if int(plan.bin_tokens.sum()) != accounting.num_tokens_packed:
        return f"its bins hold {int(plan.bin_tokens.sum())} tokens, not {accounting.num_tokens_packed} as accounted"
    packed = plan.indices if plan.chunks is None else np.unique(plan.chunks.sequence[plan.indices])
    if packed.size != accounting.num_sequences_packed:
        return f"it packs {packed.size} sequences, not {accounting.num_sequences_packed} as accounted"
    return ""
