"""`validate` for indexed datasets: the index against itself and its .bin, every id, and how to train on them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_packed_sft.disk.npy import ID_DTYPE, ID_LIMITS
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.storage.megatron_indexed.reader import IndexedDocuments, open_indexed_dataset
from megatron_packed_sft.storage.validation_report import Finding, ValidationReport
from megatron_packed_sft.support.wording import counted

if TYPE_CHECKING:
    from tqdm import tqdm

_BLOCK_TOKENS = 1 << 20
_SEQ_LENGTH = 2048


def validate_indexed(path: Path, report: ValidationReport, bar: tqdm[Any]) -> BinFigures | None:
    """Check an indexed dataset: that it opens, and with level `full` that every token can be an id.

    Args:
        path: the .idx file.
        report: takes the findings, the counts, and how to train on the data.
        bar: shows the bytes read.
    """
    try:
        documents = open_indexed_dataset(path)
    except PackedSFTError as error:
        report.add(Finding(str(path), str(error)))
        return None
    index, figures = documents.index, documents.figures
    report.num_bins += len(documents)
    report.num_sequences += len(documents)
    report.num_bytes += index.tokens.size + path.stat().st_size
    empty = f", and {counted(index.num_empty, 'empty one')} that is left out" if index.num_empty else ""
    report.notes.append(
        f"{path}: {counted(len(documents), 'document')} of up to {documents.pack_size:,} tokens of "
        f"{np.dtype(index.tokens.dtype).name}{empty}"
    )
    largest = None
    if report.level == "full":
        largest = _scan(documents, report, bar)
        report.num_tokens += index.tokens.num_tokens
        report.num_loss_tokens += index.tokens.num_tokens - len(documents)
        report.notes.append(f"{path}: the largest id is {largest:,}")
    report.notes += _usage(path, documents, largest)
    return figures


def _scan(documents: IndexedDocuments, report: ValidationReport, bar: tqdm[Any]) -> int:
    """Look at every token; those that cannot be ids are one finding. Return the largest."""
    from megatron_packed_sft.storage.token_stream import window_kernel

    tokens = documents.index.tokens
    largest, num_outside, place, value = -1, 0, -1, 0
    for start in range(0, tokens.num_tokens, _BLOCK_TOKENS):
        block = tokens.tokens(start, min(start + _BLOCK_TOKENS, tokens.num_tokens))
        _, highest, first_outside, outside = window_kernel.scan_tokens(block, -1, ID_LIMITS[ID_DTYPE])
        largest = max(largest, highest)
        if outside and not num_outside:
            place, value = start + first_outside, int(block[first_outside])
        num_outside += outside
        bar.update(block.nbytes)
    if num_outside:
        more = f", and {num_outside - 1:,} more like it" if num_outside > 1 else ""
        message = f"the token at position {place:,} is {value}, which is no id{more}"
        report.add(Finding(str(tokens.path), message, field="tokens"))
    return largest


def _usage(path: Path, documents: IndexedDocuments, largest: int | None) -> list[str]:
    """Return the recipe's line and the Python calls, as a stream and as documents."""
    seq_length = min(_SEQ_LENGTH, max(documents.index.tokens.num_tokens - 1, 1))
    keys = f"data.path={shlex.quote(str(path))} data.sequence_length={seq_length}"
    vocabulary = "" if largest is None else f" model.vocab_size={largest + 1}"
    return [
        f"train: packed-sft train {keys}{vocabulary}",
        f"python: create_sft_dataset({str(path)!r}, tokenizer, seq_length={seq_length})",
        f"python, by document: create_sft_dataset({str(path)!r}, tokenizer, seq_length={documents.pack_size}, "
        "documents=True)",
    ]
