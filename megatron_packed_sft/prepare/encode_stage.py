"""Rows to token stores, one per split: units of work by any number of processes, reused where they are whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.counts import ERRORS, Counts
from megatron_packed_sft.prepare.duplicates import find_duplicates
from megatron_packed_sft.prepare.encode_worker import (
    EncodeSettings,
    SliceResult,
    SliceTask,
    encode_slice,
    hash_slice,
    start_encoder,
)
from megatron_packed_sft.prepare.executor import Executor, LocalExecutor
from megatron_packed_sft.prepare.progress import Progress
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.prepare.token_stores import open_stores, publish_parts, remove_other_stores
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.tokens.store import TokenPart, TokenStore
from megatron_packed_sft.tokens.writer import part_path


@dataclass(frozen=True)
class EncodeRequest:
    """Everything that decides what the encode stage writes, and how it may go about it."""

    sources: Sequence[ScannedSource]
    settings: EncodeSettings
    description: Mapping[str, Any]  # plain settings; with the sources they decide every byte
    deduplicate: bool
    limit: int | None  # rows of each source
    max_errors: int  # 0 unless errors are skipped

    @property
    def fingerprint(self) -> str:
        """Equal when the stage would write the same bytes."""
        return fingerprint_of(
            {
                "stage": "encode",
                "sources": [{"name": one.source.name, **one.to_json()} for one in self.sources],
                "deduplicate": self.deduplicate,
                "limit": self.limit,
                **self.description,
            }
        )


@dataclass
class EncodedSources:
    """What the stage left: a token store for each split that got a row, and the counts of each source."""

    stores: dict[str, TokenStore]
    counts: dict[str, Counts]
    num_units: int
    num_reused: int


def encode_sources(
    request: EncodeRequest, work: WorkDirectory, executor: Executor, progress: Progress
) -> EncodedSources:
    """Bring the token stores of a work directory in line with a request."""
    whole = work.receipt("encode", request.fingerprint)
    if whole is not None and (stores := open_stores(work.tokens, whole["stores"])) is not None:
        counts = {name: Counts.from_json(document) for name, document in whole["counts"].items()}
        # If fewer errors are allowed than that run had, its units are looked at again, to say which rows they were.
        if _num_errors(*counts.values()) <= request.max_errors:
            return EncodedSources(stores, counts, whole["num_units"], num_reused=whole["num_units"])
    encoder = SliceRun(request, work, progress)
    encoder.run(executor)
    stores = {split: publish_parts(work.tokens / split, numbers) for split, numbers in sorted(encoder.parts.items())}
    if not stores:
        raise nothing_left(encoder.counts)
    remove_other_stores(work.tokens, stores)
    work.write_receipt(
        "encode",
        request.fingerprint,
        {
            "stores": {split: store.fingerprint for split, store in stores.items()},
            "counts": {name: counts.to_json() for name, counts in encoder.counts.items()},
            "num_units": encoder.num_units,
        },
    )
    return EncodedSources(stores, encoder.counts, encoder.num_units, encoder.num_reused)


class SliceRun:
    """The units of one run: those that are whole are taken over, the others go to the executor.

    Args:
        request: what to encode.
        work: where receipts are; None for a dry run, which neither reads nor writes any.
        progress: told of every unit.
        every: of the units, only each so-manieth.
    """

    def __init__(self, request: EncodeRequest, work: WorkDirectory | None, progress: Progress, every: int = 1) -> None:
        self._request, self._work, self._progress, self._every = request, work, progress, every
        self._rows_left = _rows_left(request)
        self._files: dict[int, InputFile] = {}  # of the units that the executor has
        self._results: dict[int, SliceResult] = {}
        self._seen = Counts()
        self.num_units = self.num_reused = 0

    def run(self, executor: Executor) -> None:
        """Encode every unit that is not whole already."""
        # With a limit a unit must know how many rows the ones before it had; a trial need not be parallel.
        if self._request.limit is not None:
            executor = LocalExecutor(1)
        executor = executor.fitting(sum(one.num_bytes for one in self._request.sources))
        duplicates = self._duplicates(executor) if self._request.deduplicate else {}
        for result in executor.run(encode_slice, self._tasks(duplicates), start_encoder, self._request.settings):
            self._files.pop(result.number).refuse_changed()  # or its receipt would vouch for other rows
            self._take(result)
            if self._work is not None:
                noted = {"counts": result.counts.to_json(), "parts": result.parts}
                self._work.write_receipt(_receipt_name(result.number), result.fingerprint, noted)

    def _duplicates(self, executor: Executor) -> dict[int, frozenset[int]]:
        """Slice -> positions of records that equal an earlier one, among those that this run looks at."""
        rows_left = _rows_left(self._request)
        tasks = (task for task in slice_tasks(self._request.sources, rows_left) if task.number % self._every == 0)
        hashes = {}
        self._progress.begin("compare")
        for unit in executor.run(hash_slice, tasks, _nothing):
            hashes[unit.number] = unit.hashes
            _take_off(rows_left, unit.source, len(unit.hashes))
            self._progress.update(unit.num_bytes, rows=len(unit.hashes))
        self._progress.begin("encode")
        return find_duplicates(hashes)

    def _tasks(self, duplicates: Mapping[int, frozenset[int]]) -> Iterator[SliceTask]:
        """The units that must be encoded; the whole ones are counted on the way."""
        for task in slice_tasks(self._request.sources, self._rows_left):
            if task.number % self._every:
                continue
            self.num_units += 1
            described = task._replace(duplicates=duplicates.get(task.number, frozenset()))
            described = described._replace(fingerprint=self._fingerprint(described))
            reused = self._whole(described)
            if reused is None:
                self._files[task.number] = task.unit.file
                yield described
            else:
                self.num_reused += 1
                self._take(reused)

    def _fingerprint(self, task: SliceTask) -> str:
        return fingerprint_of(
            {
                "unit": task.unit.key(),
                "number": task.number,
                "file": task.unit.file.path,  # the examples of dropped rows name it
                "source": [task.source.name, task.source.schema, task.source.weight, task.source.split],
                "mapping": dict(task.source.mapping),
                "max_rows": task.max_rows,
                "duplicates": sorted(task.duplicates),
                **self._request.description,
            }
        )

    def _whole(self, task: SliceTask) -> SliceResult | None:
        if self._work is None:
            return None
        noted = self._work.receipt(_receipt_name(task.number), task.fingerprint)
        if noted is None:
            return None
        for split, fingerprint in noted["parts"].items():
            try:
                if TokenPart.open(part_path(self._work.tokens / split, task.number)).fingerprint != fingerprint:
                    return None
            except PackedSFTError:
                return None
        counts = Counts.from_json(noted["counts"])
        if _num_errors(counts) and not self._request.settings.skip_errors:
            return None  # read again, to say what is wrong
        return SliceResult(task.number, task.source.name, task.fingerprint, counts, noted["parts"], {})

    def _take(self, result: SliceResult) -> None:
        self._results[result.number] = result
        _take_off(self._rows_left, result.source, result.counts.num_rows)
        sequences = result.counts.splits.values()
        self._progress.update(
            result.counts.num_bytes, rows=result.counts.num_rows, tokens=sum(one.num_tokens for one in sequences)
        )
        self._seen.add(result.counts)
        _check_errors(self._seen, self._request.max_errors)

    @property
    def counts(self) -> dict[str, Counts]:
        """Per source, added up in the order of the units, whoever finished first."""
        counts = {one.source.name: Counts() for one in self._request.sources}
        for _, result in sorted(self._results.items()):
            counts[result.source].add(result.counts)
        return counts

    @property
    def lengths(self) -> dict[str, npt.NDArray[np.int32]]:
        """Split -> lengths of its sequences, in order; of dry runs only."""
        lengths: dict[str, list[npt.NDArray[np.int32]]] = {}
        for _, result in sorted(self._results.items()):
            for split, found in result.lengths.items():
                lengths.setdefault(split, []).append(found)
        return {split: np.concatenate(found) for split, found in lengths.items()}

    @property
    def parts(self) -> dict[str, list[int]]:
        """Split -> the numbers of the parts that this run vouches for."""
        parts: dict[str, list[int]] = {}
        for number, result in sorted(self._results.items()):
            for split in result.parts:
                parts.setdefault(split, []).append(number)
        return parts


def slice_tasks(
    sources: Sequence[ScannedSource], rows_left: Mapping[str, int | None] | None = None
) -> Iterator[SliceTask]:
    """All units of all sources, numbered in the order of the configuration.

    Args:
        sources: in that order.
        rows_left: source -> rows still wanted of it; what a unit has is taken off before the next one is asked for.
    """
    number = 0
    for one in sources:
        for unit, num_bytes in one.units():
            max_rows = None if rows_left is None else rows_left[one.source.name]
            if max_rows is not None and max_rows <= 0:
                break
            yield SliceTask(number, one.source, unit, num_bytes, max_rows=max_rows)
            number += 1


def _rows_left(request: EncodeRequest) -> dict[str, int | None]:
    return {one.source.name: request.limit for one in request.sources}


def _take_off(rows_left: dict[str, int | None], source: str, num_rows: int) -> None:
    left = rows_left[source]
    if left is not None:
        rows_left[source] = left - num_rows


def _num_errors(*counts: Counts) -> int:
    return sum(one.dropped.get(reason, 0) for one in counts for reason in ERRORS)


def _check_errors(counts: Counts, max_errors: int) -> None:
    """Refuse to go on when more rows could not be used than the user allows."""
    num_errors = _num_errors(counts)
    if num_errors > max_errors:
        shown = "; ".join(example for reason in ERRORS for example in counts.examples.get(reason, []))
        raise InvalidInputError(
            f"{num_errors:,} rows could not be used, more than max_errors={max_errors:,} allows; the first: {shown}"
        )


def _nothing() -> None:
    """Hashing needs no set-up."""


def _receipt_name(number: int) -> str:
    return f"tokens/receipts/unit_{number:06d}"


def nothing_left(counts: Mapping[str, Counts]) -> InvalidInputError:
    """The error for an input of which no row is left, with the reasons."""
    total = Counts()
    for one in counts.values():
        total.add(one)
    if not total.num_rows:
        return InvalidInputError("the input holds no row; check input or sources")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(total.dropped.items()))
    example = next((shown[0] for _, shown in sorted(total.examples.items()) if shown), "")
    return InvalidInputError(
        f"all {total.num_rows:,} rows were dropped ({reasons}), such as {example}; "
        "check the schema, the template and the encode settings"
    )
