"""Encode records into token stores, one per split: slice by slice in any number of processes, reusing whole slices.

    files ─▶ slices ─▶ those that are whole ─▶ taken over ───────────────────┐
                  └─▶ the others ─▶ the executor, `encode_worker` ─▶ receipt ─┴─▶ store.json, encode.json

A slice is whole if its receipt has the fingerprint of all that decides its result, and lists parts that still exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.array import Share, ShareReport, not_encoded
from megatron_packed_sft.prepare.audit import Audit
from megatron_packed_sft.prepare.counts import Counts, total_of
from megatron_packed_sft.prepare.encode_worker import (
    EncodeSettings,
    SliceResult,
    SliceTask,
    encode_slice,
    hash_slice,
    receipt_of,
    start_encoder,
)
from megatron_packed_sft.prepare.remote_work import RemoteWorkDirectory, encode_slice_and_send, start_sending_encoder
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of, part_number, slice_receipt
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.support.processes import Executor, LocalExecutor
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.tokens.store import TokenStore

ENOUGH_BYTES = 64 << 20  # of the input, for a dry run; more is sampled
_MOST_SLICES = 1_000_000  # of a file


@dataclass
class EncodedSources:
    """What the stage made: a token store for each split that got a sequence, and the counts of each source."""

    stores: dict[str, TokenStore]
    counts: dict[str, Counts]  # in the order of the configuration
    slice_sources: dict[int, str]  # number of each slice -> its source, in order
    num_reused: int

    def sources_of(self, split: str) -> npt.NDArray[np.int64]:
        """Return the index of the source of each sequence of a split."""
        names = list(self.counts)
        parts = [(names.index(self.slice_sources[part_number(part)]), len(part)) for part in self.stores[split].parts]
        return np.repeat([index for index, _ in parts], [size for _, size in parts]).astype(np.int64)


class EncodedSplit(NamedTuple):
    """The sequences of a split, one entry each."""

    lengths: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]  # trained tokens
    sources: npt.NDArray[np.int64]  # index of the source


@dataclass
class Estimate:
    """What a dry run found."""

    counts: dict[str, Counts]
    splits: dict[str, EncodedSplit]
    num_slices: int
    looked_at: float  # share of the input's bytes
    audits: dict[str, Audit] | None = None  # by source, if that was asked for


def encode_sources(
    sources: Sequence[ScannedSource],
    settings: EncodeSettings,
    work: WorkDirectory,
    executor: Executor,
    progress: Progress,
    array: Share | None = None,
) -> EncodedSources:
    """Return token stores for the sources, of whole slices from earlier runs and of new ones.

    Args:
        sources: what to encode.
        settings: how.
        work: where the token stores and receipts are.
        executor: encodes the slices that are not whole.
        progress: called after every slice.
        array: the share of the last call of an array, which owns everything and encodes nothing: slices that are not
            whole are an error.
    """
    run = SliceRun(sources, settings, work, progress)
    fingerprint = encode_fingerprint(sources, settings)
    whole = work.receipt("encode", fingerprint)
    if whole is not None and (stores := work.open_stores(whole["stores"])) is not None:
        counts = {one.source.name: Counts.from_json(whole["counts"][one.source.name]) for one in sources}
        # If fewer errors are allowed than that run had, its slices are encoded again, to say which records they were.
        if total_of(counts.values()).num_errors <= settings.max_errors:
            names = {numbered(file, place): name for name, file, number in whole["slices"] for place in range(number)}
            return EncodedSources(stores, counts, names, num_reused=len(names))
    if array is not None:
        run.take_whole(executor, array)
    else:
        run.run(executor)
    stores = work.publish_parts(run.parts)
    if not stores:
        raise _nothing_left(run.counts)
    noted = {
        "stores": {split: store.fingerprint for split, store in stores.items()},
        "counts": {name: counts.to_json() for name, counts in run.counts.items()},
        "slices": run.slices_of_files(),
    }
    work.write_receipt("encode", fingerprint, noted)
    return EncodedSources(stores, run.counts, run.slice_sources, run.num_reused)


def encode_fingerprint(sources: Sequence[ScannedSource], settings: EncodeSettings) -> str:
    """Return a fingerprint that is equal if the stage would write the same bytes."""
    return fingerprint_of(
        {
            "stage": "encode",
            "sources": [{"name": one.source.name, **one.to_json()} for one in sources],
            "deduplicate": settings.deduplicate,
            "limit": settings.limit,
            **settings.to_json(),
        }
    )


def encode_share(
    sources: Sequence[ScannedSource],
    settings: EncodeSettings,
    work: WorkDirectory,
    executor: Executor,
    progress: Progress,
    share: Share,
) -> ShareReport:
    """Encode the slices of one call of an array; write their parts and receipts, and nothing else."""
    assert share.index is not None
    progress.expect(sum(one.num_bytes for one in share.listing.sources) // share.count)
    run = SliceRun(sources, settings, work, progress, share=share)
    run.run(executor)
    return ShareReport(share.index, share.count, len(run.slice_sources), run.num_reused, total_of(run.counts.values()))


def estimate(
    sources: Sequence[ScannedSource], settings: EncodeSettings, executor: Executor, progress: Progress
) -> Estimate:
    """Count records, drops and tokens of the input, or of evenly spread slices of a large one; write nothing."""
    total = sum(one.num_bytes for one in sources)
    every = 1 if settings.limit is not None else max(1, -(-total // ENOUGH_BYTES))
    progress.expect(total // every)
    run = SliceRun(sources, settings, None, progress, every)
    run.run(executor)
    splits = run.splits()
    if not splits:
        raise _nothing_left(run.counts)
    num_bytes = sum(one.num_bytes for one in run.counts.values())
    looked_at = 1.0 if every == 1 else num_bytes / total
    return Estimate(run.counts, splits, len(run.slice_sources), looked_at, run.audits if settings.audit else None)


def audit_sources(
    sources: Sequence[ScannedSource], settings: EncodeSettings, executor: Executor, progress: Progress
) -> dict[str, Audit]:
    """Encode all of the input once more, to say what is trained of it; nothing is kept."""
    again = [replace(one, known={}) for one in sources]
    run = SliceRun(again, replace(settings, tokens=None, audit=True), None, progress)
    run.run(executor)
    return run.audits


class SliceRun:
    """The slices of one run: whole ones are taken over, the others go to the executor.

    Args:
        sources: what to encode.
        settings: how.
        work: where receipts are; None for a dry run, which neither reads nor writes them.
        progress: called after every slice.
        every: take every n-th slice only.
        share: of a call of an array, or None for all slices.
    """

    def __init__(
        self,
        sources: Sequence[ScannedSource],
        settings: EncodeSettings,
        work: WorkDirectory | None,
        progress: Progress,
        every: int = 1,
        share: Share | None = None,
    ) -> None:
        self._sources, self._settings, self._work = sources, settings, work
        self._progress, self._every, self._share = progress, every, share
        self._description = settings.to_json()
        self._records_left = self._limits()
        self._files: dict[int, InputFile] = {}  # of the slices that the executor has
        self._results: dict[int, SliceResult] = {}
        self._seen = Counts()
        self.num_reused = 0

    def run(self, executor: Executor) -> None:
        """Encode every slice that is not whole already."""
        # With a limit, a slice must know how many records the earlier ones had; a trial need not be parallel.
        if self._settings.limit is not None:
            executor = LocalExecutor(1)
        num_shares = self._every if self._share is None else self._share.count
        executor = executor.fitting(sum(one.num_bytes for one in self._sources) // num_shares)
        duplicates = self._duplicates(executor) if self._settings.deduplicate else {}
        for result in self._encoded(executor, self._tasks(duplicates)):
            file = self._files.pop(result.number)
            file.refuse_changed()  # or its receipt would be about other records
            if self._work is not None and not isinstance(self._work, RemoteWorkDirectory):
                noted = receipt_of(result, file.shown)
                self._work.write_receipt(slice_receipt(result.number), result.fingerprint, noted)
            self._take(result._replace(drops=()))

    def _encoded(self, executor: Executor, tasks: Iterator[SliceTask]) -> Iterator[SliceResult]:
        if isinstance(self._work, RemoteWorkDirectory):
            return executor.run(encode_slice_and_send, tasks, start_sending_encoder, self._settings, self._work.url)
        return executor.run(encode_slice, tasks, start_encoder, self._settings)

    def take_whole(self, executor: Executor, share: Share) -> None:
        """Take over every slice; raise an error if no call of an array has encoded some of them."""
        duplicates = self._duplicates(executor) if self._settings.deduplicate else {}
        self._share = share
        missing = [share.owners[task.number] for task in self._tasks(duplicates)]
        if missing:
            raise not_encoded(missing, len(missing) + self.num_reused, share.count)

    def _duplicates(self, executor: Executor) -> dict[int, frozenset[int]]:
        """Return slice -> positions of records that equal an earlier one.

        A dry run compares the records that it looks at; a call of an array compares all, as a single run would.
        """
        left = self._limits()
        every = self._every if self._work is None else 1
        tasks = islice(slice_tasks([replace(one, known={}) for one in self._sources], left), 0, None, every)
        hashes = {}
        self._progress.begin("compare")
        for one in executor.run(hash_slice, tasks, _no_setup):
            hashes[one.number] = one.hashes
            _subtract(left, one.source, len(one.hashes))
            self._progress.update(one.num_bytes, records=len(one.hashes))
        self._progress.begin("encode")
        return find_duplicates(hashes)

    def _tasks(self, duplicates: Mapping[int, frozenset[int]]) -> Iterator[SliceTask]:
        """Yield the slices that must be encoded; take over the whole ones on the way."""
        tasks = slice_tasks(self._sources, self._records_left, self._share, self._on_file)
        for task in islice(tasks, 0, None, self._every):
            described = task._replace(duplicates=duplicates.get(task.number, frozenset()))
            described = described._replace(fingerprint=self._slice_fingerprint(described))
            reused = self._whole(described)
            if reused is None:
                self._files[task.number] = task.slice.file
                yield described
            else:
                self.num_reused += 1
                self._take(reused)

    def _on_file(self, file: InputFile, cuts: Sequence[Sequence[int]], carried: bool) -> None:
        if self._share is not None and self._share.index is not None and self._work is not None:
            self._share.note(self._work, file, cuts, carried=carried)

    def _slice_fingerprint(self, task: SliceTask) -> str:
        return fingerprint_of(
            {
                "slice": task.slice.key(),
                "number": task.number,
                "file": task.slice.file.shown,  # the examples of dropped records name it
                "source": [task.source.name, task.source.schema, task.source.weight, task.source.split],
                "mapping": dict(task.source.mapping),
                **task.source.unusual,
                "max_records": task.max_records,
                "duplicates": sorted(task.duplicates),
                **self._description,
            }
        )

    def _whole(self, task: SliceTask) -> SliceResult | None:
        """Return the result of an earlier run for a slice, if all of it still exists."""
        if self._work is None:
            return None
        noted = self._work.receipt(slice_receipt(task.number), task.fingerprint)
        if noted is None or not self._work.has_slice(task.number, noted):
            return None
        counts = Counts.from_json(noted["counts"])
        if counts.num_errors and not self._settings.max_errors:
            return None  # read again, to report what is wrong
        return SliceResult(task.number, task.source.name, task.fingerprint, counts, noted["parts"])

    def _take(self, result: SliceResult) -> None:
        self._results[result.number] = result
        _subtract(self._records_left, result.source, result.counts.num_rows)
        num_tokens = sum(one.num_tokens for one in result.counts.splits.values())
        self._progress.update(result.counts.num_bytes, records=result.counts.num_rows, tokens=num_tokens)
        self._seen.add(result.counts)
        self._seen.refuse_errors(self._settings.max_errors)

    def _limits(self) -> dict[str, int | None]:
        return {one.source.name: self._settings.limit for one in self._sources}

    def _in_order(self) -> list[SliceResult]:
        return [result for _, result in sorted(self._results.items())]

    @property
    def counts(self) -> dict[str, Counts]:
        """Counts per source, added up in the order of the slices, not in the order in which they finished."""
        counts = {one.source.name: Counts() for one in self._sources}
        for result in self._in_order():
            counts[result.source].add(result.counts)
        return counts

    @property
    def audits(self) -> dict[str, Audit]:
        """What is trained of each source."""
        audits = {one.source.name: Audit() for one in self._sources}
        for result in self._in_order():
            if result.audit is not None:
                audits[result.source].add(result.audit)
        return audits

    @property
    def slice_sources(self) -> dict[int, str]:
        """Number of each slice -> its source, in order."""
        return {result.number: result.source for result in self._in_order()}

    def slices_of_files(self) -> list[list[Any]]:
        """Return [source, number of the file, number of its slices] of all files that have any."""
        found = Counter((result.source, file_number(result.number)) for result in self._in_order())
        return [[source, file, number] for (source, file), number in found.items()]

    def splits(self) -> dict[str, EncodedSplit]:
        """Return what a dry run keeps of each split."""
        found: dict[str, list[tuple[str, SliceResult]]] = {}
        for result in self._in_order():
            for split in result.lengths:
                found.setdefault(split, []).append((result.source, result))
        names = [one.source.name for one in self._sources]
        return {
            split: EncodedSplit(
                np.concatenate([result.lengths[split] for _, result in some]).astype(np.int64),
                np.concatenate([result.trained[split] for _, result in some]).astype(np.int64),
                np.concatenate([np.full(len(one.lengths[split]), names.index(name)) for name, one in some]),
            )
            for split, some in found.items()
        }

    @property
    def parts(self) -> dict[str, dict[int, str]]:
        """Split -> number -> fingerprint of the parts of this run."""
        parts: dict[str, dict[int, str]] = {}
        for result in self._in_order():
            for split, fingerprint in result.parts.items():
                parts.setdefault(split, {})[result.number] = fingerprint
        return parts


def _nothing_left(counts: Mapping[str, Counts]) -> InvalidInputError:
    """Return the error for an input whose records were all dropped, with the reasons."""
    total = total_of(counts.values())
    if not total.num_rows:
        return InvalidInputError("the input has no records; check input or sources")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(total.dropped.items()))
    example = next((shown[0] for _, shown in sorted(total.examples.items()) if shown), "")
    return InvalidInputError(
        f"all {total.num_rows:,} records were dropped ({reasons}), such as {example}; "
        "check the schema, the template and the encode settings"
    )


def _subtract(records_left: dict[str, int | None], source: str, num_records: int) -> None:
    left = records_left[source]
    if left is not None:
        records_left[source] = left - num_records


def _no_setup() -> None:
    """Hashing needs no set-up."""


def slice_tasks(
    sources: Sequence[ScannedSource],
    records_left: Mapping[str, int | None] | None = None,
    share: Share | None = None,
    on_file: Callable[[InputFile, Sequence[Sequence[int]], bool], object] | None = None,
) -> Iterator[SliceTask]:
    """Yield the slices of all sources, or those of a share, numbered by file and by position in it.

    Args:
        sources: in the order of the configuration.
        records_left: source -> records still wanted; the caller subtracts those of a slice before it asks for the next.
        share: of a call of an array; files of which it has no part are not opened.
        on_file: called with every file that was cut, with [start, stop, first record, bytes] of its slices, and
            whether workers cannot read these by themselves.
    """
    files = ((one, file) for one in sources for file in one.files)
    for number, (one, file) in enumerate(files):
        if share is not None and not share.has_part_of(file):
            continue
        position = 0
        cuts: list[list[int]] = []
        carried = False
        for place, (file_slice, num_bytes) in enumerate(one.slices_of(file)):
            max_records = None if records_left is None else records_left[one.source.name]
            if max_records is not None and max_records <= 0:
                break
            task = SliceTask(numbered(number, place), one.source, file_slice, num_bytes, max_records=max_records)
            if share is None or share.takes(task.number, file, position):
                yield task
            position += num_bytes
            cuts.append([file_slice.start, file_slice.stop, file_slice.first_record, num_bytes])
            carried = carried or file_slice.payload is not None
        else:
            if on_file is not None:
                on_file(file, cuts, carried)


def numbered(file: int, place: int) -> int:
    """Return the number of a slice from that of its file and its position in it, whatever the other files are.

    Example:
        >>> numbered(0, 5), numbered(3, 5), file_number(numbered(3, 5))
        (5, 3000005, 3)
    """
    if place >= _MOST_SLICES:
        raise InvalidInputError(f"a file has more than {_MOST_SLICES:,} slices; split it into several files")
    return file * _MOST_SLICES + place


def file_number(number: int) -> int:
    """Return the number of the file that a slice belongs to."""
    return number // _MOST_SLICES


def find_duplicates(hashes: Mapping[int, npt.NDArray[np.uint64]]) -> dict[int, frozenset[int]]:
    """Return the positions of repeated records in each slice; the first one wins for any number of workers.

    Args:
        hashes: slice number -> content hashes [records, 2]. Costs 16 bytes of memory per record, and as much to sort.

    Example:
        >>> one, two = np.array([[1, 1], [2, 2]], np.uint64), np.array([[3, 3], [1, 1]], np.uint64)
        >>> find_duplicates({0: one, 1: two})
        {0: frozenset(), 1: frozenset({1})}
    """
    numbers = sorted(hashes)
    records = np.concatenate([hashes[number] for number in numbers]) if numbers else np.empty((0, 2), np.uint64)
    order = np.lexsort((records[:, 1], records[:, 0]))  # stable: equal records stay in their order
    repeated = np.zeros(len(records), bool)
    repeated[order[1:]] = np.all(records[order[1:]] == records[order[:-1]], axis=1)
    ends = np.cumsum([len(hashes[number]) for number in numbers])
    by_slice = np.split(repeated, ends[:-1]) if numbers else []
    return {number: frozenset(np.flatnonzero(one).tolist()) for number, one in zip(numbers, by_slice, strict=True)}
