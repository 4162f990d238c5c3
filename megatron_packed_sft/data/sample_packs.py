"""Static packs of raw samples: a plan that is the same on every rank and in every epoch, and the packs it makes.

    lengths ─ oversized samples: a pack of their own, or left out ─▶ raw plan ─ repeat or drop packs ─▶ aligned plan

Indices ascend inside a pack, and packs are ordered by their smallest index. The sampler shuffles packs, never the plan.

Any map-style dataset will do, multimodal ones included: a sample is whatever `dataset[i]` returns, and its length is
the number of positions it takes in the forward pass. Lengths are computed once and cached:

    rank 0   lock ─ not cached ─ compute ─ publish ─ unlock       every rank returns the published lengths
    rank 1   lock ........ waits ......................... load   (without file locks: the first to publish wins)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.options import SampleLength
from megatron_packed_sft.errors import InvalidInputError, ManifestError, PackedSFTError, TargetExistsError
from megatron_packed_sft.packing.items import longest_that_fits
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import AlignedPlan, PackPlan
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.array_files import SMALL_HEADER, ArrayFileWriter, ArraySpec
from megatron_packed_sft.support.atomic import Staging, os_errors, write_file
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.support.json_document import MANIFEST, parse_file_records
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

FORMAT = "sample_lengths_v1"
LENGTHS = "lengths.npy"
_MAX_SAMPLES = (1 << 31) - 1
OVERFLOWS = ("single", "drop", "error")
_NUM_INDICES_SHOWN = 20
_MEANT_FOR_THE_SAMPLER = ("shuffle_output", "steps", "whole_batches")


class SamplePackDataset:
    """Packs of whole samples: item i is the list of the raw samples of pack i, in plan order.

    The number of packs is fixed: the same on every rank and in every epoch. Samples are never cut. With
    `overflow="single"` a sample longer than the pack becomes a pack of its own; with `drop` it is left out and counted.
    The sampler decides the order of packs in an epoch.

    Args:
        dataset: map-style; samples are whatever it returns. Iterable ones, and those with `set_epoch`, are refused.
        length_of: the number of positions a sample takes.
        pack_size: positions of a pack.
        overflow: `single`, `drop` or `error`, for oversized samples: those longer than the pack. They are logged.
        full_is_oversized: a sample that fills a pack exactly is oversized, too.
        cache_path: a directory to cache the lengths in; ranks may share a new one.
        fingerprint: of whatever changes lengths; a cache needs one. By default the dataset's own `fingerprint`.
        progress: show a progress bar while lengths are computed.
        world_size, drop_last: make the number of packs a multiple of the ranks, by repeating the first packs or by
            dropping the last ones.
        check_lengths: compare every sample's length with the planned one when it is read.
        pack_arguments: further arguments of `pack`, such as strategy or seed; not those that change the packs' order.

    Example:
        >>> packs = SamplePackDataset([[1, 2], [3], [4, 5, 6]], len, pack_size=3)
        >>> len(packs), packs[0]
        (2, [[1, 2], [3]])
    """

    def __init__(
        self,
        dataset: Any,
        length_of: SampleLength,
        *,
        pack_size: int,
        overflow: str = "single",
        full_is_oversized: bool = False,
        cache_path: str | os.PathLike[str] | None = None,
        fingerprint: str | None = None,
        world_size: int = 1,
        drop_last: bool = False,
        check_lengths: bool = True,
        progress: bool = False,
        **pack_arguments: Any,
    ) -> None:
        lengths = compute_lengths(dataset, length_of, cache_path=cache_path, fingerprint=fingerprint, progress=progress)
        self.dataset = dataset
        self.static_plan = plan_statically(
            lengths,
            pack_size=pack_size,
            overflow=overflow,
            full_is_oversized=full_is_oversized,
            world_size=world_size,
            drop_last=drop_last,
            **pack_arguments,
        )
        self.aligned = self.static_plan.aligned
        self.plan: PackPlan = self.aligned.plan
        self._identity = fingerprint if fingerprint is not None else str(getattr(dataset, "fingerprint", ""))
        self._length_of = length_of if check_lengths else None

    def __len__(self) -> int:
        return len(self.aligned.bins)

    @property
    def fingerprint(self) -> str:
        """Identifies the plan, and so the lengths; it is part of a loader's state."""
        return checksum((self.aligned.fingerprint + self._identity).encode())

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        samples = []
        for number in self.sample_numbers(index):
            sample = read_sample(self.dataset, number)
            if self._length_of is not None:
                found = measured(sample, self._length_of, number)
                check_unchanged(number, int(self.plan.item_lengths[number]), found)
            samples.append(sample)
        return samples

    def sample_numbers(self, index: int) -> list[int]:
        """Return which samples pack `index` holds."""
        numbers: list[int] = self.plan.bin(int(self.aligned.bins[index])).tolist()
        return numbers

    def __getitems__(self, indices: Sequence[int]) -> list[list[Any]]:
        """Return many packs."""
        return [self[index] for index in indices]

    @staticmethod
    def collate_fn(packs: Sequence[list[Any]]) -> list[list[Any]]:
        """Return the packs as they are: samples may be anything. `create_sft_dataset` makes batches of encoded ones."""
        return list(packs)


class StaticPlan(NamedTuple):
    """A plan for samples, and which of them are oversized."""

    aligned: AlignedPlan
    oversized: npt.NDArray[np.int64]  # indices of samples, ascending
    lines: list[str]  # what a person should know, for logs


def plan_statically(
    lengths: npt.NDArray[np.int64],
    *,
    pack_size: int,
    overflow: str = "single",
    full_is_oversized: bool = False,
    world_size: int = 1,
    drop_last: bool = False,
    **pack_arguments: Any,
) -> StaticPlan:
    """Plan packs of whole samples and log what was done.

    Args:
        lengths: of all samples.
        pack_size: the most tokens in a pack of several samples.
        overflow: oversized samples are packs of their own (`single`), left out (`drop`) or an `error`.
        full_is_oversized: a sample that fills a pack exactly is oversized, too.
        world_size, drop_last: make the number of packs a multiple, by repeating the first or dropping the last ones.
        pack_arguments: other fields of `PackOptions`, such as strategy.

    Example:
        >>> plan = plan_statically(np.array([3, 9, 1]), pack_size=4)
        >>> plan.aligned.bins.tolist(), plan.oversized.tolist()
        ([0, 1], [1])
    """
    if overflow not in OVERFLOWS:
        raise InvalidInputError(
            f"overflow is {overflow!r}; samples are never cut, so it is 'single', 'drop' or 'error'"
        )
    for name in _MEANT_FOR_THE_SAMPLER:
        if pack_arguments.get(name):
            raise InvalidInputError(
                f"{name} changes the order of packs, and a static plan keeps that of the data; leave it out and let "
                "the sampler shuffle the packs"
            )
    longest = longest_that_fits(
        pack_size, pack_arguments.get("measure", "tokens"), pack_arguments.get("pad_seq_to_mult", 1)
    )
    limit = longest - 1 if full_is_oversized else longest
    oversized = np.flatnonzero(lengths > limit)
    if overflow == "drop" and len(oversized) == len(lengths):
        raise InvalidInputError(
            f"static packing produced no packs: all {plural(len(lengths), 'sample')} are oversized for packs of "
            f"{pack_size}, and oversized samples are left out; choose a larger length, or allow packs of a single "
            "long sample"
        )
    if overflow == "error" and full_is_oversized and len(oversized):
        raise InvalidInputError(f"{_described(oversized, lengths, pack_size, True)}; leave them out")
    if full_is_oversized and overflow == "drop":
        pack_arguments["max_len"] = min(limit, pack_arguments.get("max_len") or limit)
    plan = pack(lengths, PackOptions(pack_size=pack_size, overflow=overflow, **pack_arguments))
    lines = []
    if len(oversized):
        fate = "packed alone" if overflow == "single" else "left out"
        lines.append(f"{_described(oversized, lengths, pack_size, full_is_oversized)}: {fate}")
        logger.info("static plan: %s", lines[0])
    aligned = plan.aligned(world_size, drop_last)
    if not aligned.num_bins:
        raise InvalidInputError(
            f"drop_last leaves no packs: the plan has {plural(plan.num_bins, 'pack')} for {world_size} ranks; repeat "
            "packs instead (drop_last false), or start fewer ranks"
        )
    return StaticPlan(aligned, oversized, [*aligned.lines(), *lines])


def _described(
    oversized: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], pack_size: int, full_is_oversized: bool
) -> str:
    """Return how many samples are oversized, and the indices of the first ones."""
    indices = ", ".join(map(str, oversized[:_NUM_INDICES_SHOWN].tolist()))
    more = f", and {len(oversized) - _NUM_INDICES_SHOWN:,} more" if len(oversized) > _NUM_INDICES_SHOWN else ""
    rule = f"of length {pack_size} or more" if full_is_oversized else f"longer than a pack of {pack_size}"
    number = f"{len(oversized):,} of {plural(len(lengths), 'sample')}"
    return f"{number} {'is' if len(oversized) == 1 else 'are'} {rule} (index {indices}{more})"


def compute_lengths(
    dataset: Any,
    length_of: SampleLength,
    *,
    cache_path: str | os.PathLike[str] | None = None,
    fingerprint: str | None = None,
    progress: bool = False,
) -> npt.NDArray[np.int64]:
    """Return the length of every sample: from the cache if it holds this dataset's, else computed.

    Ranks may call this at the same time with one `cache_path`: one of them computes, and all return the same lengths.

    Args:
        dataset: map-style: `len(dataset)` and `dataset[i]`, the same sample at every call.
        length_of: returns the number of positions a sample takes.
        cache_path: a directory to cache the lengths in; None caches nothing.
        fingerprint: of the dataset, its template and its settings: whatever changes lengths. By default the dataset's
            own `fingerprint`; a cache needs one.
        progress: show a progress bar over the samples.

    Example:
        >>> compute_lengths([[1, 2], [3]], len).tolist()
        [2, 1]
    """
    refuse_changing(dataset)
    if not 1 <= len(dataset) <= _MAX_SAMPLES:
        raise InvalidInputError(f"the dataset has {len(dataset)} samples; a plan needs 1 to {_MAX_SAMPLES:,}")
    if cache_path is None:
        return _measure_all(dataset, length_of, progress)
    identity = fingerprint if fingerprint is not None else getattr(dataset, "fingerprint", None)
    if not isinstance(identity, str):
        raise InvalidInputError(
            f"a length cache needs a fingerprint, and {type(dataset).__name__} has none; pass fingerprint= with a "
            "string that changes whenever the samples' lengths may change"
        )
    path = local_path(cache_path, "cache_path")
    if os.path.lexists(path):  # published whole, so no lock is needed, and the directory may be read-only
        return _load(path, identity, len(dataset))
    with _only_one_process(path):
        if os.path.lexists(path):
            return _load(path, identity, len(dataset))
        lengths = _measure_all(dataset, length_of, progress)
        try:
            _save(path, identity, lengths)
        except TargetExistsError:  # no file locks here, and another process was faster
            published = _load(path, identity, len(dataset))
            for index in np.flatnonzero(published != lengths)[:1].tolist():
                check_unchanged(index, int(published[index]), int(lengths[index]))
        return lengths


def refuse_changing(dataset: Any) -> None:
    """Refuse a dataset whose sample i is not the same at every call, or that has no sample i."""
    name = type(dataset).__name__
    is_iterable = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
    if is_iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InvalidInputError(
            f"{name} is not map-style, and a static plan names samples by their index; give a dataset with len() and "
            "dataset[i], such as the list of its samples, or prepare the data with packed-sft prepare"
        )
    for one in _parts_of(dataset):
        if callable(getattr(one, "set_epoch", None)):
            inside = "" if one is dataset else f", inside {name},"
            raise InvalidInputError(
                f"{type(one).__name__}{inside} has set_epoch, so its samples may change from epoch to epoch and a "
                "static plan would not fit them; use a dataset with fixed samples, and let the sampler shuffle the "
                "packs"
            )


def _parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and what it wraps, as torch's Subset and ConcatDataset do."""
    waiting, seen = [dataset], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = getattr(one, "datasets", None)
        waiting += [getattr(one, "dataset", None), *(inner if isinstance(inner, list | tuple) else ())]


def _measure_all(dataset: Any, length_of: SampleLength, progress: bool) -> npt.NDArray[np.int64]:
    lengths = np.empty(len(dataset), np.int64)
    with Progress("lengths", len(dataset), "sample", quiet=not progress) as bar:
        for index in range(len(dataset)):
            lengths[index] = measured(read_sample(dataset, index), length_of, index)
            bar.update(1)
    # Measure a few samples twice: lengths that depend on chance or on the order of calls cannot be planned with.
    for index in np.unique(np.linspace(0, len(dataset) - 1, 16).astype(int)).tolist():
        check_unchanged(index, int(lengths[index]), measured(read_sample(dataset, index), length_of, index))
    return lengths


@contextlib.contextmanager
def _only_one_process(path: Path) -> Iterator[None]:
    """Hold a lock file beside `path`; continue without one if the file system has no locks."""
    lock = path.with_name(f".{path.name}.lock")
    with os_errors("create", lock):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            has_lock = _lock(fd, lock)
            # The process that held it has removed the file: then this lock guards nothing.
            if not has_lock or (lock.exists() and os.path.samestat(os.fstat(fd), os.stat(lock))):
                break
            os.close(fd)
    try:
        yield
    finally:
        if has_lock:
            lock.unlink(missing_ok=True)
        os.close(fd)


def _lock(fd: int, path: Path) -> bool:
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is computing lengths; waiting for %s", path)
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return False
    return True


def read_sample(dataset: Any, index: int) -> Any:
    """Return one sample; an error in the dataset's own code is reported with the index."""
    try:
        return dataset[index]
    except PackedSFTError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"sample {index} of {type(dataset).__name__} cannot be read ({type(error).__name__}: {error}); fix it, or "
            "leave it out of the dataset"
        ) from error


def measured(sample: Any, length_of: SampleLength, index: int) -> int:
    """Return the length of one sample; it must be at least 1."""
    try:
        length = int(length_of(sample))
    except InvalidInputError as error:
        raise InvalidInputError(f"sample {index}: {error}") from None
    if length < 1:
        raise InvalidInputError(f"sample {index} has length {length}; leave empty samples out of the dataset")
    return length


def check_unchanged(index: int, planned: int, found: int) -> None:
    """Raise if a sample is not as long as it was when the plan was made."""
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
            raise ManifestError(f"{file} is not a length cache; choose another cache_path")
        if values.text("fingerprint") != checksum(identity.encode()):
            raise InvalidInputError(
                f"{path} holds the lengths of another dataset or of other settings; "
                "remove it or choose another cache_path"
            )
        if values.integer("num_samples", 1, _MAX_SAMPLES) != num_samples:
            raise InvalidInputError(
                f"{path} has a different number of lengths than the dataset's {num_samples} samples; remove it"
            )
        _, records = parse_file_records(values, [LENGTHS])
        record = (records or {}).get(LENGTHS)
        checked = directory.array(ArraySpec(LENGTHS, "<i8", (num_samples,), SMALL_HEADER), record)
        lengths = checked.map().copy()
    if record is None or checksum((path / LENGTHS).read_bytes()) != record.checksum:
        raise ManifestError(f"{path / LENGTHS} does not match its checksum; remove {path} to compute it again")
    return lengths
