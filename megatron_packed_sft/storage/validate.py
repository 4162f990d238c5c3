"""`validate`: is what lies there whole and sound? Findings name the file, the row and the field.

`structure` looks at manifests, names, sizes and headers (milliseconds). `full` also reads every byte once, compares
it with its checksum and checks every invariant of every row.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardError
from megatron_packed_sft.storage.dataset_directory import DATASET, DatasetDirectory, open_dataset, summarize
from megatron_packed_sft.storage.memmap_v1 import layout
from megatron_packed_sft.storage.memmap_v1.content_check import ShardContent
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.memmap_v1.reader import checked_shard
from megatron_packed_sft.storage.validation_report import Finding, Level, ValidationReport


def validate(
    path: str | os.PathLike[str], *, level: Level = "full", max_findings: int = 100, progress: bool = False
) -> ValidationReport:
    """Check a shard, a dataset directory, or a directory of shards.

    Args:
        path: a directory with manifest.json (a shard), with dataset.json (a dataset), or with shards in it.
        level: `structure` or `full`.
        max_findings: keep that many; more are only counted.
        progress: show a bar over the bytes read.

    Example:
        >>> report = validate("my_dataset")  # doctest: +SKIP
        >>> report.ok, report.num_bins  # doctest: +SKIP
        (True, 20000)
    """
    if level not in get_args(Level):
        raise InvalidInputError(f"level {level!r} is unknown; use one of {', '.join(get_args(Level))}")
    location = Path(os.path.abspath(path))
    report = ValidationReport(str(location), level, max_findings=max_findings)
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="validate", disable=not progress) as bar:
        if os.path.lexists(location / DATASET):
            _validate_dataset(location, report, bar)
        elif os.path.lexists(location / MANIFEST):
            _validate_shard(location, report, bar)
        else:
            for shard in _shards_below(location):
                _validate_shard(shard, report, bar)
    return report


def _shards_below(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ShardError(f"{directory} is not a directory; name a shard or a dataset directory")
    with os_errors("list", directory):
        found = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise ShardError(f"{directory} holds neither {MANIFEST} nor {DATASET} nor shards; check the path")
    return found


def _validate_dataset(location: Path, report: ValidationReport, bar: tqdm[Any]) -> None:
    try:
        dataset = open_dataset(location)
    except PackedSFTError as error:
        report.add(Finding(DATASET, str(error)))
        return
    _report_strangers(location, {DATASET, "README.md", *dataset.splits}, report)
    for split, entries in dataset.splits.items():
        _report_strangers(location / split, {entry.name for entry in entries}, report)
        manifests = []
        for entry in entries:
            path = dataset.shard_path(split, entry)
            try:
                dataset.open_shard(split, entry)
            except PackedSFTError as error:
                report.add(Finding(f"{split}/{entry.name}", str(error)))
                continue
            manifest = _validate_shard(path, report, bar)
            if manifest is not None:
                manifests.append(manifest)
        if len(manifests) == len(entries):
            _compare_split_totals(dataset, split, manifests, report)


def _compare_split_totals(
    dataset: DatasetDirectory, split: str, manifests: list[ShardManifest], report: ValidationReport
) -> None:
    for name, value in summarize(manifests).items():
        recorded = dataset.figures[split].get(name)
        if recorded != value:
            report.add(
                Finding(
                    DATASET,
                    f"splits.{split}.{name} is {recorded}, its shards say {value}",
                    field=name,
                )
            )


def _report_strangers(directory: Path, expected: set[str], report: ValidationReport) -> None:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return  # what is missing is reported by whoever opens it
    for name in names:
        if name not in expected:
            report.add(Finding(str(directory / name), "does not belong here; remove it"))


def _validate_shard(path: Path, report: ValidationReport, bar: tqdm[Any]) -> ShardManifest | None:
    report.num_shards += 1
    _report_strangers(path, {MANIFEST, *layout.ARRAY_FILES}, report)
    try:
        with checked_shard(path) as shard:
            _note_what_cannot_be_checked(path, shard.manifest, report)
            report.num_bins += shard.manifest.num_bins
            report.num_bytes += sum(file.size for file in shard.files)
            if report.level == "full":
                ShardContent(path, shard, report, bar).check()
            return shard.manifest
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None


def _note_what_cannot_be_checked(path: Path, manifest: ShardManifest, report: ValidationReport) -> None:
    if manifest.files is None:
        report.notes.append(f"{path}: an old manifest without checksums; damage inside valid values cannot be seen")
    elif not manifest.is_self_checked:
        report.add(
            Finding(str(path / MANIFEST), "self_checksum is missing; write the shard again", field="self_checksum")
        )
    if manifest.vocab_size is None:
        report.notes.append(f"{path}: vocab_size was not recorded; ids are checked against the dtype only")
    if manifest.pad_id is None:
        report.notes.append(f"{path}: pad_id was not recorded; the padding of input_ids is not checked")
