"""One slice of the encode stage: records in, parts of the token store out. Runs in any process."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
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
from megatron_packed_sft.records.slices import FileSlice, RawRecord, read_slice
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.drop_reasons import NOTHING_LEFT, DropReason, Severity
from megatron_packed_sft.support.processes import rare_garbage_collection
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path

_RECORDS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 8 << 20  # a tokenizer needs some 50 bytes for each


@dataclass(frozen=True)
class EncodeSettings:
    """Everything that decides what the encode stage makes of its sources; sent once to every process."""

    tokenizer: Tokenizer
    template: TemplateOptions
    options: EncodeOptions
    split_rule: SplitRule
    tokens: Path | None  # where parts are written; None: only count
    skip_errors: bool = False
    max_errors: int = 0
    deduplicate: bool = False
    limit: int | None = None  # records of each source
    audit: bool = False  # also count what is trained by kind

    def to_json(self) -> dict[str, Any]:
        """Return what decides the tokens of a record, in plain values."""
        template = load_template_if_any(self.template.name, self.tokenizer)
        return {
            "tokenizer": {"name": self.tokenizer.name, "fingerprint": self.tokenizer.fingerprint},
            "chat_template": template and {"name": template.name, "fingerprint": template.fingerprint},
            "encode": {**self.options.to_json(), **self.template.to_json()},
            "split": {name: getattr(self.split_rule, name) for name in SplitRule.__dataclass_fields__},
        }


class SliceTask(NamedTuple):
    """One slice, and what the parent knows about it."""

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
    drops: tuple[Drop, ...] = ()  # those that are no mere matter of options
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
    """A record that could be read, with where it came from and the hash of its content."""

    raw: RawRecord
    record: Record
    content: bytes


class SliceEncoder:
    """Encodes slices; keeps the tokenizer and the compiled template for the next one."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        self._template = load_template_if_any(settings.template.name, settings.tokenizer)
        # Records with nothing to train on are refused here, where file and line are known.
        options = replace(settings.options, on_empty="drop")
        self._encoder = RecordEncoder(settings.tokenizer, settings.template, options, with_kinds=settings.audit)

    def encode(self, task: SliceTask) -> SliceResult:
        """Read, adapt, encode and store the records of one slice."""
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
        """Give every sequence to its split, as often as the weight of its source says."""
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
        """Count a record that is dropped; an error stops the run unless the user wants to skip errors."""
        where = str(raw.where)
        problem = problem or (f"{where}: {detail}" if detail else where)
        if reason.severity is Severity.ERROR and not self.settings.skip_errors:
            raise InvalidInputError(f"{problem} (on_error=skip drops such records and counts them)")
        if reason in NOTHING_LEFT and self.settings.options.on_empty == "error":
            raise InvalidInputError(f"{problem} (encode.on_empty=drop drops such records and counts them)")
        sink.counts.drop(reason, problem)
        if reason.severity is Severity.ERROR:
            sink.counts.refuse_errors(self.settings.max_errors)
        if reason.severity is not Severity.HARMLESS:
            sink.drops.append(Drop(raw.number, reason, detail))


def _batches(records: Iterator[ReadRecord]) -> Iterator[list[ReadRecord]]:
    """Yield records to encode together, few of very long ones; what a record gives does not depend on the others."""
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
    """Yield the records of a slice in one form; the error in place of a record that cannot be read."""
    adapt = adapter(task.source.schema, task.source.mapping or None, task.source.take)
    for raw in islice(read_slice(task.slice), task.max_records):
        yield raw, read_record(raw, adapt)


def read_record(raw: RawRecord, adapt: Adapter) -> ReadRecord | RecordError:
    """Return a record in one form, or the error if it cannot be read."""
    if isinstance(raw.value, RecordError):
        return raw.value
    try:
        record = adapt(raw.value)
        return ReadRecord(raw, record, content_hash(record))
    except RecordError as error:
        return error.at(raw.where)
    except RecursionError:  # in a part of the record that no content hash covers
        return too_deep().at(raw.where)


def hash_slice(task: SliceTask) -> HashedSlice:
    """Hash the records of a slice; those that cannot be read count as different from all others."""
    digests = [
        (task.number << 32 | position).to_bytes(16, "big") if isinstance(read, RecordError) else read.content
        for position, (_, read) in enumerate(read_records(task))
    ]
    hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    return HashedSlice(task.number, task.source.name, task.num_bytes, hashes)


class _Sink:
    """What a slice gives: a part of the token store per split, or lengths only in a dry run; and its counts."""

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
        """Take sequences, with the line or row of the record that each came from."""
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
        """Publish the parts, and return what became of the slice."""
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
        """Write from which line or row each sequence came; return the file's checksum."""
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


_encoder: list[SliceEncoder] = []  # in a worker process: made once


def start_encoder(settings: EncodeSettings) -> None:
    """Set a process up for `encode_slice`."""
    _encoder[:] = [SliceEncoder(settings)]


def encode_slice(task: SliceTask) -> SliceResult:
    """Encode a slice in a process that `start_encoder` set up."""
    return _encoder[0].encode(task)
