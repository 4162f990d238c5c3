"""`validate` for indexed datasets: the index against itself and its .bin, every id, and how to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.storage.megatron_indexed.reader import open_indexed_dataset
from megatron_packed_sft.storage.token_stream.metadata import StreamMetadata
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.storage.token_stream.validate import check_stream, fitted
from megatron_packed_sft.storage.validation_report import Finding, ValidationReport
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from megatron_packed_sft.support.progress import Progress


def validate_indexed(path: Path, options: StreamOptions, report: ValidationReport, bar: Progress) -> BinFigures | None:
    """Check an indexed dataset: that it opens, and with level `full` every token, as of a stream.

    Args:
        path: the .idx file.
        options: the vocabulary and the EOS id to check against, and the length of windows.
        report: takes the findings, the counts, and how to train on the data.
        bar: shows the bytes read.
    """
    for name in ("dtype", "file_pattern"):
        if getattr(options, name) is not None:
            raise InvalidInputError(
                f"{options.spelled(name)} says nothing about {path}, which knows its own; leave it out"
            )
    try:
        documents = open_indexed_dataset(path)
        index = documents.index
        metadata = StreamMetadata(index.path, index.tokens.dtype)
        stream = TokenStream(path, [index.tokens], fitted(options, [index.tokens]), metadata)
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None
    report.num_bytes += path.stat().st_size
    num_findings = report.num_findings
    check_stream(stream, report, bar)
    empty = f"; {plural(index.num_empty, 'empty document')} left out" if index.num_empty else ""
    report.notes.append(
        f"{path}: {plural(len(documents), 'document')} of up to {plural(documents.pack_size, 'token')}{empty}"
    )
    if report.num_findings == num_findings:
        eos = "tokenizer" if stream.eos_id is None else stream.eos_id  # bins of different lengths are padded with it
        arguments = f"{str(path)!r}, {eos}, seq_length={documents.pack_size}, documents=True"
        report.notes.append(f"python, by document: create_sft_dataset({arguments})")
    return documents.figures
