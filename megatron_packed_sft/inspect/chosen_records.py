"""Choose records of an input, by number or at random, and read no more of it than necessary."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.sources import Source
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.slices import FileSlice, RawRecord, read_slice, scan_slices
from megatron_packed_sft.support.wording import byte_count, plural

_SLICE_BYTES = 1 << 18
_ENOUGH_BYTES = 1 << 30  # of each file, to choose random records from
_SPARE = 64  # extra draws, because lines may be blank


class ChosenRecord(NamedTuple):
    """A record and its source."""

    source: Source
    raw: RawRecord


class SourceFile(NamedTuple):
    """A file and its source."""

    source: Source
    file: InputFile


def files_of(sources: Sequence[Source], only: str | None = None) -> list[SourceFile]:
    """Return the files of some sources without reading them.

    Args:
        sources: of the configuration.
        only: a file or glob; other files are ignored.
    """
    found = [SourceFile(one, file) for one in sources for file in find_files(one.paths, with_checksums=False)]
    if only is None:
        return found
    wanted = {file.path for file in find_files(only, with_checksums=False)}
    chosen = [one for one in found if one.file.path in wanted]
    if not chosen:
        names = ", ".join(one.name for one in sources)
        raise InvalidInputError(f"{only} is not a file of the sources {names}; give one of their files")
    return chosen


def first_record(files: Sequence[SourceFile]) -> ChosenRecord:
    """Return the first record of the first file that has one."""
    for source, file in files:
        for file_slice in scan_slices(file, _SLICE_BYTES, max_record_bytes=source.max_record_bytes):
            for raw in read_slice(file_slice):
                return ChosenRecord(source, raw)
    raise InvalidInputError(f"{files[0].file.path} has no record; check the file")


def record_numbered(files: Sequence[SourceFile], number: int) -> ChosenRecord:
    """Return the record with a number, counted from 1 as in errors and the rejects file; of JSONL it is the line."""
    if number < 1:
        raise InvalidInputError(f"--row is {number}; lines and records are counted from 1")
    if len(files) > 1:
        raise InvalidInputError(
            f"--row {number} needs one file, but there are {len(files):,}; give one, such as {files[0].file.path}"
        )
    [(source, file)] = files
    found = next(_at(file, [number], source.max_record_bytes), None)
    if found is None:
        total = _num_records(file, _starts(file)[0])
        is_lines = file.format == "jsonl"
        what = plural(total, "line" if is_lines else "record")
        problem = f"line {number} is blank" if number <= total else f"it has {what}"
        raise InvalidInputError(f"{file.path} has no record at --row {number}: {problem}; choose another one")
    return ChosenRecord(source, found)


class Drawn(NamedTuple):
    """Random records, and a note if they are not from the whole input."""

    records: list[ChosenRecord]
    note: str


def draw_records(files: Sequence[SourceFile], count: int, seed: int | None = None) -> Drawn:
    """Return random records in their order; every line or record is equally likely.

    Args:
        files: to choose from.
        count: how many.
        seed: equal seeds choose equal records; None chooses others each time.
    """
    if count < 1:
        raise InvalidInputError(f"--random is {count}; it must be at least 1")
    numbers, note = [], ""
    for _, file in files:
        starts, is_whole = _starts(file)
        numbers.append(_num_records(file, starts) if is_whole else starts[-1] - 1)
        if not is_whole:
            note = f"chosen from the first {byte_count(_ENOUGH_BYTES)} of each file"
    total = sum(numbers)
    if not total:
        raise InvalidInputError(f"{files[0].file.path} has no record; check the file")
    drawn = random.Random(seed).sample(range(total), min(total, count + _SPARE))
    firsts = [sum(numbers[:place]) for place in range(len(files))]
    found: dict[int, ChosenRecord] = {}
    for place, (source, file) in enumerate(files):
        own = sorted(one - firsts[place] + 1 for one in drawn if bisect_right(firsts, one) - 1 == place)
        for raw in _at(file, own, source.max_record_bytes):
            found[firsts[place] + raw.number - 1] = ChosenRecord(source, raw)
    chosen = set(islice((one for one in drawn if one in found), count))
    return Drawn([found[one] for one in sorted(chosen)], note)


def _at(file: InputFile, numbers: Sequence[int], max_record_bytes: int) -> Iterator[RawRecord]:
    """Yield the records with some ascending numbers, without blank lines and numbers beyond the end."""
    if file.format == "hf_dataset":
        total = _num_records(file, [])
        for number in numbers:
            if number <= total:
                yield from read_slice(FileSlice(file, 0, number - 1, number, number, None, max_record_bytes))
        return
    waiting = list(numbers)
    previous: FileSlice | None = None
    for current in scan_slices(file, _SLICE_BYTES, max_record_bytes=max_record_bytes):
        if previous is not None:
            yield from _taken(previous, waiting, current.first_record)
            if not waiting:
                return
        previous = current
    if previous is not None:
        yield from _taken(previous, waiting, None)


def _taken(file_slice: FileSlice, waiting: list[int], stop: int | None) -> Iterator[RawRecord]:
    """Yield the waiting records of a slice and remove them from the list; a slice without any is not parsed."""
    here = {number for number in waiting if stop is None or number < stop}
    if here:
        waiting[:] = [number for number in waiting if number not in here]
        yield from (raw for raw in read_slice(file_slice) if raw.number in here)


def _starts(file: InputFile) -> tuple[list[int], bool]:
    """Return the first record of every slice up to 1 GB, and whether that is the whole file."""
    starts = []
    for one in scan_slices(file, _SLICE_BYTES):
        starts.append(one.first_record)
        if file.format in ("jsonl", "json") and one.start > _ENOUGH_BYTES:
            return starts, False
    return starts, True


def _num_records(file: InputFile, starts: Sequence[int]) -> int:
    """Return the number of lines or records, given the first record of every slice."""
    if file.format in ("parquet", "hf_dataset"):
        from megatron_packed_sft.records import tables

        return (tables.count_parquet if file.format == "parquet" else tables.count_dataset)(file)
    if not starts:
        return 0
    last = None
    for one in scan_slices(file, _SLICE_BYTES):
        if one.first_record == starts[-1]:
            last = one
    numbers = [raw.number for raw in read_slice(last)] if last is not None else []
    return max(numbers, default=starts[-1] - 1)
