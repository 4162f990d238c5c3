"""Encode one slice, in any process: records in, parts of the token store out.

    file slice ─▶ raw records ─▶ records ─▶ sequences ─▶ a part per split
                  `records`      schemas    `encode`     `tokens`, split and weight decided by content

`try_first_records` does the same with a few records of every source before anything else, so that mistakes that
concern all of them show at once.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.encoder import EncodedRecords, RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.templates.load import load_template_if_any
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.audit import Audit
from megatron_packed_sft.prepare.counts import Counts, SplitCounts
from megatron_packed_sft.prepare.sources import TRAIN, Source, SplitRule
from megatron_packed_sft.prepare.work_directory import record_numbers_path
from megatron_packed_sft.records.files import InputFile, expand_path, find_files
from megatron_packed_sft.records.record import (
    Conversation,
    NotTakenError,
    Record,
    RecordError,
    TextRecord,
    content_hash,
    too_deep,
)
from megatron_packed_sft.records.schemas.registry import Adapter, adapter
from megatron_packed_sft.records.slices import FileSlice, RawRecord, first_repeated_key, read_slice, scan_slices
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.drop_reasons import DropReason, Severity
from megatron_packed_sft.support.processes import rare_garbage_collection
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path

_RECORDS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 8 << 20  # a tokenizer needs some 50 bytes for each
_NUM_FILES_TO_TRY, _NUM_RECORDS_TO_TRY = 4, 4  # of each source, of each file
_BYTES_TO_TRY = 1 << 16


@dataclass(frozen=True)
class EncodeSettings:
    """Everything that decides how sources are encoded; sent once to every process."""

    tokenizer: Tokenizer
    template: TemplateOptions
    options: EncodeOptions
    split_rule: SplitRule
    tokens: Path | None  # where parts are written; None counts only
    max_errors: int = 0  # records that may be dropped because they cannot be read or encoded
    deduplicate: bool = False
    limit: int | None = None  # records of each source
    audit: bool = False  # also count what is trained by kind

    def to_json(self) -> dict[str, Any]:
        """Return everything that decides the tokens of a record, in plain values."""
        template = load_template_if_any(self.template.name, self.tokenizer)
        return {
            "tokenizer": {"name": self.tokenizer.name, "fingerprint": self.tokenizer.fingerprint},
            "chat_template": template and {"name": template.name, "fingerprint": template.fingerprint},
            "encode": {**self.options.to_json(), **self.template.to_json()},
            "split": {name: getattr(self.split_rule, name) for name in SplitRule.__dataclass_fields__},
        }


class SliceTask(NamedTuple):
    """A slice to encode, and what the parent process knows about it."""

    number: int
    source: Source
    slice: FileSlice
    num_bytes: int  # its share of the file, for progress
    fingerprint: str = ""
    max_records: int | None = None
    duplicates: frozenset[int] = frozenset()  # positions of records that equal an earlier one


class Drop(NamedTuple):
    """A dropped record: its line or row in the file, and why."""

    number: int
    reason: DropReason
    detail: str


class SliceResult(NamedTuple):
    """What became of a slice."""

    number: int
    source: str
    fingerprint: str
    counts: Counts
    parts: Mapping[str, str] = {}  # split -> fingerprint of the part
    record_numbers: Mapping[str, str] = {}  # split -> checksum of the file with the records' lines
    drops: tuple[Drop, ...] = ()  # except those that options ask for
    lengths: Mapping[str, npt.NDArray[np.int32]] = {}  # split -> tokens of each sequence, when only counting
    trained: Mapping[str, npt.NDArray[np.int32]] = {}  # split -> trained tokens of each sequence, likewise
    audit: Audit | None = None


class HashedSlice(NamedTuple):
    """The content hashes of a slice's records, [records, 2]."""

    number: int
    source: str
    num_bytes: int
    hashes: npt.NDArray[np.uint64]


class ReadRecord(NamedTuple):
    """A record, with the raw record it came from and the hash of its content."""

    raw: RawRecord
    record: Record
    content: bytes


class SliceEncoder:
    """Encodes slices; loads the tokenizer and compiles the template once for all of them."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        self._template = load_template_if_any(settings.template.name, settings.tokenizer)
        self._encoder = RecordEncoder(
            settings.tokenizer, settings.template, settings.options, with_kinds=settings.audit
        )

    def encode(self, task: SliceTask) -> SliceResult:
        """Read, adapt, encode and store the records of a slice."""
        fingerprint = None if self._template is None else self._template.fingerprint
        with rare_garbage_collection(), _Sink(self.settings, fingerprint, task) as sink:
            records = self._records(task, sink)
            for batch in _batches(records):
                encoded = self._encoder.encode_records([one.record for one in batch])
                self._count_drops(batch, encoded, sink)
                if sink.audit is not None:
                    sink.audit.look_at(encoded.sequences, encoded.num_turns, [str(one.raw.where) for one in batch])
                self._store(task.source, batch, encoded.sequences, sink)
            return sink.finish()

    def _records(self, task: SliceTask, sink: _Sink) -> Iterator[ReadRecord]:
        for position, (raw, read) in enumerate(read_records(task)):
            sink.counts.num_rows += 1
            if isinstance(read, NotTakenError):
                self._drop(sink, raw, DropReason.NOT_TAKEN, "")
            elif isinstance(read, RecordError):
                self._drop(sink, raw, DropReason.BAD_RECORD, f"{read.field or 'the record'} {read.problem}", str(read))
            elif position in task.duplicates:
                self._drop(sink, raw, DropReason.DUPLICATE, "")
            else:
                yield read

    def _count_drops(self, batch: list[ReadRecord], encoded: EncodedRecords, sink: _Sink) -> None:
        for index, reason, detail in encoded.dropped:
            self._drop(sink, batch[index].raw, reason, detail)
        sink.counts.num_cut_rows += encoded.num_cut_sequences
        sink.counts.num_cut_tokens += encoded.num_cut_tokens
        sink.counts.num_cut_turns += encoded.num_cut_turns
        sink.counts.num_added += encoded.num_added_sequences
        sink.counts.num_straddling += encoded.sequences.num_straddling
        for index, kind, detail in encoded.lost:
            sink.counts.lose(kind, f"{batch[index].raw.where}: {detail}")

    def _store(self, source: Source, batch: list[ReadRecord], sequences: Sequences, sink: _Sink) -> None:
        """Append every sequence to its split, as often as the weight of its source says."""
        numbers = np.array([one.raw.number for one in batch], np.int64)
        rule = self.settings.split_rule
        if source.weight == 1 and (source.split or not rule.holds_out) and len(sequences.record):
            sink.append(source.split or TRAIN, sequences, numbers[sequences.record])
            return
        chosen: dict[str, list[int]] = {}
        for sequence, index in enumerate(sequences.record.tolist()):
            content = batch[index].content
            split = source.split or rule.split_of(content)
            copies = rule.num_copies(content, source.weight) if split == TRAIN else 1
            if copies == 0:
                self._drop(sink, batch[index].raw, DropReason.SAMPLED_OUT, "")
            sink.counts.num_repeated += max(copies - 1, 0)
            chosen.setdefault(split, []).extend([sequence] * copies)
        for split, some in chosen.items():
            if some:
                taken = sequences.take(np.array(some))
                sink.append(split, taken, numbers[taken.record])

    def _drop(self, sink: _Sink, raw: RawRecord, reason: DropReason, detail: str, problem: str | None = None) -> None:
        """Count a dropped record; stop the run if it is an error and the user does not skip errors."""
        where = str(raw.where)
        problem = problem or (f"{where}: {detail}" if detail else where)
        if reason.severity is Severity.ERROR and not self.settings.max_errors:
            raise InvalidInputError(f"{problem} (max_errors=100 drops up to 100 such records and counts them)")
        sink.counts.drop(reason, problem)
        if reason.severity is Severity.ERROR:
            sink.counts.refuse_errors(self.settings.max_errors)
        if reason.severity is not Severity.HARMLESS:
            sink.drops.append(Drop(raw.number, reason, detail))


def _batches(records: Iterator[ReadRecord]) -> Iterator[list[ReadRecord]]:
    """Yield records to encode together, few of very long ones; the result of a record does not depend on the others."""
    batch: list[ReadRecord] = []
    num_characters = 0
    for one in records:
        batch.append(one)
        num_characters += _num_characters(one.record)
        if len(batch) == _RECORDS_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_characters(record: Record) -> int:
    if isinstance(record, Conversation):
        return sum(len(content) for message in record.messages if type(content := message.get("content")) is str)
    return sum(len(text) for text, _ in record.parts) if isinstance(record, TextRecord) else len(record.input_ids)


def read_records(task: SliceTask) -> Iterator[tuple[RawRecord, ReadRecord | RecordError]]:
    """Yield the records of a slice, adapted; the error in place of a record that cannot be read."""
    adapt = adapter(task.source.schema, task.source.mapping or None, task.source.take)
    for raw in islice(read_slice(task.slice), task.max_records):
        yield raw, read_record(raw, adapt)


def read_record(raw: RawRecord, adapt: Adapter) -> ReadRecord | RecordError:
    """Return a record, adapted; the error if it cannot be read."""
    if isinstance(raw.value, RecordError):
        return raw.value
    try:
        record = adapt(raw.value)
        return ReadRecord(raw, record, content_hash(record))
    except RecordError as error:
        return error.at(raw.where)
    except RecursionError:  # in a part of the record that the content hash leaves out
        return too_deep().at(raw.where)


def hash_slice(task: SliceTask) -> HashedSlice:
    """Return the content hashes of a slice's records; one that cannot be read differs from all others."""
    digests = [
        (task.number << 32 | position).to_bytes(16, "big") if isinstance(read, RecordError) else read.content
        for position, (_, read) in enumerate(read_records(task))
    ]
    hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    return HashedSlice(task.number, task.source.name, task.num_bytes, hashes)


class _Sink:
    """Collects what a slice yields: a part of the token store per split (lengths only in a dry run), and counts."""

    def __init__(self, settings: EncodeSettings, template_fingerprint: str | None, task: SliceTask) -> None:
        self.counts = Counts(num_bytes=task.num_bytes)
        self.drops: list[Drop] = []
        self.audit = Audit() if settings.audit else None
        self._task = task
        self._tokens = settings.tokens
        self._arguments: dict[str, Any] = {
            "vocab_size": settings.tokenizer.vocab_size,
            "tokenizer": {"name": settings.tokenizer.name, "fingerprint": settings.tokenizer.fingerprint},
            "chat_template_fingerprint": template_fingerprint,
            "overwrite": True,
        }
        self._writers: dict[str, TokenPartWriter] = {}
        self._numbers: dict[str, list[npt.NDArray[np.int64]]] = {}
        self._lengths: dict[str, list[npt.NDArray[np.int32]]] = {}
        self._trained: dict[str, list[npt.NDArray[np.int32]]] = {}
        self._open = ExitStack()

    def append(self, split: str, sequences: Sequences, numbers: npt.NDArray[np.int64]) -> None:
        """Append sequences, with the line or row of the record that each came from."""
        trained = int(sequences.train.sum(dtype=np.int64))
        self.counts.split(split).add(SplitCounts(len(sequences.lengths), len(sequences.input_ids), trained))
        if self._tokens is None:
            self._lengths.setdefault(split, []).append(sequences.lengths.astype(np.int32))
            starts = sequences.ends - sequences.lengths
            self._trained.setdefault(split, []).append(np.add.reduceat(sequences.train, starts, dtype=np.int32))
            return
        if split not in self._writers:
            path = part_path(self._tokens / split, self._task.number)
            self._writers[split] = self._open.enter_context(TokenPartWriter(path, **self._arguments))
        self._writers[split].append_many(sequences.input_ids, sequences.train, sequences.lengths, sequences.weights)
        self._numbers.setdefault(split, []).append(numbers)

    def finish(self) -> SliceResult:
        """Publish the parts, and return the result of the slice."""
        for writer in self._writers.values():
            writer.finalize()
        return SliceResult(
            self._task.number,
            self._task.source.name,
            self._task.fingerprint,
            self.counts,
            parts={split: TokenPart.open(writer.target).fingerprint for split, writer in self._writers.items()},
            record_numbers={split: self._write_numbers(split, numbers) for split, numbers in self._numbers.items()},
            drops=tuple(self.drops),
            lengths={split: np.concatenate(lengths) for split, lengths in self._lengths.items()},
            trained={split: np.concatenate(trained) for split, trained in self._trained.items()},
            audit=self.audit,
        )

    def _write_numbers(self, split: str, numbers: list[npt.NDArray[np.int64]]) -> str:
        """Write the line or row that each sequence came from; return the file's checksum."""
        assert self._tokens is not None
        path = record_numbers_path(self._tokens, split, self._task.number)
        file = io.BytesIO()
        np.save(file, np.concatenate(numbers))
        with os_errors("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, file.getvalue())
        return checksum(file.getvalue())

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def receipt_of(result: SliceResult, file: str) -> dict[str, Any]:
    """Return what the receipt of a slice notes.

    Args:
        result: what became of it.
        file: that it is a part of.
    """
    return {
        "counts": result.counts.to_json(),
        "parts": dict(result.parts),
        "record_numbers": dict(result.record_numbers),
        "file": file,
        "drops": [list(drop) for drop in result.drops],
    }


_encoder: list[SliceEncoder] = []  # in a worker process: made once


def start_encoder(settings: EncodeSettings) -> None:
    """Prepare a process for `encode_slice`."""
    _encoder[:] = [SliceEncoder(settings)]


def encode_slice(task: SliceTask) -> SliceResult:
    """Encode a slice in a process that `start_encoder` prepared."""
    return _encoder[0].encode(task)


def try_first_records(sources: Sequence[Source], settings: EncodeSettings) -> list[str]:
    """Encode the first records of the first files of every source as the run will; return warnings.

    Args:
        sources: of the run.
        settings: of the run; a record that would stop the run stops it here.

    Returns:
        A warning for each source whose tried records would all be dropped, or of which one has a key twice.
    """
    warnings: list[str] = []
    with _silence():
        encoder = SliceEncoder(replace(settings, tokens=None, audit=False))
        tried = [(source, _tried(source, encoder, warnings)) for source in sources]
    for source, counts in tried:
        lost = {reason: count for reason, count in counts.dropped.items() if reason.severity is not Severity.HARMLESS}
        if counts.num_rows >= _NUM_RECORDS_TO_TRY and sum(lost.values()) == counts.num_rows:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items()))
            warnings.append(
                f"the first {plural(counts.num_rows, 'record')} of source {source.name} would all be dropped "
                f"({reasons}), such as {counts.examples[min(lost)][0]}"
            )
    return warnings


def _tried(source: Source, encoder: SliceEncoder, warnings: list[str]) -> Counts:
    counts = Counts()
    repeated = None
    wanted = min(_NUM_RECORDS_TO_TRY, encoder.settings.limit or _NUM_RECORDS_TO_TRY)
    for file in _first_files(source):
        for file_slice in islice(scan_slices(file, _BYTES_TO_TRY, max_record_bytes=source.max_record_bytes), 1):
            counts.add(encoder.encode(SliceTask(0, source, file_slice, 0, max_records=wanted)).counts)
            repeated = repeated or first_repeated_key(file_slice, wanted)
    if repeated is not None:
        warnings.append(repeated)
    return counts


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the log of an encoder: the run itself will log the same."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _first_files(source: Source) -> list[InputFile]:
    paths = list(islice(chain.from_iterable(map(expand_path, source.paths)), _NUM_FILES_TO_TRY))
    return find_files(list(dict.fromkeys(paths)), with_checksums=False)  # the scan refuses a file listed twice
