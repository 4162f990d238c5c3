"""`validate`: check that packed data is complete and valid. Findings name the file, the bin and the field.

`structure` checks names, sizes, manifests and headers (milliseconds for memmap_v1). `full` also reads every byte,
compares it with its checksum and checks every invariant of every bin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.remote.downloads import Contents, download
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.remote.uploads import scratch_directory
from megatron_packed_sft.storage.bins import (
    BinBlock,
    BlockTotals,
    clear_sequence_ends,
    find_violations,
    find_weight_violations,
)
from megatron_packed_sft.storage.dataset_directory import CARD, DATASET, DatasetDirectory, open_dataset
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, Storage
from megatron_packed_sft.storage.megatron_indexed.index import indexed_path
from megatron_packed_sft.storage.registry import STORAGES, shards_inside, storage_of
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.array_files import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum, stored_size
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.progress import Progress

Level = Literal["structure", "full"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem."""

    file: str
    message: str
    bin: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        place = self.file if self.bin is None else f"{self.file}, bin {self.bin}"
        return f"{place}: {self.message}"


@dataclass(slots=True)
class ValidationReport:
    """What `validate` checked and found."""

    path: str
    level: Level
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_findings: int = 0
    num_shards: int = 0
    num_bins: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_bytes: int = 0
    max_findings: int = 100

    @property
    def ok(self) -> bool:
        """Return whether there are no findings."""
        return self.num_findings == 0

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it unless `max_findings` are kept already."""
        self.num_findings += 1
        if len(self.findings) < self.max_findings:
            self.findings.append(finding)

    def add_strangers(self, directory: Path, expected: Collection[str]) -> None:
        """Add a finding for every file in a dataset's directory that is not part of the dataset."""
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            return  # opening the dataset reports what is missing
        for name in names:
            if name not in expected:
                self.add(Finding(str(directory / name), "is not part of the dataset; move it away"))

    def rename(self, path: str, at_home: Callable[[str], str]) -> None:
        """Replace the paths of a temporary copy by the place that the data came from."""
        self.path = path
        self.findings = [replace(one, file=at_home(one.file), message=at_home(one.message)) for one in self.findings]
        self.notes = [at_home(note) for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, as `packed-sft validate --json` prints it."""
        return {"ok": self.ok, **asdict(self)}


_STREAM_OPTIONS = ("eos_id", "vocab_size", "dtype", "seq_length", "file_pattern")


def validate(
    path: str | os.PathLike[str],
    *,
    level: Level = "full",
    max_findings: int = 100,
    progress: bool = False,
    stream: StreamOptions | None = None,
) -> ValidationReport:
    """Check a shard, a dataset directory or a directory of shards of any storage, or a token stream.

    Args:
        path: a shard, a directory with dataset.json (a dataset), a directory with shards in it, or the URL of one of
            these. For a URL, `structure` reads documents and headers only, and `full` downloads one shard after the
            other, bypassing the cache, which would hide damage.
        level: `structure` or `full`.
        max_findings: keep at most this many; the rest are only counted.
        progress: show a bar over the bytes read.
        stream: the dtype, vocabulary, EOS id and window length to check a token stream with.
    """
    if level not in get_args(Level):
        raise InvalidInputError(f"level {level!r} is unknown; use one of {', '.join(get_args(Level))}")
    if is_url(path):
        report = ValidationReport("", level, max_findings=max_findings)
        return _validate_url(os.fspath(path), report, progress, stream)
    location = indexed_path(local_path(path))
    report = ValidationReport(str(location), level, max_findings=max_findings)
    with Progress("validate", None, "B", quiet=not progress) as bar:
        if os.path.lexists(location / DATASET):
            _configured([], str(location), stream)
            _validate_dataset(location, report, bar)
        else:
            for shard, storage in _configured(_shards_at(location), str(location), stream):
                _validate_shard(storage, shard, report, bar)
    return report


def _validate_url(url: str, report: ValidationReport, progress: bool, stream: StreamOptions | None) -> ValidationReport:
    """Check data in an object store by its outline, and download whole shards where their bytes are checked."""
    info = object_info(url)
    if info is not None:
        with scratch_directory() as scratch, Progress("validate", None, "B", quiet=not progress) as bar:
            path = scratch / base_name(url)
            download(url, Contents({"": FileRecord(info.size, "")}, DEFAULT_ALGORITHM), path)
            for shard, storage in _configured(_shards_at(path, redacted(url)), redacted(url), stream):
                _validate_shard(storage, shard, report, bar)
            report.rename(redacted(url), lambda text: text.replace(str(path), redacted(url)))
        return report
    with Outline.of(url) as outline, Progress("validate", None, "B", quiet=not progress) as bar:
        report.path = str(outline.path)
        if (outline.path / DATASET).exists():
            _configured([], redacted(url), stream)
            _validate_dataset(outline.path, report, bar, outline)
        else:
            for shard, storage in _configured(_shards_at(outline.path), redacted(url), stream):
                with _bytes_of(outline, storage, shard, report):
                    _validate_shard(storage, shard, report, bar)
        report.rename(redacted(url), outline.at_home)
    return report


def _bytes_of(
    outline: Outline | None, storage: Storage, path: Path, report: ValidationReport
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which all bytes that the check reads are local."""
    if outline is None or (report.level == "structure" and storage.has_manifest):
        return contextlib.nullcontext()
    return outline.whole("" if path == outline.path else path.relative_to(outline.path).as_posix())


def _configured(
    shards: list[tuple[Path, Storage]], location: str, options: StreamOptions | None
) -> list[tuple[Path, Storage]]:
    """Apply the stream options to token streams; refuse options if there is no token stream."""
    if options is None:
        return shards
    if any(storage.stream_options for _, storage in shards):
        return [(path, storage.configured(options)) for path, storage in shards]
    defaults = StreamOptions()
    named = [name for name in _STREAM_OPTIONS if getattr(options, name) != getattr(defaults, name)]
    raise InvalidInputError(
        f"{location} is not a token stream, so {options.spelled((named or _STREAM_OPTIONS)[0])} does not apply; "
        "leave it out"
    )


def _shards_at(location: Path, shown: str = "") -> list[tuple[Path, Storage]]:
    if not os.path.lexists(location):
        raise InvalidInputError(f"{location} does not exist; check the path")
    storage = storage_of(location)
    if storage is not None:
        return [(location, storage)]
    with os_errors("list", location):
        found = shards_inside(location)
    if not found:
        raise InvalidInputError(
            f"{shown or location} is not packed data: it holds no {DATASET} and no shard of a known storage "
            f"({', '.join(STORAGES.names())}); check the path"
        )
    return found


def _validate_dataset(location: Path, report: ValidationReport, bar: Progress, outline: Outline | None = None) -> None:
    try:
        dataset = open_dataset(location)
    except PackedSFTError as error:
        report.add(Finding(DATASET, str(error)))
        return
    report.add_strangers(location, {DATASET, CARD, *dataset.splits})
    _validate_files(dataset, report, outline)
    for split, entries in dataset.splits.items():
        _name_link(location / split, report)
        expected = {entry.name for entry in entries} | set(dataset.storage.sidecars(dataset.figures[split]))
        report.add_strangers(location / split, expected)
        figures = []
        for entry in entries:
            path = dataset.shard_path(split, entry)
            _name_link(path, report)
            with _bytes_of(outline, dataset.storage, path, report):
                try:
                    shard = dataset.open_shard(split, entry)
                except PackedSFTError as error:
                    report.add(Finding(f"{split}/{entry.name}", str(error)))
                    continue
                found = _validate_shard(dataset.storage, path, report, bar, shard)
            if found is not None:
                figures.append(found)
        if len(figures) == len(entries):
            _compare_split_totals(dataset, split, BinFigures.over(figures), report)


def _validate_files(dataset: DatasetDirectory, report: ValidationReport, outline: Outline | None) -> None:
    """Compare README.md and the files beside shards with their records in dataset.json."""
    for name in sorted({CARD, *dataset.files}):
        path, record = dataset.path / name, dataset.files.get(name)
        if _name_link(path, report) or record is None:
            continue
        if not path.is_file():
            report.add(Finding(str(path), "is missing or not a file; copy the dataset again"))
            continue
        is_read = report.level == "full" and stored_size(path) == record.bytes
        with outline.whole(name) if is_read and outline is not None else contextlib.nullcontext():
            if stored_size(path) != record.bytes or (is_read and file_checksum(path) != record.checksum):
                report.add(Finding(str(path), f"was changed: it is not the file that {DATASET} lists; restore it"))


def _name_link(path: Path, report: ValidationReport) -> bool:
    """Add a finding for a symbolic link: its target is not copied with the dataset and can change independently."""
    if not path.is_symlink():
        return False
    message = f"is a symbolic link to {os.readlink(path)}; a dataset holds its own files, so replace the link by a copy"
    report.add(Finding(str(path), message))
    return True


def _validate_shard(
    storage: Storage, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
) -> BinFigures | None:
    report.num_shards += 1
    return storage.validate(path, report, bar, shard)


def _compare_split_totals(dataset: DatasetDirectory, split: str, found: BinFigures, report: ValidationReport) -> None:
    for name, value in found.numbers().items():
        recorded = dataset.figures[split][name]
        # A storage without manifests takes its longest bin for the pack size, which may be less than what was asked.
        if name == "pack_size" and not dataset.storage.has_manifest and recorded is not None and recorded >= value:
            continue
        if recorded != value:
            message = f"splits.{split}.{name} is {recorded}, its shards say {value}"
            report.add(Finding(DATASET, message, field=name))


def validate_bins(
    storage: Storage, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
) -> BinFigures | None:
    """Check one shard of any storage: it must open (unless an open one is given), and every bin must be valid."""
    try:
        shard = storage.open(path) if shard is None else shard
        report.num_bins += len(shard)
        size = stored_size(path)
        report.num_bytes += size
        if report.level == "full":
            _check_bins(path, shard, report)
        bar.update(size)
        return shard.figures
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None


def _check_bins(path: Path, shard: PackedShard, report: ValidationReport) -> None:
    totals = BlockTotals(0, 0, 0, 0, shard.pack_size)
    num_cleared = 0
    for first, block in _numbered(shard.blocks(shard.pack_size, 0)):
        num_cleared += clear_sequence_ends(block)
        ids = np.ascontiguousarray(block.input_ids, ID_DTYPE)
        checked = replace(block, input_ids=ids)
        violations, of_block = find_violations(checked, vocab_size=ID_LIMITS[ID_DTYPE], pad_id=0)
        if not violations and block.loss_weights is not None:
            violations, _ = find_weight_violations(block)
        totals = totals.plus(of_block)
        report.num_sequences += len(block.seq_starts)
        for found in violations:
            report.add(Finding(str(path), f"{found.field} {found.message}", first + found.bin, found.field))
    report.num_tokens += totals.num_tokens
    report.num_loss_tokens += totals.num_loss_tokens
    if num_cleared:
        report.notes.append(
            f"{path}: {num_cleared:,} sequences have a loss mask of 1 at their last token, which has no prediction; "
            "batches ignore it"
        )


def _numbered(blocks: Iterator[BinBlock]) -> Iterator[tuple[int, BinBlock]]:
    first = 0
    for block in blocks:
        yield first, block
        first += len(block)
