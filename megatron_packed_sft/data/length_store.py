"""Lengths of a dataset's samples, computed once and kept: what a plan is made from when samples are not ours.

Any map-style dataset will do, multimodal ones included: a sample is whatever `dataset[i]` returns, and its length is
the number of positions it takes in the forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.array_file import ArrayFileWriter
from megatron_packed_sft.disk.atomic import Staging, write_file
from megatron_packed_sft.disk.checked_files import CheckedDirectory
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.disk.file_record import parse_file_records
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.disk.npy import SMALL_HEADER, ArraySpec
from megatron_packed_sft.errors import InvalidInputError, ManifestError

FORMAT = "sample_lengths_v1"
LENGTHS = "lengths.npy"
_MAX_SAMPLES = (1 << 31) - 1

SampleLength = Callable[[Any], int]


def refuse_resampling(dataset: Any) -> None:
    """Refuse datasets whose samples change from epoch to epoch: a plan made once would be wrong from then on.

    Example:
        >>> refuse_resampling([1, 2, 3])
    """
    if callable(getattr(dataset, "set_epoch", None)):
        raise InvalidInputError(
            f"{type(dataset).__name__} has set_epoch, so its samples may change from epoch to epoch and a static plan "
            "would not fit them; use a dataset whose samples are fixed, and let the sampler shuffle packs"
        )


def compute_lengths(
    dataset: Any,
    length_of: SampleLength,
    *,
    cache_path: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    progress: bool = False,
) -> npt.NDArray[np.int64]:
    """The length of every sample, from the cache if it is there and belongs to this dataset, else computed.

    Args:
        dataset: map-style: `len(dataset)` and `dataset[i]`, the same sample at every call.
        length_of: the number of positions a sample takes.
        cache_path: a directory to keep the lengths in; None keeps nothing.
        fingerprint: of dataset, template and settings: whatever changes lengths. By default the dataset's own
            `fingerprint`; a cache needs one.
        progress: show a bar over the samples.

    Example:
        >>> compute_lengths([[1, 2], [3]], len).tolist()
        [2, 1]
    """
    refuse_resampling(dataset)
    if not 1 <= len(dataset) <= _MAX_SAMPLES:
        raise InvalidInputError(f"the dataset has {len(dataset)} samples; a plan needs 1 to {_MAX_SAMPLES:,}")
    identity = fingerprint if fingerprint is not None else getattr(dataset, "fingerprint", None)
    if cache_path is not None and not isinstance(identity, str):
        raise InvalidInputError(
            f"a cache of lengths needs a fingerprint, and {type(dataset).__name__} has none; pass fingerprint= with a "
            "text that changes whenever the samples' lengths may"
        )
    if cache_path is not None and os.path.lexists(cache_path):
        return _load(Path(cache_path), str(identity), len(dataset))
    lengths = np.empty(len(dataset), np.int64)
    for index in tqdm(range(len(dataset)), unit="sample", desc="lengths", disable=not progress):
        lengths[index] = measured(dataset[index], length_of, index)
    # A few samples again: lengths that depend on the order of calls, or on chance, cannot be planned with.
    for index in np.unique(np.linspace(0, len(dataset) - 1, 16).astype(int)).tolist():
        check_unchanged(index, int(lengths[index]), measured(dataset[index], length_of, index))
    if cache_path is not None:
        _save(Path(cache_path), str(identity), lengths)
    return lengths


def measured(sample: Any, length_of: SampleLength, index: int) -> int:
    """The length of one sample, at least 1.

    Example:
        >>> measured([1, 2, 3], len, 0)
        3
    """
    length = int(length_of(sample))
    if length < 1:
        raise InvalidInputError(f"sample {index} has length {length}; leave empty samples out of the dataset")
    return length


def check_unchanged(index: int, planned: int, found: int) -> None:
    """Raise when a sample is not as long as it was when the plan was made.

    Example:
        >>> check_unchanged(0, 3, 3)
    """
    if planned != found:
        raise InvalidInputError(
            f"sample {index} had length {planned} when lengths were computed and has {found} now; samples of a static "
            "plan must not depend on chance, on the order of calls or on the epoch: fix that, or do not pack statically"
        )


def _save(path: Path, identity: str, lengths: npt.NDArray[np.int64]) -> None:
    with Staging(path) as staging:
        file = ArrayFileWriter(
            staging.path / LENGTHS, ArraySpec(LENGTHS, "<i8", lengths.shape, SMALL_HEADER), DEFAULT_ALGORITHM
        )
        try:
            file.write(0, lengths)
            record = file.finish()
        finally:
            file.close()
        document = {
            "format": FORMAT,
            "fingerprint": checksum(identity.encode()),
            "num_samples": len(lengths),
            "checksum_algorithm": DEFAULT_ALGORITHM,
            "files": {LENGTHS: record._asdict()},
        }
        write_file(staging.path / MANIFEST, json_document.render(document))
        staging.publish()


def _load(path: Path, identity: str, num_samples: int) -> npt.NDArray[np.int64]:
    with CheckedDirectory.open(path) as directory:
        file = str(path / MANIFEST)
        values = json_document.Fields(json_document.parse(directory.read(MANIFEST, 1 << 20), file), file)
        if values.text("format") != FORMAT:
            raise ManifestError(f"{file} is not a cache of sample lengths; choose another cache_path")
        if values.text("fingerprint") != checksum(identity.encode()):
            raise InvalidInputError(
                f"{path} holds the lengths of another dataset or of other settings; remove it or choose another path"
            )
        if values.integer("num_samples", 1, _MAX_SAMPLES) != num_samples:
            raise InvalidInputError(f"{path} holds another number of lengths than {num_samples}; remove it")
        _, records = parse_file_records(values, [LENGTHS])
        record = (records or {}).get(LENGTHS)
        checked = directory.array(ArraySpec(LENGTHS, "<i8", (num_samples,), SMALL_HEADER), record)
        lengths = checked.map().copy()
    if record is None or checksum((path / LENGTHS).read_bytes()) != record.checksum:
        raise ManifestError(f"{path / LENGTHS} does not match its checksum; remove {path} and compute lengths again")
    return lengths
