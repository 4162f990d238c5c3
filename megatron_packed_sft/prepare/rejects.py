"""Write the rejects file: JSON lines with file, line, reason and detail of every record that was lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import basename

import numpy as np

from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.encode_stage import EncodedSources
from megatron_packed_sft.prepare.plan_stage import drop_reasons, reason_of
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.prepare.work_directory import WorkDirectory, part_number, slice_receipt
from megatron_packed_sft.remote.filesystem import refuse_read_only
from megatron_packed_sft.remote.objects import object_info, read_range
from megatron_packed_sft.remote.uploads import uploading
from megatron_packed_sft.support.atomic import Staging, os_errors
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.drop_reasons import Severity
from megatron_packed_sft.support.paths import is_url, local_path, refuse_special_file

_LONGEST_LINE = 1 << 20
_KEYS = {"file", "line", "reason", "detail"}


def rejects_place(path: str) -> Path | str:
    """Return the path or URL of the rejects file."""
    return path if is_url(path) else local_path(path, "rejects")


def refuse_other_file(path: Path | str) -> None:
    """Refuse to replace anything but an earlier rejects file."""
    if isinstance(path, str):
        refuse_read_only(path, "rejects")
        info = object_info(path)
        if info is None or info.size == 0:
            return
    elif not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    try:
        if isinstance(path, str):
            first = json.loads(read_range(path, 0, _LONGEST_LINE).partition(b"\n")[0])
        else:
            refuse_special_file(path)
            with open(path, "rb") as file:
                first = json.loads(file.readline())
        is_ours = isinstance(first, dict) and set(first) == _KEYS
    except StorageIOError:
        raise  # what is there is unknown
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise InvalidInputError(f"rejects {path} exists and is not a rejects file; choose another path")


def write_rejects(
    path: Path | str,
    sources: Sequence[ScannedSource],
    encoded: EncodedSources,
    plans: Mapping[str, PackPlan],
    options: PackOptions,
    work: WorkDirectory,
) -> None:
    """Write every record that was lost: those that could not be encoded, and those that fit into no bin.

    Records that the options leave out on purpose (duplicates, a weight below 1, packing.min_len and packing.max_len)
    are only counted.
    """
    if isinstance(path, str):
        with uploading(path, overwrite=True) as local:
            write_rejects(local, sources, encoded, plans, options, work)
        return
    too_long = _dropped_by_plans(encoded, plans, options, work)
    with Staging(path, overwrite=True) as staging:
        with os_errors("write", path), open(staging.path / path.name, "w", encoding="utf-8") as file:
            for number, name in encoded.slice_sources.items():
                noted = work.receipt(slice_receipt(number), None)
                if noted is None:
                    raise _damaged(work)
                where = _current_path(noted["file"], name, sources)
                for line, reason, detail in sorted([*map(tuple, noted["drops"]), *too_long.get(number, [])]):
                    reject = {"file": where, "line": line, "reason": reason, "detail": detail}
                    file.write(json.dumps(reject, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        staging.publish_file(path.name)


def _dropped_by_plans(
    encoded: EncodedSources, plans: Mapping[str, PackPlan], options: PackOptions, work: WorkDirectory
) -> dict[int, list[tuple[int, str, str]]]:
    """Return slice -> records of which no token is in a bin, although no option asked for that."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for split, plan in plans.items():
        store = encoded.stores[split]
        lengths = store.lengths
        reasons = drop_reasons(plan, lengths, options)
        first = 0
        for part in store.parts:
            number = part_number(part)
            dropped = np.flatnonzero(reasons[first : first + len(part)] >= 0)
            lost = [
                one for one in dropped.tolist() if reason_of(reasons[first + one]).severity is not Severity.HARMLESS
            ]
            if lost:
                records = _record_numbers(work, split, number)
                unique = {int(records[one]): one for one in lost}  # a weight above 1 repeats records
                found.setdefault(number, []).extend(
                    (
                        record,
                        str(reason_of(reasons[first + one])),
                        f"{lengths[first + one]} tokens, but at most {options.longest_item} fit into a bin",
                    )
                    for record, one in unique.items()
                )
            first += len(part)
    return found


def _record_numbers(work: WorkDirectory, split: str, number: int) -> Sequence[int]:
    path = work.record_numbers(split, number)
    noted = work.receipt(slice_receipt(number), None)
    try:
        if noted is not None and checksum(path.read_bytes()) == noted["record_numbers"][split]:
            numbers: Sequence[int] = np.load(path).tolist()
            return numbers
    except (OSError, KeyError):
        pass
    raise _damaged(work)


def _current_path(noted: str, source: str, sources: Sequence[ScannedSource]) -> str:
    """Return the current path of a file, which may have been moved since it was encoded."""
    files = next(one.files for one in sources if one.source.name == source)
    same_name: Iterator[str] = (file.shown for file in files if file.name == basename(noted.split("?")[0]))
    return noted if any(file.shown == noted for file in files) else next(same_name, noted)


def _damaged(work: WorkDirectory) -> StorageIOError:
    return StorageIOError(
        f"rejects cannot be written, because receipts in {work.shown} are damaged; remove that directory and run again"
    )
