"""`validate` for token streams: check every id and every recorded file, and report how to train on the stream."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.errors import ManifestError, PackedSFTError
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.token_stream.files import NPY, FlatFile, find_files
from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions, read_metadata
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.storage.validate import Finding, ValidationReport
from megatron_packed_sft.support.array_files import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import file_checksum
from megatron_packed_sft.support.json_document import Fields, FileRecord, parse, parse_file_records
from megatron_packed_sft.support.truncated_files import wrong_size

_MAX_BYTES = 16 << 20


class RecordedFiles:
    """The files that a meta.json lists; empty if it lists none or does not exist.

    Args:
        path: the meta.json.

    Attributes:
        algorithm: the checksum algorithm, or None.
        files: size and checksum by the path of each file.
    """

    def __init__(self, path: Path) -> None:
        self.algorithm: str | None = None
        self.files: dict[Path, FileRecord] = {}
        if not path.exists():
            return
        with os_errors("read", path), open(path, "rb") as file:
            document = parse(file.read(_MAX_BYTES), str(path))
        names = list(Fields(document, str(path)).optional_object("files") or {})
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ManifestError(f"{path}: files lists {name!r}, outside its directory; restore the original")
        if names:
            self.algorithm, records = parse_file_records(Fields(document, str(path)), names)
            self.files = {path.parent / name: record for name, record in records.items()}

    def inside(self, folder: Path) -> dict[Path, FileRecord]:
        """Return the files directly inside a folder."""
        return {path: record for path, record in self.files.items() if path.parent == folder}

    def findings(self, folder: Path, report: ValidationReport) -> Iterator[Finding]:
        """Yield a finding for each file of a folder that is missing or differs in size or content."""
        for path, record in self.inside(folder).items():
            if not path.is_file():
                yield Finding(str(path), "is missing, but its meta.json lists it")
            elif (size := path.stat().st_size) != record.bytes:
                yield Finding(str(path), wrong_size(size, record.bytes, "in its meta.json"))
            elif report.level == "full" and self.algorithm is not None:
                found = file_checksum(path, self.algorithm)
                if found != record.checksum:
                    yield Finding(str(path), "its content does not match its checksum in meta.json; copy it again")


if TYPE_CHECKING:
    from megatron_packed_sft.support.progress import Progress

_PLAIN = re.compile(r"[\w./-]+")  # characters that need no quoting in a shell or in Hydra


@dataclass
class _Seen:
    """Statistics of a stream's ids."""

    num_eos: int = 0
    num_trained: int = 0  # predictions that are not made at an EOS
    largest: int = -1


def validate_stream(path: Path, options: StreamOptions, report: ValidationReport, bar: Progress) -> BinFigures | None:
    """Check that a stream opens and, with level `full`, that every id is in the vocabulary.

    Args:
        path: the directory, or one file.
        options: the dtype, vocabulary and EOS id to check against; metadata beside the files is used, too.
        report: receives the findings, the counts, and how to train on the stream.
        bar: shows the bytes read.
    """
    try:
        stream = _opened(path, options)
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None
    check_stream(stream, report, bar)
    return stream.figures


def check_stream(stream: TokenStream, report: ValidationReport, bar: Progress) -> None:
    """Check an open stream, and report how to train on it."""
    num_findings = report.num_findings
    report.notes += [*stream.warnings, *stream.notes]
    report.num_bins += len(stream)
    report.num_bytes += sum(file.size for file in stream.files)
    report.notes.append(
        f"{stream.path}: {stream.num_tokens:,} tokens of {stream.dtype} in {len(stream.files):,} "
        f"{'file' if len(stream.files) == 1 else 'files'}"
    )
    for finding in _recorded_findings(stream, report):
        report.add(finding)
    seen = None
    if report.level == "full":
        seen = _Seen()
        for number, file in enumerate(stream.files):
            _scan(stream, number, file, seen, report)
            bar.update(file.size)
        report.num_tokens += stream.num_tokens
        report.num_loss_tokens += seen.num_trained
        report.notes += _describe_ids(stream, seen)
    if report.num_findings == num_findings:
        report.notes += _usage(stream, seen)


def _recorded_findings(stream: TokenStream, report: ValidationReport) -> Iterator[Finding]:
    """Compare the files with their records in the meta.json of a token cache."""
    described_by = stream.metadata.path
    if described_by is None or described_by.name != "meta.json":
        return
    try:
        folder = stream.path if stream.path.is_dir() else stream.path.parent
        yield from RecordedFiles(described_by).findings(folder, report)
    except PackedSFTError as error:
        yield Finding(str(described_by), str(error))


def _opened(path: Path, options: StreamOptions) -> TokenStream:
    """Open the stream; the default window length adapts to short files instead of refusing them."""
    metadata = read_metadata(path if path.is_dir() else path.parent)
    files = find_files(path, options, metadata)
    return TokenStream(path, files, fitted(options, files), metadata)


def fitted(options: StreamOptions, files: Sequence[FlatFile]) -> StreamOptions:
    """Return the options to check files with: a default window length is reduced to fit the longest file."""
    longest = max(file.num_tokens for file in files)
    if options.seq_length == DEFAULT_SEQ_LENGTH and 2 <= longest <= DEFAULT_SEQ_LENGTH:
        options = replace(options, seq_length=longest - 1)
    return replace(options, pack_sequences=False)


def _scan(stream: TokenStream, number: int, file: FlatFile, seen: _Seen, report: ValidationReport) -> None:
    """Check every id of one file; ids outside the vocabulary are reported as one finding."""
    from megatron_packed_sft.storage.token_stream import window_kernel

    eos_id = -1 if stream.eos_id is None else stream.eos_id
    limit = stream.vocab_size or ID_LIMITS[ID_DTYPE]
    num_windows = int(stream.window_offsets[number + 1] - stream.window_offsets[number])
    num_inputs = num_windows * stream.options.seq_length  # positions that have a prediction, with overlap
    num_outside, place, value = 0, -1, 0
    for start, tokens in itertools.chain(file.blocks(0, num_inputs), file.blocks(num_inputs, file.num_tokens)):
        num_eos, largest, first_outside, outside = window_kernel.scan_tokens(
            tokens.astype(tokens.dtype.newbyteorder("=")), eos_id, limit
        )
        seen.num_eos += num_eos
        seen.largest = max(seen.largest, largest)
        if start < num_inputs:
            seen.num_trained += tokens.size - num_eos
        if outside and not num_outside:
            place, value = start + first_outside, int(tokens[first_outside])
        num_outside += outside
    if num_outside:
        more = f", and {num_outside - 1:,} more like it" if num_outside > 1 else ""
        message = f"the token at position {place:,} is {value}, not in 0..{limit - 1}{more}"
        report.add(Finding(str(file.path), message, field="tokens"))


def _describe_ids(stream: TokenStream, seen: _Seen) -> Iterator[str]:
    known = (
        "the size of the vocabulary is unknown: pass --vocab-size or --tokenizer"
        if stream.vocab_size is None
        else f"the vocabulary ends at {stream.vocab_size - 1:,}"
    )
    yield f"{stream.path}: the largest id is {seen.largest:,}; {known}"
    if stream.eos_id is None:
        yield f"{stream.path}: the EOS id is unknown, so documents were not counted: pass --eos-id or --tokenizer"
    elif not seen.num_eos:
        yield (
            f"{stream.path}: the EOS id {stream.eos_id} does not occur, so documents cannot be told apart and "
            "pack_sequences would be refused"
        )
    else:
        mean = stream.num_tokens / seen.num_eos
        yield f"{stream.path}: the EOS id {stream.eos_id} ends {seen.num_eos:,} documents of about {mean:,.0f} tokens"


def _usage(stream: TokenStream, seen: _Seen | None) -> Iterator[str]:
    """Yield the recipe's line and the Python call that train on the stream as it was validated."""
    options = stream.options
    vocab_size = stream.vocab_size or (None if seen is None else seen.largest + 1)
    packs = stream.eos_id is not None and (seen is None or seen.num_eos > 0)
    keys: dict[str, Any] = {"data.path": str(stream.path), "data.sequence_length": options.seq_length}
    arguments = [repr(str(stream.path)), repr(stream.eos_id), f"seq_length={options.seq_length}"]
    chosen: list[str] = []  # of StreamOptions
    if packs:
        keys |= {"data.pack_sequences": "true"}
        chosen.append("pack_sequences=True")
    if stream.eos_id is not None:
        keys["data.eos_id"] = stream.eos_id
    if options.file_pattern is not None:
        keys["data.file_pattern"] = options.file_pattern
        chosen.append(f"file_pattern={options.file_pattern!r}")
    if stream.files[0].path.suffix != NPY and stream.metadata.dtype != stream.files[0].dtype:
        keys["data.dtype"] = stream.dtype
        chosen.append(f"dtype={stream.dtype!r}")
    if vocab_size is not None and stream.metadata.vocab_size != vocab_size:
        keys["model.vocab_size"] = vocab_size
    yield f"train: packed-sft train {' '.join(_override(key, value) for key, value in keys.items())}"
    if chosen:
        arguments.append(f"stream=StreamOptions({', '.join(chosen)})")
    yield f"python: create_sft_dataset({', '.join(arguments)})"


def _override(key: str, value: Any) -> str:
    """Return a setting quoted for the shell and for Hydra."""
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return shlex.quote(f"{key}={text}") if "'" in text else f"{key}={text}"
