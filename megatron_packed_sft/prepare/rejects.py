"""The rejects file: which records were dropped and why, as JSON lines with file, line, reason and detail."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import basename

import numpy as np

from megatron_packed_sft.disk.atomic import Staging, os_errors
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.encode_stage import EncodedSources
from megatron_packed_sft.prepare.plan_stage import drop_reasons, reason_of
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.prepare.work_directory import WorkDirectory, part_number, record_numbers_path, slice_receipt
from megatron_packed_sft.support.drop_reasons import Severity

_KEYS = {"file", "line", "reason", "detail"}


def refuse_other_file(path: Path) -> None:
    """Refuse to replace anything but an earlier rejects file."""
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    try:
        with open(path, "rb") as file:
            first = json.loads(file.readline())
        is_ours = isinstance(first, dict) and set(first) == _KEYS
    except (OSError, ValueError):
        is_ours = False
    if not is_ours:
        raise InvalidInputError(f"rejects {path} exists and is not a rejects file; choose another path")


def write_rejects(
    path: Path,
    sources: Sequence[ScannedSource],
    encoded: EncodedSources,
    plans: Mapping[str, PackPlan],
    options: PackOptions,
    work: WorkDirectory,
) -> None:
    """Write every record that was lost: those that could not be encoded and those that no bin has room for.

    Records that the options leave out on purpose (duplicates, a weight below 1, packing.min_len and packing.max_len)
    are only counted.
    """
    too_long = _dropped_by_plans(encoded, plans, options, work)
    with Staging(path, overwrite=True) as staging:
        with os_errors("write", path), open(staging.path / path.name, "w", encoding="utf-8") as file:
            for number, name in enumerate(encoded.slice_sources):
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
    """Return slice -> the records of which no token is in a bin, though no option asked for that."""
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
    path = record_numbers_path(work.tokens, split, number)
    noted = work.receipt(slice_receipt(number), None)
    try:
        if noted is not None and checksum(path.read_bytes()) == noted["record_numbers"][split]:
            numbers: Sequence[int] = np.load(path).tolist()
            return numbers
    except (OSError, KeyError):
        pass
    raise _damaged(work)


def _current_path(noted: str, source: str, sources: Sequence[ScannedSource]) -> str:
    """Return where a file is now; it may have been moved since it was encoded."""
    files = next(one.files for one in sources if one.source.name == source)
    same_name: Iterator[str] = (file.path for file in files if basename(file.path) == basename(noted))
    return noted if any(file.path == noted for file in files) else next(same_name, noted)


def _damaged(work: WorkDirectory) -> StorageIOError:
    return StorageIOError(f"the receipts in {work.path} are damaged, so rejects cannot be written; add --force")
