"""The slices of all sources as tasks with numbers of their own, and the records that occur twice among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.encode_worker import SliceTask
from megatron_packed_sft.prepare.shares import Share
from megatron_packed_sft.prepare.sources import ScannedSource
from megatron_packed_sft.records.files import InputFile
from megatron_packed_sft.records.slices import FileSlice

MOST_SLICES = 1_000_000  # of a file


def slice_tasks(
    sources: Sequence[ScannedSource],
    records_left: Mapping[str, int | None] | None = None,
    share: Share | None = None,
    on_file: Callable[[InputFile, Sequence[tuple[FileSlice, int]]], object] | None = None,
) -> Iterator[SliceTask]:
    """Yield the slices of all sources, or those of a share, numbered by file and by place in it.

    Args:
        sources: in the order of the configuration.
        records_left: source -> records still wanted; what a slice has is taken off before the next one is asked for.
        share: of a call of an array; files of which it has nothing are not opened.
        on_file: called with every file that was cut, and its slices without their content.
    """
    files = ((one, file) for one in sources for file in one.files)
    for number, (one, file) in enumerate(files):
        if share is not None and not share.has_part_of(file):
            continue
        position = 0
        cut: list[tuple[FileSlice, int]] = []
        for place, (file_slice, num_bytes) in enumerate(one.slices_of(file)):
            max_records = None if records_left is None else records_left[one.source.name]
            if max_records is not None and max_records <= 0:
                break
            task = SliceTask(numbered(number, place), one.source, file_slice, num_bytes, max_records=max_records)
            if share is None or share.takes(task.number, file, position):
                yield task
            position += num_bytes
            cut.append((file_slice if file_slice.payload is None else replace(file_slice, payload=b""), num_bytes))
        else:
            if on_file is not None:
                on_file(file, cut)


def numbered(file: int, place: int) -> int:
    """Return the number of a slice, from that of its file and its place in it: nobody must know the other files.

    Example:
        >>> numbered(0, 5), numbered(3, 5), file_number(numbered(3, 5))
        (5, 3000005, 3)
    """
    if place >= MOST_SLICES:
        raise InvalidInputError(f"a file has more than {MOST_SLICES:,} slices; cut it into several files")
    return file * MOST_SLICES + place


def file_number(number: int) -> int:
    """Return the number of the file that a slice is of."""
    return number // MOST_SLICES


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
