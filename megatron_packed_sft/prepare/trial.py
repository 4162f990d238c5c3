"""The first records of every source, encoded before anything else: what is wrong with all of them is told at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice

from megatron_packed_sft.prepare.counts import Counts
from megatron_packed_sft.prepare.encode_worker import EncodeSettings, SliceEncoder, SliceTask
from megatron_packed_sft.prepare.sources import Source
from megatron_packed_sft.records.files import InputFile, expand_path, find_files
from megatron_packed_sft.records.slices import first_repeated_key, scan_slices
from megatron_packed_sft.support.drop_reasons import Severity
from megatron_packed_sft.support.wording import plural

_NUM_FILES, _NUM_RECORDS = 4, 4  # of each source, of each file
_SLICE_BYTES = 1 << 16


def try_first_records(sources: Sequence[Source], settings: EncodeSettings) -> list[str]:
    """Encode the first records of the first files of every source as the run will, and keep nothing.

    Args:
        sources: of the run.
        settings: of the run; a record that stops the run stops it here.

    Returns:
        A warning for each source of which every record that was tried would be dropped, or has a key twice.
    """
    warnings: list[str] = []
    with _silence():
        encoder = SliceEncoder(replace(settings, tokens=None, audit=False))
        tried = [(source, _tried(source, encoder, warnings)) for source in sources]
    for source, counts in tried:
        lost = {reason: count for reason, count in counts.dropped.items() if reason.severity is not Severity.HARMLESS}
        if counts.num_rows >= _NUM_RECORDS and sum(lost.values()) == counts.num_rows:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(lost.items()))
            warnings.append(
                f"the first {plural(counts.num_rows, 'record')} of source {source.name} would all be dropped "
                f"({reasons}), such as {counts.examples[min(lost)][0]}"
            )
    return warnings


def _tried(source: Source, encoder: SliceEncoder, warnings: list[str]) -> Counts:
    counts = Counts()
    repeated = None
    wanted = min(_NUM_RECORDS, encoder.settings.limit or _NUM_RECORDS)
    for file in _first_files(source):
        for file_slice in islice(scan_slices(file, _SLICE_BYTES, max_record_bytes=source.max_record_bytes), 1):
            counts.add(encoder.encode(SliceTask(0, source, file_slice, 0, max_records=wanted)).counts)
            repeated = repeated or first_repeated_key(file_slice, wanted)
    if repeated is not None:
        warnings.append(repeated)
    return counts


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what encoders log for the run itself, which logs it as well."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _first_files(source: Source) -> list[InputFile]:
    paths = list(islice(chain.from_iterable(map(expand_path, source.paths)), _NUM_FILES))
    return find_files(list(dict.fromkeys(paths)), with_checksums=False)  # listed twice is told when all are found
