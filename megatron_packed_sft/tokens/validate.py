"""Check a token store: every byte against its checksum, every offset, id and train value."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.storage.interface import ALWAYS
from megatron_packed_sft.storage.validate import Finding, Level, ValidationReport
from megatron_packed_sft.support.checked_files import CheckedDirectory, CheckedFile, HashingReader
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.tokens.manifest import CHECKSUMS, IDS, OFFSETS, STORE, TRAIN, WEIGHTS, part_arrays
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.store import open_token_store

_BLOCK = 1 << 18  # values read at once


def is_token_store(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory looks like a token store or one of its parts."""
    if is_url(path):
        from megatron_packed_sft.tokens.remote_store import is_remote_store

        return is_remote_store(os.fspath(path))
    location = Path(path)
    return (location / STORE).exists() or (location / OFFSETS).exists()


def validate_token_store(
    path: str | os.PathLike[str], *, level: Level = "full", max_findings: int = 100, progress: bool = False
) -> ValidationReport:
    """Check a token store or a part of one, and report as `validate` does for shards.

    For a URL, `structure` reads documents and headers only, and `full` downloads one part after the other.
    """
    if is_url(path):
        report = ValidationReport("", level, max_findings=max_findings)
        with Outline.of(os.fspath(path)) as outline:
            _validate(outline.path, report, progress, outline)
            report.rename(redacted(os.fspath(path)), outline.at_home)
        return report
    report = ValidationReport(str(local_path(path)), level, max_findings=max_findings)
    _validate(local_path(path), report, progress)
    return report


def _validate(path: Path, report: ValidationReport, progress: bool, outline: Outline | None = None) -> None:
    try:
        store = open_token_store(path)
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return
    with Progress("validate", None, "B", quiet=not progress) as bar:
        for part in store.parts:
            report.num_shards += 1
            report.num_sequences += len(part)
            report.num_tokens += part.manifest.num_tokens
            report.num_loss_tokens += part.manifest.num_trained_tokens
            if report.level == "full":
                try:
                    with contextlib.nullcontext() if outline is None else outline.whole(_name_in(outline, part.path)):
                        _check_part(part, report, bar)
                except PackedSFTError as error:
                    report.add(Finding(str(part.path), str(error)))


def _name_in(outline: Outline, path: Path) -> str:
    return "" if path == outline.path else path.relative_to(outline.path).as_posix()


def _check_part(part: TokenPart, report: ValidationReport, bar: Progress) -> None:
    damaged = []
    with CheckedDirectory.open(part.path) as directory:
        for spec in part_arrays(part.manifest):
            file = directory.array(spec, part.manifest.files[spec.name])
            report.num_bytes += file.size
            if not _check_file(part, file, report, bar):
                damaged.append(spec.name)
    # Damaged offsets do not say where the sequences are.
    if OFFSETS not in damaged:
        _check_sequences(part, damaged, report)


def _check_sequences(part: TokenPart, damaged: Sequence[str], report: ValidationReport) -> None:
    """Compare every sequence with its checksum; report the first one that differs, with the damaged file."""
    arrays = part.arrays
    for first in range(0, len(part), _BLOCK):
        sequences = np.arange(first, min(first + _BLOCK, len(part)))
        part.recorded_spans(sequences)  # refuses those that are not inside the arrays
        unsound = arrays.find_unsound(sequences, ALWAYS)
        if unsound is not None:
            file = part.path / (damaged[0] if damaged else CHECKSUMS)
            report.add(Finding(str(file), f"sequence {unsound} does not match its checksum", field="checksums"))
            return


def _check_file(part: TokenPart, file: CheckedFile, report: ValidationReport, bar: Progress) -> bool:
    """Check one file and report what is wrong; return whether its content matches its checksum."""
    manifest = part.manifest
    reader = HashingReader(file, manifest.checksum_algorithm or DEFAULT_ALGORITHM, bar)
    count = file.header.shape[0]
    buffer = np.empty(min(_BLOCK, count), file.header.dtype)
    previous = -1
    trained = 0
    for first in range(0, count, _BLOCK):
        values = buffer[: min(_BLOCK, count - first)]
        reader.read_into(values)
        if file.name == IDS:
            bad = np.flatnonzero(values.view(f"<u{values.dtype.itemsize}") >= manifest.id_limit)
            says = f"id is not in 0..{manifest.id_limit - 1}"
        elif file.name == TRAIN:
            bad = np.flatnonzero(values > 1)
            says = "train is not 0 or 1"
            trained += int(values.sum(dtype=np.int64))
        elif file.name == WEIGHTS:
            train = part.arrays.train[first : first + len(values)]
            bad = np.flatnonzero(~np.isfinite(values) | (values < 0) | ((values > 0) != (train > 0)))
            says = "the weight is not a finite number that is above 0 exactly where train is 1"
        elif file.name == CHECKSUMS:
            continue  # any number is possible here; `_check_sequences` compares them
        else:
            steps = np.diff(values.view(np.int64), prepend=previous)
            bad = np.flatnonzero(steps < 1)
            says = "offsets do not increase"
            previous = int(values[-1])
        if bad.size:
            place = first + int(bad[0])
            report.add(Finding(str(file.path), f"{says} at entry {place}", field=file.name.removesuffix(".npy")))
    if reader.hexdigest() != manifest.files[file.name].checksum:
        report.add(Finding(str(file.path), "its content does not match its checksum; restore it from the original"))
        return False
    if file.name == TRAIN and trained != manifest.num_trained_tokens:
        report.add(
            Finding(
                str(part.path / MANIFEST),
                f"num_trained_tokens is {manifest.num_trained_tokens}, the array says {trained}",
                field="num_trained_tokens",
            )
        )
    return True
