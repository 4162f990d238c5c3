"""`validate` for SFT caches; a cache of texts is a directory of token streams, which `storage.validate` checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.caches.example_files import open_tokens, read_offsets
from megatron_packed_sft.caches.meta import META, read_meta
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.storage.token_stream.options import read_metadata
from megatron_packed_sft.storage.token_stream.validate import RecordedFiles
from megatron_packed_sft.storage.validate import Finding, Level, ValidationReport
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.progress import Progress

_SPLITS = ("train", "val")
_BLOCK_TOKENS = 1 << 20


def is_sft_cache(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a cache of chats, sound or not."""
    folder = Path(path)
    return (folder / META).is_file() and (folder / "train_idx.npy").is_file()


def validate_sft_cache(
    path: str | os.PathLike[str],
    *,
    level: Level = "full",
    max_findings: int = 100,
    progress: bool = False,
    **options: Any,
) -> ValidationReport:
    """Check a cache of chats: sizes, offsets and counts, and with level `full` every checksum and every id.

    Args:
        path: the folder with meta.json.
        level, max_findings, progress: as for packed data.
        options: for other data; ignored.
    """
    folder = local_path(path)
    report = ValidationReport(str(folder), level, max_findings=max_findings)
    try:
        meta = read_meta(folder / META)
        recorded = RecordedFiles(folder / META)
        metadata = read_metadata(folder)
    except PackedSFTError as error:
        report.add(Finding(META, str(error)))
        return report
    damaged = list(recorded.findings(folder, report))
    for finding in damaged:
        report.add(finding)
    num_bytes = sum(record.bytes for record in recorded.files.values())
    with Progress("validate", num_bytes, "B", quiet=not progress) as bar:
        for split in _SPLITS:
            try:
                _validate_split(folder, split, meta, metadata.dtype, metadata.vocab_size, report, bar)
            except PackedSFTError as error:
                if not damaged:  # else it was said in other words
                    report.add(Finding(f"{split}_tokens.bin", str(error)))
    return report


def _validate_split(
    folder: Path,
    split: str,
    meta: dict[str, Any],
    dtype: str | None,
    vocab_size: int | None,
    report: ValidationReport,
    bar: Progress,
) -> None:
    tokens = open_tokens(folder / f"{split}_tokens.bin", dtype)
    offsets = read_offsets(folder / f"{split}_idx.npy", tokens)
    report.num_shards += 1
    report.num_sequences += len(offsets)
    report.num_bytes += tokens.size
    counted = meta.get(f"{split}_examples")
    if counted != len(offsets):
        report.add(Finding(str(folder / META), f"{split}_examples is {counted}, but there are {len(offsets):,}"))
    if report.level != "full":
        return
    report.num_tokens += tokens.num_tokens
    for first in range(0, tokens.num_tokens, _BLOCK_TOKENS):
        ids = tokens.tokens(first, min(first + _BLOCK_TOKENS, tokens.num_tokens))
        bar.update(ids.nbytes)
        if vocab_size is not None and int(ids.max()) >= vocab_size:
            place = first + int(np.argmax(ids >= vocab_size))
            says = f"the token at position {place:,} is {int(ids[place - first])}, not in 0..{vocab_size - 1}"
            report.add(Finding(str(tokens.path), says))
            return
