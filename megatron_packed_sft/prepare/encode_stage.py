"""Rows to token stores, one per split: units of work by any number of processes, reused where they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.counts import ERRORS, Counts
from megatron_packed_sft.prepare.duplicates import find_duplicates
from megatron_packed_sft.prepare.encode_worker import (
    EncodeSettings,
    UnitResult,
    UnitTask,
    encode_unit,
    hash_unit,
    start_encoder,
)
from megatron_packed_sft.prepare.executor import Executor, LocalExecutor
from megatron_packed_sft.prepare.progress import Progress
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.prepare.splits import SPLITS
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.storage.atomic import os_errors
from megatron_packed_sft.tokens.store import TokenPart, TokenStore, open_token_store, publish_store
from megatron_packed_sft.tokens.writer import part_path


@dataclass(frozen=True)
class EncodeRequest:
    """Everything that decides what the encode stage writes, and how it may go about it."""

    sources: Sequence[ScannedSource]
    settings: EncodeSettings
    description: Mapping[str, Any]  # plain settings; with the sources they decide every byte
    deduplicate: bool
    limit: int | None  # rows of each source
    max_errors: int

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
    if whole is not None and (stores := _open_stores(work, whole["stores"])) is not None:
        counts = {name: Counts.from_json(document) for name, document in whole["counts"].items()}
        return EncodedSources(stores, counts, whole["num_units"], num_reused=whole["num_units"])
    encoder = UnitRun(request, work, progress)
    encoder.run(executor)
    stores = {split: _publish(work.tokens / split, numbers) for split, numbers in sorted(encoder.parts.items())}
    if not stores:
        raise nothing_left(encoder.counts)
    _remove_other_stores(work.tokens, stores)
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


class UnitRun:
    """The units of one run: those that are whole are taken over, the others go to the executor.

    Args:
        request: what to encode.
        work: where receipts are; None for a dry run, which neither reads nor writes any.
        progress: told of every unit.
        every: of the units, only each so-manieth.
    """

    def __init__(self, request: EncodeRequest, work: WorkDirectory | None, progress: Progress, every: int = 1) -> None:
        self._request, self._work, self._progress, self._every = request, work, progress, every
        self._room = {one.source.name: request.limit for one in request.sources}
        self._results: dict[int, UnitResult] = {}
        self._seen = Counts()
        self.num_units = self.num_reused = 0

    def run(self, executor: Executor) -> None:
        """Encode every unit that is not whole already."""
        # With a limit a unit must know how many rows the ones before it had; a trial need not be parallel.
        if self._request.limit is not None:
            executor = LocalExecutor(1)
        duplicates = _duplicates(self._request, executor) if self._request.deduplicate else {}
        for result in executor.run(encode_unit, self._tasks(duplicates), start_encoder, self._request.settings):
            self._take(result)
            if self._work is not None:
                noted = {"counts": result.counts.to_json(), "parts": result.parts}
                self._work.write_receipt(_receipt_name(result.number), result.fingerprint, noted)

    def _tasks(self, duplicates: Mapping[int, frozenset[int]]) -> Iterator[UnitTask]:
        """The units that must be encoded; the whole ones are counted on the way."""
        for task in unit_tasks(self._request.sources):
            room = self._room[task.source.name]
            if task.number % self._every or (room is not None and room <= 0):
                continue
            self.num_units += 1
            described = task._replace(max_rows=room, duplicates=duplicates.get(task.number, frozenset()))
            described = described._replace(fingerprint=self._fingerprint(described))
            reused = self._whole(described)
            if reused is None:
                yield described
            else:
                self.num_reused += 1
                self._take(reused)

    def _fingerprint(self, task: UnitTask) -> str:
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

    def _whole(self, task: UnitTask) -> UnitResult | None:
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
        return UnitResult(task.number, task.source.name, task.fingerprint, counts, noted["parts"], {})

    def _take(self, result: UnitResult) -> None:
        self._results[result.number] = result
        room = self._room[result.source]
        if room is not None:
            self._room[result.source] = room - result.counts.num_rows
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


def unit_tasks(sources: Sequence[ScannedSource]) -> Iterator[UnitTask]:
    """All units of all sources, numbered in the order of the configuration."""
    number = 0
    for one in sources:
        for unit, num_bytes in one.units():
            yield UnitTask(number, one.source, unit, num_bytes)
            number += 1


def _check_errors(counts: Counts, max_errors: int) -> None:
    """Refuse to go on when more rows could not be used than the user allows."""
    num_errors = sum(counts.dropped.get(reason, 0) for reason in ERRORS)
    if num_errors > max_errors:
        shown = "; ".join(example for reason in ERRORS for example in counts.examples.get(reason, []))
        raise InvalidInputError(
            f"{num_errors:,} rows could not be used, more than max_errors={max_errors:,} allows; the first: {shown}"
        )


def _duplicates(request: EncodeRequest, executor: Executor) -> dict[int, frozenset[int]]:
    return find_duplicates(dict(executor.run(hash_unit, unit_tasks(request.sources), _nothing)))


def _nothing() -> None:
    """Hashing needs no set-up."""


def _receipt_name(number: int) -> str:
    return f"tokens/receipts/unit_{number:06d}"


def _open_stores(work: WorkDirectory, fingerprints: Mapping[str, str]) -> dict[str, TokenStore] | None:
    stores = {}
    for split, fingerprint in fingerprints.items():
        with suppress(PackedSFTError):
            store = open_token_store(work.tokens / split)
            if store.fingerprint == fingerprint:
                stores[split] = store
    return stores if len(stores) == len(fingerprints) else None


def _publish(store: Path, numbers: Sequence[int]) -> TokenStore:
    """List the parts of this run in store.json, and remove what other runs left beside them."""
    wanted = {part_path(store, number).name for number in numbers}
    with os_errors("clear", store):
        for entry in os.scandir(store):
            if entry.name.startswith("part_") and entry.name not in wanted:
                shutil.rmtree(entry.path)
    return publish_store(store)


def _remove_other_stores(tokens: Path, stores: Mapping[str, TokenStore]) -> None:
    for split in SPLITS:
        if split not in stores:
            shutil.rmtree(tokens / split, ignore_errors=True)


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
