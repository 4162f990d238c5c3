"""One unit of work of the encode stage: rows in, parts of the token store and a receipt out. Runs in any process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.encoder import EncodedRecords, RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.templates.load import load_template_if_any
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.counts import BAD_ROW, DUPLICATE, ERRORS, NOTHING_LEFT, SAMPLED_OUT, Counts
from megatron_packed_sft.prepare.sources import Source
from megatron_packed_sft.prepare.splits import TRAIN, SplitRule
from megatron_packed_sft.records.content_hash import content_hash
from megatron_packed_sft.records.record import Record, RecordError
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.records.slices import FileSlice, RawRecord, read_slice
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class EncodeSettings:
    """What every process of the encode stage needs to know; sent once."""

    tokenizer: Tokenizer
    template: TemplateOptions
    options: EncodeOptions
    split_rule: SplitRule
    skip_errors: bool
    tokens: Path | None  # where parts are written; None: only count


class SliceTask(NamedTuple):
    """One unit, and what the parent knows about it."""

    number: int
    source: Source
    unit: FileSlice
    num_bytes: int  # its share of the file, for progress
    fingerprint: str = ""
    max_rows: int | None = None
    duplicates: frozenset[int] = frozenset()  # positions of rows that an earlier unit or row had already


class SliceResult(NamedTuple):
    """What became of a unit."""

    number: int
    source: str
    fingerprint: str
    counts: Counts
    parts: dict[str, str]  # split -> fingerprint of the part
    lengths: dict[str, npt.NDArray[np.int32]]  # split -> lengths, when only counting


class HashedSlice(NamedTuple):
    """The content hashes of a unit's rows, [rows, 2]."""

    number: int
    source: str
    num_bytes: int
    hashes: npt.NDArray[np.uint64]


class ReadRecord(NamedTuple):
    """A row that could be read, with where it came from and the hash of its content."""

    raw: RawRecord
    row: Record
    content: bytes

    @property
    def where(self) -> str:
        """File and line, in words; made when asked for, since most rows are never asked."""
        return str(self.raw.where)


class SliceEncoder:
    """Encodes units; keeps the tokenizer and the compiled template for the next one."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        self._tokenizer = settings.tokenizer
        self._vocab_size = settings.tokenizer.vocab_size
        self._template = load_template_if_any(settings.template.name, self._tokenizer)
        # Rows with nothing to train on are refused here, where file and line are known.
        self._encoder = RecordEncoder(self._tokenizer, settings.template, replace(settings.options, on_empty="drop"))

    def encode(self, task: SliceTask) -> SliceResult:
        """Read, adapt, encode and store the rows of one unit."""
        counts = Counts(num_bytes=task.num_bytes)
        sink: _Sink = _LengthSink() if self.settings.tokens is None else self._part_sink(self.settings.tokens, task)
        with sink:
            rows = self._rows(task, counts)
            while batch := list(islice(rows, _ROWS_AT_ONCE)):
                encoded = self._encoder.encode_records([one.row for one in batch])
                self._store(task.source, batch, encoded, counts, sink)
            parts, lengths = sink.finish()
        return SliceResult(task.number, task.source.name, task.fingerprint, counts, parts, lengths)

    def _part_sink(self, tokens: Path, task: SliceTask) -> _PartSink:
        return _PartSink(
            tokens,
            task.number,
            vocab_size=self._vocab_size,
            tokenizer={"name": self._tokenizer.name, "fingerprint": self._tokenizer.fingerprint},
            chat_template_fingerprint=self._template and self._template.fingerprint,
            overwrite=True,
        )

    def _rows(self, task: SliceTask, counts: Counts) -> Iterator[ReadRecord]:
        for position, read in enumerate(read_rows(task)):
            counts.num_rows += 1
            if isinstance(read, RecordError):
                self._refuse(counts, BAD_ROW, str(read))
            elif position in task.duplicates:
                counts.drop(DUPLICATE, read.where)
            else:
                yield read

    def _store(
        self, source: Source, batch: list[ReadRecord], encoded: EncodedRecords, counts: Counts, sink: _Sink
    ) -> None:
        for index, reason, detail in encoded.dropped:
            problem = f"{batch[index].where}: {detail}"
            if reason in ERRORS:
                self._refuse(counts, reason, problem)
            elif reason in NOTHING_LEFT and self.settings.options.on_empty == "error":
                raise InvalidInputError(f"{problem} (encode.on_empty=drop leaves such rows out and counts them)")
            else:
                counts.drop(reason, problem)
        counts.num_cut_rows += encoded.num_cut_sequences
        counts.num_cut_tokens += encoded.num_cut_tokens
        sequences = encoded.sequences
        counts.num_straddling += sequences.num_straddling
        rule = self.settings.split_rule
        if source.weight == 1 and (source.split or not rule.holds_out) and len(sequences.record):
            sink.append(source.split or TRAIN, sequences, counts)
            return
        chosen: dict[str, list[int]] = {}
        for sequence, index in enumerate(sequences.record.tolist()):
            content = batch[index].content
            split = source.split or rule.split_of(content)
            copies = rule.num_copies(content, source.weight) if split == TRAIN else 1
            if copies == 0:
                counts.drop(SAMPLED_OUT, batch[index].where)
            counts.num_repeated += max(copies - 1, 0)
            chosen.setdefault(split, []).extend([sequence] * copies)
        for split, numbers in chosen.items():
            if numbers:
                sink.append(split, sequences.take(np.array(numbers)), counts)

    def _refuse(self, counts: Counts, reason: str, problem: str) -> None:
        if not self.settings.skip_errors:
            raise InvalidInputError(f"{problem} (on_error=skip leaves such rows out and counts them)")
        counts.drop(reason, problem)


def read_rows(task: SliceTask) -> Iterator[ReadRecord | RecordError]:
    """The rows of a unit in one form; the error in place of a row that has none."""
    adapt = adapter(task.source.schema, task.source.mapping or None)
    for raw in islice(read_slice(task.unit), task.max_rows):
        if isinstance(raw.value, RecordError):
            yield raw.value
            continue
        try:
            row = adapt(raw.value)
            yield ReadRecord(raw, row, content_hash(row))
        except RecordError as error:
            yield error.at(raw.where)


def hash_slice(task: SliceTask) -> HashedSlice:
    """Hash the rows of a unit; those that cannot be read count as different from all others."""
    digests = [
        (task.number << 32 | position).to_bytes(16, "big") if isinstance(read, RecordError) else read.content
        for position, read in enumerate(read_rows(task))
    ]
    hashes = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    return HashedSlice(task.number, task.source.name, task.num_bytes, hashes)


class _Sink(Protocol):
    """Where encoded sequences go."""

    def append(self, split: str, sequences: Sequences, counts: Counts) -> None: ...

    def finish(self) -> tuple[dict[str, str], dict[str, npt.NDArray[np.int32]]]: ...

    def __enter__(self) -> _Sink: ...

    def __exit__(self, *_: object) -> None: ...


def _count(counts: Counts, split: str, sequences: Sequences) -> None:
    of_split = counts.split(split)
    of_split.num_sequences += len(sequences.lengths)
    of_split.num_tokens += len(sequences.input_ids)
    of_split.num_trained_tokens += int(sequences.train.sum(dtype=np.int64))


class _PartSink:
    """Parts of the token store, one per split that gets a sequence."""

    def __init__(self, tokens: Path, number: int, **arguments: Any) -> None:
        self._tokens, self._number, self._arguments = tokens, number, arguments
        self._writers: dict[str, TokenPartWriter] = {}
        self._open = ExitStack()

    def append(self, split: str, sequences: Sequences, counts: Counts) -> None:
        if split not in self._writers:
            path = part_path(self._tokens / split, self._number)
            self._writers[split] = self._open.enter_context(TokenPartWriter(path, **self._arguments))
        self._writers[split].append_many(sequences.input_ids, sequences.train, sequences.lengths)
        _count(counts, split, sequences)

    def finish(self) -> tuple[dict[str, str], dict[str, npt.NDArray[np.int32]]]:
        from megatron_packed_sft.tokens.store import TokenPart

        for writer in self._writers.values():
            writer.finalize()
        return {split: TokenPart.open(writer.target).fingerprint for split, writer in self._writers.items()}, {}

    def __enter__(self) -> _PartSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class _LengthSink:
    """Only the lengths, for a dry run."""

    def __init__(self) -> None:
        self._lengths: dict[str, list[npt.NDArray[np.int32]]] = {}

    def append(self, split: str, sequences: Sequences, counts: Counts) -> None:
        self._lengths.setdefault(split, []).append(sequences.lengths.astype(np.int32))
        _count(counts, split, sequences)

    def finish(self) -> tuple[dict[str, str], dict[str, npt.NDArray[np.int32]]]:
        return {}, {split: np.concatenate(lengths) for split, lengths in self._lengths.items()}

    def __enter__(self) -> _LengthSink:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_encoder: list[SliceEncoder] = []  # in a worker process: made once


def start_encoder(settings: EncodeSettings) -> None:
    """Set a process up for `encode_slice`."""
    _encoder[:] = [SliceEncoder(settings)]


def encode_slice(task: SliceTask) -> SliceResult:
    """Encode a unit in a process that `start_encoder` set up."""
    return _encoder[0].encode(task)
